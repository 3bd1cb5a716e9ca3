"""What a run says it is expected to take, before its first step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hybridpar.plan import StepFigures
from hybridpar.run.reporting import expected_lines, opening_lines


@pytest.mark.parametrize(
    ("counts", "said"),
    [
        ([64], "batch    64 samples per step"),
        ([32, 32], "batch    64 samples per step, 32 each on 2 replicas"),
        ([16, 48], "batch    64 samples per step, 16 and 48 on 2 replicas"),
        ([22, 21, 21], "batch    64 samples per step, 22, 21 and 21 on 3 replicas"),
    ],
)
def test_the_batch_is_shown_with_what_each_replica_has_of_it(counts: list[int], said: str) -> None:
    plan = SimpleNamespace(model=SimpleNamespace(parameters=1))
    samples = SimpleNamespace(batches=SimpleNamespace(counts=counts), per_epoch=1)
    facts = {"workers": len(counts), "device": "a CPU", "batch_size": sum(counts)}
    parts = {"samples": samples, "facts": facts, "plan": plan, "folder": SimpleNamespace(directory="runs/a")}
    run: Any = SimpleNamespace(**parts, state=SimpleNamespace(resumed_from=None), notes=[], batch_line="")
    vars(run).update(model_name="net", data_line="digits", total=1)
    assert said in list(opening_lines(run))


def test_what_was_predicted_is_said_with_the_memory_of_a_worker() -> None:
    (line,) = expected_lines(StepFigures(step_ms=250.0, memory_bytes=900_000_000), 480)
    assert line == "expected about 0:02:00, without data and tests; 900.0 MB per worker"
    assert expected_lines(None, 480) == expected_lines(StepFigures(memory_bytes=1), 480) == []
