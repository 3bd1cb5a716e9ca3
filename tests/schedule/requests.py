"""What the tests of schedules ask for, and what they read from the answers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hybridpar.schedule.actions import Kind, Schedule
from hybridpar.schedule.costs import Costs, unit_ms
from hybridpar.schedule.layout import Layout
from hybridpar.schedule.program import lower
from hybridpar.schedule.schedules import ScheduleRequest, make
from hybridpar.schedule.simulate import simulate


def request(stages: int, lanes: int, kind: str = "linear", count: int = 4, **more) -> ScheduleRequest:
    costs = Costs(*unit_ms(stages))
    return ScheduleRequest(Layout.dealt(stages, lanes, kind), count, replace(costs, **more))


def step_ms(schedule: Schedule, wanted: ScheduleRequest) -> float:
    return simulate(lower(schedule, wanted.layout), wanted.costs).step_ms


def order_of_torch(name: str, lanes: int, count: int, per_lane: int | None = None) -> list[list[str]]:
    visualizer = pytest.importorskip("torch.distributed.pipelining._schedule_visualizer")
    rows = visualizer.get_schedule_ops(name, lanes, count, per_lane)
    return [[str(cell) for cell in row if cell is not None and "REDUCE" not in str(cell)] for row in rows]


def own_order(name: str, wanted: ScheduleRequest) -> list[list[str]]:
    return [[str(action) for action in row] for row in make(name, wanted).rows]


def assert_backward_passes_ascend(schedule: Schedule) -> None:
    for kind in (Kind.FORWARD, Kind.BACKWARD):
        for stage in {action.stage for row in schedule.rows for action in row}:
            indices = [a.index for row in schedule.rows for a in row if a.stage == stage and a.kind is kind]
            assert indices == list(range(schedule.micro_batches))
