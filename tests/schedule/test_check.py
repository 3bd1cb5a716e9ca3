"""What would hang, forget or overfill is found before it runs, and shown where it happens."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hybridpar.errors import ScheduleError
from hybridpar.schedule.actions import Schedule, parse_action, read_schedule
from hybridpar.schedule.check import check
from hybridpar.schedule.layout import Edge, Layout
from hybridpar.schedule.program import LaneRun, Program, dependencies, lower
from hybridpar.schedule.schedules import ScheduleRequest, make
from hybridpar.schedule.simulate import most_held
from tests.schedule.proof import check_program

TWO = Layout.dealt(2, 2)


def program_of(name: str = "1f1b", layout: Layout = TWO, count: int = 4) -> Program:
    return lower(make(name, ScheduleRequest(layout, count)), layout, [2] + [1] * (layout.stages - 1))


def changed(program: Program, worker: int, change) -> Program:
    """The program with another list for one worker; `change` edits a list of texts."""
    texts = [str(action) for action in program.workers[worker]]
    change(texts)
    lists = list(program.workers)
    lists[worker] = tuple(parse_action(text) for text in texts)
    return replace(program, workers=tuple(lists))


def swap(texts: list[str], one: str, other: str) -> None:
    first, second = texts.index(one), texts.index(other)
    texts[first], texts[second] = texts[second], texts[first]


def refused(schedule: str) -> ScheduleError:
    with pytest.raises(ScheduleError) as caught:
        check(read_schedule(schedule, "own"), TWO)
    return caught.value


def test_a_proof_counts_what_is_held():
    layout = Layout.dealt(4, 4, workers=2)
    schedule = make("1f1b", ScheduleRequest(layout, 6))
    assert check(schedule, layout).in_flight == (4, 3, 2, 1)
    assert LaneRun(schedule, layout, dependencies(layout, schedule)).length == 27


def test_lanes_of_a_worker_are_added():
    """Each lane keeps its own pace, so only the sum of what each holds at most is sure."""
    layout = Layout.dealt(2, 2, workers=1)
    assert most_held(make("gpipe", ScheduleRequest(layout, 3)), layout, (1, 10)).worker_bytes == (33,)


def test_a_deadlock_is_shown_where_it_is():
    error = refused("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n")
    assert error.what == "schedule 'own' deadlocks"
    assert error.why.splitlines() == [
        "0B0 needs 1B0, which waits for it, directly or not.",
        "        0   1   2   3   4",
        "lane 0  F0  B0? F1? B1?",
        "            ^^^ here",
        "lane 1  .   F0  F1? B0? B1?",
    ]


def test_another_order_without_a_circle_is_allowed():
    assert check(read_schedule("0F0,0F1,0B0,0B1\n1F1,1F0,1B1,1B0\n"), TWO).in_flight == (2, 2)


@pytest.mark.parametrize(
    ("schedule", "what"),
    [
        ("0F0,0B0,0F1,0B1\n1F0,1B0,1B1\n", "stage 1 does B for micro-batch 1"),
        ("0F0,0B0\n1F0\n", "stage 1 does F for micro-batch 0"),
        ("0F0,0B0,0F1,0B1\n1F0,1B0\n", "stage 1 does nothing for micro-batch 1"),
        ("0F0,0B0\n1F0,1B0,1B0\n", "stage 1 does F B B for micro-batch 0"),
        ("0F0,0B0,1F0\n1B0\n", "1F0 stands on lane 0 of schedule 'own'"),
        ("0F0,0B0,1F0,1B0\n", "schedule 'own' has 1 row(s) for 2 lane(s)"),
        ("0F0,0B0\n1B0,1F0\n", "schedule 'own' deadlocks"),
    ],
)
def test_incomplete_schedules_are_refused(schedule, what):
    error = refused(schedule)
    assert error.what == what
    assert error.fix


def test_a_schedule_of_nothing_is_refused_as_any_other():
    with pytest.raises(ScheduleError, match="stage 0 does nothing for micro-batch 0"):
        check(Schedule("own", ((),), micro_batches=1), Layout.dealt(1, 1))


def test_what_lower_makes_is_proved():
    for name, layout in (
        ("1f1b", Layout.dealt(4, 4)),
        ("interleaved", Layout.dealt(8, 4, "loop", workers=2)),
        ("looped_bfs", Layout.dealt(6, 3, "v")),
        ("gpipe", Layout.dealt(3, 3, edges=(Edge(0, 1, 1, 1), Edge(0, 2, 1, 1), Edge(1, 2, 1, 0)))),
    ):
        check_program(program_of(name, layout, 5))


@pytest.mark.parametrize(
    ("worker", "change"),
    [
        (1, lambda w: w.remove("1RECV_F2")),
        (0, lambda w: w.append("0SEND_F1")),
        (0, lambda w: (w.remove("0SEND_F0"), w.insert(w.index("0SEND_F1") + 1, "0SEND_F0"))),
        (1, lambda w: (w.remove("1RECV_F2"), w.insert(w.index("1F2") + 1, "1RECV_F2"))),
        (1, lambda w: swap(w, "1F0", "1F1")),
        (0, lambda w: (w.remove("0SYNC1"), w.insert(0, "0SYNC1"))),
    ],
)
def test_a_program_that_was_changed_is_not_proved(worker, change):
    with pytest.raises((AssertionError, ScheduleError)):
        check_program(changed(program_of(), worker, change))


def test_a_circle_through_two_pairs_of_workers_is_found():
    """Each of two workers waits in its queue for a transfer that the other has put behind its own."""
    layout = Layout.dealt(4, 2, "loop", edges=(Edge(0, 1, 1, 0), Edge(0, 3, 1, 0), Edge(2, 3, 1, 0)))
    schedule = read_schedule("0F0,2F0,0B0,2B0\n1F0,3F0,1B0,3B0\n", "own")
    program = lower(schedule, layout)
    check_program(program)
    turned = changed(program, 0, lambda w: (w.remove("0SEND_F0"), w.insert(w.index("2SEND_F0") + 1, "0SEND_F0")))
    with pytest.raises(ScheduleError, match="stops with"):
        check_program(turned)


def test_the_fault_in_a_long_schedule_is_in_the_picture():
    layout = Layout.dealt(2, 2)
    schedule = make("gpipe", ScheduleRequest(layout, 60))
    row = list(schedule.rows[1])
    row.remove(parse_action("1F50"))
    error = refused(Schedule("own", (schedule.rows[0], tuple(row)), 60).to_csv())
    lines = error.why.splitlines()
    assert any("^" in line for line in lines)
    assert max(map(len, lines)) <= 110
    assert "of" in lines[-1]
    assert lines[-1].startswith("(slots")
