"""1-bit Adam in a plain loop and in the trainer: Adam at first, then momentum in one bit, equal on all workers."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hybridpar import OnebitAdam
from hybridpar.errors import UsageError
from hybridpar.optim.onebit_adam import FrozenAdam
from tests.ranks import run_ranks
from tests.train.training import batch, close, make_net, same, share, train_rank, weights


def loop(net: nn.Module, optimizer: torch.optim.Optimizer, steps: range, world=None) -> list[torch.Tensor]:
    for step in steps:
        x, y = batch(step) if world is None else share(world, step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
    return weights(net)


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_first_steps_are_adams_bit_for_bit(decay):
    mine, theirs = make_net(), make_net()
    adam = torch.optim.AdamW if decay else torch.optim.Adam
    ours = loop(mine, FrozenAdam(mine.parameters(), 0.01, weight_decay=decay, freeze_steps=6), range(6))
    assert same(ours, loop(theirs, adam(theirs.parameters(), lr=0.01, weight_decay=decay, foreach=False), range(6)))


def test_then_the_variance_stands_and_its_correction_with_it():
    parameter = nn.Parameter(torch.tensor([1.0, 1.0]))
    optimizer = FrozenAdam([parameter], lr=0.1, betas=(0.9, 0.99), freeze_steps=1, momentum_arrives=True)
    parameter.grad = torch.tensor([2.0, 0.0])
    optimizer.step()
    torch.testing.assert_close(parameter.detach(), torch.tensor([0.9, 1.0]))  # the first step of Adam is lr
    parameter.grad = torch.tensor([0.5, 0.5])  # the momentum that all workers share
    optimizer.step()
    # v = 0.04, corrected by 1 - 0.99: 4; m corrected by 1 - 0.81. Without a variance nothing moves.
    torch.testing.assert_close(parameter.detach(), torch.tensor([0.9 - 0.1 * 0.5 / 0.19 / 2, 1.0]))


def test_momentum_goes_on_by_itself_where_nobody_shares_it():
    net = make_net()
    loop(net, FrozenAdam(net.parameters(), 0.01, freeze_steps=2, momentum_arrives=False), range(5))
    assert all(one.isfinite().all() for one in net.parameters())


def _alone(world, levels, steps, freeze, resume):
    net = make_net()
    optimizer = OnebitAdam(net.parameters(), lr=0.01, freeze_steps=freeze, levels=levels)
    if resume:
        loop(net, optimizer, range(steps // 2), world)
        saved, state = copy.deepcopy(net.state_dict()), copy.deepcopy(optimizer.state_dict())
        net = make_net()
        optimizer = OnebitAdam(net.parameters(), lr=0.01, freeze_steps=freeze, levels=levels)
        net.load_state_dict(saved)
        optimizer.load_state_dict(state)
        return loop(net, optimizer, range(steps // 2, steps), world)
    return loop(net, optimizer, range(steps), world)


def _adam(world, steps):
    net = make_net()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    for step in range(steps):
        x, y = share(world, step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        for parameter in net.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= world.size
        optimizer.step()
    return weights(net)


@pytest.mark.parametrize("levels", ["means", "norm"])
def test_workers_stay_equal_and_a_resumed_loop_goes_on(levels):
    ranks = run_ranks(_alone, 3, levels, 6, 2, False, shared_memory=False)
    assert same(ranks[0], ranks[1])
    assert same(ranks[0], ranks[2])
    resumed = run_ranks(_alone, 3, levels, 6, 2, True, shared_memory=False)
    assert same(ranks[1], resumed[1])


def test_first_steps_of_several_workers_are_adams():
    ours = run_ranks(_alone, 2, "means", 4, 4, False, shared_memory=False)
    theirs = run_ranks(_adam, 2, 4, shared_memory=False)
    close(ours[0], theirs[0])


def test_alone_it_is_adam_with_a_variance_that_stands():
    net, other = make_net(), make_net()
    ours = loop(net, OnebitAdam(net.parameters(), lr=0.01, freeze_steps=2), range(5))
    frozen = FrozenAdam(other.parameters(), 0.01, freeze_steps=2, momentum_arrives=False)
    assert same(ours, loop(other, frozen, range(5)))


def _spoiled(world):
    net = make_net()
    optimizer = OnebitAdam(net.parameters(), lr=0.01, freeze_steps=1)
    before = loop(net, optimizer, range(3), world)
    x, y = share(world, 3)
    optimizer.zero_grad()
    nn.functional.cross_entropy(net(x * torch.nan if world.rank == 1 else x), y).backward()
    optimizer.step()
    return same(before, weights(net)), optimizer.skipped_steps, loop(net, optimizer, range(4, 6), world)


def test_a_bad_gradient_changes_nothing_anywhere():
    ranks = run_ranks(_spoiled, 2, shared_memory=False)
    assert [rank[:2] for rank in ranks] == [(True, 1), (True, 1)]
    assert same(ranks[0][2], ranks[1][2])
    assert all(one.isfinite().all() for one in ranks[0][2])


@pytest.mark.parametrize("wrong", [{"lr": -1.0}, {"betas": (1.0, 0.9)}, {"freeze_steps": 0}, {"eps": 0.0}])
def test_bad_options(wrong):
    with pytest.raises(UsageError, match=next(iter(wrong))):
        FrozenAdam(make_net().parameters(), **{"freeze_steps": 1, **wrong})


def _train(world, options, steps, more):
    return train_rank(world, options, steps, **more)


def test_the_loop_and_the_trainer_do_the_same(tmp_path):
    options = {"recipe": "onebit-adam", "warm_start_steps": 2, "lr": 0.01, "weight_decay": 0.0}
    through = run_ranks(_train, 2, options, 6, {"save": (str(tmp_path), 4)}, shared_memory=False)
    assert through[0]["optimizer"] == "FrozenAdam"
    assert through[0]["codec"].startswith("onebit_adam:warm=2")
    assert same(through[0]["weights"], through[1]["weights"])
    close(through[0]["weights"], run_ranks(_alone, 2, "means", 6, 2, False, shared_memory=False)[0], atol=1e-5)
    resumed = run_ranks(_train, 2, options, 6, {"load": str(tmp_path / "step-4")}, shared_memory=False)
    assert same(through[1]["weights"], resumed[1]["weights"])
