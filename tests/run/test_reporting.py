"""What a run says it is expected to take, before its first step."""

from __future__ import annotations

from datetime import datetime

from hybridpar.plan import StepFigures
from hybridpar.run.reporting import expected_lines

NOON = datetime(2026, 5, 4, 12, 0)


def test_the_end_is_said_in_wall_clock_time_with_the_memory_of_a_worker() -> None:
    predicted = StepFigures(step_ms=250.0, memory_bytes=900_000_000)
    (line,) = expected_lines(predicted, 480, NOON)
    assert line == "expected about 0:02:00, until 12:02, without data and tests; 900.0 MB per worker"
    (line,) = expected_lines(StepFigures(step_ms=1000.0), 100_000, NOON)
    assert line == "expected about 1 day, 3:46:40, until 2026-05-05 15:46, without data and tests"


def test_where_nothing_was_predicted_nothing_is_said() -> None:
    assert expected_lines(None, 480, NOON) == []
    assert expected_lines(StepFigures(memory_bytes=1), 480, NOON) == []
