"""Workers of a grid call their collectives in one order, in grids that are too large to be started here.

Torch's fake process group has any number of workers of which one is real: nothing is sent, and everything is called. So
each worker of a grid is run by itself, what it calls is written down, and then all of them are compared.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from hybridpar import TrainConfig, Trainer
from hybridpar.comm import connections
from hybridpar.comm.world import World
from hybridpar.compress import read_policy
from hybridpar.lanes import Lanes
from hybridpar.pipeline.engine import PipelineEngine
from hybridpar.schedule.layout import Layout
from hybridpar.sync.reducer import Reducer
from hybridpar.sync.stage_gradients import SyncOptions, open_sync_lanes
from tests.pipeline.oracle import cut, options_of, run_step, step_optimizer
from tests.pipeline.tape import StreamLanes, stand_in
from tests.small_nets import SmallNet

MICRO_BATCHES, SAMPLES = 4, 2
GRIDS = [(4, 1), (2, 2), (1, 4), (8, 1), (4, 2), (2, 4)]


@dataclass
class Calls:
    """What one worker called.

    Attributes:
        groups: Members of every group that was made, in order, whether this worker is one of them or not.
        of: For every group, by its place in `groups`, the calls on it: what, shape and dtype of each tensor.
    """

    groups: list[tuple[int, ...]] = field(default_factory=list)
    of: dict[int, list[tuple[Any, ...]]] = field(default_factory=lambda: defaultdict(list))


@contextmanager
def worker(rank: int, size: int) -> Iterator[Calls]:
    """Be one of many workers. Lanes call from threads of their own, but those of one group from one thread."""
    calls, numbers = Calls(), {}
    real_group, real_sum, real_batch = dist.new_group, dist.all_reduce, dist.batch_isend_irecv

    def new_group(ranks: list[int], **options: Any) -> Any:
        group = real_group(ranks, **options)
        numbers[group] = len(calls.groups)
        calls.groups.append(tuple(ranks))
        return group

    def all_reduce(tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None) -> None:
        calls.of[numbers[group]].append(("sum", tuple(tensor.shape), tensor.dtype))
        real_sum(tensor, op, group=group)
        tensor.mul_(dist.get_world_size(group))  # as if all had the same

    def batch(transfers: list[Any]) -> Any:
        for one in transfers:
            kind = "send" if one.op is dist.isend else "receive"
            calls.of[numbers[one.group]].append((kind, len(transfers), tuple(one.tensor.shape), one.tensor.dtype))
            if one.op is dist.irecv:
                one.tensor.zero_()
        return real_batch(transfers)

    def no_sockets(*_: Any) -> Any:
        raise OSError("there is one worker in truth")

    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(connections, "connect", no_sockets)
        patched.setattr(dist, "new_group", new_group)
        patched.setattr(dist, "all_reduce", all_reduce)
        patched.setattr(dist, "batch_isend_irecv", batch)
        try:
            yield calls
        finally:
            dist.destroy_process_group()


class Chain(nn.Sequential):
    """Eight blocks, so that it can be cut into as many stages; the last values are of the classes."""

    def __init__(self) -> None:
        blocks = [nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU()) for _ in range(8)]
        super().__init__(*blocks)


def train(world: World, positions: int, schedule: str, *, batch_norm: bool = False) -> PipelineEngine:
    """Two steps of one worker of a grid."""
    torch.manual_seed(0)
    model = Chain()
    stages = cut(model, torch.randn(SAMPLES, 6), positions)
    options = options_of(
        Layout.dealt(positions, positions, replicas=world.size // positions),
        MICRO_BATCHES,
        schedule,
        sync=SyncOptions(bucket_bytes=100, sync_batch_norm=batch_norm),
        sync_lanes=2,
    )

    def optimizer(stage: nn.Module) -> Any:
        made = torch.optim.SGD(stage.parameters(), lr=0.1)
        return lambda factor, commit, unwritten: step_optimizer(made, unwritten)

    given = [(torch.randn(SAMPLES, 6), torch.randint(0, 6, (SAMPLES,))) for _ in range(MICRO_BATCHES)]
    with Lanes("cpu") as lanes:
        engine = PipelineEngine(model, stages, world, lanes, F.cross_entropy, optimizer, options, MICRO_BATCHES)
        try:
            for _ in range(2):
                run_step(engine, given, SAMPLES * MICRO_BATCHES * world.size // positions)
            engine.wait()
        finally:
            engine.close()
    return engine


def everybody(positions: int, replicas: int, schedule: str, **options: Any) -> list[Calls]:
    """The calls of all workers of a grid, by rank."""
    answers = []
    for rank in range(positions * replicas):
        with worker(rank, positions * replicas) as calls:
            world = World.join(device=torch.device("cpu"), lanes=2, shared_memory=False)
            train(world, positions, schedule, **options)
            world.close()
        answers.append(calls)
    return answers


@pytest.fixture(scope="module")
def runs() -> dict[tuple[int, int], list[Calls]]:
    return {grid: everybody(*grid, "1f1b") for grid in GRIDS}


@pytest.mark.parametrize("grid", GRIDS)
def test_members_of_a_group_agree_on_every_call(
    runs: dict[tuple[int, int], list[Calls]], grid: tuple[int, int]
) -> None:
    answers = runs[grid]
    for number, members in enumerate(answers[0].groups):
        mine = [answers[rank].of.get(number, []) for rank in members]
        kinds = {call[0] for calls in mine for call in calls}
        if kinds <= {"sum"}:
            assert all(calls == mine[0] for calls in mine)
        else:
            sent, received = sorted(mine, key=lambda calls: calls[0][0] != "send")
            assert [call[0] for call in sent] == ["send"] * len(sent)
            assert [call[0] for call in received] == ["receive"] * len(received)
            assert [call[1:] for call in sent] == [call[1:] for call in received]
            # The first message opens the channel; then one activation or gradient per micro-batch and step.
            assert len(sent) == 1 + 2 * MICRO_BATCHES
            assert {call[1] for call in sent} == {1}
    for rank, calls in enumerate(answers):
        assert all(rank in calls.groups[number] for number, made in calls.of.items() if made)


def test_batch_norm_over_replicas_adds_on_a_group_of_its_own() -> None:
    answers = everybody(2, 2, "1f1b", batch_norm=True)
    for rank, calls in enumerate(answers):
        column = (rank // 2 * 2, rank // 2 * 2 + 1)
        groups = [number for number, members in enumerate(calls.groups) if members == column]
        kinds = [Counter(dtype for _, _, dtype in calls.of[number]) for number in groups]
        assert len(groups) == 4  # control, two lanes for gradients, one for BatchNorm
        assert set(kinds[1]) == set(kinds[2]) == {torch.float32}
        # Four layers, forward and backward in every micro-batch of two steps; the example run adds nothing up.
        assert kinds[3] == {torch.float64: 4 * 2 * MICRO_BATCHES * 2}
        other = answers[rank ^ 1]
        assert all(calls.of[number] == other.of[number] for number in groups)


# ------------------------------------------------------------------------------ what only GPUs do


def test_hooks_may_issue_from_the_thread_of_autograd() -> None:
    """On a GPU hooks run on a thread of autograd, while the thread that issues waits for the backward pass."""
    with worker(0, 2) as calls:
        world = World.join(device=torch.device("cpu"), lanes=2, shared_memory=False)
        model = nn.Linear(3, 2)
        with Lanes("cpu") as lanes:
            reducer = Reducer(
                *(dict(model.named_parameters()), world, lanes, lanes.caller, open_sync_lanes(world, lanes)),
                SyncOptions(bucket_bytes=1, codec=read_policy("none")),
                measure=False,
            )
            flight = reducer.new_step()
            reducer.start(flight)
            reducer.begin_last(flight)
            problems: list[BaseException] = []

            def backward() -> None:
                try:
                    model(torch.ones(1, 3)).sum().backward()
                except BaseException as error:
                    problems.append(error)

            thread = threading.Thread(target=backward)
            thread.start()
            thread.join()
            assert not problems
            reducer.flush()
            for bucket in range(len(reducer.buckets)):
                lanes.caller.wait(reducer.issue(bucket, flight))
            reducer.close()
        assert sorted(shape for made in calls.of.values() for _, shape, _ in made) == [(2,), (6,)]
        world.close()


def test_a_captured_step_of_a_replica_forks_and_joins_its_sync_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = stand_in(monkeypatch)
    images, labels = torch.randn(4, 3, 8, 8), torch.randint(0, 10, (4,))
    batch = SimpleNamespace(micro_batches=[(images, labels)], samples=4, global_samples=8)
    states = []
    for config in (
        TrainConfig(lr=0.125, sync="allreduce:bucket=0.001"),
        TrainConfig(lr=0.125, sync="allreduce:bucket=0.001", cuda_graph="on"),
    ):
        with worker(0, 2) as calls:
            torch.manual_seed(0)
            model = SmallNet()
            world = World.join(device=torch.device("cpu"), lanes=2, shared_memory=False)
            lanes = StreamLanes() if config.cuda_graph == "on" else None
            with Trainer(model, config=config, world=world, lanes=lanes) as trainer:
                for _ in range(15):
                    trainer.step(batch)
            world.close()
            states.append((model.state_dict(), dict(calls.of)))
    assert "captured 3 other streams" in cuda.log  # two sync lanes and control
    assert sum(line.startswith("replay") for line in cuda.log) == 3  # after the first, and 11 as PyTorch asks for
    (plain, plain_calls), (graphed, graph_calls) = states
    assert all(torch.equal(plain[name], graphed[name]) for name in plain)
    for number, made in plain_calls.items():
        # Issued by the host: 12 steps and the capture; replays call nothing.
        assert graph_calls[number] == made[: -(-len(made) * 13 // 15)]
