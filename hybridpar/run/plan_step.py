"""A step as a plan has it, simulated, as a timeline that can be drawn."""

from __future__ import annotations

from typing import Any

from hybridpar.errors import UsageError
from hybridpar.observe.timeline import Timeline, TimelineRow
from hybridpar.plan import Plan
from hybridpar.schedule.layout import Layout
from hybridpar.schedule.program import lower
from hybridpar.schedule.simulate import Simulation, simulate
from hybridpar.schedule.spans import StepSpans


def timeline_of_plan(plan: Plan) -> Timeline:
    """A step of a plan, for drawing, without what takes no time."""
    step = step_of_plan(plan)
    if plan.pipeline is None or step is None:
        raise UsageError(
            "this plan does not say how micro-batches flow, so there is no schedule to draw",
            "A schedule is drawn from the sections placement and pipeline, and the times of all stages.",
            "Draw the plan.json of a run with --stages.",
        )
    facts: dict[str, Any] = {"model": plan.model.name, "schedule": plan.pipeline.schedule}
    facts["micro_batches"] = plan.pipeline.micro_batches
    if plan.predicted is not None and plan.predicted.step_ms is not None:
        facts["whole"] = f"{plan.predicted.step_ms:,.1f} ms with exchange and update"
    simulation, layout = step
    spans = [span for span in simulation.timeline if span.duration_ms > 0]
    rows = [
        TimelineRow(worker, 0, StepSpans(0.0, tuple(span for span in spans if span.worker == worker)), predicted=True)
        for worker in sorted({span.worker for span in spans})
    ]
    return Timeline(tuple(rows), layout, facts)


def step_of_plan(plan: Plan) -> tuple[Simulation, Layout] | None:
    """The passes of a step of the slowest replica, from the rows, edges and times in the plan; None without these."""
    costs = plan.pass_costs()
    if plan.pipeline is None or plan.placement is None or costs is None:
        return None
    layouts = [plan.layout.replica(replica, plan.partition.edges or None) for replica in plan.layout.kinds]
    pairs = zip(plan.orders(), layouts, strict=True)
    steps = [(simulate(lower(order, layout), costs), layout) for order, layout in pairs]
    return max(steps, key=lambda step: step[0].step_ms)
