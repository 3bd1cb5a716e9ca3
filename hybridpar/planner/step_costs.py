"""Why: a step is more than forward and backward passes, and workers that share a host compute more slowly.

The rest of a step is run as it is in a training, by `GradientSync` with one worker and the optimizer, and timed part by
part. How much workers of one host slow each other down is measured by having them all compute at a time.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hybridpar.lanes import Lanes
from hybridpar.partition.nest import tensor_leaves
from hybridpar.partition.state import untouched
from hybridpar.partition.unit_runner import Clock, whole_step_ms
from hybridpar.pipeline.buckets import make_buckets
from hybridpar.pipeline.sync import GradientSync, SyncOptions
from hybridpar.pipeline.world import World
from hybridpar.process import host_identity

#: Steps of each measurement; the median of them counts.
STEPS = 5


@dataclass(frozen=True)
class StepCosts:
    """What a step of a whole model takes besides its passes, on one worker, in milliseconds.

    Attributes:
        update_ms: Opening and closing a step: the guard, BatchNorm's statistics, the optimizer.
        collect_ms: Copying all gradients into buckets.
        accumulate_ms: Adding all gradients to others. Profiles hold it in every backward pass, as in all micro-batches
            but the first, whose gradients have nothing to be added to.
    """

    update_ms: float
    collect_ms: float
    accumulate_ms: float


def optimizer_like(model: nn.Module, copies: int) -> torch.optim.Optimizer:
    """An optimizer that keeps so many tensors per parameter, and changes nothing.

    Args:
        model: The model.
        copies: 0 for plain SGD, 1 for SGD with momentum, 2 or more for AdamW.
    """
    parameters = [one for one in model.parameters() if one.requires_grad]
    if copies >= 2:
        return torch.optim.AdamW(parameters, lr=0.0, weight_decay=0.0, fused=True)
    return torch.optim.SGD(parameters, lr=0.0, momentum=0.9 if copies else 0.0, fused=True)


def measure_step_costs(
    model: nn.Module, example: Tensor, *, copies: int = 1, bucket_bytes: int = 8 << 20, steps: int = STEPS
) -> StepCosts:
    """Time what a step does besides its passes.

    Args:
        model: The model, on its device; it is left as it was.
        example: A micro-batch.
        copies: As for `optimizer_like`.
        bucket_bytes: Size at which a bucket of gradients is full.
        steps: Steps to time, after two that are not counted.

    Raises:
        RuntimeError: The model's training step fails.
    """
    update, collect, accumulate = [], [], []
    clock = Clock(example.device)
    with untouched(model, training=True), Lanes(example.device) as lanes:
        # With two micro-batches BatchNorm's statistics are pooled, as they are between replicas.
        sync = GradientSync(model, World(device=example.device), lanes, SyncOptions(), micro_batches=2)
        optimizer = optimizer_like(model, copies)
        try:
            for _ in range(steps + 2):
                sync.begin(len(example))  # frees the gradients of the step before
                between = _passes(sync, model, example, clock)
                began = clock.mark()
                outcome = sync.finish()
                if outcome.committed:
                    optimizer.step()
                sync.end(outcome)
                ended = clock.mark()
                clock.wait()
                update.append(clock.between(*between) + clock.between(began, ended))
        finally:
            sync.close()
        order = [(name, one) for name, one in reversed(list(model.named_parameters())) if one.requires_grad]
        buckets = make_buckets(order, bucket_bytes)
        for _ in range(steps + 2):
            whole_step_ms(model, (example,), clock)
            gradients = [parameter.grad for _, parameter in order]
            fresh = [gradient.clone() for gradient in gradients if gradient is not None]
            began = clock.mark()
            for gradient, other in zip((one for one in gradients if one is not None), fresh, strict=True):
                gradient.add_(other)
            middle = clock.mark()
            for bucket in buckets:
                bucket.collect()
            ended = clock.mark()
            clock.wait()
            accumulate.append(clock.between(began, middle))
            collect.append(clock.between(middle, ended))
            for (_, parameter), before in zip(order, gradients, strict=True):
                parameter.grad = before
    return StepCosts(*(statistics.median(times[2:]) for times in (update, collect, accumulate)))


def _passes(sync: GradientSync, model: nn.Module, example: Tensor, clock: Clock) -> tuple[Any, Any]:
    """Forward and backward pass; marks of the clock around what the sync does between them."""
    sync.micro_batch(len(example), last=True)
    leaves = [leaf for _, leaf in tensor_leaves(model(example)) if leaf.requires_grad]
    loss = torch.stack([leaf.float().square().mean() for leaf in leaves]).sum()
    began = clock.mark()
    scaled = sync.forward_done(loss)
    ended = clock.mark()
    scaled.backward()  # type: ignore[no-untyped-call]
    return began, ended


def measure_hand_over(device: torch.device, turns: int = 100) -> float:
    """Milliseconds that handing a piece of work from one lane to another takes, as stages do with every micro-batch.

    Half of a turn there and back, with an event between each two, on the host's clock.

    Args:
        device: Of the lanes.
        turns: How many; the median of five parts of them counts.
    """
    times, each = [], max(1, turns // 5)
    with Lanes(device) as lanes:
        one, other = lanes.open("one"), lanes.open("other")
        for _ in range(6):
            began = time.perf_counter()
            for _ in range(each):
                one.submit(_no_work)
                other.wait(one.record())
                other.submit(_no_work)
                one.wait(other.record())
            one.synchronize()
            times.append(1e3 * (time.perf_counter() - began) / (2 * each))
    return statistics.median(times[1:])


def _no_work() -> None:
    """Work that does nothing."""


def measure_crowd(model: nn.Module, example: Tensor, world: World, *, steps: int = STEPS) -> dict[int, float]:
    """How much slower workers of a host compute when all of them do; a collective.

    Args:
        model: The model, on its device; it is left as it was.
        example: A micro-batch.
        world: All workers of the job.
        steps: Turns of one worker alone and of all; the median of each counts.

    Returns:
        For the most workers on one host: time of a pass with all over that of one alone. Empty where no host has
        several, or a GPU computes, which is its worker's own.

    Raises:
        SyncError: A worker died or did not answer in time.
    """
    places: list[str] = world.gather(host_identity())  # type: ignore[assignment]
    most = max(Counter(places).values())
    if most == 1 or world.device.type == "cuda":
        return {}
    clock = Clock(example.device)
    alone: list[float] = []
    together: list[float] = []
    with untouched(model, training=True):
        whole_step_ms(model, (example,), clock)
        for _ in range(steps):
            world.barrier()
            alone.append(whole_step_ms(model, (example,), clock) if world.is_main else 0.0)
            world.barrier()
            together.append(whole_step_ms(model, (example,), clock))
    told: list[tuple[list[float], list[float]]] = world.gather((alone, together))  # type: ignore[assignment]
    slowest = [max(times) for times in zip(*(beside for _, beside in told), strict=True)]
    return {most: max(1.0, statistics.median(slowest) / statistics.median(told[0][0]))}
