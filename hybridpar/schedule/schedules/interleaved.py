"""Schedule `interleaved`: 1F1B with several stages per lane."""

from __future__ import annotations

import itertools

from hybridpar.errors import ScheduleError
from hybridpar.schedule.actions import Action, Kind, Schedule
from hybridpar.schedule.layout import Layout
from hybridpar.schedule.schedules.base import ScheduleRequest, register_schedule
from hybridpar.schedule.schedules.one_forward_one_backward import in_turns


@register_schedule(
    "interleaved", "1F1B over several stages per lane, dealt out round and round; a shorter fill", placements=("loop",)
)
def interleaved(request: ScheduleRequest) -> Schedule:
    """Interleaved 1F1B: P lanes with v stages each, stage s on lane s mod P.

    Narayanan et al., SC 2021 (arXiv:2104.04473), section 2.2. Micro-batches go in rounds through the v stages of a
    lane; lane p does (v - 1) * round + 2 * (P - 1 - p) forward passes before its first backward pass. The paper wants M
    to be a multiple of P and makes rounds of P. Here any M works: there are max(1, M // P) rounds, and their sizes
    differ by one at most. A round smaller than P could lock the lanes, so only a single one may be.
    """
    layout, count = request.layout, request.micro_batches
    require_loop("interleaved", layout)
    lanes, chunks = layout.lanes, layout.stages // layout.lanes
    rounds = _rounds(count, lanes)
    rows = []
    for lane in range(lanes):
        stages = range(lane, layout.stages, lanes)
        ahead = (chunks - 1) * max(len(indices) for indices in rounds) + 2 * (lanes - 1 - lane)
        forward = [Action(stage, Kind.FORWARD, index) for indices in rounds for stage in stages for index in indices]
        backward = [
            Action(stage, Kind.BACKWARD, index) for indices in rounds for stage in reversed(stages) for index in indices
        ]
        rows.append(in_turns(forward, backward, ahead))
    return Schedule("interleaved", tuple(rows), count)


def require_loop(name: str, layout: Layout) -> None:
    """Refuse layouts that do not deal stages out to lanes round and round."""
    wanted = tuple(stage % layout.lanes for stage in range(layout.stages))
    if layout.lane_of != wanted or layout.stages % layout.lanes:
        raise ScheduleError(
            f"the stages are on lanes {layout.lane_of}, and {name!r} is asked for",
            f"{name!r} needs stages dealt out round and round, a whole number of them per lane: lanes {wanted}.",
            "Use `greedy` or `looped_bfs`, which fit every layout, or the `loop` placement.",
        )


def _rounds(count: int, lanes: int) -> list[range]:
    """Micro-batches cut into rounds of at least `lanes`, as equal as can be; into one where there are fewer."""
    rounds = max(1, count // lanes)
    ends = [count * number // rounds for number in range(rounds + 1)]
    return [range(first, last) for first, last in itertools.pairwise(ends)]
