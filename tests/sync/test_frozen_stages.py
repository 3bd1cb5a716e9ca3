"""Stages that are frozen, for a while or throughout, over replicas."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from hybridpar import TrainConfig, Trainer
from hybridpar.comm.world import World
from hybridpar.sync.shared_reducer import SharedReducer
from tests.ranks import run_ranks

STEPS, CLIP = 30, 0.1


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU()),
        *(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 5)),
    )


def set_trained(nets: tuple[nn.Module, ...], first: int, last: int, trained: bool) -> None:
    for net in nets:
        for layer in list(net.children())[first:last]:
            layer.requires_grad_(trained)


def make_trainer(net: nn.Module, world: World, x: torch.Tensor, **options: Any) -> Trainer:
    return Trainer(
        net,
        optimizer=lambda module: torch.optim.SGD(module.parameters(), lr=0.1),
        config=TrainConfig(plan="none", micro_batches=2, clip_norm=CLIP, **options),
        example=x[:2],
        world=world,
    )


def freeze_and_thaw(world: World, layers: tuple[int, int], options: dict[str, Any]) -> float:
    """The largest relative error of a norm of some steps, in which a part is frozen twice, beside a plain loop; each
    norm depends on the weights after all steps before.
    """
    net, plain = make_net(), make_net()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    x, y = torch.randn(8, 12, generator=torch.Generator().manual_seed(1)), torch.arange(8) % 5
    own, off = slice(4 * world.rank, 4 * world.rank + 4), 0.0
    with make_trainer(net, world, x, **options) as trainer:
        for step in range(STEPS):
            if step in (4, 8, 9, 10):
                trainer.wait()
                set_trained((net, plain), *layers, step in (8, 10))
            norm = trainer.step((x[own], y[own])).grad_norm
            optimizer.zero_grad()
            for images, labels in zip(x.split(2), y.split(2), strict=True):
                (cross_entropy(plain(images), labels) / 4).backward()
            right = float(nn.utils.clip_grad_norm_(plain.parameters(), CLIP))
            optimizer.step()
            off = max(off, abs(float(norm) / right - 1))
    return off


@pytest.mark.parametrize("shared_memory", [True, False])
@pytest.mark.parametrize(
    ("layers", "options"),
    [
        ((0, 4), {"stages": 2, "placement": "0,0;1,1"}),
        ((4, 7), {"stages": 2, "placement": "0,0;1,1"}),
        ((0, 4), {}),
    ],
)
def test_a_part_that_is_frozen_and_thawed_trains_as_in_a_plain_loop(layers, options, shared_memory):
    assert max(run_ranks(freeze_and_thaw, 2, layers, options, shared_memory=shared_memory)) < 1e-4


def unread_messages(world: World) -> list[int]:
    """Messages of each stage that nobody has read, after steps with the first of them frozen."""
    net = make_net()
    x, y = torch.randn(8, 12), torch.arange(8) % 5
    set_trained((net,), 0, 4, False)
    unread = []
    with make_trainer(net, world, x, stages=2, placement="0,0;1,1") as trainer:
        for _ in range(20):
            trainer.step((x, y))
        trainer.wait()
        world.gather(None)
        engine: Any = trainer.engine
        for stage in engine.pipeline.stages.values():
            assert type(stage.gradients) is SharedReducer
            (bell,) = stage.gradients._segment._peers
            try:
                unread.append(len(bell._socket.recv(1000, 0x40)))  # MSG_DONTWAIT
            except BlockingIOError:
                unread.append(0)
        world.gather(None)
    return unread


def test_a_frozen_stage_tells_nothing_that_nobody_reads():
    # A socket takes a few hundred messages; then who sends one more waits for the whole time-out. The other stage has
    # told the end of the last step.
    assert run_ranks(unread_messages, 2) == [[0, 1], [0, 1]]
