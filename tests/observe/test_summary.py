"""Tests `summary.json`: its keys, its units, and how its numbers are computed.

Other programs rely on it.
"""

import math

import pytest

from hybridpar.observe.metrics import MetricsWriter, read_metrics
from hybridpar.observe.summary import SUMMARY_FILE, read_summary, summarize, write_summary


@pytest.fixture
def record(tmp_path, make_step, make_epoch):
    """Writes steps that take `times` milliseconds, an epoch after every tenth, and reads them back."""

    def write(times, first=1, resume_step=None, accuracies=(0.8, 0.7, 0.75), **fields):
        with MetricsWriter(tmp_path, resume_step=resume_step) as writer:
            for step, step_ms in enumerate(times, start=first):
                writer.write(make_step(step, step_ms=step_ms, compute_ms=step_ms / 2, **fields))
                if step % 10 == 0:
                    writer.write(make_epoch(step // 10 - 1, test_accuracy=accuracies[step // 10 - 1]))
        return read_metrics(tmp_path)

    return write


@pytest.fixture
def whole(info, record):
    return summarize(info, record([900, 800, 700] + [20.0] * 17), seed=7, ended="finished")


def test_a_whole_run_in_numbers(whole):
    versions = whole.pop("versions")
    assert {"python", "torch"} <= set(versions)
    assert {key: value for key, value in whole.items() if value is not None} == {
        **{"model": "resnet18", "data": "cifar10", "workers": 2, "device": "cpu", "batch_size": 64, "seed": 7},
        **{"exit": "finished", "epochs": 2, "steps": 20, "skipped_steps": 0},
        **{"test_accuracy": 0.7, "best_test_accuracy": 0.8, "test_loss": 0.5, "train_loss": 0.75},
        **{"train_seconds": 2.74, "step_ms_median": 20.0, "images_per_second": 3200.0},
        **{"bytes_sent_per_step": 1_000_000, "compute_ms": 10.0, "exposed_sync_ms": 3.0, "data_ms": 1.0},
        **{"stages": 1, "replicas": 1, "micro_batches": 1, "schedule": "accumulate"},
        **{"codec": "none", "shares": "equal", "final_batch_size": 64},
        **{"sync": "allreduce", "servers": 0},
    }


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
    assert [resumed[key] for key in ("steps", "epochs", "resumed_from")] == [11, 1, 5]


def test_an_interrupted_run_without_a_step_has_nulls_and_is_valid(info, tmp_path):
    summary = summarize(info, read_metrics(tmp_path), seed=0, ended="interrupted", versions={"tvm": "0.27"})
    assert summary["steps"] == summary["train_seconds"] == 0
    assert summary["test_accuracy"] is summary["step_ms_median"] is summary["bytes_sent_per_step"] is None
    assert summary["versions"]["tvm"] == "0.27"


def test_steps_without_a_number_do_not_spoil_the_medians(info, record):
    table = record([20.0] * 5 + [math.nan] * 2, skipped=True, loss=math.nan)
    summary = summarize(info, table, seed=0, ended="finished")
    assert summary["step_ms_median"] == 20
    assert summary["skipped_steps"] == 7


def test_what_is_written_is_read_and_what_lacks_a_key_is_not(whole, tmp_path):
    write_summary(tmp_path, whole)
    assert read_summary(tmp_path) == whole
    del whole["sync"]
    write_summary(tmp_path, whole)
    assert read_summary(tmp_path) is None
    (tmp_path / SUMMARY_FILE).write_text("[")
    assert read_summary(tmp_path) is None
