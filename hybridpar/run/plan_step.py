"""A step as a plan or a schedule has it, simulated, as a timeline that can be drawn."""

from __future__ import annotations

from typing import Any

from hybridpar.errors import UsageError
from hybridpar.observe.timeline import Timeline, TimelineRow
from hybridpar.plan import Plan
from hybridpar.schedule.actions import Edge, Layout, Schedule
from hybridpar.schedule.costs import Costs
from hybridpar.schedule.program import lower
from hybridpar.schedule.schedules import ScheduleRequest, make
from hybridpar.schedule.simulate import simulate
from hybridpar.schedule.spans import StepSpans


def timeline_of_plan(plan: Plan) -> Timeline:
    """A step of a plan, simulated from the times of its stages and its link, for drawing."""
    stages = plan.partition.stages
    forward = tuple(stage.forward_ms for stage in stages if stage.forward_ms is not None)
    backward = tuple(stage.backward_ms for stage in stages if stage.backward_ms is not None)
    if plan.pipeline is None or plan.placement is None or min(len(forward), len(backward)) < len(stages):
        raise UsageError(
            "this plan does not say how micro-batches flow, so there is no schedule to draw",
            "A schedule is drawn from the sections placement and pipeline, and the times of all stages.",
            "Draw the partition with `hybridpar plan MODEL --draw FILE`, or show the plan.json of a run with --stages.",
        )
    again = [ahead if index in plan.pipeline.recompute else 0.0 for index, ahead in enumerate(forward)]
    backward = tuple(back + more for back, more in zip(backward, again, strict=True))
    layout = _layout_of_plan(plan)
    measured = plan.measured
    latency = (measured.link_latency_ms if measured is not None else None) or 0.0
    speed = measured.link_bytes_per_second if measured is not None else None
    request = ScheduleRequest(
        layout,
        plan.pipeline.micro_batches,
        forward_ms=forward,
        backward_ms=backward,
        latency_ms=latency,
        bytes_per_second=speed,
    )
    schedule = make(plan.pipeline.schedule, request)
    facts: dict[str, Any] = {"model": plan.model.name, "schedule": schedule.name}
    if plan.predicted is not None and plan.predicted.step_ms is not None:
        facts["whole"] = f"{plan.predicted.step_ms:,.1f} ms with exchange and update"
    return simulated(schedule, layout, request.costs, facts)


def _layout_of_plan(plan: Plan) -> Layout:
    assert plan.placement is not None
    stages = plan.partition.stages
    return Layout(
        plan.placement.lane_of,
        tuple(worker for worker, _ in plan.placement.lanes),
        tuple(
            Edge(index, index + 1, stage.cut_bytes or 0, stage.cut_bytes or 1)
            for index, stage in enumerate(stages[:-1])
        ),
    )


def simulated(schedule: Schedule, layout: Layout, costs: Costs, facts: dict[str, Any]) -> Timeline:
    """A step as it should run, without what takes no time."""
    spans = [span for span in simulate(lower(schedule, layout), costs).timeline if span.duration_ms > 0]
    rows = [
        TimelineRow(worker, 0, StepSpans(0.0, tuple(span for span in spans if span.worker == worker)), predicted=True)
        for worker in range(layout.workers)
    ]
    return Timeline(tuple(rows), 1, {"stages": layout.stages, "micro_batches": schedule.micro_batches, **facts})
