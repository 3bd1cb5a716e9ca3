"""Tests `summary.json`: its keys, its units, and how its numbers are computed.

Other programs rely on it.
"""

import copy
import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from hybridpar.errors import RunDirectoryError
from hybridpar.observe.metrics import MetricsWriter, read_metrics
from hybridpar.observe.summary import summarize, summary_schema, validate_summary, write_summary

SCHEMA = Draft202012Validator(summary_schema())


@pytest.fixture
def record(tmp_path, make_step, make_epoch):
    """Writes steps that take `times` milliseconds, an epoch after every tenth, and reads them back."""

    def write(times, first=1, resume_step=None, accuracies=(0.8, 0.7, 0.75), **fields):
        with MetricsWriter(tmp_path, resume_step=resume_step) as writer:
            for step, step_ms in enumerate(times, start=first):
                writer.write_step(make_step(step, step_ms=step_ms, compute_ms=step_ms / 2, **fields))
                if step % 10 == 0:
                    writer.write_epoch(make_epoch(step // 10 - 1, test_accuracy=accuracies[step // 10 - 1]))
        return read_metrics(tmp_path)

    return write


@pytest.fixture
def whole(info, record):
    return summarize(info, record([900, 800, 700] + [20.0] * 17), seed=7, ended="finished")


def test_the_schema_is_a_schema_and_explains_every_key():
    Draft202012Validator.check_schema(summary_schema())
    properties = summary_schema()["properties"]
    assert set(summary_schema()["required"]) == set(properties)
    assert all(rule["description"].endswith(".") for rule in properties.values())
    for key, rule in properties.items():
        for ending, unit in (("_ms", "Milliseconds"), ("_seconds", "Seconds"), ("accuracy", "Fraction")):
            if key.endswith(ending):
                assert rule["description"].startswith(unit)


def test_a_whole_run_in_numbers(whole):
    SCHEMA.validate(whole)
    versions = whole.pop("versions")
    assert {"python", "torch"} <= set(versions)
    assert whole == {
        "model": "resnet18",
        "data": "cifar10",
        "workers": 2,
        "device": "cpu",
        "batch_size": 64,
        "seed": 7,
        "exit": "finished",
        "epochs": 2,
        "steps": 20,
        "skipped_steps": 0,
        "resumed_from": None,
        "test_accuracy": 0.7,
        "best_test_accuracy": 0.8,
        "ema_test_accuracy": None,
        "best": None,
        "train_seconds": 2.74,
        "step_ms_median": 20.0,
        "step_ms_mean": None,
        "images_per_second": 3200.0,
        "bytes_sent_per_step": 1_000_000,
        "compute_ms": 10.0,
        "exposed_sync_ms": 3.0,
        "data_ms": 1.0,
        "stages": 1,
        "replicas": 1,
        "micro_batches": 1,
        "schedule": "accumulate",
        "bubble": None,
        "overlap": None,
        "peak_saved_bytes": None,
        "memory_bytes": None,
        "predicted_step_ms": None,
        "predicted_compute_ms": None,
        "predicted_exposed_sync_ms": None,
        "predicted_bubble": None,
        "predicted_bytes_sent_per_step": None,
        "predicted_peak_saved_bytes": None,
        "predicted_memory_bytes": None,
        "prediction_warning": None,
        "codec": "none",
        "compression_ratio": None,
        "kernels": None,
        "recipe": "none",
        "double_buffer": "off",
        "shares": "equal",
        "final_batch_size": 64,
        "encode_ms": None,
        "wire_ms": None,
        "decode_ms": None,
        "sync_ms": None,
        "predicted_sync_ms": None,
        "sync": "allreduce",
        "servers": 0,
        "bytes_pulled_per_step": None,
        "queued": None,
        "staleness": None,
    }


def test_what_the_run_is_told_of_its_pipeline(info, record):
    pipeline = replace(info, stages=2, replicas=3, micro_batches=4, schedule="1f1b")
    summary = summarize(pipeline, record([20.0] * 5), seed=7, ended="finished")
    SCHEMA.validate(summary)
    assert [summary[key] for key in ("stages", "replicas", "micro_batches", "schedule")] == [2, 3, 4, "1f1b"]


def test_the_sync_of_gradients_in_numbers(info, record):
    times = {"encode_ms": 2.0, "wire_ms": 5.0, "decode_ms": 1.0, "sync_ms": 6.5}
    table = record([20.0] * 19, bytes_before=4000, bytes_after=125, **times)
    summary = summarize(replace(info, codec="onebit"), table, seed=7, ended="finished")
    SCHEMA.validate(summary)
    assert {key: summary[key] for key in times} == times
    assert (summary["codec"], summary["compression_ratio"]) == ("onebit", 32.0)


def test_the_ratio_covers_all_steps_those_in_full_precision_too(info, record):
    record([20.0] * 4, bytes_before=4000, bytes_after=4000)
    table = record([20.0] * 4, first=5, resume_step=4, bytes_before=4000, bytes_after=100)
    assert summarize(info, table, seed=7, ended="finished")["compression_ratio"] == round(32000 / 16400, 3)


def test_the_promised_keys_are_required():
    promised = (
        "model data workers epochs steps test_accuracy train_seconds step_ms_median step_ms_mean images_per_second "
        "bytes_sent_per_step compute_ms exposed_sync_ms data_ms device versions seed batch_size best "
        "best_test_accuracy ema_test_accuracy "
        "skipped_steps resumed_from exit stages replicas micro_batches schedule bubble overlap "
        "peak_saved_bytes memory_bytes predicted_step_ms predicted_compute_ms predicted_exposed_sync_ms "
        "predicted_bubble predicted_bytes_sent_per_step predicted_peak_saved_bytes predicted_memory_bytes "
        "prediction_warning codec compression_ratio encode_ms wire_ms decode_ms sync_ms predicted_sync_ms kernels "
        "recipe sync double_buffer shares final_batch_size servers bytes_pulled_per_step queued staleness"
    )
    assert set(promised.split()) == set(summary_schema()["required"])


def test_warm_up_is_left_out_where_there_are_enough_others(info, record):
    many = summarize(info, record([100, 100, 100, 10, 20, 30]), seed=0, ended="finished")
    assert many["step_ms_median"] == 20
    few = summarize(info, record([100, 100, 100, 10, 20]), seed=0, ended="finished")
    assert few["step_ms_median"] == 100


def test_warm_up_of_a_resumed_part_is_left_out_too(info, record):
    record([100, 100, 100, 20, 20])
    table = record([300, 300, 300, 20, 30, 30], first=6, resume_step=5)
    resumed = summarize(info, table, seed=0, ended="finished", resumed_from=5)
    assert resumed["step_ms_median"] == 20  # of 20 20 20 30 30
    assert resumed["train_seconds"] == pytest.approx(1.32)
    assert resumed["steps"] == 11
    assert resumed["epochs"] == 1
    assert resumed["resumed_from"] == 5


def test_a_run_that_starts_from_another_runs_checkpoint_has_its_warm_up_left_out(info, record):
    table = record([100, 100, 100, 20, 20, 20], first=101, accuracies=[0.5] * 20)
    summary = summarize(info, table, seed=0, ended="finished", resumed_from=100)
    assert summary["step_ms_median"] == 20
    assert summary["steps"] == 106


def test_an_interrupted_run_without_a_step_has_nulls_and_is_valid(info, tmp_path):
    summary = summarize(info, read_metrics(tmp_path), seed=0, ended="interrupted", versions={"tvm": "0.27"})
    SCHEMA.validate(summary)
    validate_summary(summary)
    assert summary["steps"] == summary["train_seconds"] == 0
    assert summary["test_accuracy"] is summary["step_ms_median"] is summary["bytes_sent_per_step"] is None
    assert summary["versions"]["tvm"] == "0.27"


def test_steps_without_a_number_do_not_spoil_the_medians(info, record):
    table = record([20.0] * 5 + [math.nan] * 2, skipped=True, loss=math.nan)
    summary = summarize(info, table, seed=0, ended="finished")
    assert summary["step_ms_median"] == 20
    assert summary["skipped_steps"] == 7
    validate_summary(summary)


def test_it_is_written_whole_and_read_back(whole, tmp_path):
    path = write_summary(tmp_path, whole)
    assert path == tmp_path / "summary.json"
    assert json.loads(path.read_text()) == whole
    assert not list(tmp_path.glob(".*"))


def test_an_invalid_summary_leaves_the_old_file(whole, tmp_path):
    path = write_summary(tmp_path, whole)
    before = path.read_bytes()
    with pytest.raises(ValueError, match=r"summary\.test_accuracy is 87\.5, not within 0 to 1"):
        write_summary(tmp_path, whole | {"test_accuracy": 87.5})
    assert path.read_bytes() == before


def test_a_directory_in_the_way_is_a_run_directory_error(whole, tmp_path):
    (tmp_path / "summary.json").mkdir()
    with pytest.raises(RunDirectoryError, match=r"summary\.json"):
        write_summary(tmp_path, whole)
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"exit": "crashed"}, "not one of finished, interrupted"),
        ({"steps": True}, "not of type integer"),
        ({"steps": 1.5}, "not of type integer"),
        ({"workers": 0}, "not within 1"),
        ({"versions": {"torch": 2}}, r"summary\.versions\.torch"),
        ({"step_ms_median": math.nan}, "not within"),
        ({"train_seconds": None}, "not of type number"),
    ],
)
def test_what_is_wrong_is_named(whole, change, message):
    with pytest.raises(ValueError, match=message):
        validate_summary(whole | change)


def test_a_missing_key_is_named(whole):
    del whole["device"]
    with pytest.raises(ValueError, match="lacks device"):
        validate_summary(whole)


@given(data=st.data())
def test_the_hand_check_agrees_with_jsonschema(data):
    """Random summaries near the border of the schema: both checks accept, or both refuse."""
    value = st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-2, 3),
        st.floats(-1, 2),
        st.sampled_from(["finished", "other", {}, {"torch": "2"}, {"torch": 2}]),
    )
    fitting = {
        "model": "m", "data": "d", "workers": 1, "epochs": 1, "steps": 1, "test_accuracy": None,
        "best": None, "best_test_accuracy": 1, "ema_test_accuracy": None,
        "train_seconds": 0.5, "step_ms_median": 1, "images_per_second": 2.5,
        "bytes_sent_per_step": 3.0, "compute_ms": 0, "exposed_sync_ms": 0, "data_ms": 0, "device": "cpu",
        "versions": {}, "seed": -1, "batch_size": 1, "skipped_steps": 0, "resumed_from": None, "exit": "finished",
    }  # fmt: skip
    candidate = copy.deepcopy(fitting)
    for key in data.draw(st.sets(st.sampled_from([*fitting, "added_later"]), max_size=2)):
        if key in candidate and data.draw(st.booleans()):
            del candidate[key]
        else:
            candidate[key] = data.draw(value)
    try:
        validate_summary(candidate)
        accepted = True
    except ValueError:
        accepted = False
    assert accepted == SCHEMA.is_valid(candidate)
