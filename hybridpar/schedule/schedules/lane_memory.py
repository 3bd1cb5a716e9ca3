"""Counts the activations that a lane may hold without a deadlock.

A forward pass starts only where every micro-batch under way can still be carried to its end, the oldest first:
the safe states of Dijkstra's banker's algorithm (EWD-108), with micro-batches as customers.
"""

from __future__ import annotations

from collections.abc import Sequence

from hybridpar.errors import ScheduleError
from hybridpar.schedule.actions import Layout


class LaneMemory:
    """What one lane holds while its order is built.

    Args:
        saved: For every stage of the lane what one micro-batch holds.
        cap: The most that the lane may hold; None for no limit.
    """

    def __init__(self, saved: dict[int, int], cap: int | None) -> None:
        self._saved = saved
        self._cap = cap
        self._taken = dict.fromkeys(saved, 0)
        self._freed = dict.fromkeys(saved, 0)

    def admits(self, stage: int) -> bool:
        """Whether the next forward pass of a stage may start.

        Args:
            stage: One of the lane's.
        """
        if self._cap is None:
            return True
        taken = self._taken | {stage: self._taken[stage] + 1}
        held = sum((taken[one] - self._freed[one]) * size for one, size in self._saved.items())
        for index in range(min(self._freed.values()), max(taken.values())):
            to_come = sum(size for one, size in self._saved.items() if taken[one] <= index)
            if held + to_come > self._cap:
                return False
            # This micro-batch can end; what it holds is then free for the next.
            held -= sum(size for one, size in self._saved.items() if self._freed[one] <= index < taken[one])
        return True

    def take(self, stage: int) -> None:
        """A forward pass starts.

        Args:
            stage: One of the lane's.
        """
        self._taken[stage] += 1

    def free(self, stage: int) -> None:
        """A backward pass ends.

        Args:
            stage: One of the lane's.
        """
        self._freed[stage] += 1


def lane_caps(layout: Layout, saved: Sequence[int], cap: int | None) -> list[int | None]:
    """A worker's cap dealt out to its lanes, in proportion to what one micro-batch holds on each.

    Lanes of a worker run at their own pace. Only if each keeps its own part is the whole kept at any pace.

    Args:
        layout: Where stages run.
        saved: For every stage what one micro-batch holds.
        cap: The most that a worker may hold; None for no limit.

    Raises:
        ScheduleError: A single micro-batch holds more than the cap.
    """
    if cap is None:
        return [None] * layout.lanes
    lanes, workers = [0] * layout.lanes, [0] * layout.workers
    for stage, size in enumerate(saved):
        lanes[layout.lane_of[stage]] += size
        workers[layout.home(stage)] += size
    for worker, size in enumerate(workers):
        if size > cap:
            raise ScheduleError(
                f"worker {worker} holds {size} bytes for one micro-batch, and its cap is {cap}",
                "At least one micro-batch must fit.",
                "Use smaller micro-batches, more stages, or recompute activations.",
            )
    return [
        cap * size // workers[layout.worker_of[lane]] if workers[layout.worker_of[lane]] else cap
        for lane, size in enumerate(lanes)
    ]
