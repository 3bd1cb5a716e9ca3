"""Stages that are frozen, for a while or throughout, over replicas."""

from __future__ import annotations

import socket
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from hybridpar import TrainConfig, Trainer
from hybridpar.comm.world import World
from tests.ranks import RankError, run_ranks

STEPS, CLIP = 30, 0.1
CUT = {"stages": 2, "placement": "0,0;1,1"}


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU()),
        *(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 5)),
    )


def stages_of(trainer: Trainer) -> dict[int, Any]:
    engine: Any = trainer.engine
    return engine.pipeline.stages


def make_trainer(net: nn.Module, world: World, x: torch.Tensor, **options: Any) -> Trainer:
    return Trainer(
        net,
        optimizer=lambda module: torch.optim.SGD(module.parameters(), lr=0.1),
        config=TrainConfig(plan="none", micro_batches=2, clip_grad=CLIP, **options),
        example=x[:2],
        world=world,
    )


def freeze_and_thaw(world: World, stage: int | None, shared: bool) -> float:
    """The largest relative error of a norm of some steps, in which a stage is frozen twice (or, uncut, the first
    layer), beside a plain loop; each norm depends on the weights after all steps before.
    """
    net, plain = make_net(), make_net()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    x, y = torch.randn(8, 12, generator=torch.Generator().manual_seed(1)), torch.arange(8) % 5
    own, off = slice(4 * world.rank, 4 * world.rank + 4), 0.0
    with make_trainer(net, world, x, **({} if stage is None else CUT)) as trainer:
        stages = stages_of(trainer)
        assert all((one.gradients._shared is not None) == shared for one in stages.values())
        part = net[0] if stage is None else stages[stage].module
        names = {name for name, one in net.named_parameters() if any(one is other for other in part.parameters())}
        for step in range(STEPS):
            if step in (4, 8, 9, 10):
                trainer.wait()
                for model in (net, plain):
                    for name in names:
                        model.get_parameter(name).requires_grad_(step in (8, 10))
            norm = trainer.step((x[own], y[own])).grad_norm
            optimizer.zero_grad()
            for images, labels in zip(x.split(2), y.split(2), strict=True):
                (cross_entropy(plain(images), labels) / 4).backward()
            right = float(nn.utils.clip_grad_norm_(plain.parameters(), CLIP))
            optimizer.step()
            off = max(off, abs(float(norm) / right - 1))
    return off


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("stage", [0, 1, None])
def test_a_part_that_is_frozen_and_thawed_trains_as_in_a_plain_loop(stage, shared):
    assert max(run_ranks(freeze_and_thaw, 2, stage, shared, shared_memory=shared)) < 1e-4


def unread_messages(world: World) -> list[int]:
    """Messages of each stage that nobody has read, after steps with the first of them frozen."""
    net = make_net()
    x, y = torch.randn(8, 12), torch.arange(8) % 5
    unread = []
    with make_trainer(net, world, x, **CUT) as trainer:
        stages = stages_of(trainer)
        stages[0].module.requires_grad_(False)
        for _ in range(20):
            trainer.step((x, y))
        trainer.wait()
        world.gather(None)
        for stage in stages.values():
            (bell,) = stage.gradients._shared._segment._peers.values()
            try:
                unread.append(len(bell.socket.recv(1000, socket.MSG_DONTWAIT)))
            except BlockingIOError:
                unread.append(0)
        world.gather(None)
    return unread


def test_a_frozen_stage_tells_nothing_that_nobody_reads():
    # A socket takes a few hundred messages; then who sends one more waits for the whole time-out. The other stage has
    # told the end of the last step.
    assert run_ranks(unread_messages, 2) == [[0, 1], [0, 1]]


def freeze_on_rank_1(world: World, options: dict[str, Any]) -> None:
    """Take a step after a layer was frozen on one worker only."""
    net = make_net()
    x, y = torch.randn(8, 12), torch.arange(8) % 5
    with make_trainer(net, world, x, **options) as trainer:
        for _ in range(2):
            trainer.step((x, y))
        trainer.wait()
        net[2].requires_grad_(world.rank == 0)
        trainer.step((x, y))


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("options", [{}, {"compress": "onebit"}], ids=str)
def test_workers_that_train_different_parameters_are_refused(options, shared):
    with pytest.raises(RankError) as raised:
        run_ranks(freeze_on_rank_1, 2, options, shared_memory=shared, timeout=60)
    assert str(raised.value).count("SyncError: the workers do not train the same parameters") >= 2
