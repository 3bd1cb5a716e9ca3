"""Measures what a search for a plan reads, by the probes of one table.

| probe | what it finds | steps |
|---|---|---|
| way | memory format, kernels, precision, threads, CUDA graph or torch.compile: `planner.ways` | 4 for each change |
| units | the times of the model's units in that way, at some sizes of micro-batches | 8 |
| links | hosts and links between workers: `planner.links` | 0 |
| codecs | how fast codecs write and read gradients: `planner.rates` | 0 |

All workers measure at the same time, so that what they take from each other is in the times, and how fast each is. Each
probe keeps its result, under all that it depends on: the next run of the same kind measures nothing again.

Before a run, measuring must cost less than it can gain. A run of few steps is not planned at all. Of a longer one a
step is timed, and it is left as it is where measuring would take more than half of what the run computes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from pydantic import TypeAdapter
from torch import nn

from hybridpar.comm.world import World
from hybridpar.errors import HybridparError
from hybridpar.machine.cluster_file import ClusterSpec
from hybridpar.machine.process import available_cores, host_identity, usable_memory
from hybridpar.models import autocast, model_fingerprint
from hybridpar.models.deferred import is_deferred
from hybridpar.models.state import twin_of
from hybridpar.partition.profile import Progress, intra_op_threads
from hybridpar.partition.profile_cache import machine_key
from hybridpar.planner.batch import held_bytes, memory_of, sizes_of
from hybridpar.planner.codecs import FIDELITIES, OUTER_CODECS, other_types
from hybridpar.planner.inputs import PlannerInputs, Question
from hybridpar.planner.links import describe_hosts, laps_of, measure_cluster, most_of_all
from hybridpar.planner.profile import BATCH_NORMS, ModelProfile, profile_model, set_way
from hybridpar.planner.rates import measure_rates
from hybridpar.planner.trials import OpenTrial, as_problem, random_batch, remembered
from hybridpar.planner.ways import CHANGED, COMPILED, Way, can_compile, choose_way, compiling_pays

#: Steps of the shortest run that is planned.
LEAST_STEPS = 100

#: Part of the run that measuring may take, and what it takes: seconds, and steps of the model.
WORTH, SECONDS, STEPS = 0.5, 5.0, 25

#: Bytes of gradients by which the link is judged before anything is measured.
_PROBE_BYTES = 1 << 19

#: Passes over the units.
PASSES = 2

#: Samples of the largest micro-batch that is measured for a cluster which is not the machine at hand.
_MOST_ELSEWHERE = 64

#: A step needs less than this multiple of its inputs and a hundredth of its weights.
_AT_MOST = 1000

#: Hosts whose speeds are nearer than this factor count as equally fast.
APART = 1.25

#: Options on which the time of a step depends.
_TIMED_OPTIONS = (
    *("optimizer", "amp", "memory_format", "kernels", "compile", "cuda_graph", "guard", "fidelity", "clip_grad"),
    *("plan", "deterministic", "shard_optimizer", "model_ema", "batch_norm"),
)


@dataclass(frozen=True)
class _Job:
    """What all probes know."""

    model: nn.Module
    asked: Question
    world: World
    sizes: Sequence[int]
    announce: Callable[[str], None]

    def example(self, samples: int) -> torch.Tensor:
        """Random inputs of a micro-batch, the same on all workers."""
        return random_batch(self.asked.sample_shape, samples, self.world.device)


def measure_inputs(
    model: nn.Module,
    asked: Question,
    world: World,
    *,
    cluster: ClusterSpec | None = None,
    open_trial: OpenTrial | None = None,
    announce: Callable[[str], None] = lambda text: None,
    progress: Progress | None = None,
) -> tuple[PlannerInputs, Way | None]:
    """What a search reads, measured or from the cache, and the way to compute a step that it is for; a collective."""
    if is_deferred(model):
        open_trial = None  # there is no model that can be run
    else:
        model.to(world.device)
    workers = world.size if cluster is None else min(cluster.workers, asked.options.samples_per_step)
    sizes = _sizes(model, asked, workers, None if cluster is None else _MOST_ELSEWHERE)
    if open_trial is not None:
        most = _fitting(model, asked, world, sizes[-1])
        sizes = sorted({min(size, most) for size in sizes})
    job = _Job(model, asked, world, sizes, announce)
    # What a run adds in shared memory is never sent, and no codec is faster.
    unsent = workers == 1 or (cluster is None and (world.transport == "shared memory" or other_types(model)))
    codecs = [] if unsent else _codecs(asked)
    way = None if open_trial is None else _measure_way(job, open_trial)
    profile = _measure_units(job, way, progress)
    spec = cluster or _measure_links(job, way)
    if codecs:
        announce("planning: timing ways to compress gradients")
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    rates = measure_rates(codecs, trained, workers, world)
    fixed = asked.fixed
    if fixed.codecs is not None:
        fixed = replace(fixed, codecs={name: text for name, text in fixed.codecs.items() if text in rates})
    if way is not None and way.options.get("cuda_graph") == "on":  # what a graph cannot hold is not searched for
        fixed = replace(fixed, stages=1, every_step=True, codecs=fixed.codecs or {}, shard_optimizer=False)
    named = replace(profile, info=profile.info.model_copy(update={"name": asked.name}))
    inputs = replace(
        asked.inputs(named, spec),
        rates=rates,
        # Each part of a step needs two samples, wherever it is computed.
        most_micro_batches=max(1, min(32, asked.options.samples_per_step // (2 * spec.workers))),
        fixed=fixed,
    )
    return inputs, way


# ---------------------------------------------------------------------------------------------------- the probes

_WAY: TypeAdapter[Way] = TypeAdapter(Way)
_PROFILE: TypeAdapter[ModelProfile] = TypeAdapter(ModelProfile)


def _measure_way(job: _Job, open_trial: OpenTrial) -> Way:
    """How a step is computed."""
    asked, options = job.asked, job.asked.options

    def worth(step_ms: float) -> None:
        """Raise where measuring takes longer than it can save."""
        if asked.insists or asked.steps is None:
            return
        # A step of plain data parallelism takes as long as the longer of the two, at least.
        step = max(1e-3 * step_ms, _exchange_seconds(job.model, job.world))
        needs = SECONDS + STEPS * 1e-3 * step_ms
        if needs > WORTH * asked.steps * step:
            longest = f"more than half of {asked.steps:,} steps of {1e3 * step:,.0f} ms"
            raise HybridparError(f"measuring would take {needs:,.1f} s, {longest}")

    def choose() -> Way:
        job.announce("planning: timing ways to compute a step (--plan none skips planning)")
        example = job.example(job.sizes[-1])
        return choose_way(job.model, options, asked.decided, job.world, example, open_trial, asked.steps, worth)

    key = {**_key(job), "options": {name: str(getattr(options, name)) for name in _TIMED_OPTIONS}}
    key["decided"] = sorted(asked.decided.intersection(CHANGED))
    way = remembered(job.world, "way", key, _WAY, choose)
    longer = compiling_pays(1e-3 * way.plain_ms * (asked.steps or 0)) and can_compile(job.world.device)
    if longer and "compile" not in asked.decided and not any(worth.name == COMPILED for worth in way.worths):
        way = choose()
    return way


def _measure_units(job: _Job, way: Way | None, progress: Progress | None) -> ModelProfile:
    """The times of the model's units, and of the rest of a step."""
    asked, options = job.asked, job.asked.options
    if way is not None:
        options = replace(options, **way.options)  # type: ignore[arg-type]
    memory_format = "channels_last" if options.uses_channels_last else "contiguous"
    kernels = "tuned" if options.uses_kernels else "stock"
    profiles: list[ModelProfile] = []

    def profile() -> None:
        copy = twin_of(job.model)
        examples = [set_way(copy, job.example(size), memory_format, kernels) for size in job.sizes]
        threads = way.threads if way is not None else None
        with autocast(options.amp, job.world.device), intra_op_threads(threads):
            profiles.append(profile_model(copy, examples, name=asked.name, passes=PASSES, progress=progress))

    def measure() -> ModelProfile:
        job.announce("planning: measuring the layers of the model")
        job.world.on_all_patiently(as_problem(profile))
        of_main: ModelProfile = job.world.gather(profiles[0] if job.world.is_main else None)[0]  # type: ignore[assignment]
        return of_main

    chosen = {"memory_format": memory_format, "kernels": kernels, "threads": None if way is None else way.threads}
    key = {**_key(job), "sizes": list(job.sizes), "passes": PASSES, "amp": options.amp, **chosen}
    units = remembered(job.world, "profile", key, _PROFILE, measure)
    return units if way is None else with_rest(units, way)


def with_rest(profile: ModelProfile, way: Way) -> ModelProfile:
    """The profile with what a step takes besides its units, and as fast as the way that was chosen makes all of it."""
    step_ms = way.eager_ms * way.step_ms[0] / max(way.step_ms)
    factor = max(way.step_ms) / way.eager_ms
    rest = factor * max(0.0, step_ms - profile.step_ms)
    # Units run one by one; together, as in a model that is compiled, they may be faster.
    return replace(profile.scaled(factor * min(1.0, step_ms / profile.step_ms)), update_ms=rest)


def _measure_links(job: _Job, way: Way | None) -> ClusterSpec:
    """The hosts of the job with their speeds, and the links between them."""
    world = job.world
    what = f"links of {world.size} workers" if world.size > 1 else "machine"
    job.announce(f"planning: measuring the {what}")
    cluster = measure_cluster(world)
    # A loop that divides batches itself has decided on replicas.
    may_be_unequal = job.asked.options.may_be_unequal and job.asked.fixed.replicas is None
    if way is None or not may_be_unequal:
        return cluster
    hosts: list[str] = world.gather(host_identity())  # type: ignore[assignment]
    speeds = speeds_of(hosts, way.step_ms)
    return cluster if len(set(speeds)) == 1 else cluster.at_speeds(speeds)


# -------------------------------------------------------------------------------------------- what they share


def speeds_of(hosts: Sequence[str], step_ms: Sequence[float]) -> list[float]:
    """How fast workers are over the first one; those of a host, and of hosts that are nearly as fast, are equal."""
    slowest: dict[str, float] = {}
    for host, time in zip(hosts, step_ms, strict=True):
        slowest[host] = max(time, slowest.get(host, 0.0))
    groups: list[list[str]] = []
    for host in sorted(slowest, key=slowest.__getitem__):
        if not groups or slowest[host] > APART * slowest[groups[-1][0]]:
            groups.append([])
        groups[-1].append(host)
    common = {host: max(slowest[other] for other in group) for group in groups for host in group}
    return [common[hosts[0]] / common[host] for host in hosts]


def _codecs(asked: Question) -> list[str]:
    """What gradients may be sent as."""
    if asked.fixed.codecs is not None:
        return sorted(set(asked.fixed.codecs.values()))
    fidelity = asked.options.fidelity
    outer = OUTER_CODECS if fidelity == "lossy" and not asked.fixed.every_step else ()
    return [*FIDELITIES[fidelity], *outer]


def _key(job: _Job) -> dict[str, object]:
    """What all times depend on."""
    asked, world = job.asked, job.world
    return {
        "model": model_fingerprint(job.model),
        "trained": [name for name, parameter in job.model.named_parameters() if parameter.requires_grad],
        "name": asked.name,
        "sample": list(asked.sample_shape),
        "batch": asked.options.samples_per_step,
        "largest": job.sizes[-1],
        **machine_key(world.device),
        "hosts": sorted(Counter(str(host) for host in world.gather(host_identity())).values()),
        "cores": len(available_cores()),
    }


def _exchange_seconds(model: nn.Module, world: World) -> float:
    """About how long all gradients take between the workers as they are, by a small part of them; a collective."""
    size = sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
    if world.size == 1 or not size:
        return 0.0
    message = torch.zeros(min(size, _PROBE_BYTES) // 4, device=world.device)
    with world.named_errors("timing the link"):
        (seconds,) = laps_of(world.lane_groups[0].all_reduce, message, 1)
    return most_of_all(seconds, world) * size / message.nbytes


def _sizes(model: nn.Module, asked: Question, workers: int, most: int | None) -> list[int]:
    """Sizes of micro-batches to profile: all that can be where they are few, else some that lines are drawn through.

    A small pass takes longer than the line through two larger ones says, or less.
    """
    fixed, batch = asked.fixed, asked.options.samples_per_step
    largest = max(2, -(-batch // workers))
    if fixed.micro_batches is not None:
        counts = (
            [fixed.replicas] if fixed.replicas else [count for count in range(1, workers + 1) if workers % count == 0]
        )
        sizes = {max(2, -(-batch // (count * fixed.micro_batches))) for count in counts}
        return sorted({min(sizes), max(sizes)})
    if most is None and any(isinstance(module, BATCH_NORMS) for module in model.modules()):
        return [largest]  # they normalise over a micro-batch, so its size stays
    largest = largest if most is None else min(largest, most)
    return sorted({max(2, largest // 16), max(2, largest // 4), largest})


def _fitting(model: nn.Module, asked: Question, world: World, samples: int) -> int:
    """So many samples of a micro-batch, or half as often as it takes until a step of them fits into memory."""
    device, weights = world.device, sum(parameter.nbytes for parameter in model.parameters())
    held = held_bytes(device)
    total = torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else usable_memory() // world.size
    bound = _AT_MOST * (4 * samples * math.prod(asked.sample_shape) + weights // 100)
    if all(world.gather(bound < total - held)):
        return samples
    most_held: int = max(world.gather(held))  # type: ignore[type-var, assignment]
    profile = world.on_all(as_problem(lambda: sizes_of(model, asked.options, asked.sample_shape, 2, world.device)))
    need = memory_of(asked.inputs(profile, describe_hosts(world)), held=most_held)
    while samples > 2 and not need(samples * world.size).fits:
        samples = max(2, samples // 2)
    return samples
