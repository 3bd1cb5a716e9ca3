"""Schedule `accumulate`: gradient accumulation, the pipeline of one stage."""

from __future__ import annotations

from hybridpar.errors import ScheduleError
from hybridpar.schedule.actions import Schedule
from hybridpar.schedule.schedules.base import ScheduleRequest, backwards, forwards, register_schedule


@register_schedule("accumulate", "gradient accumulation: one stage, each micro-batch forward and at once backward")
def accumulate(request: ScheduleRequest) -> Schedule:
    """Forward and backward of one micro-batch after the other; one is in flight."""
    layout = request.layout
    if layout.stages != 1 or layout.lanes != 1:
        raise ScheduleError(
            f"{layout.stages} stages on {layout.lanes} lanes, and 'accumulate' is asked for",
            "'accumulate' is for a model that is not cut.",
            "Use `1f1b`.",
        )
    pairs = zip(forwards(0, request.micro_batches), backwards(0, request.micro_batches), strict=True)
    return Schedule("accumulate", (tuple(action for pair in pairs for action in pair),), request.micro_batches)
