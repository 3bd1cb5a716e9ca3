"""Tests the table that is printed at the end of a run: its figures, its width, and broken pipes."""

import io
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from hybridpar.observe.records import SUMMARY_FIGURES
from hybridpar.observe.report import percentages, print_report

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
    "exposed_sync_ms": 7.5,
    "data_ms": 1.2,
    "stages": 1,
    "replicas": 2,
    "micro_batches": 1,
    "codec": "none",
    "wire_ms": 9.0,
    "sync_ms": 8.0,
}

GOLDEN = """
run            resnet18 on cifar10
               2 workers on cpu, batch 128
               finished after 7,820 steps in 5:33, resumed from step 391
test accuracy  93.26%  (best 95.45%)
speed          3,013 images/s
step               42.50 ms  (median)
                   30.00 ms   70%  compute
                    7.50 ms   18%  exposed sync
                    1.20 ms    3%  waiting for data
                    3.80 ms    9%  other
sent           44.0 MB per worker and step
skipped        4 steps with non-finite gradients
written        runs/a/summary.json
               runs/a/trace.json
"""


def printed(summary, width=80, terminal=True, files=()):
    console = Console(file=io.StringIO(), record=True, width=width, force_terminal=terminal)
    print_report(summary, files, console)
    return "\n".join(line.rstrip() for line in console.export_text().split("\n"))


@pytest.mark.parametrize("terminal", [True, False])
def test_the_table_to_the_letter(terminal):
    files = [Path("runs/a/summary.json"), Path("runs/a/trace.json")]
    assert printed(SUMMARY, terminal=terminal, files=files) == GOLDEN


def test_a_pipeline_shows_predicted_beside_measured():
    pipeline = {
        "stages": 4,
        "micro_batches": 8,
        "schedule": "greedy",
        "bubble": 0.273,
        "overlap": 0.914,
        "peak_saved_bytes": 87_600_000,
        "predicted_step_ms": 30.0,
    }
    assert printed(SUMMARY | pipeline).splitlines()[11:14] == [
        "predicted       30.00 ms  measured  41.30 ms   +38%  step, without data",
        "pipeline       4 stages x 2 replicas, 8 micro-batches, greedy",
        "               bubble 27%, 91% of sums hidden, 87.6 MB kept for backward",
    ]


def test_a_run_that_compresses_says_what_it_saved_and_what_that_took():
    codec = {"codec": "onebit:warmup=20", "compression_ratio": 28.04, "encode_ms": 4.0, "decode_ms": 1.5}
    assert printed(SUMMARY | codec).splitlines()[12:14] == [
        "gradients      as onebit:warmup=20, 28.0x less",
        "               encode 4.00 ms, wire 9.00 ms, decode 1.50 ms",
    ]


def test_a_run_with_servers_tells_where_gradients_met_and_how_old_they_were():
    ages = {"mean": 1.875, "most": 4, "histogram": {"1": 3, "4": 1}}
    more = {"sync": "softsync:2", "servers": 1, "staleness": ages, "bytes_pulled_per_step": 45_000_000}
    stream = io.StringIO()
    print_report(SUMMARY | more, console=Console(file=stream, width=80))
    assert "softsync:2 at 1 server" in stream.getvalue()
    assert "45.0 MB pulled per worker and step" in stream.getvalue()
    assert "mean 1.88, largest 4" in stream.getvalue()


@given(st.lists(st.floats(0.0, 1e6), min_size=1, max_size=6))
def test_percentages_add_up_to_a_hundred_and_none_is_further_off_than_one(values):
    told = percentages(values)
    whole = sum(values)
    assert sum(told) == (100 if whole else 0)
    assert all(abs(share - 100 * value / whole) < 1 for share, value in zip(told, values, strict=True) if whole)


def test_a_single_worker_is_told_nothing_of_an_exchange():
    alone = {"workers": 1, "replicas": 1, "exposed_sync_ms": 0.0, "bytes_sent_per_step": 0, "codec": "onebit"}
    predicted = {"predicted_step_ms": 40.0, "predicted_exposed_sync_ms": 0.0, "predicted_bytes_sent_per_step": 0}
    text = printed(SUMMARY | alone | predicted)
    assert "compute" in text
    assert "predicted" in text
    assert not [word for word in ("sync", "sent", "gradients  ") if word in text]
