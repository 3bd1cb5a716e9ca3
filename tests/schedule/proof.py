"""Proves the lists of actions that workers issue, beside the schedule that they were made from."""

from __future__ import annotations

from collections import Counter

from hybridpar.schedule.actions import COMPUTE, RECEIVES, Action, Kind, Schedule
from hybridpar.schedule.check import Proof, check
from hybridpar.schedule.costs import BucketCost, Costs, unit_ms
from hybridpar.schedule.layout import Layout
from hybridpar.schedule.program import Program, lower
from hybridpar.schedule.simulate import simulate


def prove(schedule: Schedule, layout: Layout) -> Proof:
    """Prove a schedule, and the program that it is lowered to."""
    return check_program(lower(schedule, layout))


def check_program(program: Program) -> Proof:
    """Prove that workers which issue these lists finish the step; an AssertionError or a ScheduleError says what fails.

    Every action is on its own worker, once; computation has the order of the schedule; what an action needs of its own
    worker is issued before it; and with queues that run in order, and transfers that block both ends until both have
    come, every queue comes to its end.
    """
    schedule, layout, needs = program.schedule, program.layout, program.needs
    proof = check(schedule, layout)
    issued = Counter((worker, action) for worker, actions in enumerate(program.workers) for action in actions)
    assert issued == Counter((layout.home(action.stage), action) for action in needs), "each action once, at home"
    for lane, row in enumerate(schedule.rows):
        mine = [one for one in program.workers[layout.worker_of[lane]] if one.kind in COMPUTE]
        assert tuple(one for one in mine if layout.lane_of[one.stage] == lane) == row
    for worker, actions in enumerate(program.workers):
        before: set[Action] = set()
        for action in actions:
            early = [need for need in needs[action] if layout.home(need.stage) == worker and need not in before]
            assert not early or action.kind in RECEIVES, f"an event of {action} is waited for before it is recorded"
            before.add(action)
    buckets = Counter(action.stage for action in needs if action.kind is Kind.SYNC)
    sums = tuple((BucketCost(0),) * buckets[stage] for stage in range(layout.stages))
    simulate(program, Costs(*unit_ms(layout.stages), buckets=sums))
    return proof
