"""Tests the parameter server benchmark: short runs, and its ratios.

A full benchmark is run rarely, so errors would be found late.
"""

from __future__ import annotations

from benchmarks.asynchronous import servers
from benchmarks.rig.paired import Paired


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
