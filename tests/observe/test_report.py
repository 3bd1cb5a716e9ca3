"""Tests the table that is printed at the end of a run: its figures, its width, and broken pipes."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from hybridpar.observe.records import SUMMARY_FIGURES
from hybridpar.observe.report import print_report, report_rows

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
    assert (rows["stages"], rows["micro-batches"], rows["sums hidden"]) == ("4", "8", "91%")


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
