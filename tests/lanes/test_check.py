from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from hybridpar.errors import LaneError
from tests.lanes.checked import Checker, Lanes

SEEDS = range(8)
SHORT = 0.0005  # longest delay before a piece of work in these tests, in seconds

Program = Callable[[Lanes], None]


def run(program: Program, seed: int = 0) -> list[str]:
    """The violations of a program. Everything it refers to is its own, so that releases are seen too."""
    checker = Checker(seed, max_delay=SHORT)
    with suppress(LaneError), checker, Lanes("cpu", check=checker) as lanes:
        program(lanes)
    return checker.violations


def raises(program: Program, seed: int = 0) -> str:
    """The error that the author of a faulty program gets to see."""
    checker = Checker(seed, max_delay=SHORT)
    with pytest.raises(LaneError) as info, checker, Lanes("cpu", check=checker) as lanes:
        program(lanes)
    return str(info.value)


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class TestMissingWait:
    """One tensor, two lanes, and the wait between them present or missing."""

    @staticmethod
    def between_lanes(first: str, second: str, ordered: bool) -> Program:
        def program(lanes: Lanes) -> None:
            a, b = lanes.open("a"), lanes.open("b")
            buffer = torch.zeros(4)
            ready = lanes.caller.record()
            a.wait(ready)
            b.wait(ready)
            uses = {"read": lambda: buffer.sum(), "write": lambda: buffer.add_(1)}
            a.submit(uses[first], uses=[buffer])
            if ordered:
                b.wait(a.record())
            b.submit(uses[second], uses=[buffer])

        return program

    @pytest.mark.parametrize("seed", SEEDS)
    @pytest.mark.parametrize("second", ["read", "write"])
    @pytest.mark.parametrize("first", ["read", "write"])
    def test_every_pair_with_a_write_is_caught(self, first: str, second: str, seed: int) -> None:
        clean = first == second == "read"
        assert (run(self.between_lanes(first, second, ordered=False), seed) == []) is clean
        assert run(self.between_lanes(first, second, ordered=True), seed) == []

    def test_the_message_names_both_sides_and_the_cure(self) -> None:
        message = raises(self.between_lanes("write", "read", ordered=False))
        for part in ("aten::add_", "aten::sum", "lane 'a'", "lane 'b'", "(4,)", "Record an event on lane"):
            assert part in message

    @pytest.mark.parametrize("seed", SEEDS)
    def test_submitting_does_not_order_what_the_host_did_before(self, seed: int) -> None:
        def program(lanes: Lanes, ordered: bool) -> None:
            lane = lanes.open("a")
            buffer = torch.zeros(4)
            if ordered:
                lane.wait(lanes.caller.record())
            lane.submit(lambda: buffer.add_(1), uses=[buffer])

        assert "lane 'caller'" in raises(lambda lanes: program(lanes, ordered=False), seed)
        assert run(lambda lanes: program(lanes, ordered=True), seed) == []

    @pytest.mark.parametrize("seed", SEEDS)
    def test_host_work_after_a_record_is_not_in_the_event(self, seed: int) -> None:
        def program(lanes: Lanes) -> None:
            lane = lanes.open("a")
            buffer = torch.zeros(4)
            event = lanes.caller.record()
            buffer.add_(1)
            lane.wait(event)
            lane.submit(buffer.sum, uses=[buffer])

        assert "aten::add_" in raises(program, seed)

    @pytest.mark.parametrize("seed", SEEDS)
    def test_the_host_reads_what_a_lane_made(self, seed: int) -> None:
        def program(lanes: Lanes, wait: Callable) -> None:
            lane = lanes.open("a")
            box: list[torch.Tensor] = []
            lane.submit(lambda: box.append(torch.ones(4)))
            event = lane.record()
            while not box:  # the tensor is there, but nothing says that its memory is written
                pass
            wait(lanes, event)
            box[0].sum()
            lanes.caller.keep(box[0])

        assert "lane 'a'" in raises(lambda lanes: program(lanes, lambda lanes, event: None), seed)
        for wait in (
            lambda lanes, event: lanes.caller.wait(event),
            lambda lanes, event: event.synchronize(),
            lambda lanes, event: event.lane.synchronize(),
        ):
            assert run(lambda lanes, wait=wait: program(lanes, wait), seed) == []

    @pytest.mark.parametrize("seed", SEEDS)
    def test_a_wait_by_the_host_orders_all_lanes(self, seed: int) -> None:
        def program(lanes: Lanes, host: bool) -> None:
            a, b = lanes.open("a"), lanes.open("b")
            buffer = torch.zeros(4)
            lanes.caller.synchronize()
            a.submit(lambda: buffer.add_(1), uses=[buffer])
            event = a.record()
            if host:
                event.synchronize()
            else:
                lanes.caller.wait(event)  # on CUDA only the current stream waits
            b.submit(buffer.sum, uses=[buffer])
            lanes.open("late").submit(buffer.sum, uses=[buffer])

        assert run(lambda lanes: program(lanes, host=True), seed) == []
        assert run(lambda lanes: program(lanes, host=False), seed) != []

    @settings(deadline=None, max_examples=150, derandomize=True)
    @given(
        st.lists(
            st.one_of(
                st.tuples(st.just("read"), st.integers(0, 2), st.integers(0, 1)),
                st.tuples(st.just("write"), st.integers(0, 2), st.integers(0, 1)),
                st.tuples(st.just("order"), st.integers(0, 2), st.integers(0, 2)),
            ),
            max_size=14,
        )
    )
    def test_the_verdict_is_that_of_reachability(self, steps: list[tuple[str, int, int]]) -> None:
        # The same program as a graph: what is ordered by lane or wait, and which pairs touch one buffer.
        before: list[set[int]] = [set(), set(), set()]
        done: list[tuple[str, int, set[int]]] = []
        for number, (action, lane, other) in enumerate(steps):
            if action == "order":
                before[other] |= before[lane]
                done.append((action, -1, set()))
            else:
                done.append((action, other, set(before[lane])))
                before[lane].add(number)
        racy = any(
            done[one][1] == done[two][1] >= 0 and "write" in (done[one][0], done[two][0]) and one not in done[two][2]
            for two in range(len(done))
            for one in range(two)
        )

        def program(lanes: Lanes) -> None:
            opened = [lanes.open(str(index)) for index in range(3)]
            buffers = [torch.zeros(2), torch.zeros(2)]
            lanes.caller.synchronize()
            for action, lane, other in steps:
                if action == "order":
                    opened[other].wait(opened[lane].record())
                elif action == "write":
                    opened[lane].submit(lambda other=other: buffers[other].add_(1), uses=buffers)
                else:
                    opened[lane].submit(lambda other=other: buffers[other].sum(), uses=buffers)

        assert (run(program) != []) is racy


class TestWhatOperatorsTouch:
    @staticmethod
    def verdict(make: Callable[[], torch.Tensor | list[torch.Tensor]], first: Callable, second: Callable) -> list[str]:
        """What is found if two lanes do two things to one tensor, with nothing between them."""

        def program(lanes: Lanes) -> None:
            a, b = lanes.open("a"), lanes.open("b")
            it = make()
            lanes.caller.synchronize()
            keep = it if isinstance(it, list) else [it]
            a.submit(lambda: first(it), uses=keep)
            b.submit(lambda: second(it), uses=keep)

        return run(program)

    def test_disjoint_views_of_one_bucket_do_not_clash(self) -> None:
        def make() -> torch.Tensor:
            return torch.zeros(8)

        assert self.verdict(make, lambda t: t[:4].add_(1), lambda t: t[4:].add_(1)) == []
        assert self.verdict(make, lambda t: t[:5].add_(1), lambda t: t[4:].add_(1)) != []

    def test_looking_at_shapes_is_no_access(self) -> None:
        def make() -> torch.Tensor:
            return torch.zeros(4, 4)

        for look in (
            lambda t: t.view(16)[3:],
            lambda t: t.t().detach(),
            lambda t: t.split(2),
            torch.empty_like,
            lambda t: t.new_zeros(2),
        ):
            assert self.verdict(make, lambda t: t.add_(1), look) == []
        assert self.verdict(make, lambda t: t.add_(1), lambda t: t.t().contiguous()) != []

    def test_all_ways_of_writing(self) -> None:
        def make() -> torch.Tensor:
            return torch.zeros(4)

        def optimize(tensor: torch.Tensor) -> None:
            parameter = nn.Parameter(tensor)
            parameter.grad = torch.ones(4)
            torch.optim.SGD([parameter], lr=0.1).step()

        for write in (
            lambda t: t.mul_(2),
            lambda t: torch.add(torch.ones(4), 1, out=t),
            lambda t: t.copy_(torch.ones(4)),
            lambda t: t.__setitem__(0, 1.0),
            lambda t: torch._foreach_add_([t], 1.0),
            optimize,
        ):
            assert self.verdict(make, lambda t: t.sum(), write) != []

    @pytest.mark.parametrize("training", [True, False])
    def test_batch_normalisation_writes_its_running_statistics(self, training: bool) -> None:
        def make() -> list[torch.Tensor]:
            return [torch.zeros(2), torch.ones(2)]

        def normalise(statistics: list[torch.Tensor]) -> None:
            nn.functional.batch_norm(torch.ones(2, 2, 2, 2), *statistics, training=training)

        assert (self.verdict(make, lambda statistics: statistics[0].sum(), normalise) != []) is training

    def test_gradient_accumulation_is_a_write(self) -> None:
        def make() -> torch.Tensor:
            weight = torch.ones(3, requires_grad=True)
            weight.grad = torch.zeros(3)
            return weight

        violations = self.verdict(make, lambda w: (2 * w).sum().backward(), lambda w: w.grad.sum())
        assert len(violations) == 1
        assert "aten::add_" in violations[0]

    def test_a_tensor_made_of_python_numbers_is_written_by_its_lane(self) -> None:
        def program(lanes: Lanes, wait: bool) -> None:
            lane = lanes.open("a")
            box: list[torch.Tensor] = []
            lane.submit(lambda: torch.tensor([3.0]).neg())
            lane.submit(lambda: box.append(torch.tensor([1.0, 2.0])))
            made = lane.record()
            while not box:
                pass
            if wait:
                lanes.caller.wait(made)
            box[0].sum()
            lanes.caller.keep(box[0])

        assert run(lambda lanes: program(lanes, wait=True)) == []
        assert "lane 'a'" in raises(lambda lanes: program(lanes, wait=False))


@pytest.mark.usefixtures("group")
class TestCollectives:
    @pytest.mark.parametrize("seed", SEEDS)
    def test_in_place_write_under_a_running_collective(self, seed: int) -> None:
        def program(lanes: Lanes, ordered: bool) -> None:
            sync = lanes.open("sync")
            bucket = torch.ones(8)
            sync.wait(lanes.caller.record())
            sync.submit(lambda: dist.all_reduce(bucket), uses=[bucket])
            if ordered:
                lanes.caller.wait(sync.record())
            bucket.add_(1)

        message = raises(lambda lanes: program(lanes, ordered=False), seed)
        for part in ("c10d::allreduce_", "aten::add_", "lane 'sync'", "lane 'caller'"):
            assert part in message
        assert run(lambda lanes: program(lanes, ordered=True), seed) == []

    def test_reading_the_parts_of_a_gather(self) -> None:
        def program(lanes: Lanes, ordered: bool) -> None:
            sync, compute = lanes.open("sync"), lanes.open("compute")
            mine, parts = torch.ones(4), [torch.empty(4)]
            lanes.caller.synchronize()
            sync.submit(lambda: dist.all_gather(parts, mine), uses=[mine, *parts])
            if ordered:
                compute.wait(sync.record())
            compute.submit(lambda: parts[0].sum(), uses=parts)

        assert run(lambda lanes: program(lanes, ordered=False)) != []
        assert run(lambda lanes: program(lanes, ordered=True)) == []


class TestEarlyRelease:
    """The host lets go of a tensor that another lane may still read."""

    @staticmethod
    def of_the_host(lanes: Lanes, safe: str) -> None:
        lane = lanes.open("reader")
        tensor = torch.ones(5)
        lane.wait(lanes.caller.record())
        box = [tensor]

        def read() -> None:
            if safe == "keep":
                lane.keep(box[0])
            box.pop().sum()

        lane.submit(read, uses=[tensor] if safe == "uses" else ())
        if safe == "wait":
            lanes.caller.wait(lane.record())
        if safe == "synchronize":
            lane.synchronize()
        del tensor

    @pytest.mark.parametrize("seed", SEEDS)
    def test_is_caught(self, seed: int) -> None:
        checker = Checker(seed, max_delay=SHORT)
        with pytest.raises(LaneError) as info, checker, Lanes("cpu", check=checker) as lanes:
            self.of_the_host(lanes, "not at all")
        assert len(checker.violations) == 1
        for part in ("(5,)", "allocated on lane 'caller'", "aten::sum", "lane 'reader'", "uses="):
            assert part in str(info.value)

    @pytest.mark.parametrize("seed", SEEDS)
    @pytest.mark.parametrize("safe", ["uses", "keep", "wait", "synchronize"])
    def test_each_cure_is_accepted(self, safe: str, seed: int) -> None:
        assert run(lambda lanes: self.of_the_host(lanes, safe), seed) == []

    @pytest.mark.parametrize("seed", SEEDS)
    @pytest.mark.parametrize("order", ["release first", "wait first", "no wait"])
    def test_of_a_lane(self, order: str, seed: int) -> None:
        def program(lanes: Lanes) -> None:
            a, b = lanes.open("a"), lanes.open("b")
            box: list[torch.Tensor] = []
            a.submit(lambda: box.append(torch.ones(5)))
            b.wait(a.record())
            b.submit(lambda: box[0].sum())
            used = b.record()
            # The second wait keeps the release behind the use on a CPU, as the order of issue does on a GPU.
            c = lanes.open("c")
            c.wait(used)
            if order == "wait first":
                a.wait(used)
            c.submit(box.clear)
            if order == "release first":
                a.wait(used)

        violations = run(program, seed)
        assert len(violations) == (order != "wait first")

    @pytest.mark.parametrize("again", [False, True])
    def test_the_caller_keeps_what_it_used_so_far(self, again: bool) -> None:
        def program(lanes: Lanes) -> None:
            lane = lanes.open("a")
            box: list[torch.Tensor] = []
            lane.submit(lambda: box.append(torch.ones(5)))
            lanes.caller.wait(lane.record())
            box[0].sum()
            lanes.caller.keep(box[0])
            if again:
                box[0].neg()

        assert [("aten::neg" in violation) for violation in run(program)] == [True] * again

    def test_what_counts_is_when_the_host_let_go(self) -> None:
        def program(lanes: Lanes) -> None:
            a, b = lanes.open("a"), lanes.open("b")
            gate = threading.Event()
            box: list[torch.Tensor] = []
            a.submit(lambda: box.append(torch.ones(5)))
            made = a.record()
            lanes.caller.wait(made)
            b.wait(made)
            b.submit(gate.wait)
            b.submit(box.pop().sum)  # the queue now has the only reference, and keeps it longer than a GPU would
            a.wait(b.record())
            gate.set()

        assert "allocated on lane 'a'" in raises(program)

    def test_a_number_read_by_the_host_is_out_of_danger(self) -> None:
        def program(lanes: Lanes, read: Callable[[torch.Tensor], object]) -> None:
            lane = lanes.open("a")
            box: list[torch.Tensor] = []
            lane.submit(lambda: box.append(torch.ones(1)))
            lanes.caller.wait(lane.record())
            read(box.pop())

        assert run(lambda lanes: program(lanes, torch.Tensor.item)) == []
        assert "lane 'caller'" in raises(lambda lanes: program(lanes, torch.Tensor.neg))


class TestTraining:
    """A step of two stages with a gradient sync, as a pipeline would issue it: nothing in it may be left out."""

    PARTS = (
        "inputs before forward",
        "activation before second stage",
        "gradient before first backward",
        "backward before sync",
        "sync before optimizer",
        "the batch in backward",
    )

    @staticmethod
    def step(lanes: Lanes, without: str) -> None:
        first, second, sync = (lanes.open(name) for name in ("first", "second", "sync"))
        stages = [nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 2)]
        batch = torch.ones(3, 4)
        box: dict[str, torch.Tensor] = {}
        start = lanes.caller.record()
        if without != "inputs before forward":
            first.wait(start)
        second.wait(start)

        def forward_first() -> None:
            box["out"] = stages[0](batch)

        def second_stage() -> None:
            second.keep(box["out"])
            leaf = box["out"].detach().requires_grad_()
            stages[1](leaf).square().sum().backward()
            assert leaf.grad is not None
            box["gradient"] = leaf.grad

        def backward_first() -> None:
            gradient = box.pop("gradient")
            first.keep(gradient)
            box.pop("out").backward(gradient)

        def reduce() -> None:
            for parameter in stages[0].parameters():
                assert parameter.grad is not None
                sync.keep(parameter.grad)
                parameter.grad.mul_(0.5)

        def optimize() -> None:
            torch.optim.SGD(stages[0].parameters(), lr=0.1).step()

        first.submit(forward_first, uses=[batch, *stages[0].parameters()])
        ready = first.record()
        if without != "activation before second stage":
            second.wait(ready)
        second.submit(second_stage, uses=list(stages[1].parameters()))
        ready = second.record()
        if without != "gradient before first backward":
            first.wait(ready)
        # The batch too: autograd saved it for the gradient of the weight, and lets go of it in backward.
        first.submit(backward_first, uses=[batch] if without != "the batch in backward" else ())
        ready = first.record()
        if without != "backward before sync":
            sync.wait(ready)
        sync.submit(reduce)
        ready = sync.record()
        if without != "sync before optimizer":
            first.wait(ready)
        with torch.no_grad():
            first.submit(optimize, uses=list(stages[0].parameters()))

    @pytest.mark.parametrize("seed", SEEDS)
    def test_the_whole_step_is_clean(self, seed: int) -> None:
        assert run(lambda lanes: self.step(lanes, without="nothing"), seed) == []

    @pytest.mark.parametrize("seed", [0, 1, 2])
    @pytest.mark.parametrize("without", PARTS)
    def test_every_missing_part_is_caught(self, without: str, seed: int) -> None:
        checker = Checker(seed, max_delay=SHORT)
        # Without its wait, work may come before the tensors it wants are there at all: an error as well.
        with pytest.raises((LaneError, KeyError, AssertionError)), checker, Lanes("cpu", check=checker) as lanes:
            self.step(lanes, without)


class TestChecker:
    def test_the_host_is_watched_only_inside_the_block(self) -> None:
        checker = Checker(max_delay=0)
        buffer = torch.zeros(4)
        with Lanes("cpu", check=checker) as lanes:
            lane = lanes.open("a")
            lane.submit(lambda: buffer.add_(1), uses=[buffer])
            buffer.sum()
            lane.synchronize()
        checker.assert_clean()

    def test_leaving_the_block_waits_for_the_lanes(self) -> None:
        checker = Checker(max_delay=SHORT)
        with Lanes("cpu", check=checker) as lanes:
            lane = lanes.open("a")

            def unordered() -> None:
                with checker:
                    buffer = torch.zeros(4)
                    lane.submit(lambda: buffer.add_(1), uses=[buffer])

            with pytest.raises(LaneError, match="nothing orders the two"):
                unordered()
