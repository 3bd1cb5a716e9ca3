"""Proves the lists of actions that workers issue, by the schedule that they were made from and the layout alone."""

from __future__ import annotations

from collections import Counter

from hybridpar.schedule.actions import COMPUTE, Action, Kind, Schedule
from hybridpar.schedule.check import check
from hybridpar.schedule.costs import BucketCost, Costs, unit_ms
from hybridpar.schedule.layout import Layout
from hybridpar.schedule.program import Program, lower
from hybridpar.schedule.simulate import HeldPasses, simulate

#: For each direction the kinds that send a value and receive it.
_TRANSFERS = {
    Kind.FORWARD: (Kind.SEND_FORWARD, Kind.RECEIVE_FORWARD),
    Kind.BACKWARD: (Kind.SEND_BACKWARD, Kind.RECEIVE_BACKWARD),
}
_SENDS = {send: kind for kind, (send, _) in _TRANSFERS.items()}
_RECEIVES = {receive: kind for kind, (_, receive) in _TRANSFERS.items()}


def prove(schedule: Schedule, layout: Layout) -> HeldPasses:
    """Prove a schedule, and the program that it is lowered to."""
    return check_program(lower(schedule, layout))


def check_program(program: Program) -> HeldPasses:
    """Prove that workers which issue these lists finish the step; an AssertionError or a ScheduleError says what fails.

    Every action is on its own worker, once; computation has the order of the schedule; values and gradients have come
    where they are used; and with queues that run in order, and transfers that block both ends until both have come,
    every queue comes to its end.
    """
    schedule, layout = program.schedule, program.layout
    held = check(schedule, layout)
    moved = (Kind.PARK, Kind.FETCH, Kind.SYNC, Kind.DECIDE)
    issued = [action for actions in program.workers for action in actions if action.kind not in moved]
    assert Counter(issued) == Counter(_expected(schedule, layout)), "each action once"
    for worker, actions in enumerate(program.workers):
        assert {layout.home(action.stage) for action in actions} == {worker}, "each action at home"
    for lane, row in enumerate(schedule.rows):
        passes = [action for action in program.workers[layout.worker_of[lane]] if action.kind in COMPUTE]
        assert tuple(action for action in passes if layout.lane_of[action.stage] == lane) == row
    _follow(program)
    buckets = Counter(action.stage for actions in program.workers for action in actions if action.kind is Kind.SYNC)
    sums = tuple((BucketCost(0),) * buckets[stage] for stage in range(layout.stages))
    simulate(program, Costs(*unit_ms(layout.stages), buckets=sums))
    return held


def _expected(schedule: Schedule, layout: Layout) -> list[Action]:
    """What a step consists of, but for sums, the decision of each worker and what moves to the host."""
    actions = [Action(stage, Kind.REPORT, part) for stage in range(layout.stages) for part in (0, 1)]
    actions += [Action(stage, Kind.STEP) for stage in range(layout.stages)]
    for index in range(schedule.micro_batches):
        actions += [Action(stage, kind, index) for stage in range(layout.stages) for kind in COMPUTE]
        for kind, (send, receive) in _TRANSFERS.items():
            for stage in range(layout.stages):
                for other in _users(layout, stage, kind):
                    if layout.home(stage) != layout.home(other):
                        actions += [Action(stage, send, index, other), Action(other, receive, index, stage)]
    return actions


def _users(layout: Layout, stage: int, kind: Kind) -> list[int]:
    """The stages that use the values of a stage, or the gradients that its backward pass computes."""
    if kind is Kind.FORWARD:
        return [edge.target for edge in layout.out_of(stage)]
    return [edge.source for edge in layout.into(stage) if edge.gradient_bytes > 0]


def _follow(program: Program) -> None:
    """Issue every list in order: a pass waits until what it reads is on its worker, and all lists come to an end."""
    layout, count = program.layout, program.schedule.micro_batches
    here: set[tuple[int, Kind, int, int | None]] = set()  # worker, kind, stage and index of a value
    sent: set[Action] = set()
    wanted: set[tuple[int, Action]] = set()
    at = [0] * len(program.workers)

    def reads(action: Action) -> list[tuple[Kind, int, int | None]]:
        stage, kind, index = action.stage, action.kind, action.index
        if kind is Kind.FORWARD:
            return [(kind, edge.source, index) for edge in layout.into(stage)]
        if kind is Kind.BACKWARD:
            used = [edge.target for edge in layout.out_of(stage) if edge.gradient_bytes > 0]
            return [(Kind.FORWARD, stage, index), *((kind, target, index) for target in used)]
        if kind in _SENDS:
            return [(_SENDS[kind], stage, index)]
        if kind is Kind.SYNC:
            return [(Kind.BACKWARD, stage, number) for number in range(count)]
        if kind is Kind.STEP:
            sums = {each for each in program.workers[layout.home(stage)] if each[:2] == (stage, Kind.SYNC)}
            return [(Kind.REPORT, stage, 1), *((Kind.SYNC, stage, each.index) for each in sums)]
        return []

    progress = True
    while progress:
        progress = False
        for worker, actions in enumerate(program.workers):
            while at[worker] < len(actions):
                action = actions[at[worker]]
                for receiver, receive in wanted:
                    kind, peer = _RECEIVES[receive.kind], receive.peer
                    assert peer is not None
                    if Action(peer, _TRANSFERS[kind][0], receive.index, receive.stage) in sent:
                        here.add((receiver, kind, peer, receive.index))
                if any((worker, *value) not in here for value in reads(action)):
                    break
                if action.kind in _RECEIVES:
                    wanted.add((worker, action))
                elif action.kind in _SENDS:
                    sent.add(action)
                else:
                    here.add((worker, action.kind, action.stage, action.index))
                at[worker] += 1
                progress = True
    stuck = [str(actions[at[worker]]) for worker, actions in enumerate(program.workers) if at[worker] < len(actions)]
    assert not stuck, f"what they read never comes: {', '.join(stuck)}"
