"""Runs some steps of plain data parallelism before other plans are predicted, and corrects predictions by them.

Threads that move gradients evict the caches of the computing thread, wake up late, and wait for the slowest worker.
Parts that are timed alone do not show that. Plain data parallelism, which every search contains, does: by as much as it
takes longer than was predicted, computing on several workers is assumed to be slower for all plans. Data parallelism
with a codec gives the factor for plans that use one.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from hybridpar.comm.world import World
from hybridpar.lanes import Lanes
from hybridpar.machine.cluster_file import ClusterSpec
from hybridpar.machine.steady import halves_apart
from hybridpar.models.state import untouched
from hybridpar.partition.unit_runner import Clock, whole_step_ms
from hybridpar.pipeline.engine import PipelineEngine
from hybridpar.pipeline.local_stage import OptimizerStep
from hybridpar.pipeline.stage_module import WholeModel
from hybridpar.pipeline.step import PipelineOptions, StepRequest, whole_options
from hybridpar.planner.evaluate import Evaluator
from hybridpar.planner.fixed import Fixed
from hybridpar.planner.inputs import PlannerInputs
from hybridpar.planner.network import PLAIN, Network
from hybridpar.planner.space import DATA_PARALLEL, Candidate, Space
from hybridpar.planner.step_costs import any_loss, figures_key, optimizer_like
from hybridpar.planner.store import NOISE, remembered
from hybridpar.schedule.layout import Layout
from hybridpar.sync.options import SyncOptions
from hybridpar.sync.pieces import step_optimizer

#: What is kept.
KIND = "rehearsal"

#: Steps that count at least, and steps before them, in which buckets are cut.
STEPS, FIRST_STEPS = 5, 2

#: Seconds that they are repeated for, as one moment of a machine is not the next, and how many steps are enough.
SECONDS, ENOUGH = 1.0, 10

#: Parts are never so wrong; what lies beyond was a disturbance.
LEAST, MOST = 0.9, 1.4

#: Where plain data parallelism was not rehearsed: so much of what a codec showed is taken to be in all plans, as
#: threads that move bytes are. In between what pipelines and codecs were seen to need (benchmarks/planner).
SHARED = 0.5

#: The codec that stands for all.
CODEC = "onebit:decay=0.5"
#: By how much that shortens an exchange, at least.
_LESS = 20


@dataclass(frozen=True)
class Rehearsal:
    """Steps of data parallelism that were run before anything was predicted.

    Attributes:
        codec: What gradients travelled as.
        samples: Of each worker.
        step_ms: In milliseconds, the median over steps, of the worker where that is longest.
    """

    codec: str
    samples: int
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
    compiled: bool = False,
    steps: int = STEPS,
    seconds: float = SECONDS,
    codec: bool = True,
    cache: Path | None = None,
    note: str = "",
) -> tuple[Rehearsal, ...]:
    """Time steps of data parallelism; a collective."""
    if world.size == 1:
        return ()
    key = {
        **figures_key(model, example),
        "cluster": cluster.key,
        "transport": world.transport,
        "how": [copies, bucket_bytes, memory_format, steps, seconds, codec, note, *(["compiled"] if compiled else [])],
    }

    def measure() -> dict[str, float]:
        whole = whole_options(world.size, compile=compiled, sync=SyncOptions(bucket_bytes=bucket_bytes))
        return _step_times(model, example, world, cluster, copies, whole, memory_format, steps, seconds, codec)

    found = remembered(KIND, key, cache, measure, world)
    return tuple(Rehearsal(codec, len(example), step_ms) for codec, step_ms in found.items())


def _step_times(
    model: nn.Module,
    example: Tensor,
    world: World,
    cluster: ClusterSpec,
    copies: int,
    whole: PipelineOptions,
    memory_format: str,
    steps: int,
    seconds: float,
    codec: bool,
) -> dict[str, float]:
    """Milliseconds of a step by codec, and the noise; a collective, so all workers know the same."""
    clock = Clock(example.device)
    size = sum(4 * one.numel() for one in model.parameters() if one.requires_grad)
    exchange = size * Network(cluster, Layout.repeated([(0, 0)], world.size)).exchange([PLAIN])[PLAIN].ms_per_byte
    layout = torch.channels_last if memory_format == "channels_last" else torch.contiguous_format
    example = example.contiguous(memory_format=layout)
    with untouched(model, training=True):
        model.to(memory_format=layout)
        try:
            run = torch.compile(model) if whole.compile else model
            whole_step_ms(run, (example,), clock)
            told: list[float] = world.gather(whole_step_ms(run, (example,), clock))  # type: ignore[assignment]
            codecs = ["none"] if exchange <= max(told) else []
            if codec and exchange / _LESS <= max(told):
                codecs.append(CODEC)
            found, noises = {}, [0.0]
            for text in codecs:
                options = replace(whole, sync=replace(whole.sync, codec=text))
                optimizer = optimizer_like(model, copies)
                found[text], noise = _steps(model, example, world, options, optimizer, steps, seconds / len(codecs))
                noises.append(noise)
        finally:
            model.to(memory_format=torch.contiguous_format)
    return found | {NOISE: max(noises)}


def _steps(
    model: nn.Module,
    example: Tensor,
    world: World,
    options: PipelineOptions,
    optimizer: torch.optim.Optimizer,
    steps: int,
    seconds: float,
) -> tuple[float, float]:
    """Milliseconds of a step of the slowest worker, the median over steps, and the largest noise; a collective."""
    clock = Clock(example.device)
    for parameter in model.parameters():
        parameter.grad = None

    def step_of(_: nn.Module) -> OptimizerStep:
        return lambda factor, commit, unwritten: step_optimizer(optimizer, unwritten)  # the rates are 0

    with (
        Lanes(example.device) as lanes,
        closing(PipelineEngine(model, [WholeModel(model)], world, lanes, any_loss, step_of, options, 1)) as engine,
    ):

        def step_ms() -> float:
            began = time.perf_counter()
            executor = engine.executor
            request = StepRequest([(example, example)], len(example))
            executor.step(request, executor.count_samples(len(example)))
            clock.wait()
            return 1e3 * (time.perf_counter() - began)

        first: list[float] = world.gather(min(step_ms() for _ in range(FIRST_STEPS)))  # type: ignore[assignment]
        # From here on workers wait for nothing but gradients, as in a training: a worker that was late in one step
        # catches up in the next.
        count = max(steps, min(ENOUGH, int(1e3 * seconds / max(first))))
        times = [step_ms() for _ in range(count)]
        mine = statistics.median(times), halves_apart(times)
        told: list[tuple[float, float]] = world.gather(mine)  # type: ignore[assignment]
    return max(took for took, _ in told), max(noise for _, noise in told)


def rehearsed(inputs: PlannerInputs, rehearsals: Sequence[Rehearsal]) -> PlannerInputs:
    """Inputs whose predictions for the plans that were rehearsed are what these took."""
    names = [one.name for one in inputs.profile.parameters]
    profile = inputs.profile
    for one in rehearsals:
        coded = one.codec != "none"
        if coded and one.codec not in inputs.rates:
            continue
        # It ran whatever was decided, and maybe with fewer samples than a step of the plan has.
        fixed = Fixed(codecs=dict.fromkeys(names, one.codec) if coded else {})
        asked = replace(inputs, fixed=fixed, batch=one.samples * inputs.workers)
        plain = Space(replace(asked, fixed=Fixed(codecs={}))).baselines()[DATA_PARALLEL]
        found = _factor(asked, replace(plain, codec=1 if coded else 0), one.step_ms)
        profile = replace(profile, together_coded=found) if coded else replace(profile, together=found)
    if profile.together_coded is not None and all(one.codec != "none" for one in rehearsals):
        profile = replace(profile, together=round(1 + SHARED * (profile.together_coded - 1), 4))
    return replace(inputs, profile=profile)


def _factor(inputs: PlannerInputs, candidate: Candidate, step_ms: float) -> float:
    """How much slower computing must be for a candidate's step to be predicted as it was."""
    low, high = LEAST, MOST
    while high - low > 1e-3:  # a step grows with the factor, in no simple way
        middle = (low + high) / 2
        tried = replace(inputs, profile=replace(inputs.profile, together=middle, together_coded=None))
        if Evaluator(Space(tried)).outcome(candidate).step_ms < step_ms:
            low = middle
        else:
            high = middle
    return round((low + high) / 2, 4)
