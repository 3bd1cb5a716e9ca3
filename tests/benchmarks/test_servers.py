"""Tests the parameter server benchmark: short runs, its ratios, and the comparison with plain training.

A full benchmark is run rarely, so errors would be found late.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.asynchronous import servers, trainings
from benchmarks.rig.paired import Paired
from hybridpar.errors import HybridparError, UsageError

ROOT = Path(__file__).parents[2]


def test_throughput_is_over_that_of_the_all_reduce(monkeypatch):
    monkeypatch.setenv("RIG_LINK", "1gbit")
    times = {"allreduce": (10.0,) * 20, "masters": (10.5,) * 20, "servers": (20.0,) * 20}
    rows = servers._cost_rows(Paired(times, 0, 0.0, False), "here")
    assert [(row.what.split()[2], round(row.value, 3), row.verdict) for row in rows] == [
        ("masters", 0.952, "met"),
        ("servers", 0.5, "missed"),
    ]
    monkeypatch.setenv("RIG_LINK", "loopback")
    assert [row.verdict for row in servers._cost_rows(Paired(times, 0, 0.0, False), "here")] == ["", ""]


def test_ratios_with_a_slow_worker_are_within_a_turn():
    rows = servers._slow_rows({"ps": [10.0, 20.0], "ps-async": [15.0, 60.0]}, 3, 40, 1)
    assert [(row.value, row.low, row.high, row.verdict) for row in rows] == [(1, 1, 1, ""), (2.25, 1.5, 3, "met")]


@pytest.mark.sweep
@pytest.mark.parametrize("table", ["cost", "slow", "codecs"])
def test_a_quick_run_prints_its_table(table):
    arguments = ["--quick", "--table", table, "--links", "loopback"]
    command = [sys.executable, "-m", "benchmarks.asynchronous.servers", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert ("loss after" if table == "codecs" else "images/s of") in done.stdout


def test_trainings_are_compared_with_plain_ones_of_as_many_workers(monkeypatch, tmp_path, capsys):
    found = {"plain, 3 workers": 0.99, "softsync:2": 0.985, "ps-async": 0.97}
    monkeypatch.setattr(
        trainings, "train", lambda way, seed, _: {"way": way, "seed": seed, "test_accuracy": found[way]}
    )
    trainings.main(trainings.Options(only=("softsync", "ps-"), output=tmp_path / "new" / "rows.csv"))
    said = capsys.readouterr().out
    assert "softsync:2: 98.50 %, +0.50 points lost, met" in said
    assert "ps-async: 97.00 %, +2.00 points lost, missed" in said
    assert (tmp_path / "new" / "rows.csv").read_text().count("\n") == 1 + 3
    with pytest.raises(UsageError, match="no way is called 'none'"):
        trainings.chosen(["none"])


def test_a_training_that_fails_says_why():
    with pytest.raises(HybridparError, match="ended with 2") as failed:
        trainings.train("plain, 2 workers", 0, ["resnet18", "--dota", "digits"])
    assert "--dota" in failed.value.why
