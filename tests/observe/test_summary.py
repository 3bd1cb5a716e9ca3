"""Tests `summary.json`: its keys, its units, and how its numbers are computed; and the table at the end of a run.

Other programs rely on the file.
"""

import io
import math
from contextlib import closing
from pathlib import Path

import pytest
from rich.console import Console

from hybridpar.observe.metrics import MetricsWriter, read_metrics
from hybridpar.observe.records import SUMMARY_FIGURES
from hybridpar.observe.summary import SUMMARY_FILE, print_report, read_summary, report_rows, summarize, write_summary


@pytest.fixture
def record(tmp_path, make_step, make_epoch):
    """Writes steps that take `times` milliseconds, an epoch after every tenth, and reads them back."""

    def write(times, first=1, resume_step=None, accuracies=(0.8, 0.7, 0.75), **fields):
        with closing(MetricsWriter(tmp_path, resume_step=resume_step)) as writer:
            for step, step_ms in enumerate(times, start=first):
                writer.write(make_step(step, step_ms=step_ms, compute_ms=step_ms / 2, **fields))
                if step % 10 == 0:
                    writer.write(make_epoch(step // 10 - 1, test_accuracy=accuracies[step // 10 - 1]))
        return read_metrics(tmp_path)

    return write


@pytest.fixture
def whole(facts, record):
    return summarize(facts, record([900, 800, 700] + [20.0] * 17), ended="finished")


def test_a_whole_run_in_numbers(whole):
    versions = whole.pop("versions")
    assert {"python", "torch"} <= set(versions)
    assert {key: value for key, value in whole.items() if value is not None} == {
        **{"model": "resnet18", "data": "cifar10", "workers": 2, "device": "cpu", "batch_size": 64, "seed": 7},
        **{"exit": "finished", "steps": 20, "skipped_steps": 0},
        **{"test_accuracy": 0.7, "best_test_accuracy": 0.8, "test_loss": 0.5, "train_loss": 0.75},
        **{"train_seconds": 2.74, "step_ms_median": 20.0, "images_per_second": 3200.0},
        **{"bytes_sent_per_step": 1_000_000, "compute_ms": 10.0, "exposed_sync_ms": 3.0, "data_ms": 1.0},
        **{"stages": 1, "replicas": 1, "micro_batches": 1, "schedule": "accumulate"},
        **{"codec": "none", "shares": "equal", "final_batch_size": 64},
        **{"sync": "allreduce", "servers": 0},
    }


def test_warm_up_is_left_out_where_there_are_enough_others(facts, record):
    many = summarize(facts, record([100, 100, 100, 10, 20, 30]), ended="finished")
    assert many["step_ms_median"] == 20
    few = summarize(facts, record([100, 100, 100, 10, 20]), ended="finished")
    assert few["step_ms_median"] == 100


def test_warm_up_of_a_resumed_part_is_left_out_too(facts, record):
    record([100, 100, 100, 20, 20])
    table = record([300, 300, 300, 20, 30, 30], first=6, resume_step=5)
    resumed = summarize(facts, table, ended="finished", resumed_from=5)
    assert resumed["step_ms_median"] == 20  # of 20 20 20 30 30
    assert resumed["train_seconds"] == pytest.approx(1.32)
    assert [resumed[key] for key in ("steps", "resumed_from")] == [11, 5]


def test_an_interrupted_run_without_a_step_has_nulls_and_is_valid(facts, tmp_path):
    summary = summarize(facts, read_metrics(tmp_path), ended="interrupted", versions={"tvm": "0.27"})
    assert summary["steps"] == summary["train_seconds"] == 0
    assert summary["test_accuracy"] is summary["step_ms_median"] is summary["bytes_sent_per_step"] is None
    assert summary["versions"]["tvm"] == "0.27"


def test_steps_without_a_number_do_not_spoil_the_medians(facts, record):
    table = record([20.0] * 5 + [math.nan] * 2, skipped=True, loss=math.nan)
    summary = summarize(facts, table, ended="finished")
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


# ---------------------------------------------------------------------------------------------- the table at the end

SUMMARY = dict.fromkeys(row.name for row in SUMMARY_FIGURES) | {
    "model": "resnet18",
    "data": "cifar10",
    "workers": 2,
    "device": "cpu",
    "batch_size": 128,
    "exit": "finished",
    "steps": 7820,
    "skipped_steps": 4,
    "resumed_from": 391,
    "test_accuracy": 0.9326,
    "best_test_accuracy": 0.9545,
    "train_seconds": 333.2,
    "step_ms_median": 42.5,
    "images_per_second": 3013.2,
    "bytes_sent_per_step": 44_000_000,
    "compute_ms": 30.0,
    "exposed_sync_ms": 11.3,
    "data_ms": 1.2,
    "stages": 1,
    "replicas": 2,
    "micro_batches": 1,
    "codec": "none",
}

GOLDEN = """
run                 resnet18 on cifar10
                    2 workers on cpu, batch 128
state               finished
steps               7,820
resumed from step   391
trained for         0:05:33
test accuracy       93.26%
best test accuracy  95.45%
speed               3,013 images/s
step                42.50 ms
compute             30.00 ms   71%
exposed sync        11.30 ms   27%
waiting for data    1.20 ms     3%
sent per step       44.0 MB
skipped steps       4
written  runs/a/summary.json
written  runs/a/trace.json
"""


@pytest.mark.parametrize("terminal", [True, False])
def test_the_table_to_the_letter(terminal):
    console = Console(file=io.StringIO(), record=True, width=80, force_terminal=terminal)
    print_report(SUMMARY, [Path("runs/a/summary.json"), Path("runs/a/trace.json")], console)
    assert "\n".join(line.rstrip() for line in console.export_text().split("\n")) == GOLDEN


def test_a_pipeline_shows_predicted_beside_measured():
    pipeline = {"stages": 4, "micro_batches": 8, "schedule": "greedy", "bubble": 0.273, "overlap": 0.914}
    predicted = {"predicted_step_ms": 30.0, "predicted_compute_ms": 29.5, "predicted_bubble": 0.2}
    rows = dict(report_rows(SUMMARY | pipeline | predicted))
    assert rows["step, without data"] == "41.30 ms        predicted 30.00 ms, +38%"
    assert rows["compute"] == "30.00 ms   71%  predicted 29.50 ms", "half a millisecond is no error to speak of"
    assert rows["bubble"] == "27%             predicted 20%"
    slow = dict(report_rows(SUMMARY | {"step_ms_median": 1154.1, "compute_ms": 1154.1}))
    assert slow["compute"] == "1154.10 ms 100%"
    assert (rows["stages"], rows["micro-batches"], rows["sync hidden"]) == ("4", "8", "91%")


def test_codecs_servers_and_kernels_have_their_rows():
    more = {
        **{"codec": "onebit:warmup=20", "compression_ratio": 28.04, "encode_ms": 4.0, "sync": "softsync:2"},
        "staleness": {"mean": 1.875, "most": 4, "histogram": {"1": 3, "4": 1}},
        **{"bytes_pulled_per_step": 45_000_000, "kernels": {"tuned": 2, "stock": 1, "saved_ms": None}},
        "best": {"step": 9, "metric": "test_loss", "test_accuracy": 0.5, "checkpoint": "checkpoints/step-9"},
    }
    rows = dict(report_rows(SUMMARY | more))
    assert (rows["gradients sent as"], rows["bytes saved"]) == ("onebit:warmup=20", "28.0x")
    assert rows["encoding"] == "4.00 ms"
    assert (rows["sync"], rows["staleness"]) == ("softsync:2", "mean 1.88, largest 4")
    assert (rows["pulled per step"], rows["kernels"]) == ("45.0 MB", "2 of 3 operations")
    assert rows["best checkpoint"] == "checkpoints/step-9, by test_loss"


def test_a_single_worker_is_told_nothing_of_an_exchange():
    alone = {"workers": 1, "replicas": 1, "exposed_sync_ms": 0.0, "bytes_sent_per_step": 0}
    predicted = {"predicted_step_ms": 40.0, "predicted_exposed_sync_ms": 0.0, "predicted_bytes_sent_per_step": 0}
    rows = dict(report_rows(SUMMARY | alone | predicted))
    assert "step, without data" in rows
    assert not {"exposed sync", "sent per step", "gradients sent as"} & rows.keys()
