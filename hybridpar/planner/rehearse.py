"""Why: a step is more than the sum of its parts, so the plainest plan of all runs for a few steps before others are
predicted.

Threads that move gradients push what the computing one needs out of the caches, wake up late, and wait for the slowest
worker. None of that shows in parts that are timed alone. Plain data parallelism, which every search contains, shows it:
by as much as it takes longer than was predicted, computing on several workers is taken to be slower for all plans.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from hybridpar.cluster_file import ClusterSpec
from hybridpar.compress.auto import PLAIN
from hybridpar.lanes import Lanes
from hybridpar.partition.state import untouched
from hybridpar.partition.unit_runner import Clock, whole_step_ms
from hybridpar.pipeline.collective import BackendSum
from hybridpar.pipeline.sync import GradientSync, SyncOptions
from hybridpar.pipeline.world import World
from hybridpar.planner.evaluate import Evaluator
from hybridpar.planner.fixed import Fixed
from hybridpar.planner.inputs import PlannerInputs
from hybridpar.planner.network import Network
from hybridpar.planner.space import DATA_PARALLEL, Space
from hybridpar.planner.step_costs import forward_backward, optimizer_like

#: Steps that count, and steps before them, in which buckets are cut.
STEPS, FIRST_STEPS = 5, 2

#: Parts are never so wrong; what lies beyond was a disturbance.
LEAST, MOST = 0.9, 1.4

#: What gradients travel as where the link is too slow for them as they are.
CODEC = "onebit:decay=0.9"
#: By how much that shortens an exchange, at least.
_LESS = 20


@dataclass(frozen=True)
class Rehearsal:
    """Steps of data parallelism that were run before anything was predicted.

    Attributes:
        codec: What gradients travelled as.
        step_ms: The slowest worker's step, the median over steps.
    """

    codec: str
    step_ms: float


def measure_rehearsal(
    model: nn.Module,
    example: Tensor,
    world: World,
    cluster: ClusterSpec,
    *,
    copies: int = 1,
    bucket_bytes: int = 8 << 20,
    memory_format: str = "contiguous",
    steps: int = STEPS,
) -> Rehearsal | None:
    """Time steps of data parallelism, as plain as the link allows; a collective.

    Args:
        model: The model, on its device; it is left as it was.
        example: A micro-batch of a worker.
        world: All workers of the job.
        cluster: What they were found to be.
        copies: Tensors per parameter that the optimizer keeps.
        bucket_bytes: Size at which a bucket of gradients is full.
        memory_format: `contiguous` or `channels_last`.
        steps: Steps that count.

    Returns:
        What it took. Where exchanging gradients takes longer than computing them, the link says what a step takes, and
        it has been measured; there they travel compressed. None where that is still so, or is not possible, and where
        one worker has nobody to wait for.

    Raises:
        SyncError: A worker died or did not answer in time.
    """
    if world.size == 1:
        return None
    clock = Clock(example.device)
    size = sum(4 * one.numel() for one in model.parameters() if one.requires_grad)
    exchange = size * Network(cluster, 1, world.size).exchange([PLAIN])[PLAIN].ms_per_byte
    layout = torch.channels_last if memory_format == "channels_last" else torch.contiguous_format
    example = example.contiguous(memory_format=layout)
    with untouched(model, training=True), Lanes(example.device) as lanes:
        model.to(memory_format=layout)
        whole_step_ms(model, (example,), clock)
        told: list[float] = world.gather(whole_step_ms(model, (example,), clock))  # type: ignore[assignment]
        codec = _affordable(exchange, max(told), world)
        if codec is None:
            model.to(memory_format=torch.contiguous_format)
            return None
        for parameter in model.parameters():
            parameter.grad = None
        sync = GradientSync(model, world, lanes, SyncOptions(bucket_bytes=bucket_bytes, codec=codec))
        optimizer = optimizer_like(model, copies)
        times = []
        try:
            for _ in range(FIRST_STEPS + steps):
                world.barrier()
                began = time.perf_counter()
                sync.begin(len(example))
                forward_backward(sync, model, example, clock)
                outcome = sync.finish()
                if outcome.committed:
                    optimizer.step()
                sync.end(outcome)
                clock.wait()
                told = world.gather(1e3 * (time.perf_counter() - began))  # type: ignore[assignment]
                times.append(max(told))
        finally:
            sync.close()
            model.to(memory_format=torch.contiguous_format)
    return Rehearsal(codec, statistics.median(times[FIRST_STEPS:]))


def _affordable(exchange_ms: float, compute_ms: float, world: World) -> str | None:
    """What gradients can travel as without taking longer than computing."""
    if exchange_ms <= compute_ms:
        return "none"
    if exchange_ms / _LESS <= compute_ms and isinstance(world.lane_sums[0], BackendSum):
        return CODEC
    return None


def rehearsed(inputs: PlannerInputs, took: Rehearsal | None) -> PlannerInputs:
    """Inputs whose prediction for the plan that was rehearsed is what it took.

    Args:
        inputs: As measured, part by part.
        took: See `measure_rehearsal`; None changes nothing, and so does a codec whose rates nobody measured.
    """
    if took is None:
        return inputs
    codecs = {} if took.codec == "none" else dict.fromkeys((one.name for one in inputs.profile.parameters), took.codec)
    if codecs and took.codec not in inputs.rates:
        return inputs
    free = replace(inputs, fixed=Fixed(codecs=codecs), calibration={})
    plain = replace(Space(replace(free, fixed=Fixed())).baselines()[DATA_PARALLEL], travel=1 if codecs else 0)
    low, high = LEAST, MOST
    while high - low > 1e-3:  # a step grows with the factor, in no simple way
        middle = (low + high) / 2
        tried = replace(free, profile=replace(inputs.profile, together=middle))
        if Evaluator(Space(tried)).outcome(plain).step_ms < took.step_ms:
            low = middle
        else:
            high = middle
    return replace(inputs, profile=replace(inputs.profile, together=round((low + high) / 2, 4)))
