"""A small net, its data and an oracle of one process, for tests of training recipes on several ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hybridpar.comm.world import World
from hybridpar.config import TrainConfig
from hybridpar.train.trainer import Trainer

SAMPLES = 12


def make_net(norm: bool = False) -> nn.Module:
    torch.manual_seed(3)
    layers: list[nn.Module] = [nn.Flatten(), nn.Linear(48, 40)]
    if norm:
        layers.append(nn.BatchNorm1d(40))
    return nn.Sequential(*layers, nn.Tanh(), nn.Linear(40, 5))


def batch(step: int, samples: int = SAMPLES) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(step)
    return torch.randn(samples, 3, 4, 4, generator=draw), torch.randint(0, 5, (samples,), generator=draw)


def share(
    world: World, step: int, cut: Sequence[int] | None = None, *, samples: int = SAMPLES
) -> tuple[Tensor, Tensor]:
    """A worker's part of a step's samples."""
    x, y = batch(step, samples)
    if cut is None:
        return x.tensor_split(world.size)[world.rank], y.tensor_split(world.size)[world.rank]
    return torch.split(x, list(cut))[world.rank], torch.split(y, list(cut))[world.rank]


def config(**options: Any) -> TrainConfig:
    usual = {"lr": 0.1, "optimizer": "sgd:momentum=0.9", "weight_decay": 0.01, "sync": "allreduce:bucket=0.001"}
    return TrainConfig(**{**usual, **options})


def gradients(net: nn.Module, x: Tensor, y: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(nn.functional.cross_entropy(net(x), y), list(net.parameters())))


def plain_loop(
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[tuple[Tensor, Tensor]],
    *,
    parts: int = 1,
    limit: float | None = None,
    loss: Callable[[Tensor, Tensor], Tensor] = nn.functional.cross_entropy,
) -> nn.Module:
    """What everybody writes by hand: one process, the micro-batches one after the other."""
    for x, y in batches:
        optimizer.zero_grad()
        for inputs, targets in zip(x.tensor_split(parts), y.tensor_split(parts), strict=True):
            (loss(net(inputs), targets) * (len(targets) / len(y))).backward()
        if limit is not None:
            nn.utils.clip_grad_norm_(net.parameters(), limit)
        optimizer.step()
    return net


def weights(net: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in net.parameters()]


def train_rank(
    world: World,
    options: dict[str, Any],
    steps: int,
    *,
    norm: bool = False,
    total: int | None = None,
    cut: Sequence[int] | None = None,
    save: tuple[str, int] | None = None,
    load: str | None = None,
    spoil: int | None = None,
) -> dict[str, Any]:
    """Train one rank, from a checkpoint or anew.

    Args:
        world: The workers.
        options: Of the trainer.
        steps: Last step.
        norm: With BatchNorm.
        total: Steps of the run, for recipes.
        cut: Samples of each worker.
        save: Where to save, and after which step.
        load: Where to go on from.
        spoil: Step in which rank 0's inputs are not finite.
    """
    with Trainer(make_net(norm), config=config(**options), world=world, total_steps=total) as trainer:
        trainer.total_steps = None  # a constant rate
        if load is not None:
            trainer.load(load)
        results = []
        for step in range(trainer.steps_done, steps):
            x, y = share(world, step, cut)
            if step == spoil and world.rank == 0:
                x = x * torch.nan
            results.append(trainer.step((x, y)))
            if save is not None and step + 1 == save[1]:
                trainer.save(Path(save[0]))
        return {
            "weights": weights(trainer.model),
            "buffers": [buffer.clone() for buffer in trainer.model.buffers()],
            "losses": [result.loss for result in results],
            "staleness": [result.staleness for result in results],
            "skipped": [result.skipped for result in results],
            "sent": [result.outcome.bytes_sent for result in results],
            "optimizer": type(trainer.optimizer).__name__,
        }


def delayed_oracle(
    steps: int, parts: int = 1, momentum: float = 0.9, decay: float = 0.01, frozen: Sequence[int] = ()
) -> list[Tensor]:
    """One process: each update uses the gradient that was computed before the update before it.

    Args:
        steps: Batches.
        parts: Updates per batch, with as many parts of its samples of each of two workers.
        momentum: Of each update.
        decay: Of each update.
        frozen: Steps in which the first layer is frozen.
    """
    net = make_net()
    first = len(list(net[1].parameters()))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=momentum, weight_decay=decay)
    groups: list[dict[str, Any]] = optimizer.param_groups
    exempt = [one for one in net.parameters() if one.ndim <= 1]
    groups[0]["params"] = [one for one in net.parameters() if one.ndim > 1]
    optimizer.add_param_group({"params": exempt, "weight_decay": 0.0})
    waiting: list[Tensor | None] | None = None
    for step in range(steps):
        x, y = batch(step)
        workers = [
            list(zip(a.tensor_split(parts), b.tensor_split(parts), strict=True))
            for a, b in zip(x.tensor_split(2), y.tensor_split(2), strict=True)
        ]
        for part in range(parts):
            inputs = torch.cat([worker[part][0] for worker in workers])
            targets = torch.cat([worker[part][1] for worker in workers])
            fresh: list[Tensor | None] = [one * (len(targets) / len(y)) for one in gradients(net, inputs, targets)]
            if step in frozen:
                fresh[:first] = [None] * first
            if waiting is not None:
                for index, (parameter, gradient) in enumerate(zip(net.parameters(), waiting, strict=True)):
                    parameter.grad = None if index < first and step in frozen else gradient
                optimizer.step()
            waiting = fresh
    return weights(net)


def close(left: Sequence[Tensor], right: Sequence[Tensor], **limits: float) -> None:
    for one, other in zip(left, right, strict=True):
        torch.testing.assert_close(one, other, **{"rtol": 1e-5, "atol": 1e-6, **limits})


def same(left: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    return len(left) == len(right) and all(map(torch.equal, left, right))
