from __future__ import annotations

import gc
import random
import subprocess
import sys
import threading
import traceback
import weakref
from collections.abc import Callable

import pytest
import torch

from hybridpar.errors import LaneError
from tests.lanes.checked import Checker, Lanes

PATIENCE = 60  # seconds until a test that hangs fails; none comes near it


def lane_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("lane ")]


def fail() -> None:
    raise ValueError("the original")


def nothing() -> None:
    pass


class TestOrder:
    def test_work_of_one_lane_runs_in_the_order_of_submission(self) -> None:
        ran: list[int] = []
        with Lanes("cpu") as lanes:
            lane = lanes.open("a")
            for number in range(100):
                lane.submit(lambda number=number: ran.append(number))
            lane.synchronize()
            assert ran == list(range(100))

    def test_work_runs_on_the_thread_of_its_lane(self) -> None:
        ran: dict[str, str] = {}
        with Lanes("cpu") as lanes:
            for name in ("a", "b"):
                lanes.open(name).submit(lambda name=name: ran.update({name: threading.current_thread().name}))
            lanes.caller.submit(lambda: ran.update(caller=threading.current_thread().name))
        assert ran == {"a": "lane a", "b": "lane b", "caller": threading.current_thread().name}

    def test_lanes_run_at_the_same_time(self) -> None:
        together = threading.Barrier(2)
        with Lanes("cpu") as lanes:
            a, b = lanes.open("a"), lanes.open("b")
            a.submit(lambda: together.wait(PATIENCE))
            b.submit(lambda: together.wait(PATIENCE))
            a.synchronize()
            b.synchronize()

    def test_work_behind_a_wait_starts_after_the_event(self) -> None:
        ran: list[str] = []
        gate = threading.Event()
        with Lanes("cpu") as lanes:
            a, b = lanes.open("a"), lanes.open("b")
            a.submit(lambda: gate.wait(PATIENCE))
            a.submit(lambda: ran.append("a"))
            event = a.record()
            b.submit(lambda: ran.append("b before"))
            before = b.record()
            b.wait(event)
            b.submit(lambda: ran.append("b after"))
            before.synchronize()
            assert ran == ["b before"]
            assert not event.passed
            gate.set()
            b.synchronize()
            assert event.passed
            assert ran == ["b before", "a", "b after"]

    @pytest.mark.parametrize("seed", range(20))
    def test_random_programs_never_hang_and_keep_their_order(self, seed: int) -> None:
        choose = random.Random(seed)
        finished: set[int] = set()
        late: list[tuple[int, set[int]]] = []

        def work(number: int, needs: set[int]) -> None:
            if not needs <= finished:
                late.append((number, needs - finished))
            finished.add(number)

        with Lanes("cpu", check=Checker(seed, max_delay=0.0003)) as lanes:
            opened = [lanes.open(str(index)) for index in range(3)]
            before: list[set[int]] = [set() for _ in opened]
            events = []
            for number in range(60):
                index = choose.randrange(3)
                action = choose.choice(("submit", "record", "wait"))
                if action == "submit":
                    opened[index].submit(lambda number=number, needs=set(before[index]): work(number, needs))
                    before[index].add(number)
                elif action == "record":
                    events.append((opened[index].record(), set(before[index])))
                elif events:
                    event, earlier = choose.choice(events)
                    opened[index].wait(event)
                    before[index] |= earlier
        assert finished == set().union(*before)
        assert late == []


class TestCaller:
    def test_work_runs_inline(self) -> None:
        ran: list[int] = []
        with Lanes("cpu") as lanes:
            lanes.caller.submit(lambda: ran.append(1))
            assert ran == [1]
            assert lanes.caller.record().passed

    def test_waiting_blocks(self) -> None:
        ran: list[int] = []
        gate = threading.Event()
        with Lanes("cpu") as lanes:
            lane = lanes.open("a")
            lane.submit(lambda: gate.wait(PATIENCE))
            lane.submit(lambda: ran.append(1))
            event = lane.record()
            gate.set()
            lanes.caller.wait(event)
            assert ran == [1]

    def test_its_own_failure_stops_nothing(self) -> None:
        with Lanes("cpu") as lanes:
            with pytest.raises(ValueError, match="the original"):
                lanes.caller.submit(fail)
            lanes.caller.submit(nothing)
            lanes.caller.synchronize()


class TestEvents:
    def test_waiting_for_an_unrecorded_event_is_refused(self) -> None:
        with Lanes("cpu") as lanes:
            lane, event = lanes.open("a"), lanes.event()
            for use in (lambda: lane.wait(event), lambda: lanes.caller.wait(event), event.synchronize):
                with pytest.raises(LaneError, match="not recorded"):
                    use()
            assert lane.record(event) is event
            lane.wait(event)
            lane.synchronize()
            assert event.passed

    def test_an_event_is_recorded_once(self) -> None:
        with Lanes("cpu") as lanes:
            event = lanes.open("a").record()
            with pytest.raises(LaneError, match="recorded before, on lane 'a'"):
                lanes.caller.record(event)

    def test_events_of_another_family_are_refused(self) -> None:
        with Lanes("cpu") as lanes, Lanes("cpu") as others:
            with pytest.raises(LaneError, match="another family"):
                lanes.caller.wait(others.caller.record())
            with pytest.raises(LaneError, match="another family"):
                lanes.caller.record(others.event())


class TestFailure:
    def test_later_work_is_skipped_and_everyone_meets_the_original(self) -> None:
        ran: list[int] = []
        with Lanes("cpu") as lanes:
            lane = lanes.open("a")
            before = lane.record()
            gate = threading.Event()
            lane.submit(lambda: gate.wait(PATIENCE))  # so that all is queued before anything fails
            lane.submit(fail)
            lane.submit(lambda: ran.append(1))
            event = lane.record()
            gate.set()
            before.synchronize()
            caught, frames = [], []
            for use in (
                event.synchronize,
                lambda: lanes.caller.wait(event),
                lambda: lane.submit(nothing),
                lane.synchronize,
                event.synchronize,
            ):
                with pytest.raises(ValueError, match="the original") as info:
                    use()
                caught.append(info.value)
                frames.append([frame.name for frame in traceback.extract_tb(info.value.__traceback__)])
            assert ran == []
            assert event.passed
            assert all(error is caught[0] for error in caught)
            assert caught[0].__notes__ == ["on lane 'a'"]
            assert all(names.count("fail") == 1 for names in frames)
            assert frames[0] == frames[-1]  # nothing of the raises in between

    def test_lanes_that_wait_for_it_stop_too(self) -> None:
        ran: list[str] = []
        with Lanes("cpu") as lanes:
            a, b, c, free = (lanes.open(name) for name in ("a", "b", "c", "free"))
            gate = threading.Event()
            a.submit(lambda: gate.wait(PATIENCE))
            a.submit(fail)
            b.wait(a.record())
            b.submit(lambda: ran.append("b"))
            c.wait(b.record())
            c.submit(lambda: ran.append("c"))
            free.submit(lambda: ran.append("free"))
            gate.set()
            with pytest.raises(ValueError, match="the original") as info:
                c.synchronize()
            with pytest.raises(ValueError, match="the original"):
                b.submit(nothing)
            free.synchronize()
            assert ran == ["free"]
            assert info.value.__notes__ == ["on lane 'a'"]

    def test_misuse_from_inside_of_work(self) -> None:
        with Lanes("cpu") as lanes:
            a, b = lanes.open("a"), lanes.open("b")
            a.submit(lambda: b.submit(nothing))
            with pytest.raises(LaneError, match="other code than its issuing thread"):
                a.synchronize()

    def test_keep_belongs_inside_of_work(self) -> None:
        with Lanes("cpu") as lanes:
            lane = lanes.open("a")
            lane.submit(lambda: lane.keep(torch.ones(1)))
            lane.synchronize()
            with pytest.raises(LaneError, match="outside its work"):
                lane.keep(torch.ones(1))


class TestClose:
    def test_queued_work_is_finished(self) -> None:
        ran: list[int] = []
        lanes = Lanes("cpu")
        lane = lanes.open("a")
        gate = threading.Event()
        lane.submit(lambda: gate.wait(PATIENCE))
        for number in range(10):
            lane.submit(lambda number=number: ran.append(number))
        event = lane.record()
        gate.set()
        lanes.close()
        lanes.close()
        assert ran == list(range(10))
        assert event.passed
        assert lane_threads() == []

    def test_nothing_goes_in_afterwards(self) -> None:
        with Lanes("cpu") as lanes:
            lane = lanes.open("a")
            event, unrecorded = lane.record(), lanes.event()
        uses: list[Callable[[], object]] = [
            lambda: lane.submit(nothing),
            lambda: lane.wait(event),
            lambda: lane.record(unrecorded),
            lambda: lanes.caller.wait(event),
            lambda: lanes.open("b"),
        ]
        for use in uses:
            with pytest.raises(LaneError, match="closed"):
                use()
        lane.synchronize()
        event.synchronize()

    def test_a_failure_that_nobody_met_is_raised_once(self) -> None:
        lanes = Lanes("cpu")
        lane = lanes.open("a")
        lane.submit(fail)
        with pytest.raises(ValueError, match="the original"):
            lanes.close()
        lanes.close()
        assert lane_threads() == []

    def test_leaving_by_an_exception_skips_what_has_not_begun(self) -> None:
        ran: list[int] = []
        started, gate = threading.Event(), threading.Event()

        def first() -> None:
            started.set()
            gate.wait(PATIENCE)

        def interrupted() -> None:
            with Lanes("cpu") as lanes:
                a, b = lanes.open("a"), lanes.open("b")
                a.submit(first)
                a.submit(lambda: ran.append(1))
                events.append(a.record())
                b.wait(events[0])
                started.wait(PATIENCE)
                releaser.start()
                raise KeyboardInterrupt

        # The gate opens only once the lane knows that the rest is to be skipped.
        def release() -> None:
            while not any(frame.f_code.co_name == "join" for frame in frames_of(main)):
                pass
            gate.set()

        main = threading.get_ident()
        events: list = []
        releaser = threading.Thread(target=release)
        with pytest.raises(KeyboardInterrupt):
            interrupted()
        releaser.join()
        assert ran == []
        assert lane_threads() == []
        with pytest.raises(LaneError, match="before all work was done"):
            events[0].synchronize()

    def test_opening_and_closing_leaks_no_threads(self) -> None:
        for _ in range(1000):
            with Lanes("cpu") as lanes:
                lanes.open("a").submit(nothing)
        assert lane_threads() == []

    def test_a_forgotten_family_ends_its_threads(self) -> None:
        lanes = Lanes("cpu")
        lane = lanes.open("a")
        lane.submit(nothing)
        lane.synchronize()
        thread = lane_threads()[0]
        del lanes, lane
        gc.collect()
        thread.join(PATIENCE)
        assert not thread.is_alive()

    def test_an_open_family_does_not_keep_the_interpreter(self) -> None:
        program = (
            "import threading; from hybridpar.lanes import Lanes\n"
            "lanes = Lanes('cpu'); a, b = lanes.open('a'), lanes.open('b')\n"
            "a.submit(lambda: print('ran', flush=True)); b.wait(a.record()); b.synchronize()\n"
            "raise RuntimeError('main failed')\n"
        )
        ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE * 2)
        assert (ended.returncode, ended.stdout) == (1, "ran\n")
        assert ended.stderr.strip().endswith("RuntimeError: main failed")


def frames_of(thread: int) -> list:
    frame, found = sys._current_frames().get(thread), []
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    return found


class TestModes:
    def test_work_runs_in_the_modes_of_its_submission(self) -> None:
        seen: list[tuple[bool, bool, torch.dtype]] = []

        def look() -> None:
            product = torch.ones(2, 2) @ torch.ones(2, 2)
            seen.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled(), product.dtype))

        with Lanes("cpu") as lanes:
            lane = lanes.open("a")
            lane.submit(look)
            with torch.no_grad():
                lane.submit(look)
            with torch.inference_mode():
                lane.submit(look)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                lane.submit(look)
            with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
                lane.submit(look)
            lane.submit(look)
        assert seen == [
            (True, False, torch.float32),
            (False, False, torch.float32),
            (False, True, torch.float32),
            (True, False, torch.bfloat16),
            (False, False, torch.bfloat16),
            (True, False, torch.float32),
        ]

    def test_intra_op_threads_belong_to_the_lane(self) -> None:
        seen: dict[str, int] = {}

        def look(name: str) -> None:
            seen[name] = torch.get_num_threads()

        before = torch.get_num_threads()
        torch.set_num_threads(3)
        try:
            with Lanes("cpu") as lanes:
                lanes.open("one").submit(lambda: look("one"))
                lanes.open("two", threads=2).submit(lambda: look("two"))
            look("host")
            stranger = threading.Thread(target=look, args=("stranger",))
            stranger.start()
            stranger.join()
        finally:
            torch.set_num_threads(before)
        assert seen == {"one": 1, "two": 2, "host": 3, "stranger": 3}


class TestLifetime:
    def test_uses_live_until_the_work_is_done_and_no_longer(self) -> None:
        tensor = torch.ones(3)
        alive = weakref.ref(tensor)
        gate = threading.Event()
        seen: list[bool] = []
        with Lanes("cpu") as lanes:
            lane = lanes.open("a")
            lane.submit(lambda: gate.wait(PATIENCE))
            lane.submit(lambda: seen.append(alive() is not None), uses=[tensor])
            event = lane.record()
            del tensor
            gate.set()
            event.synchronize()
            assert seen == [True]
            assert alive() is None


class TestFamily:
    def test_names_are_unique(self) -> None:
        with Lanes("cpu") as lanes:
            lanes.open("a")
            for name in ("a", "caller"):
                with pytest.raises(LaneError, match=f"lane '{name}' is open already"):
                    lanes.open(name)
