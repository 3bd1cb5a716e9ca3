"""Tests the pipeline benchmark: short runs on the loopback and on shaped links, and the arithmetic of its table.

A full table is made rarely, so errors would be found late.
"""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.pipeline.hidden_sync import hidden
from benchmarks.pipeline.main import Options, main
from benchmarks.rig.network import missing
from hybridpar.schedule.actions import parse_action
from hybridpar.schedule.spans import Span, StepSpans

needs_root = pytest.mark.skipif(bool(missing()), reason=missing() or "links can be shaped")


@needs_root
@pytest.mark.root
def test_a_table_on_shaped_links_runs(capfd: pytest.CaptureFixture[str]) -> None:
    main(Options(table="ddp", quick=True))
    assert "100mbit" in capfd.readouterr().out


def _steps(*rows: tuple[Any, ...]) -> dict[int, StepSpans]:
    """Spans by rank: rank, queue, action, start, end, for sums also when they were ready."""
    spans: dict[int, list[Span]] = {}
    for rank, queue, action, *times in rows:
        spans.setdefault(rank, []).append(Span(rank, queue, 0, parse_action(action), *times))
    return {rank: StepSpans(0.0, tuple(of_rank)) for rank, of_rank in spans.items()}


def test_sync_is_hidden_as_long_as_anyone_computes() -> None:
    steps = _steps(
        (0, "compute", "0B0", 0, 100),
        (1, "compute", "1B0", 0, 50),
        (1, "sync", "1SYNC0", 40, 80, 35),
        (1, "sync", "1SYNC1", 60, 120, 50),
    )
    # At best, the 80 ms that two sums took on two lanes run from 35 on; 65 of them while rank 0 computes.
    assert hidden(steps) == {1: (80.0, 65.0, 60.0)}
