"""Small timelines for tests of their views, made without training."""

from __future__ import annotations

from hybridpar.observe.timeline import Timeline, add_prediction
from hybridpar.schedule.costs import BucketCost, Costs, Link
from hybridpar.schedule.layout import Edge, Layout
from hybridpar.schedule.program import lower
from hybridpar.schedule.schedules import ScheduleRequest, make
from hybridpar.schedule.simulate import Simulation, simulate
from hybridpar.schedule.spans import StepSpans

FACTS = {"model": "resnet18", "stages": 2, "micro_batches": 4, "schedule": "1f1b", "clocks": "one for all workers"}


def a_step(factor: float = 1.0, *, stages: int = 2, micro_batches: int = 4, workers: int = 2) -> Simulation:
    """A simulated step with transfers, two buckets per stage, and an agreement before the optimizers."""
    edges = [Edge(stage, stage + 1, 1_000_000, 1_000_000) for stage in range(stages - 1)]
    layout = Layout.dealt(stages, stages, workers=workers, edges=edges)
    program = lower(make("1f1b", ScheduleRequest(layout, micro_batches)), layout, [2] * stages)
    costs = Costs(
        (10.0 * factor,) * stages,
        (20.0 * factor,) * stages,
        step_ms=(2.0,) * stages,
        link=Link(0.1, 1e9),
        buckets=(tuple(BucketCost(one << 20, ready, 0.0, 0.0, 1.05 * one, 0.2) for one, ready in ((8, 0.5), (4, 1.0))),)
        * stages,
        replicas=2,
        sync_own_link=True,
        sync_lanes=2,
        control_ms=0.5,
    )
    return simulate(program, costs)


def a_timeline(
    *, replicas: int = 2, steps: tuple[int, ...] = (4, 5, 6), predicted: bool = True, stages: int = 2, workers: int = 2
) -> Timeline:
    """Steps that took a fifth longer than predicted; the second replica is half a millisecond behind."""
    ran = a_step(1.2, stages=stages, workers=workers)
    layout = Layout.dealt(stages, stages, workers=workers, replicas=replicas)
    recorded = {
        step: {
            rank: StepSpans(
                3600.0 + 0.5 * step + 5e-4 * replica, tuple(s for s in ran.timeline if s.worker == position)
            )
            for replica, ranks in enumerate(layout.ranks)
            for position, rank in enumerate(ranks)
        }
        for step in steps
    }
    spans = a_step(stages=stages, workers=workers).timeline if predicted else ()
    facts = {**FACTS, "stages": stages} | ({"prediction": "a simulation"} if predicted else {})
    return Timeline(add_prediction(recorded, spans, layout), layout, facts)
