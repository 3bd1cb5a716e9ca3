"""The picture of a schedule shows every cell at its time, or says what it leaves out."""

from __future__ import annotations

from hybridpar.schedule.actions import parse_action, read_schedule
from hybridpar.schedule.layout import Layout
from hybridpar.schedule.picture import draw_schedule
from hybridpar.schedule.schedules import ScheduleRequest, make


def test_1f1b():
    layout = Layout.dealt(2, 2)
    assert draw_schedule(make("1f1b", ScheduleRequest(layout, 3)), layout).splitlines() == [
        "        0  1  2  3  4  5  6  7  8  9  10 11",
        "lane 0  F0 F1 .  .  B0 -- F2 B1 -- .  B2 --",
        "lane 1  .  F0 B0 -- F1 B1 -- F2 B2 -- .  .",
    ]


def test_lanes_with_several_stages_name_them():
    layout = Layout.dealt(4, 2, "v")
    picture = draw_schedule(read_schedule("0F0,3F0,3B0,0B0\n1F0,2F0,2B0,1B0\n"), layout)
    assert picture.splitlines() == [
        "        0   1   2   3   4   5   6   7   8   9   10  11",
        "lane 0  0F0 .   .   3F0 3B0 --- .   .   .   .   0B0 ---",
        "lane 1  .   1F0 2F0 .   .   .   2B0 --- 1B0 --- .   .",
    ]


def test_a_mark_points_at_its_cell():
    layout = Layout.dealt(2, 2)
    lines = draw_schedule(
        make("gpipe", ScheduleRequest(layout, 3)), layout, mark=parse_action("0F2"), note="too many"
    ).splitlines()
    assert lines[2] == "              ^^ too many"
    assert lines[1][14:16] == "F2"


def test_what_is_left_out_is_said():
    layout = Layout.dealt(4, 4)
    schedule = make("gpipe", ScheduleRequest(layout, 20))
    lines = draw_schedule(schedule, layout, width=80).splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[-1] == "(slots 0 to 17 of 69)"
    marked = draw_schedule(schedule, layout, width=80, mark=parse_action("3B19")).splitlines()
    assert "B19" in marked[4]
    assert marked[-1].endswith("of 69)")
    assert "(slots" not in draw_schedule(schedule, layout, width=400)


def test_lanes_that_wait_for_ever_have_question_marks():
    layout = Layout.dealt(2, 2)
    picture = draw_schedule(read_schedule("0F0,0B0\n1B0,1F0\n"), layout)
    assert picture.splitlines()[1:] == ["lane 0  F0  B0?", "lane 1  B0? F0?"]
