"""Measures what a search for a plan reads: `hybridpar plan` and `hybridpar train` call the same function.

Rank 0 profiles the model, and all workers together measure how much they slow each other down, the links between them,
the codecs, and some steps of data parallelism. Everything is kept in one cache, by what it depends on, so that
`hybridpar train` after `hybridpar plan`, or after another run of the same kind, measures nothing again.

Before a run, measuring must cost less than it can gain. A run of few steps is not planned at all. Of a longer one a
step is timed; the profile is made smaller where it would take more than `MOST_SECONDS`, and is left out where measuring
would take more than half of what the run computes.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any, TypeVar

import torch
from pydantic import TypeAdapter, ValidationError
from torch import nn

from hybridpar.comm.world import PATIENCE, World
from hybridpar.compress import parse_codec
from hybridpar.compress.kernels import prepare_aside
from hybridpar.config import TrainConfig
from hybridpar.config.optimizer import state_copies
from hybridpar.errors import HybridparError
from hybridpar.formats.cache import load_measurement, measurements_directory, store_measurement
from hybridpar.machine.cluster_file import ClusterSpec
from hybridpar.machine.process import available_cores, host_identity
from hybridpar.machine.steady import MOST_NOISE
from hybridpar.models import autocast, model_fingerprint
from hybridpar.models.deferred import is_deferred
from hybridpar.models.state import untouched
from hybridpar.partition.profile import Progress
from hybridpar.partition.profile_cache import machine_key
from hybridpar.partition.unit_runner import Clock, whole_step_ms
from hybridpar.planner.codecs import OUTER_CODECS, planned_codecs
from hybridpar.planner.fixed import Fixed
from hybridpar.planner.inputs import Fidelity, PlannerInputs
from hybridpar.planner.links import laps_of, measure_cluster, most_of_all
from hybridpar.planner.measure import TURNS, measure_rates, profile_model, set_way
from hybridpar.planner.profile import ModelProfile
from hybridpar.planner.rehearse import CODEC, Rehearsal, measure_rehearsal, rehearsed
from hybridpar.planner.step_costs import measure_crowd, measure_hand_over, measure_speeds
from hybridpar.tvm_kernels.swap import has_tuned_kernels

#: Steps of the shortest run that is planned.
LEAST_STEPS = 100

#: Part of the run that measuring may take.
WORTH = 0.5

#: Bytes of gradients by which the link is judged before anything is measured.
_PROBE_BYTES = 1 << 19

#: Seconds that measuring takes at most before a run, where that leaves anything to choose from.
MOST_SECONDS = 12.0

#: Passes of a profile, and steps that are timed with workers beside each other.
PASSES, CROWD_STEPS = 3, 3
#: What measuring takes: steps for each way to compute the model, for the rest of a step in each memory format, and for
#: workers beside each other and rehearsals; and seconds for the links between several workers.
_STEPS_EACH, _STEPS_REST, _STEPS_BESIDE, _LINK_SECONDS = 2 + 3 * PASSES, 12, 23, 2.0
#: Seconds that compiling a model is taken to need; it is known only afterwards.
_COMPILE_SECONDS = 60.0

#: Samples of the largest micro-batch that is measured for a cluster which is not the machine at hand.
_MOST_ELSEWHERE = 64

#: Name of the profiles in the cache.
KIND = "profile"

_T = TypeVar("_T")

_log = logging.getLogger(__name__)

_BATCH_NORMS = nn.modules.batchnorm._BatchNorm


@dataclass(frozen=True)
class Question:
    """What a plan is searched for.

    Attributes:
        name: What to call the model.
        sample_shape: Of one sample.
        batch: Samples of a step, over all workers.
        fidelity: `exact`, `close` or `lossy`.
        fixed: What is not searched for.
        amp: `none`, `bf16` or `fp16`.
        copies: Tensors per parameter that the optimizer keeps.
        averages: Of these moving averages.
        whole_model: Workers of a pipeline will hold the whole model.
        bucket_bytes: Size at which a bucket of gradients is full.
        sync_lanes: Buckets that a worker exchanges beside each other.
        compiled: Whether the model, or every stage of it, is trained through torch.compile.
        steps: Of the run that the plan is for; None to measure everything, however long it takes, also what is of use
            only with other options or on other machines.
        unequal: Replicas may differ in their parts of a batch, and in their numbers of workers.
    """

    name: str
    sample_shape: tuple[int, ...]
    batch: int
    fidelity: Fidelity = "exact"
    fixed: Fixed = field(default_factory=Fixed)
    amp: str = "none"
    copies: int = 1
    averages: int = 0
    whole_model: bool = False
    bucket_bytes: int = 8 << 20
    sync_lanes: int = 2
    compiled: bool = False
    steps: int | None = None
    unequal: bool = False

    @classmethod
    def of_run(
        cls, config: TrainConfig, fixed: Fixed, name: str, sample_shape: Sequence[int], steps: int | None
    ) -> Question:
        """The question of a training run with these options; see the attributes."""
        return cls(
            name,
            tuple(sample_shape),
            config.batch_size,
            config.fidelity,
            fixed,
            config.amp,
            state_copies(config),
            int(config.model_ema is not None),
            True,  # what is measured for a run is its model, which all workers have built
            config.bucket_bytes,
            config.sync_lanes,
            config.compile,
            steps,
            # A loop that divides batches itself has decided on replicas.
            config.may_be_unequal and fixed.replicas is None,
        )

    @property
    def codecs(self) -> list[str]:
        """What gradients may be sent as; with `steps` None also what a looser fidelity would allow."""
        if self.fixed.codecs is not None:
            return sorted(set(self.fixed.codecs.values()))
        fidelity = "lossy" if self.steps is None else self.fidelity
        outer = OUTER_CODECS[1:] if fidelity == "lossy" and not self.fixed.every_step else ()
        return [*planned_codecs(fidelity), *outer]


@dataclass(frozen=True)
class _Kept:
    """What was measured of a model.

    Attributes:
        profile: Its units.
        overhead_ms: As in `PlannerInputs`.
        complete: Whether all was measured that there is, whatever it took.
        steps: Of the run that it was measured for.
        passes: Of the profile.
    """

    profile: ModelProfile
    overhead_ms: float
    complete: bool
    steps: int
    passes: int = PASSES


_KEPT: TypeAdapter[_Kept] = TypeAdapter(_Kept)


@dataclass(frozen=True)
class _Scope:
    """How the model of a question is profiled: sizes of micro-batches, memory formats, tuned kernels, passes."""

    sizes: list[int]
    formats: list[str]
    kernels: bool
    passes: int
    compiled: bool = False

    @property
    def ways(self) -> set[tuple[str, str]]:
        """Memory format and kernels of every way to compute the model."""
        return set(product(self.formats, ("stock", "tuned") if self.kernels else ("stock",)))

    @property
    def cost(self) -> float:
        """What profiling takes, in steps at the largest size."""
        ways = len(self.ways)
        turns = 2 * TURNS * ways if ways > 1 or self.compiled else 0
        sizes = sum(self.sizes) / self.sizes[-1]
        return _STEPS_EACH * ways * sizes + turns + _STEPS_REST * len(self.formats) + _STEPS_BESIDE


def measure_inputs(
    model: nn.Module,
    asked: Question,
    world: World,
    *,
    cluster: ClusterSpec | None = None,
    measure: bool = True,
    passes: int = PASSES,
    cache: bool = True,
    announce: Callable[[str], None] = lambda text: None,
    progress: Progress | None = None,
) -> PlannerInputs | None:
    """Measure what a search reads, or find it in the cache; a collective."""
    if not is_deferred(model):
        model.to(world.device)
    workers = world.size if cluster is None else min(cluster.workers, asked.batch)
    scope = _scope(model, asked, world, cluster, workers, passes)
    key = _key(model, asked, world)
    kept = _kept(key, scope, asked.steps) if world.is_main and measure and cache else None
    if not world.gather(kept is not None)[0]:
        kept = _measure(model, asked, world, scope, cluster is None, measure, announce, progress)
        if kept is not None and measure and cache and kept.profile.noise <= MOST_NOISE:  # else a warning has said so
            store_measurement(KIND, key, _KEPT.dump_python(kept, mode="json", exclude_defaults=True))
    directory = measurements_directory() if cache else None
    trained = [one for one in model.parameters() if one.requires_grad]
    codecs = _codecs(asked, world, cluster)
    took: Sequence[Rehearsal] = ()
    if cluster is not None:
        announce("timing codecs")
        rates = measure_rates(codecs, trained, workers, world.device, cache=directory)
    else:
        announce(f"planning: measuring the links between {workers} workers" if workers > 1 else "measuring the machine")
        cluster = measure_cluster(world, fresh=not cache)
        whole = not is_deferred(model)  # else there is nothing to run on a worker: rank 0 measured unit by unit
        if asked.unequal and whole:
            cluster = world.on_all(_named(partial(_at_speeds, cluster, model, asked, scope, world, cache)))
        if codecs:
            announce("planning: timing ways to compress gradients")
        # By now what codecs need has been built.
        rates = measure_rates(_rated(codecs, world), trained, workers, world.device, world=world, cache=directory)
        if whole:
            if workers > 1:
                announce("planning: running some steps of plain data parallelism")
            rehearse = partial(
                measure_rehearsal,
                model,
                _example(asked, scope.sizes[-1], world),
                world,
                cluster,
                copies=asked.copies,
                bucket_bytes=asked.bucket_bytes,
                memory_format=scope.formats[0],
                compiled=asked.compiled,
                codec=_tries_codec(codecs, world),
                cache=directory,
                note=asked.amp,
            )
            with autocast(asked.amp, world.device):
                took = world.on_all(_named(rehearse))
    return None if kept is None else _inputs(asked, cluster, kept, rates, took)


def _example(asked: Question, samples: int, world: World) -> torch.Tensor:
    """Random inputs of a micro-batch, the same on all workers."""
    draw = torch.Generator().manual_seed(0)
    return torch.randn(samples, *asked.sample_shape, generator=draw).to(world.device)


def _at_speeds(
    cluster: ClusterSpec, model: nn.Module, asked: Question, scope: _Scope, world: World, cache: bool
) -> ClusterSpec:
    """A job's hosts with their speeds; a collective.

    Workers that share the cores of a host slow each other down, and how much is measured for one host only.
    """
    places: list[str] = world.gather(host_identity())  # type: ignore[assignment]
    beside = max(Counter(places).values())
    if len(set(places)) == 1 or (beside > 1 and world.device.type == "cpu"):
        return cluster
    key = {**_key(model, asked, world), "places": places}
    speeds: Any = world.from_main(lambda: load_measurement("speeds", key) if cache else None)
    if speeds is None:
        with autocast(asked.amp, world.device):
            speeds = measure_speeds(model, _example(asked, scope.sizes[-1], world), world)
        if world.is_main and cache:
            store_measurement("speeds", key, speeds)
    return cluster.at_speeds(speeds)


def _scope(
    model: nn.Module, asked: Question, world: World, cluster: ClusterSpec | None, workers: int, passes: int
) -> _Scope:
    off = asked.fixed.kernels == "stock"
    same = world.device.type == "cpu" and (cluster is None or cluster.hosts[0].kind == "cpu")
    formats = ["contiguous", "channels_last"] if len(asked.sample_shape) == 3 else ["contiguous"]
    if asked.fixed.memory_format is not None:
        formats = [asked.fixed.memory_format]
    if asked.compiled:  # to compile takes longer than to train for a while: not for ways that nobody asked for
        formats, off = formats[:1], off or asked.fixed.kernels is None
    most = None if cluster is None else _MOST_ELSEWHERE
    kernels = not off and same and has_tuned_kernels(model)
    return _Scope(_sizes(model, asked, workers, most), formats, kernels, passes, asked.compiled)


def _key(model: nn.Module, asked: Question, world: World) -> dict[str, object]:
    """What a profile depends on, but for how much of it was measured."""
    return {
        "model": model_fingerprint(model),
        "name": asked.name,
        "sample": list(asked.sample_shape),
        "batch": asked.batch,
        "divided": [asked.fixed.replicas, asked.fixed.micro_batches] if asked.fixed.micro_batches else None,
        "amp": asked.amp,
        "copies": asked.copies,
        **({"compiled": True} if asked.compiled else {}),
        **({"unit by unit": True} if is_deferred(model) else {}),
        **machine_key(world.device),
        "hosts": sorted(Counter(str(one) for one in world.gather(host_identity())).values()),
        "cores": len(available_cores()),
    }


def _measure(
    model: nn.Module,
    asked: Question,
    world: World,
    scope: _Scope,
    here: bool,
    measure: bool,
    announce: Callable[[str], None],
    progress: Progress | None,
) -> _Kept | None:
    """Profile the model; a collective."""
    full, examples = scope, [_example(asked, size, world) for size in scope.sizes]
    if asked.steps is not None:
        announce("planning: timing a step of the model (--plan none skips planning)")
        with autocast(asked.amp, world.device):
            own = world.on_all(_named(lambda: _step_ms(model, examples[-1], scope.formats[0]) / 1e3))
        slowest = max(map(float, world.gather(own)))  # type: ignore[arg-type]
        # A step of plain data parallelism takes as long as the longer of the two, at least.
        step = max(slowest, _exchange_seconds(model, world))
        worth = WORTH * asked.steps * step
        beside = _LINK_SECONDS if world.size > 1 else 0.0
        beside += _COMPILE_SECONDS if asked.compiled else 0.0
        while (needs := beside + slowest * scope.cost) > min(MOST_SECONDS, worth) and len(scope.ways) > 1:
            scope = replace(scope, kernels=False, formats=scope.formats if scope.kernels else scope.formats[:1])
        if needs > worth:
            told = f"more than half of {asked.steps:,} steps of {1e3 * step:,.0f} ms"
            raise HybridparError(f"measuring would take {needs:,.1f} s, {told}")
        announce(f"planning: measuring the model, about {max(1.0, needs):.0f} s in all (--plan none skips planning)")
    if asked.compiled:
        announce("planning: compiling the model (--plan none skips planning)")
        with autocast(asked.amp, world.device):  # on all workers at once, so that none waits for another one's compiler
            world.on_all(_named(lambda: _step_ms(model, examples[-1], scope.formats[0], compiled=True)))
    crowd: Mapping[int, float] = {}
    if here:
        if world.device.type == "cpu":
            prepare_aside(map(parse_codec, _rated(_codecs(asked, world, None), world)))
        if not is_deferred(model):
            with autocast(asked.amp, world.device):
                crowd = measure_crowd(model, examples[-1], world, steps=CROWD_STEPS)
    found: list[_Kept] = []

    def profile() -> None:
        with autocast(asked.amp, world.device):
            profiled = profile_model(
                model,
                examples,
                name=asked.name,
                measure=measure,
                passes=scope.passes,
                formats=scope.formats if measure else scope.formats[:1],
                kernels=scope.kernels,
                lanes=(2,) if world.device.type == "cuda" or torch.get_num_threads() > 1 else (),
                optimizer_copies=asked.copies,
                crowd=crowd,
                compiled=asked.compiled,
                progress=progress,
                announce=announce if asked.steps is None else None,
            )
            overhead = measure_hand_over(world.device) if measure and world.device.type == "cpu" else 0.0
        found.append(_Kept(profiled, overhead, scope == full, asked.steps or 0, scope.passes))

    world.from_main(_named(profile), PATIENCE)
    return found[0] if found else None


def _exchange_seconds(model: nn.Module, world: World) -> float:
    """About how long all gradients take between the workers as they are, by a small part of them; a collective."""
    size = sum(one.nbytes for one in model.parameters() if one.requires_grad)
    if world.size == 1 or not size:
        return 0.0
    message = torch.zeros(min(size, _PROBE_BYTES) // 4, device=world.device)
    with world.named_errors("timing the link"):
        (seconds,) = laps_of(world.lane_groups[0].all_reduce, message, 1)
    return most_of_all(seconds, world) * size / message.nbytes


def _rated(codecs: Sequence[str], world: World) -> list[str]:
    """The codecs whose rates are measured: those that a plan may have, and the one that may be rehearsed."""
    return sorted({*codecs, CODEC}) if _tries_codec(codecs, world) else list(codecs)


def _named(act: Callable[[], _T]) -> Callable[[], _T]:
    """What `act` does, with errors of any kind as the one kind that workers tell each other."""

    def run() -> _T:
        try:
            return act()
        except HybridparError:
            raise
        except Exception as error:
            raise HybridparError(f"{type(error).__name__}: {error}") from error

    return run


def _kept(key: Mapping[str, Any], scope: _Scope, steps: int | None) -> _Kept | None:
    """What was measured before; None where it is less than is asked for now."""
    try:
        kept = _KEPT.validate_python(load_measurement(KIND, key))
    except (ValidationError, HybridparError):  # a damaged file is measured again
        return None
    variants = [one for one in kept.profile.variants if (one.memory_format, one.kernels) in scope.ways]
    small = any(not {one.samples for one in variant.sizes} >= set(scope.sizes) for variant in variants)
    if not variants or small or kept.passes < scope.passes or kept.profile.noise > MOST_NOISE:
        return None
    if not kept.complete and (steps is None or steps > 2 * kept.steps):  # it was made small for a much shorter run
        return None
    if kept.complete and len(variants) < len(scope.ways):
        return None
    return replace(kept, profile=replace(kept.profile, variants=tuple(variants)))


def _inputs(
    asked: Question,
    cluster: ClusterSpec,
    kept: _Kept,
    rates: Mapping[str, Mapping[int, tuple[float, float]]],
    took: Sequence[Rehearsal],
) -> PlannerInputs:
    """What was measured, as a search reads it, with what earlier runs corrected."""
    fixed = asked.fixed
    if fixed.codecs is not None:
        fixed = replace(fixed, codecs={one: text for one, text in fixed.codecs.items() if text in rates})
    inputs = PlannerInputs(
        replace(kept.profile, info=kept.profile.info.model_copy(update={"name": asked.name})),
        cluster,
        asked.batch,
        asked.fidelity,
        rates,
        optimizer_copies=asked.copies,
        averages=asked.averages,
        whole_model=asked.whole_model,
        bucket_bytes=asked.bucket_bytes,
        sync_lanes=asked.sync_lanes,
        overhead_ms=kept.overhead_ms,
        # Each part of a step needs two samples, wherever it is computed.
        most_micro_batches=max(1, min(32, asked.batch // (2 * cluster.workers))),
        fixed=fixed,
        run_steps=asked.steps,
    )
    return rehearsed(inputs, took)


def _sizes(model: nn.Module, asked: Question, workers: int, most: int | None) -> list[int]:
    """Sizes of micro-batches to profile: all that can be where they are few, else some that lines are drawn through.

    A small pass takes longer than the line through two larger ones says, or less.
    """
    fixed, whole = asked.fixed, max(2, -(-asked.batch // workers))
    if fixed.micro_batches is not None:
        counts = [fixed.replicas] if fixed.replicas else [one for one in range(1, workers + 1) if workers % one == 0]
        found = {max(2, -(-asked.batch // (count * fixed.micro_batches))) for count in counts}
        return sorted({min(found), max(found)})
    if asked.steps is not None and any(isinstance(module, _BATCH_NORMS) for module in model.modules()):
        return [whole]  # they normalise over a micro-batch, so its size stays
    whole = whole if most is None else min(whole, most)
    return sorted({max(2, whole // 16), max(2, whole // 4), whole})


def _codecs(asked: Question, world: World, cluster: ClusterSpec | None) -> Sequence[str]:
    """The codecs that plans may have. What a run adds in shared memory is never sent, and no codec is faster."""
    if cluster is not None:
        return asked.codecs if min(cluster.workers, asked.batch) > 1 else []
    adds = world.transport == "shared memory" and asked.steps is not None
    return [] if world.size == 1 or adds else asked.codecs


def _tries_codec(codecs: Sequence[str], world: World) -> bool:
    """Whether steps with a codec are rehearsed: a plan may have some, or those without may take too long for that."""
    return world.size > 1 and (bool(codecs) or world.transport != "shared memory")


def _step_ms(model: nn.Module, example: torch.Tensor, form: str, *, compiled: bool = False) -> float:
    """One training step of the whole model, after one that is not counted, in which it may be compiled."""
    clock = Clock(example.device)
    given = set_way(model, example, form)
    run = torch.compile(model) if compiled else model
    try:
        with untouched(model, training=True):
            whole_step_ms(run, (given,), clock)
            return whole_step_ms(run, (given,), clock)
    finally:
        model.to(memory_format=torch.contiguous_format)
