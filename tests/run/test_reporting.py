"""What a run says it is expected to take, before its first step."""

from __future__ import annotations

from hybridpar.plan import StepFigures
from hybridpar.run.reporting import expected_lines


def test_what_was_predicted_is_said_with_the_memory_of_a_worker() -> None:
    (line,) = expected_lines(StepFigures(step_ms=250.0, memory_bytes=900_000_000), 480)
    assert line == "expected about 0:02:00, without data and tests; 900.0 MB per worker"
    assert expected_lines(None, 480) == expected_lines(StepFigures(memory_bytes=1), 480) == []
