"""Dropout does not depend on stages, lanes, schedules, workers or recomputation; it does on step, replica, seed."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hybridpar.comm.world import World
from hybridpar.pipeline.stage_run import RandomKeys, key_random_operations, numbers_of_its_own
from tests.pipeline.oracle import Residuals, Run, Setting, batches_of, cut, cut_evenly, places, seeded, train_stages
from tests.ranks import run_ranks


class Dropping(Residuals):
    """Dropout as a module in every block, as a function, and with a rate of its own."""

    def __init__(self) -> None:
        super().__init__(norm=False, dropout=0.4)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.dropout(x, 0.2, self.training))


class OwnNoise(nn.Module):
    """Draws what no node of a graph could, so it is kept whole; nothing says that it is random but running it."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rand(x.shape[1], 1, 1)


class Noisy(Residuals):
    def __init__(self) -> None:
        super().__init__(norm=False)
        self.noise = OwnNoise()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.noise(x))


def train(
    stages: int,
    *,
    make: Callable[[], nn.Module] = Dropping,
    seed: int = 0,
    together: bool = False,
    schedule: str = "looped_bfs",
    **options: Any,
) -> Run:
    model = seeded(make)
    batches = batches_of(8)
    parts = cut_evenly(model, batches[0][0][:2], stages)
    return train_stages(
        model, parts, batches, Setting(), places(stages), schedule=schedule, seed=seed, together=together, **options
    )


def assert_same(run: Run, other: Run) -> None:
    assert run.losses == other.losses
    for name, tensor in other.state.items():
        assert torch.equal(run.state[name], tensor), name


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("stages", [2, 3, 5])
@pytest.mark.parametrize("recompute", [False, True])
def test_masks_do_not_depend_on_the_cut_or_the_order(stages: int, schedule: str, recompute: bool) -> None:
    again = tuple(range(stages)) if recompute else ()
    assert_same(train(stages, schedule=schedule, recompute=again, together=True), train(1))


def test_a_module_that_is_kept_whole_draws_the_same_wherever_it_runs() -> None:
    assert_same(train(3, make=Noisy, recompute=(0, 1, 2), together=True), train(1, make=Noisy))


def train_rank(world: World) -> Run:
    model = seeded(Dropping)
    batches = batches_of(8)
    parts = cut_evenly(model, batches[0][0][:2], world.size)
    torch.manual_seed(world.rank)  # workers are elsewhere in their own random numbers
    return train_stages(model, parts, batches, Setting(), places(world.size, workers=world.size), world=world)


@pytest.mark.parametrize("workers", [2, 3])
def test_masks_do_not_depend_on_the_workers(workers: int) -> None:
    reference = train(1)
    for run in run_ranks(train_rank, workers):
        assert run.losses == reference.losses
        for name, tensor in run.state.items():
            assert torch.equal(tensor, reference.state[name]), name


def test_every_step_micro_batch_and_seed_has_its_own_masks() -> None:
    keys = RandomKeys(3, torch.device("cpu"))
    graph = torch.fx.symbolic_trace(nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5)))
    ones = torch.ones(64)

    def mask(of: RandomKeys, step: int, micro_batch: int) -> tuple[bool, ...]:
        with of.of(step, micro_batch):
            return tuple((graph(ones) > 0).tolist())

    assert key_random_operations(graph.graph, graph) == 2
    graph.recompile()
    first = mask(keys, 1, 0)
    assert first == mask(keys, 1, 0)
    others = [mask(keys, 2, 0), mask(keys, 1, 1), mask(RandomKeys(4, keys.device), 1, 0)]
    assert len({first, *others}) == 4
    # Micro-batch 1 of the first replica, of two micro-batches each, is not that of the second: that one is number 3.
    assert mask(RandomKeys(3, keys.device, first=2), 1, 1) == mask(keys, 1, 3)
    kept = sum(first) / len(first)
    assert 0.1 < kept < 0.4  # two masks of a half, which are not the same one


def test_dropout_of_rate_zero_does_not_count_and_is_keyed_for_when_it_is_raised() -> None:
    graph = torch.fx.symbolic_trace(nn.Sequential(nn.Dropout(0.0), nn.Dropout2d(0.0)))
    assert key_random_operations(graph.graph, graph) == 0
    graph.recompile()
    graph.get_submodule("0").p = 0.5
    keys = RandomKeys(3, torch.device("cpu"))
    masks = []
    for _ in range(2):
        with keys.of(1, 0):
            masks.append(graph(torch.ones(2, 2, 8)))
    assert torch.equal(*masks)
    assert (masks[0] == 0).any()


def replica_masks(world: World) -> list[Tensor]:
    """What a dropout passes on, on every replica, for equal inputs."""
    seen: list[Tensor] = []

    def loss(output: Tensor, target: Tensor) -> Tensor:
        seen.append(output.detach().clone())
        return F.cross_entropy(output, target)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 5), nn.Dropout(0.5))
    x, y = torch.ones(2, 5), torch.zeros(2, dtype=torch.long)
    batch = (torch.cat([x, x]), torch.cat([y, y]))
    setting = Setting(2, loss=loss, shares=(2, 2))
    train_stages(model, cut(model, x[:1], 1), [batch], setting, places(1), schedule="accumulate", world=world)
    return seen[-2:]  # the first is the example run's


def test_replicas_use_different_masks() -> None:
    masks = [tuple((tensor != 0).flatten().tolist()) for answer in run_ranks(replica_masks, 2) for tensor in answer]
    assert len(masks) == 4
    assert len(set(masks)) == 4


def test_a_stage_may_be_given_to_a_second_pipeline() -> None:
    model = seeded(Dropping)
    batches = batches_of(8)
    parts = cut_evenly(model, batches[0][0][:2], 2)
    state = copy.deepcopy(model.state_dict())
    first = train_stages(model, parts, batches, Setting(), places(2))
    model.load_state_dict(state)
    assert_same(train_stages(model, parts, batches, Setting(), places(2)), first)


def test_the_users_own_random_numbers_are_left_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(4)
    model = seeded(Dropping)
    batches = batches_of(8)
    parts = cut_evenly(model, batches[0][0][:2], 2)
    torch.manual_seed(5)
    train_stages(model, parts, batches, Setting(), places(2))
    assert torch.equal(torch.rand(4), expected)


def test_numbers_drawn_by_the_host_meanwhile_neither_disturb_nor_are_disturbed() -> None:
    reference = train(3)
    torch.manual_seed(5)
    expected = [torch.rand(3) for _ in range(200)]
    stop = threading.Event()
    drawn: list[Tensor] = []

    def draw() -> None:
        while not stop.is_set():
            drawn.append(torch.rand(3))

    for _ in range(3):
        model = seeded(Dropping)
        batches = batches_of(8)
        parts = cut_evenly(model, batches[0][0][:2], 3)
        stop.clear()
        drawn.clear()
        torch.manual_seed(5)
        thread = threading.Thread(target=draw)
        thread.start()
        try:
            run = train_stages(model, parts, batches, Setting(), places(3), schedule="looped_bfs", together=True)
        finally:
            stop.set()
            thread.join()
        assert_same(run, reference)
        assert all(torch.equal(one, other) for one, other in zip(drawn, expected, strict=False))


def test_an_example_run_takes_no_numbers_from_a_thread_that_draws_meanwhile() -> None:
    torch.manual_seed(5)
    expected = torch.rand(4)
    torch.manual_seed(5)
    drawn: list[Tensor] = []
    with numbers_of_its_own(torch.device("cpu")):
        F.dropout(torch.ones(8), 0.5)
        thread = threading.Thread(target=lambda: drawn.append(torch.rand(2)))
        thread.start()
        thread.join()
        torch.rand_like(torch.ones(8))
    drawn.append(torch.rand(2))
    assert torch.equal(torch.cat(drawn), expected)


def test_outside_of_a_pipeline_a_keyed_stage_draws_as_ever() -> None:
    graph = torch.fx.symbolic_trace(nn.Sequential(nn.Dropout(0.5)))
    torch.manual_seed(1)
    expected = graph(torch.ones(16))
    key_random_operations(graph.graph, graph)
    graph.recompile()
    torch.manual_seed(1)
    assert torch.equal(graph(torch.ones(16)), expected)


def test_a_compiled_stage_is_not_compiled_again_for_another_micro_batch() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))
    graph = torch.fx.symbolic_trace(model)
    for compiled in (False, True):  # the stage may have been in a pipeline before
        assert key_random_operations(graph.graph, graph, compiled=compiled) == 1
    graph.recompile()
    stage = torch.compile(graph, backend="eager")
    keys = RandomKeys(0, torch.device("cpu"), compiled=True)

    def output(micro_batch: int) -> Tensor:
        with keys.of(1, micro_batch):
            return stage(torch.ones(20, 3))

    first = output(0)
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert torch.equal(output(0), first)
        assert not torch.equal(output(1), first)
        output(2)


class Fails(nn.Module):
    """A random operation that fails, which the tracer keeps whole."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = 0.5
        self.broken = True

    def forward(self, x: Tensor) -> Tensor:
        if self.broken and bool(x.sum() > -1):
            raise RuntimeError("out of luck")
        return F.dropout(x, self.dropout)


def test_an_operation_that_fails_gives_everything_back() -> None:
    class Whole(torch.fx.Tracer):
        def is_leaf_module(self, module: nn.Module, name: str) -> bool:
            return True

    model = nn.Sequential(nn.Linear(3, 3), Fails())
    stage = torch.fx.GraphModule(model, Whole().trace(model))
    assert key_random_operations(stage.graph, stage) == 1
    stage.recompile()
    keys = RandomKeys(0, torch.device("cpu"))
    before = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="out of luck"), keys.of(1, 0):
        stage(torch.ones(2, 3))
    assert torch.equal(torch.get_rng_state(), before)
    stage.get_submodule("1").broken = False
    with keys.of(1, 0):  # would hang if something were still held
        first = stage(torch.ones(2, 3))
    with keys.of(1, 0):
        assert torch.equal(stage(torch.ones(2, 3)), first)


@pytest.mark.parametrize(
    "draw",
    [
        torch.rand_like,
        torch.randn_like,
        lambda like: torch.randint_like(like, 1000),
        lambda like: torch.randint_like(like, -50, 50),
        lambda like: torch.rand(like.shape),
        lambda like: torch.randperm(len(like)),
    ],
)
def test_operators_without_a_generator_leave_the_hosts_alone(draw: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    like = torch.ones(8)
    with numbers_of_its_own(torch.device("cpu")):
        first, second = draw(like), draw(like)
    assert not torch.equal(first, second)
    seed = int(torch.randint(1 << 62, (), generator=torch.Generator().manual_seed(0)))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        assert torch.equal(draw(like), first)

    def refuse(devices: Any) -> Any:
        raise AssertionError("another thread may draw meanwhile")

    monkeypatch.setattr(torch.random, "fork_rng", refuse)
    state = torch.get_rng_state()
    with numbers_of_its_own(torch.device("cpu")):
        assert torch.equal(draw(like), first)
    assert torch.equal(torch.get_rng_state(), state)
