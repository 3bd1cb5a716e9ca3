"""Schedule `1f1b`: the time of GPipe with fewer micro-batches in memory."""

from __future__ import annotations

from itertools import chain

from hybridpar.schedule.actions import Action, Schedule
from hybridpar.schedule.schedules.base import (
    ScheduleRequest,
    backwards,
    forwards,
    one_stage_per_lane,
    register_schedule,
)


@register_schedule(
    "1f1b",
    "a few forward passes, then one forward and one backward in turns; holds few micro-batches",
    placements=("linear",),
)
def one_forward_one_backward(request: ScheduleRequest) -> Schedule:
    """Stage s of S does min(M, S-1-s) forward passes, then one forward and one backward in turns, then what is left.

    So min(M, S-s) micro-batches are in flight on it. Narayanan et al., PipeDream, SOSP 2019; in the form with a flush
    at the end of each step of Narayanan et al., SC 2021 (arXiv:2104.04473), section 2.2. Any number of micro-batches
    works; with fewer than stages the pipeline never fills.
    """
    count, stages = request.micro_batches, one_stage_per_lane("1f1b", request.layout, "interleaved")
    rows = tuple(in_turns(forwards(stage, count), backwards(stage, count), len(stages) - 1 - stage) for stage in stages)
    return Schedule("1f1b", rows, count)


def in_turns(first: list[Action], second: list[Action], ahead: int) -> tuple[Action, ...]:
    """Two lists of equal length merged one by one, the first `ahead` actions ahead of the second."""
    pairs = zip(first[ahead:], second, strict=False)
    return (*first[:ahead], *chain.from_iterable(pairs), *second[max(0, len(first) - ahead) :])
