"""Puts the timestamps of workers on different hosts on one time axis.

Workers of one host read the same clock. Those of other hosts are aligned by the end of something that all workers do
together, a `World.gather`: nobody leaves it before everybody has come, so all leave it within about the time of a
message. That is the error of the alignment.
"""

from __future__ import annotations

import contextlib
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hybridpar.comm.world import World
from hybridpar.schedule.spans import StepSpans

#: Common moments that the clocks of hosts are compared at; the median of the differences counts.
_MOMENTS = 5


@dataclass(frozen=True)
class Recording:
    """Steps as all workers ran them, on the clock of rank 0.

    Attributes:
        steps: For every step, by number, what every worker did, by rank. Origins are seconds on the clock of rank 0.
        clocks: Number of clocks that the workers read; where there are several, they were aligned.
        ahead: How far this worker's clock is ahead of rank 0's, in seconds.
    """

    steps: Mapping[int, Mapping[int, StepSpans]]
    clocks: int = 1
    ahead: float = 0.0


def clock_identity() -> str:
    """Equal in processes that read the same clock: those of one running kernel, and of one time namespace in it."""
    parts = [platform.node()]
    with contextlib.suppress(OSError):
        parts = [Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()]
        parts.append(os.readlink("/proc/self/ns/time"))
    return "|".join(parts)


def gather_spans(
    world: World,
    mine: Mapping[int, StepSpans],
    *,
    identity: str | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Recording:
    """Bring together what all workers recorded. A collective; all workers get the result."""
    answers: list[Any] = world.gather((clock_identity() if identity is None else identity, dict(mine)))
    clocks, spans = zip(*answers, strict=True)
    ahead_of_main = _ahead_of_main(world, clocks, clock)
    steps = {
        step: {
            rank: replace(recorded[step], origin=recorded[step].origin - ahead)
            for rank, (recorded, ahead) in enumerate(zip(spans, ahead_of_main, strict=True))
        }
        for step in sorted(set.intersection(*map(set, spans)))
    }
    return Recording(steps, len(set(clocks)), ahead_of_main[world.rank])


def _ahead_of_main(world: World, clocks: Sequence[str], clock: Callable[[], float]) -> list[float]:
    """For every rank how far its clock is ahead of rank 0's, in seconds; one number per clock."""
    if len(set(clocks)) == 1:
        return [0.0] * len(clocks)
    readings = []
    for _ in range(_MOMENTS):
        world.gather(None)
        readings.append(clock())
    everyone: list[Any] = world.gather(readings)
    ahead = {
        name: statistics.median(theirs - ours for theirs, ours in zip(everyone[rank], everyone[0], strict=True))
        for rank, name in reversed([*enumerate(clocks)])
    }
    return [ahead[name] for name in clocks]
