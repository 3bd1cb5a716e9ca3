"""A step that is rolled back leaves buffers as they were, whether forward writes into them or assigns others."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from hybridpar import TrainConfig, Trainer
from hybridpar.comm.world import World
from hybridpar.sync.batchnorm import BufferRollback
from tests.ranks import run_ranks


class Keeping(nn.Module):
    """Keeps what it has seen in buffers of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(12, 3)
        self.register_buffer("centre", torch.zeros(12))  # becomes another tensor
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))  # is written into, then another dtype
        self.register_buffer("recent", torch.zeros(0, 12))  # grows
        self.register_buffer("first", None)  # is there from the first pass on
        self.register_buffer("older", torch.zeros(12))  # takes turns with the next
        self.register_buffer("newer", torch.zeros(12))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            mean = x.detach().mean(0)
            self.centre = 0.9 * self.centre + 0.1 * mean
            self.count.add_(1)
            self.count = self.count.to(torch.float64)
            self.recent = torch.cat((self.recent, mean[None]))[-4:]
            self.first = mean if self.first is None else self.first
            self.older, self.newer = self.newer, self.older
            self.newer.copy_(mean)
        return self.head(x - self.centre - self.recent.mean(0) + self.newer - self.older) / self.count


def batch(step: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(step)
    return torch.randn(8, 12, generator=draw), torch.arange(8) % 3


def make_net() -> Keeping:
    torch.manual_seed(0)
    return Keeping()


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], msg=name)


def train(world: World, bad: tuple[int, ...], options: dict[str, Any]) -> dict[str, Tensor]:
    net = make_net()
    with Trainer(
        net,
        optimizer=lambda module: torch.optim.SGD(module.parameters(), lr=0.1),
        config=TrainConfig(plan="none", **options),
        world=world,
    ) as trainer:
        for step in range(6):
            x, y = batch(step)
            if step in bad:
                x[0, 0] = math.nan
                before = state_of(net)
            result = trainer.step((x, y))
            trainer.wait()
            assert result.skipped == (step in bad)
            if step in bad:
                assert_same(state_of(net), before)
    return state_of(net)


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("bad", [(), (0, 3, 4)])
def test_a_model_trains_as_in_a_plain_loop_that_leaves_out_bad_steps(bad, workers, micro_batches):
    found = run_ranks(train, workers, bad, {"micro_batches": micro_batches, "model_ema": "0.9"})
    plain = make_net()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(6):
        if step not in bad:
            optimizer.zero_grad()
            for x, y in zip(*(one.chunk(micro_batches) for one in batch(step)), strict=True):
                (cross_entropy(plain(x), y) / micro_batches).backward()
            optimizer.step()
    for state in found:
        assert_same(state, state_of(plain))


@pytest.mark.parametrize("commit", [False, True])
def test_a_device_that_decides_leaves_the_tensors_in_their_places(commit):
    """A captured step writes where it read, however often it is replayed."""
    net = make_net()
    del net.recent, net.first, net.count
    rollback = BufferRollback(net)
    tensors, expected = dict(net.named_buffers()), copy.deepcopy(net)
    for module in (net, expected):
        module.centre = module.centre + 1
        module.older, module.newer = module.newer, module.older
        module.newer.fill_(3)
    rollback.restore(unless=torch.tensor(commit))
    assert all(net.get_buffer(name) is tensor for name, tensor in tensors.items())
    assert_same(
        dict(net.named_buffers()),
        dict(expected.named_buffers()) if commit else {name: torch.zeros(12) for name in tensors},
    )


@pytest.mark.parametrize("commit", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_device_decides_about_a_buffer_with_other_strides(transposed, commit):
    module, square = nn.Module(), torch.arange(9.0).view(3, 3)
    module.register_buffer("square", square.t() if transposed else square)
    module.register_buffer("count", torch.zeros((), dtype=torch.long))
    rollback = BufferRollback(module)
    before, after = module.square.clone(), (module.square + 1).t()
    module.square = after
    rollback.restore(unless=torch.tensor(commit))
    assert module.square.tolist() == (after if commit else before).tolist()


@pytest.mark.parametrize("commit", [False, True])
def test_a_device_decides_about_buffers_of_another_shape_too(commit):
    net = make_net()
    net(batch(0)[0])
    rollback = BufferRollback(net)
    before = state_of(net)
    net(batch(1)[0])
    after = state_of(net)
    rollback.restore(unless=torch.tensor(commit))
    assert_same(state_of(net), after if commit else before)


def test_tensors_of_the_step_before_need_no_new_memory():
    net = nn.BatchNorm1d(12)
    rollback = BufferRollback(net)
    memory = [copies.saved for copies in rollback._copies]
    net(batch(0)[0])
    rollback.keep()
    assert all(copies.saved is saved for copies, saved in zip(rollback._copies, memory, strict=True))


def test_a_device_decides_about_a_buffer_that_was_none():
    module = nn.Module()
    module.register_buffer("first", None)
    rollback = BufferRollback(module)
    module.first = torch.ones(2)
    rollback.restore(unless=torch.tensor(True))
    assert module.first is not None
    rollback.keep()
    module.first = torch.zeros(2)
    rollback.restore(unless=torch.tensor(False))
    assert module.first.tolist() == [1, 1]


def _assign(module):
    module.b = (module.b + 1).t()


def _other_memory(module):
    module.b.data = module.b.data.contiguous() * 3


CHANGES = {
    "transposed in place": lambda module: module.b.t_(),
    "transposed and written": lambda module: module.b.t_().add_(1),
    "assigned": _assign,
    "other memory": _other_memory,
    "resized": lambda module: module.b.resize_(2, 2),
}


@pytest.mark.parametrize("unless", [None, False, True])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("transposed", [False, True])
def test_a_buffer_that_is_laid_out_otherwise_in_a_step(transposed, change, unless):
    """Two steps: the second must find what the first has left."""
    first = torch.arange(16.0).view(4, 4)
    module, expected = nn.Module(), nn.Module()
    for each in (module, expected):
        each.register_buffer("b", first.clone().t() if transposed else first.clone())
    rollback = BufferRollback(module)
    for _ in range(2):
        rollback.keep()
        CHANGES[change](module)
        if unless:
            CHANGES[change](expected)
        rollback.restore(unless=None if unless is None else torch.tensor(unless))
        assert module.b.shape == expected.b.shape
        assert torch.equal(module.b, expected.b)


def test_a_buffer_that_is_conjugated_lazily_stays():
    module = nn.Module()
    module.register_buffer("b", torch.polar(torch.ones(3), torch.arange(3.0)).conj())
    before = module.b.clone()
    rollback = BufferRollback(module)
    rollback.keep()
    assert torch.equal(module.b, before)
