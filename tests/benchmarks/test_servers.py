"""Tests the parameter server benchmark: short runs, and its ratios.

A full benchmark is run rarely, so errors would be found late.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.asynchronous import servers
from benchmarks.rig.paired import Paired

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
@pytest.mark.parametrize("table", ["cost", "slow"])
def test_a_quick_run_prints_its_table(table):
    arguments = ["--quick", "--table", table, "--links", "loopback"]
    command = [sys.executable, "-m", "benchmarks.asynchronous.servers", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "images/s of" in done.stdout
