"""Measures what a step takes besides its passes, how much workers of a host slow each other down, and hosts' speeds.

The rest of a step is run as it is in a training, by the stage of one worker and the optimizer, and timed part by part.
How much workers of one host slow each other down is measured by having them all compute at a time.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hybridpar.comm.world import World
from hybridpar.lanes import Lanes
from hybridpar.machine.process import host_identity
from hybridpar.machine.steady import halves_apart
from hybridpar.models import model_fingerprint
from hybridpar.models.state import untouched
from hybridpar.partition.nest import tensor_leaves
from hybridpar.partition.profile_cache import machine_key
from hybridpar.partition.unit_runner import Clock, whole_step_ms
from hybridpar.pipeline.local_stage import LocalStage, decide
from hybridpar.pipeline.stage_module import WholeModel
from hybridpar.pipeline.stage_run import Mailbox, StageRun
from hybridpar.planner.store import NOISE, steadied
from hybridpar.sync.buckets import make_buckets
from hybridpar.sync.options import SyncOptions

#: Steps of each measurement; the median of them counts.
STEPS = 5
#: And of the rest of a step, which is little of it.
REST_STEPS = 3


@dataclass(frozen=True)
class StepCosts:
    """What a step of a whole model takes besides its passes, on one worker, in milliseconds.

    Attributes:
        update_ms: Opening and closing a step: the guard, BatchNorm's statistics, the optimizer.
        collect_ms: Copying all gradients into buckets.
        accumulate_ms: By how much a pass whose gradients are added to others takes longer than one that makes the first
            ones. Profiles are of the former kind. Below 0 where new memory costs more than adding does.
        noise: How far whole steps of the measurement lay apart, relative.
    """

    update_ms: float
    collect_ms: float
    accumulate_ms: float
    noise: float = 0.0


def optimizer_like(model: nn.Module, copies: int) -> torch.optim.Optimizer:
    """An optimizer that keeps so many tensors per parameter, and changes nothing."""
    parameters = [one for one in model.parameters() if one.requires_grad]
    if copies >= 2:
        return torch.optim.AdamW(parameters, lr=0.0, weight_decay=0.0, fused=True)
    return torch.optim.SGD(parameters, lr=0.0, momentum=0.9 if copies else 0.0, fused=True)


def measure_step_costs(
    model: nn.Module, example: Tensor, *, copies: int = 1, bucket_bytes: int = 8 << 20, steps: int = REST_STEPS
) -> StepCosts:
    """Time what a step does besides its passes."""
    update, collect, kept, fresh = [], [], [], []
    clock = Clock(example.device)
    with untouched(model, training=True), Lanes(example.device) as lanes:
        optimizer = optimizer_like(model, copies)
        # With two micro-batches BatchNorm's statistics are pooled, as they are between replicas.
        stage = LocalStage(
            *(StageRun(WholeModel(model), {}, Mailbox()), lanes.caller, lanes, World(device=example.device), []),
            *(SyncOptions(), 2, lambda factor, commit, pieces: optimizer.step()),
        )
        try:
            for _ in range(steps + 1):
                flight = stage.gradients.new_step()
                stage.start(0, flight)  # frees the gradients of the step before
                loss = any_loss(model(example))
                pooling = clock.mark()
                if stage.batch_norm is not None:
                    stage.batch_norm.fold()
                pooled = clock.mark()
                loss.backward()  # type: ignore[no-untyped-call]
                began = clock.mark()
                stage.gradients.measure(flight)
                squares = stage.gradients.squares(flight)
                values = decide(torch.zeros_like(squares).expand(4), squares, guard=True, measured=True)
                stage.apply(values, on_device=False)
                ended = clock.mark()
                clock.wait()
                update.append(clock.between(pooling, pooled) + clock.between(began, ended))
        finally:
            stage.detach()
        order = [(name, one) for name, one in reversed(list(model.named_parameters())) if one.requires_grad]
        buckets = make_buckets(order, bucket_bytes)
        for _ in range(steps + 1):
            for _, parameter in order:
                parameter.grad = None
            fresh.append(whole_step_ms(model, (example,), clock))
            kept.append(whole_step_ms(model, (example,), clock))
            began = clock.mark()
            for bucket in buckets:
                bucket.collect()
            ended = clock.mark()
            clock.wait()
            collect.append(clock.between(began, ended))
    updating, collecting, adding, making = (statistics.median(times[1:]) for times in (update, collect, kept, fresh))
    whole = [sum(times) for times in zip(update, collect, kept, fresh, strict=True)]
    return StepCosts(updating, collecting, adding - making, halves_apart(whole[1:]))


def any_loss(output: Any, target: Any = None) -> Tensor:
    """Something to go backward from, for any kind of output that depends on a parameter."""
    leaves = [leaf for _, leaf in tensor_leaves(output) if leaf.requires_grad]
    return torch.stack([leaf.float().square().mean() for leaf in leaves]).sum()


def measure_hand_over(device: torch.device, turns: int = 100) -> float:
    """Milliseconds that handing a piece of work from one lane to another takes, as stages do with every micro-batch.

    Half of a turn there and back, with an event between each two, on the host's clock.
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
    """How much slower workers of a host compute when all of them do; a collective."""
    places: list[str] = world.gather(host_identity())  # type: ignore[assignment]
    most = max(Counter(places).values())
    if most == 1 or world.device.type == "cuda":
        return {}
    return {most: steadied("crowd", lambda: _crowding(model, example, world, steps), world)["slower"]}


def _crowding(model: nn.Module, example: Tensor, world: World, steps: int) -> dict[str, float]:
    """Time of a pass with all workers computing over that of one alone, and its noise; a collective."""
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
    first = told[0][0]
    slower = max(1.0, statistics.median(slowest) / statistics.median(first))
    return {"slower": slower, NOISE: max(halves_apart(slowest), halves_apart(first))}


#: Hosts whose speeds are nearer than this factor count as equally fast.
APART = 1.25
#: Speeds count where a second measurement agrees within this factor.
AGREED = 1.1


def measure_speeds(model: nn.Module, example: Tensor, world: World, *, steps: int = STEPS) -> list[float]:
    """How fast hosts compute, measured twice while all do; a collective."""
    clock, rounds = Clock(example.device), []
    with untouched(model, training=True):
        whole_step_ms(model, (example,), clock)
        for _ in range(2):
            world.barrier()
            rounds.append(min(whole_step_ms(model, (example,), clock) for _ in range(steps)))
    told: list[tuple[str, list[float]]] = world.gather((host_identity(), rounds))  # type: ignore[assignment]
    return speeds_of([host for host, _ in told], list(zip(*(times for _, times in told), strict=True)))


def speeds_of(hosts: Sequence[str], rounds: Sequence[Sequence[float]]) -> list[float]:
    """How fast workers are over the first one, as far as measurements tell."""
    taken: dict[str, list[float]] = {host: [] for host in hosts}
    for times in rounds:
        for host, own in taken.items():
            own.append(max(time for time, place in zip(times, hosts, strict=True) if place == host))
    if any(max(own) > AGREED * min(own) for own in taken.values()):
        return [1.0] * len(hosts)
    groups: list[list[str]] = []
    for host in sorted(taken, key=lambda one: min(taken[one])):
        if not groups or min(taken[host]) > APART * min(taken[groups[-1][0]]):
            groups.append([])
        groups[-1].append(host)
    found = {host: max(min(taken[one]) for one in group) for group in groups for host in group}
    return [found[hosts[0]] / found[host] for host in hosts]


def figures_key(model: nn.Module, example: Tensor) -> dict[str, object]:
    """What figures of a model on a device depend on."""
    return {
        "model": model_fingerprint(model),
        "input": list(example.shape),
        "dtype": str(example.dtype),
        **machine_key(example.device),
    }
