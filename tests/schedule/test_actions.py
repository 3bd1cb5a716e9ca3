"""An action and a schedule mean the same wherever they are written down and read again."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridpar.errors import ScheduleError
from hybridpar.schedule.actions import (
    COMPUTE,
    ONCE,
    RECEIVES,
    SENDS,
    Action,
    Kind,
    Schedule,
    parse_action,
    read_schedule,
)


@st.composite
def actions(draw):
    kind = draw(st.sampled_from(list(Kind)))
    stage = draw(st.integers(0, 99))
    index = None if kind in ONCE else draw(st.integers(0, 999))
    peer = draw(st.integers(0, 99)) if kind in SENDS | RECEIVES else None
    return Action(stage, kind, index, peer)


@given(actions())
@settings(deadline=None)
def test_text_gives_the_action_back(action):
    assert parse_action(str(action)) == action


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("2F0", Action(2, Kind.FORWARD, 0)),
        ("0SEND_F1", Action(0, Kind.SEND_FORWARD, 1, 1)),
        ("1RECV_F1", Action(1, Kind.RECEIVE_FORWARD, 1, 0)),
        ("1SEND_B1", Action(1, Kind.SEND_BACKWARD, 1, 0)),
        ("0SEND_F1>2", Action(0, Kind.SEND_FORWARD, 1, 2)),
        (" 3SYNC2 ", Action(3, Kind.SYNC, 2)),
        ("3STEP", Action(3, Kind.STEP)),
        ("3REPORT1", Action(3, Kind.REPORT, 1)),
    ],
)
def test_texts_are_those_of_torch(text, action):
    assert parse_action(text) == action
    assert str(action) == text.strip()


@pytest.mark.parametrize("text", ["", "F0", "2X0", "2F", "2STEP1", "2DECIDE1", "2REPORT", "-1F0", "2F0 3F0", "2F0;rm"])
def test_other_texts_are_refused(text):
    with pytest.raises(ScheduleError, match="is not an action"):
        parse_action(text)


@given(
    st.lists(
        st.lists(
            st.builds(Action, st.integers(0, 5), st.sampled_from(sorted(COMPUTE)), st.integers(0, 9), st.none()),
            min_size=1,
        ),
        min_size=1,
        max_size=5,
    )
)
@settings(deadline=None)
def test_a_schedule_survives_its_text(rows):
    count = 1 + max(action.index for row in rows for action in row)
    schedule = Schedule("some", tuple(map(tuple, rows)), count)
    assert read_schedule(schedule.to_csv(), "some") == schedule


def test_empty_cells_are_bubbles():
    schedule = read_schedule("0F0,,0B0\n,1F0,1B0,,\n")
    assert schedule.to_csv() == "0F0,0B0\n1F0,1B0\n"
    assert schedule.micro_batches == 1


@pytest.mark.parametrize("text", ["", ",,\n", "0F0,0SEND_F0\n", "0F0,hello\n"])
def test_a_text_with_something_else_is_refused(text):
    with pytest.raises(ScheduleError):
        read_schedule(text)
