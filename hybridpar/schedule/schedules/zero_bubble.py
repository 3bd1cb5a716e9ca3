"""Schedule `zero_bubble`: fills bubbles with the gradients of parameters."""

from __future__ import annotations

from hybridpar.schedule.actions import Action, Kind, Schedule
from hybridpar.schedule.schedules.base import ScheduleRequest, forwards, one_stage_per_lane, register_schedule


@register_schedule(
    "zero_bubble", "1F1B with backward passes split in two; the second halves fill bubbles (ZB-H1)", splits=True
)
def zero_bubble(request: ScheduleRequest) -> Schedule:
    """ZB-H1: 1F1B in which stage s puts off the weight halves of its first s micro-batches.

    Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024 (arXiv:2401.10241), section 2.3. No stage holds more than
    min(M, S) micro-batches, which is what 1F1B holds on its first. Splitting is not free: where a framework computes
    part of the backward pass twice for it, the two halves take longer than the whole.

    Args:
        request: The layout, the number of micro-batches, and what was measured.

    Raises:
        ScheduleError: A lane has no stage or several.
    """
    count, stages = request.micro_batches, one_stage_per_lane("zero_bubble", request.layout, "greedy")
    rows = []
    for stage in stages:
        ahead = min(count, len(stages) - 1 - stage)
        forward = forwards(stage, count)
        row = forward[:ahead]
        for index in range(count):
            row += forward[ahead + index : ahead + index + 1]
            row.append(Action(stage, Kind.BACKWARD_INPUT, index))
            if index >= stage:
                row.append(Action(stage, Kind.BACKWARD_WEIGHT, index - stage))
        row += [Action(stage, Kind.BACKWARD_WEIGHT, index) for index in range(max(0, count - stage), count)]
        rows.append(tuple(row))
    return Schedule("zero_bubble", tuple(rows), count)
