"""Tests events that work in a lane marks before it ends: other lanes start then, in order, and races are found."""

from __future__ import annotations

import threading

import pytest
import torch

from hybridpar.errors import LaneError
from hybridpar.lanes import Lanes
from tests.lanes.test_check import SEEDS, Program, raises, run
from tests.lanes.test_lanes import PATIENCE, fail, nothing


class TestEvents:
    """Events that work passes on its way."""

    def test_others_start_before_the_work_has_ended(self) -> None:
        ran: list[str] = []
        seen = threading.Event()
        with Lanes("cpu") as lanes:
            a, b = lanes.open("a"), lanes.open("b")
            half, end = lanes.event(), lanes.event()

            def work() -> None:
                ran.append("first half")
                a.mark(half)
                assert seen.wait(PATIENCE)  # would never come if `b` waited for the end
                ran.append("second half")
                a.mark(end)

            a.submit(work, marks=[half, end])
            b.wait(half)
            b.submit(lambda: ran.append("between"))
            b.submit(seen.set)
            b.wait(end)
            b.submit(lambda: ran.append("after"))
            b.synchronize()
            assert ran == ["first half", "between", "second half", "after"]
            assert half.passed
            assert end.passed

    @pytest.mark.parametrize("order", [(1, 0), (0, 0)])
    def test_they_are_passed_once_and_in_their_order(self, order: tuple[int, int]) -> None:
        with Lanes("cpu") as lanes:
            lane = lanes.open("a")
            events = [lanes.event(), lanes.event()]
            lane.submit(lambda: [lane.mark(events[index]) for index in order], marks=events)
            with pytest.raises(LaneError, match="out of order"):
                lane.synchronize()

    def test_marking_belongs_inside_of_work(self) -> None:
        with Lanes("cpu") as lanes:
            a, b = lanes.open("a"), lanes.open("b")
            event = lanes.event()
            for lane in (a, lanes.caller):
                with pytest.raises(LaneError, match="outside its work"):
                    lane.mark(event)
            b.submit(lambda: b.mark(event))  # not one of its own
            with pytest.raises(LaneError, match="outside its work"):
                b.synchronize()

    def test_they_are_recorded_from_the_submission_on(self) -> None:
        with Lanes("cpu") as lanes:
            lane, event = lanes.open("a"), lanes.event()
            lane.submit(nothing, marks=[event])
            assert event.recorded_on() is lane
            with pytest.raises(LaneError, match="recorded before, on lane 'a'"):
                lane.submit(nothing, marks=[event])
            with pytest.raises(LaneError, match="recorded before, on lane 'a'"):
                lanes.caller.record(event)
            event.synchronize()

    @pytest.mark.parametrize("marked", [False, True])
    def test_failing_work_fails_what_it_has_not_passed(self, marked: bool) -> None:
        ran: list[str] = []
        with Lanes("cpu") as lanes:
            a, b = lanes.open("a"), lanes.open("b")
            first, second = lanes.event(), lanes.event()

            def work() -> None:
                if marked:
                    a.mark(first)
                fail()

            a.submit(work, marks=[first, second])
            b.wait(first)
            b.submit(lambda: ran.append("b"))
            if marked:
                b.synchronize()
            else:
                with pytest.raises(ValueError, match="the original"):
                    b.synchronize()
            with pytest.raises(ValueError, match="the original"):
                second.synchronize()
            assert ran == ["b"] * marked

    def test_the_caller_passes_them_too(self) -> None:
        ran: list[str] = []
        with Lanes("cpu") as lanes:
            lane, event, rest = lanes.open("a"), lanes.event(), lanes.event()

            def work() -> None:
                lanes.caller.mark(event)
                assert event.passed
                assert not rest.passed
                ran.append("work")

            lanes.caller.submit(work, marks=[event, rest])
            lane.wait(rest)
            lane.submit(lambda: ran.append("a"))
            lane.synchronize()
            assert ran == ["work", "a"]


class TestRaces:
    """Work that hands on one half of a tensor while it still writes to the other."""

    @staticmethod
    def program(read: str, *, mark: int = 0, keep: bool = True) -> Program:
        def run_it(lanes: Lanes) -> None:
            work_lane, sync = lanes.open("work"), lanes.open("sync")
            halves = torch.zeros(8)
            work_lane.wait(lanes.caller.record())
            marks = [lanes.event(), lanes.event()]

            def work() -> None:
                halves[:4].add_(1)
                work_lane.mark(marks[0])
                halves[4:].add_(1)
                work_lane.mark(marks[1])

            work_lane.submit(work, uses=[halves], marks=marks)
            sync.wait(marks[mark])
            part = {"first": slice(0, 4), "second": slice(4, 8), "both": slice(0, 8)}[read]
            sync.submit(lambda: halves[part].mul_(2), uses=[halves] if keep else [])
            sync.synchronize()
            work_lane.synchronize()

        return run_it

    @pytest.mark.parametrize("seed", SEEDS)
    @pytest.mark.parametrize("read", ["first", "second", "both"])
    def test_what_was_written_after_the_mark_is_out_of_bounds(self, read: str, seed: int) -> None:
        assert (run(self.program(read), seed) == []) is (read == "first")
        assert run(self.program(read, mark=1), seed) == []

    @pytest.mark.parametrize("seed", SEEDS)
    def test_work_after_the_marking_one_is_not_in_its_marks(self, seed: int) -> None:
        def program(lanes: Lanes) -> None:
            a, b = lanes.open("a"), lanes.open("b")
            buffer, event = torch.zeros(4), lanes.event()
            a.wait(lanes.caller.record())
            a.submit(lambda: a.mark(event), marks=[event])
            a.submit(lambda: buffer.add_(1), uses=[buffer])
            b.wait(event)
            b.submit(buffer.sum, uses=[buffer])

        assert "aten::add_" in raises(program, seed)
