"""Buffers that learn and are no BatchNorm statistics: all replicas pass with worker 0's, as DistributedDataParallel."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from hybridpar import TrainConfig, Trainer
from hybridpar.comm.world import World
from hybridpar.errors import SyncError
from tests.ranks import RankError, run_ranks

STEPS = 4


class Keeping(nn.Module):
    """Subtracts a moving mean, and keeps buffers of other dtypes and sizes."""

    mean: Tensor
    count: Tensor
    flags: Tensor
    seen: Tensor

    def __init__(self, grows: bool) -> None:
        super().__init__()
        self.grows = grows
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))  # of all passes, tests too
        self.register_buffer("flags", torch.zeros(3, dtype=torch.bool))
        self.register_buffer("seen", torch.zeros(0, dtype=torch.float64))  # grows in the first pass

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.count += 1
            if self.training:
                self.mean.data.mul_(0.9).add_(0.1 * x.mean(0))  # no counter of changes sees this
                self.flags[int(self.count) % 3] = True
                if self.grows:
                    self.seen = torch.cat((self.seen, x.double().sum().reshape(1)))[-2:]
        return x - self.mean * self.count / 10


def make_net(norm: bool, grows: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4, track_running_stats=True), nn.AdaptiveAvgPool2d(1))
    norms = [nn.BatchNorm1d(6)] if norm else []
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(4, 6), *norms, Keeping(grows), nn.Linear(6, 3))


def batch(step: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(step)
    x = torch.randn(12, 3, 8, 8, generator=draw)
    x[6:] += 3  # workers see other images
    return x, torch.arange(12) % 3


def plain_loop(norm: bool = False) -> dict[str, Tensor]:
    """Two replicas: the second one takes the buffers of the first before each step."""
    nets = [make_net(norm), make_net(norm)]
    optimizer = torch.optim.SGD(nets[0].parameters(), lr=0.1)
    for step in range(STEPS):
        x, y = batch(step)
        nets[1] = copy.deepcopy(nets[0])
        optimizer.zero_grad()
        for net, images, labels in zip(nets, x.split(6), y.split(6), strict=True):
            net.zero_grad()
            for part, targets in zip(images.split(3), labels.split(3), strict=True):
                (cross_entropy(net(part), targets) / 4).backward()  # type: ignore[no-untyped-call]
        for mine, other in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
            assert mine.grad is not None
            assert other.grad is not None
            mine.grad += other.grad
        optimizer.step()
    return nets[0].state_dict()


def train(
    world: World, norm: bool, options: dict[str, Any]
) -> tuple[dict[str, Tensor], list[float], dict[str, Tensor]]:
    """A worker's state after training; losses of the same images, tested by the first and by the last worker; and the
    state after these tests.
    """
    net = make_net(norm, grows="sync" not in options)
    config = TrainConfig(plan="none", micro_batches=2, **options)
    optimizer = lambda model: torch.optim.SGD(model.parameters(), lr=0.1)  # noqa: E731
    with Trainer(net, optimizer, config=config, world=world, example=batch(0)[0][:3]) as trainer:
        replicas = trainer.plan.layout.replicas
        replica = world.rank * replicas // world.size
        mine = slice(12 * replica // replicas, 12 * (replica + 1) // replicas)
        for step in range(STEPS):
            x, y = batch(step)
            trainer.step((x[mine], y[mine]))
        trainer.collect()
        state = copy.deepcopy(net.state_dict())
        x, y = batch(99)
        losses = [trainer.evaluate([(x, y)] if world.rank == tester else []).loss for tester in (0, world.size - 1)]
        return state, losses, copy.deepcopy(net.state_dict())


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: name + text)


@pytest.mark.parametrize(
    ("workers", "shared", "options"),
    [
        (2, True, {}),
        (2, False, {}),
        (2, True, {"stages": 2, "placement": "0,0;1,1"}),
        (4, False, {"stages": 2}),
    ],
    ids=["shared memory", "sockets", "stages", "pipelines"],
)
def test_replicas_train_as_with_distributed_data_parallel(workers, shared, options):
    expected = plain_loop()
    results = run_ranks(train, workers, False, options, shared_memory=shared)
    for state, _, after in results:
        assert_same(state, expected)
        assert_same(after, results[0][2])


@pytest.mark.parametrize(
    "options",
    [
        {"compress": "onebit"},
        {"batch_norm": "local"},
        {"guard": False},
        {"model_ema": "0.9"},
        {"shard_optimizer": True},
    ],
    ids=str,
)
def test_the_result_of_a_test_does_not_depend_on_who_tests_what(options):
    results = run_ranks(train, 2, True, options, shared_memory="compress" not in options)
    first = results[0]
    assert first[2]["6.count"] > first[0]["6.count"], "tests count, too"
    for state, losses, after in results:
        assert losses == pytest.approx(first[1])
        assert_same(state, first[0])
        assert_same(after, first[2])


def train_with_an_empty_share(world: World) -> None:
    x, y = batch(0)
    share = slice(0, 12 if world.rank else 0)
    with Trainer(make_net(False), config=TrainConfig(plan="none"), world=world) as trainer:
        trainer.step((x[share], y[share]))


def test_buffers_of_other_sizes_are_an_error():
    with pytest.raises(RankError, match="buffers of the model do not have the same sizes") as caught:
        run_ranks(train_with_an_empty_share, 2)
    assert SyncError.__name__ in str(caught.value)


def train_with_an_outer_loop(world: World) -> None:
    x, y = batch(0)
    with Trainer(make_net(False), config=TrainConfig(plan="none", sync="outer:2"), world=world) as trainer:
        for _ in range(4):
            trainer.step((x, y))


def test_an_outer_loop_refuses_buffers_that_change_their_size():
    with pytest.raises(RankError, match=r"5\.seen, a buffer that forward makes another size"):
        run_ranks(train_with_an_outer_loop, 2)
