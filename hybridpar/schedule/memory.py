"""The memory that a schedule needs on each lane."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hybridpar.schedule.actions import Kind, Schedule
from hybridpar.schedule.layout import Layout


@dataclass(frozen=True)
class HeldPasses:
    """The most that forward passes hold for backward passes at one time.

    A micro-batch is held by a stage from the start of its forward pass to the end of its backward pass.

    Attributes:
        in_flight: For every stage the most micro-batches.
        worker_bytes: For every worker the sum over its lanes of the most that each holds. With several lanes the real
            peak may be lower; it is never higher.
    """

    in_flight: tuple[int, ...]
    worker_bytes: tuple[int, ...]


def most_held(schedule: Schedule, layout: Layout, saved_bytes: Sequence[int] | None = None) -> HeldPasses:
    """The peaks of a schedule."""
    saved = [0] * layout.stages if saved_bytes is None else saved_bytes
    count, peak = [0] * layout.stages, [0] * layout.stages
    workers = [0] * layout.workers
    for lane, row in enumerate(schedule.rows):
        held = most = 0
        for action in row:
            stage = action.stage
            if action.kind is Kind.FORWARD:
                count[stage] += 1
                held += saved[stage]
                peak[stage] = max(peak[stage], count[stage])
                most = max(most, held)
            else:
                count[stage] -= 1
                held -= saved[stage]
        workers[layout.worker_of[lane]] += most
    return HeldPasses(tuple(peak), tuple(workers))
