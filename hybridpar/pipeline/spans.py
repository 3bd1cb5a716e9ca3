"""Why: what was predicted and what really ran are compared span by span, so both are told in the same record."""

from __future__ import annotations

from dataclasses import dataclass

from hybridpar.pipeline.actions import Action


@dataclass(frozen=True, slots=True)
class Span:
    """One action on one queue, from its start to its end, in milliseconds since the start of the step.

    Attributes:
        worker: The worker that did it.
        queue: Kind of queue: `compute`, `send`, `receive` or `sync`.
        lane: Which one of that kind: the lane for `compute`, the other worker for `send` and `receive`, and the sync
            lane for `sync`.
        action: What was done.
        start_ms: When it started.
        end_ms: When it ended.
    """

    worker: int
    queue: str
    lane: int
    action: Action
    start_ms: float
    end_ms: float

    @property
    def duration_ms(self) -> float:
        """Time from start to end."""
        return self.end_ms - self.start_ms
