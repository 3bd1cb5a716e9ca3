"""When fragments are exchanged: the quadratic rule, the end of a run, and the slots of a round."""

from __future__ import annotations

import itertools

import pytest

from hybridpar.sync.outer import OuterRound, Timetable, Transfer


@pytest.mark.parametrize(
    ("rate", "steps"), [(0.008, 4), (0.004, 19), (0.002, 76), (0.001, 306), (0.0005, 1225), (0.0001, 30625)]
)
def test_rounds_grow_as_the_quadratic_rule_says(rate, steps):
    timetable = Timetable(4, ratio=0.0175 / 0.008)
    found = timetable.next_round(10, rate / 0.008)
    assert (found.start, found.stop, found.is_last) == (10, 10 + steps, False)


@pytest.mark.parametrize("ratio", [None, 2.0])
def test_rounds_make_up_the_run_and_end_with_it(ratio):
    timetable, rounds, at = Timetable(4, total=98, ratio=ratio, warmup=10), list[OuterRound](), 0
    while at < 98:
        rounds.append(timetable.next_round(at, max(0.0, 1 - at / 98)))
        at = rounds[-1].stop
    lengths = [one.stop - one.start for one in rounds]
    assert sum(lengths) == 98
    assert [one.is_last for one in rounds] == [False] * (len(rounds) - 1) + [True]
    assert lengths[:2] == [4, 4]
    assert (max(lengths) > 4) == (ratio is not None)
    assert timetable.next_round(200, 1.0) == OuterRound(200, 204), "a run that goes on after its end"


@pytest.mark.parametrize("fragments", [1, 2, 3, 4])
@pytest.mark.parametrize("length", [4, 7, 12])
def test_each_fragment_has_a_slot_of_its_own(fragments, length):
    delay = length // fragments - 1
    found = OuterRound(20, 20 + length).transfers(fragments, delay)
    assert [one.fragment for one in found] == list(range(fragments))
    assert found[-1].arrives == 20 + length
    assert all(one.sent == one.arrives - delay > 20 - (delay == 0) for one in found)
    assert all(one.arrives < other.sent for one, other in itertools.pairwise(found))


def test_the_last_round_ends_with_all_fragments():
    last = OuterRound(8, 16, is_last=True)
    assert last.transfers(2, 1) == [Transfer(11, 12, 0), Transfer(16, 16, 0), Transfer(16, 16, 1)]
    assert OuterRound(8, 10, is_last=True).transfers(3, 1) == [Transfer(10, 10, index) for index in range(3)]
