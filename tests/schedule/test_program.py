"""What must travel follows from what is computed, and workers agree on the order."""

from __future__ import annotations

import pytest

from hybridpar.errors import ScheduleError
from hybridpar.schedule.actions import RECEIVES, SENDS, Action, Kind, parse_action, read_schedule
from hybridpar.schedule.layout import Edge, Layout
from hybridpar.schedule.program import lower
from hybridpar.schedule.schedules import ScheduleRequest, make
from tests.schedule.proof import check_program

LOOKS = [
    ("1f1b", Layout.dealt(4, 4), 6),
    ("interleaved", Layout.dealt(6, 2, "loop"), 5),
    ("interleaved", Layout.dealt(8, 4, "loop", workers=2), 8),
    ("looped_bfs", Layout.dealt(6, 3, "v"), 4),
    ("gpipe", Layout.dealt(3, 3), 5),
]


def words(actions):
    return " ".join(str(action) for action in actions)


def test_the_program_of_two_stages():
    layout = Layout.dealt(2, 2)
    program = lower(read_schedule("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"), layout, [2, 0])
    assert words(program.workers[0]) == (
        "0F0 0SEND_F0 0F1 0SEND_F1 0REPORT0 0RECV_B0 0B0 0RECV_B1 0B1 0SYNC0 0SYNC1 0REPORT1 0DECIDE 0STEP"
    )
    assert words(program.workers[1]) == (
        "1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1F1 1REPORT0 1B1 1SEND_B1 1REPORT1 1DECIDE 1STEP"
    )


def test_optimizers_wait_for_the_decision_only_where_it_counts():
    schedule = read_schedule("0F0,0B0\n1F0,1B0\n")
    for commit, needs in ((True, "1REPORT1 1DECIDE"), (False, "1REPORT1")):
        program = lower(schedule, Layout.dealt(2, 2), [0, 2], commit=commit)
        assert words(program.needs[parse_action("1STEP")]) == needs
        assert words(program.needs[parse_action("1REPORT1")]) == "1B0 1SYNC0 1SYNC1"


def test_what_waits_long_enough_leaves_and_comes_back_in_time():
    schedule = read_schedule("0F0,0F1,0F2,0F3,0B0,0B1,0B2,0B3\n")
    program = lower(schedule, Layout.dealt(1, 1), offload={0})
    assert words(program.workers[0]) == (
        "0F0 0PARK0 0F1 0PARK1 0F2 0FETCH0 0PARK2 0F3 0FETCH1 0PARK3 0REPORT0 0B0 0FETCH2 0B1 0FETCH3 0B2 0B3 "
        "0REPORT1 0DECIDE 0STEP"
    )
    assert words(program.needs[parse_action("0FETCH0")]) == "0F2 0PARK0"
    assert words(program.needs[parse_action("0F2")]) == "0PARK0", "its memory is free by then"
    assert words(program.needs[parse_action("0B0")]) == "0F0 0FETCH0 0PARK2"
    assert program.queue_of(parse_action("0PARK0")) == program.queue_of(parse_action("0FETCH0")) == ("copy", 0, 0)
    assert not [action for action in lower(schedule, Layout.dealt(1, 1)).needs if action.kind is Kind.PARK]


def test_what_is_soon_needed_stays():
    schedule = read_schedule("0F0,0F1,0F2,0B0,0B1,0B2\n")
    assert not [action for action in lower(schedule, Layout.dealt(1, 1), offload={0}).needs if action.kind is Kind.PARK]


def test_what_needs_no_gradient_gets_none():
    layout = Layout.dealt(2, 2, edges=[Edge(0, 1, 8, 0)])
    program = lower(read_schedule("0F0,0B0\n1F0,1B0\n"), layout)
    assert words(program.workers[0]) == "0F0 0SEND_F0 0REPORT0 0B0 0REPORT1 0DECIDE 0STEP"


def test_nothing_travels_within_a_worker():
    program = lower(read_schedule("0F0,0B0\n1F0,1B0\n"), Layout.dealt(2, 2, workers=1))
    assert words(program.workers[0]) == "0F0 0REPORT0 1F0 1REPORT0 1B0 0B0 1REPORT1 0REPORT1 0DECIDE 1STEP 0STEP"


@pytest.mark.parametrize(("name", "layout", "count"), LOOKS)
def test_both_ends_of_a_pair_have_the_same_order(name, layout, count):
    program = lower(make(name, ScheduleRequest(layout, count)), layout)
    for sender in range(layout.workers):
        for receiver in range(layout.workers):
            sends = [a for a in program.workers[sender] if program.queue_of(a) == ("send", sender, receiver)]
            receives = [a for a in program.workers[receiver] if program.queue_of(a) == ("receive", receiver, sender)]
            assert [(a.stage, a.index, a.peer) for a in sends] == [(a.peer, a.index, a.stage) for a in receives]


@pytest.mark.parametrize(("name", "layout", "count"), LOOKS)
def test_a_program_with_sums_is_proved_and_ends_with_the_steps(name, layout, count):
    program = lower(make(name, ScheduleRequest(layout, count)), layout, [2] * layout.stages)
    check_program(program)
    for actions in program.workers:
        steps = [action for action in actions if action.kind is Kind.STEP]
        assert list(actions[-len(steps) :]) == steps


def test_one_thread_per_worker_with_blocking_transfers_comes_to_the_end():
    """The strictest reading of a program: everything in the order of the list, and a send waits for its receive."""
    layout = Layout.dealt(8, 4, "loop")
    program = lower(make("interleaved", ScheduleRequest(layout, 6)), layout)
    left = [list(actions) for actions in program.workers]
    done: set[Action] = set()
    moved = True
    while moved:
        moved = False
        for actions in left:
            while actions and actions[0].kind not in SENDS | RECEIVES:
                assert all(need in done for need in program.needs[actions[0]])
                done.add(actions.pop(0))
                moved = True
            if actions and actions[0].kind in SENDS:
                receive = next(a for a in program.needs if program.needs[a] == (actions[0],) and a.kind in RECEIVES)
                other = left[layout.home(receive.stage)]
                if other and other[0] == receive:
                    done |= {actions.pop(0), other.pop(0)}
                    moved = True
    assert not any(left)


def test_a_circle_is_refused():
    with pytest.raises(ScheduleError, match="deadlocks: 0B0, 1F1 wait for ever"):
        lower(read_schedule("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n"), Layout.dealt(2, 2))
    with pytest.raises(ScheduleError, match="0B0 needs 1B0, which nobody does"):
        lower(read_schedule("0F0,0B0\n1F0,1F1\n"), Layout.dealt(2, 2))


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("0F0,0B0\n", r"1 row\(s\) for 2 lane"),
        ("1F0,1B0\n0F0,0B0\n", "1F0 stands on lane 0"),
        ("0F0,0B0\n1F0,1B0,2F0\n", "2F0 stands on lane 1"),
    ],
)
def test_a_schedule_for_another_layout_is_refused(text, match):
    with pytest.raises(ScheduleError, match=match):
        lower(read_schedule(text), Layout.dealt(2, 2))
