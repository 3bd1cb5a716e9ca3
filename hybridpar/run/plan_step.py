"""A step as a plan or a schedule has it, simulated, as a timeline that can be drawn."""

from __future__ import annotations

from typing import Any

from hybridpar.errors import UsageError
from hybridpar.observe.timeline import Timeline, TimelineRow
from hybridpar.plan import Plan
from hybridpar.schedule.actions import Schedule
from hybridpar.schedule.costs import Costs, Link
from hybridpar.schedule.layout import Layout
from hybridpar.schedule.program import lower
from hybridpar.schedule.simulate import Simulation, simulate
from hybridpar.schedule.spans import StepSpans


def timeline_of_plan(plan: Plan) -> Timeline:
    """A step of a plan, for drawing."""
    step = step_of_plan(plan)
    if plan.pipeline is None or step is None:
        raise UsageError(
            "this plan does not say how micro-batches flow, so there is no schedule to draw",
            "A schedule is drawn from the sections placement and pipeline, and the times of all stages.",
            "Draw the partition with `hybridpar plan MODEL --draw FILE`, or show the plan.json of a run with --stages.",
        )
    facts: dict[str, Any] = {"model": plan.model.name, "schedule": plan.pipeline.schedule}
    facts |= {"stages": len(plan.partition.stages), "micro_batches": plan.pipeline.micro_batches}
    if plan.inputs is None and plan.predicted is not None and plan.predicted.step_ms is not None:
        facts["whole"] = f"{plan.predicted.step_ms:,.1f} ms with exchange and update"
    return _timeline(*step, facts)


def step_of_plan(plan: Plan) -> tuple[Simulation, Layout] | None:
    """A step as the search of the plan predicted it, else simulated from the times of stages; None without these."""
    times = plan.pass_ms()
    if plan.pipeline is None or plan.placement is None or times is None:
        return None
    if (predicted := _predicted(plan)) is not None:
        return predicted
    layout = plan.layout.replica(0, plan.partition.edges or None)
    costs = Costs(*times, link=Link(bytes_per_second=plan.pipeline.link_bytes_per_second))
    return simulate(lower(plan.orders()[0], layout), costs), layout


def _predicted(plan: Plan) -> tuple[Simulation, Layout] | None:
    """The step of the slowest replica, with exchange and update; None where the plan's search does not know it."""
    from hybridpar.planner.evaluate import Evaluator
    from hybridpar.planner.inputs import inputs_of_plan
    from hybridpar.planner.record import candidate_of
    from hybridpar.planner.space import Space

    if plan.inputs is None:
        return None
    evaluator = Evaluator(Space(inputs_of_plan(plan)))
    if (one := candidate_of(plan, evaluator.space)) is None:
        return None
    steps = [
        (evaluator.simulation(one, evaluator.costs(one, replica=each), each, order), one.layout.replica(each))
        for each, order in zip(one.layout.kinds, plan.orders(), strict=True)
    ]
    return max(steps, key=lambda step: step[0].step_ms)


def simulated(schedule: Schedule, layout: Layout, costs: Costs, facts: dict[str, Any]) -> Timeline:
    """A step as it should run, without what takes no time."""
    facts = {"stages": layout.stages, "micro_batches": schedule.micro_batches, **facts}
    return _timeline(simulate(lower(schedule, layout), costs), layout, facts)


def _timeline(step: Simulation, layout: Layout, facts: dict[str, Any]) -> Timeline:
    spans = [span for span in step.timeline if span.duration_ms > 0]
    rows = [
        TimelineRow(worker, 0, StepSpans(0.0, tuple(span for span in spans if span.worker == worker)), predicted=True)
        for worker in sorted({span.worker for span in spans})
    ]
    return Timeline(tuple(rows), layout, facts)
