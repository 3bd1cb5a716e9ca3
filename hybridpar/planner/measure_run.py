"""Why: what a search reads is measured where the run will be: on its workers, at its micro-batch, with its threads.

Rank 0 profiles the model, and all workers together find out how much they slow each other down. What was measured is
kept, by everything that it depends on; the next run of the same kind reads it in a moment.

Measuring must cost less than it can gain. A run of few steps is not planned at all. Of a longer one a step is timed,
and the profile is made smaller where it would take more than a quarter of a minute, and left out where measuring would
take more than half of what the run computes.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError
from torch import nn

from hybridpar.comm.collective import BackendSum
from hybridpar.comm.world import World
from hybridpar.compress import parse_codec, read_policy
from hybridpar.compress.kernels import prepare_aside
from hybridpar.config import TrainConfig
from hybridpar.errors import HybridparError
from hybridpar.machine.cluster_file import ClusterSpec
from hybridpar.machine.process import available_cores, describe_allocator, host_identity
from hybridpar.machine.steady import MOST_NOISE
from hybridpar.models import autocast, model_fingerprint
from hybridpar.partition.profile_cache import device_name
from hybridpar.partition.state import untouched
from hybridpar.partition.unit_runner import Clock, whole_step_ms
from hybridpar.planner.calibrate import calibrated
from hybridpar.planner.fixed import Fixed
from hybridpar.planner.inputs import PlannerInputs
from hybridpar.planner.link_ways import PLAIN_WAYS, STRIPED_WAYS, WAYS
from hybridpar.planner.links import measure_cluster
from hybridpar.planner.measure import TURNS, has_tuned_kernels, measure_rates, profile_model
from hybridpar.planner.profile import ModelProfile
from hybridpar.planner.rehearse import CODEC, Rehearsal, measure_rehearsal, rehearsed
from hybridpar.planner.step_costs import measure_crowd, measure_hand_over
from hybridpar.planner.steps import planned_codecs
from hybridpar.planner.store import folder, load, store

#: Steps of the shortest run that is planned.
LEAST_STEPS = 100

#: Part of the run that measuring may take.
WORTH = 0.5

#: Seconds that measuring takes at most, where that leaves anything to choose from.
MOST_SECONDS = 12.0

#: Passes of a profile, and steps that are timed with workers beside each other.
PASSES, CROWD_STEPS = 3, 3
#: What measuring takes: steps for each way to compute the model, for the rest of a step in each memory format, and for
#: workers beside each other and rehearsals; and seconds for the cores of a worker, and for the links between several.
_STEPS_EACH, _STEPS_REST, _STEPS_BESIDE, _CORE_SECONDS, _LINK_SECONDS = 2 + 3 * PASSES, 12, 23, 1.0, 6.0

#: What is kept.
KIND = "profile"

_BATCH_NORMS = nn.modules.batchnorm._BatchNorm


@dataclass(frozen=True)
class _Kept:
    """What was measured of a model.

    Attributes:
        profile: Its units.
        rates: As in `PlannerInputs`.
        overhead_ms: As in `PlannerInputs`.
        complete: Whether all was measured that there is, whatever it took.
        steps: Of the run that it was measured for.
    """

    profile: ModelProfile
    rates: dict[str, dict[int, tuple[float, float]]]
    overhead_ms: float
    complete: bool
    steps: int


_KEPT: TypeAdapter[_Kept] = TypeAdapter(_Kept)


@dataclass(frozen=True)
class Measured:
    """What a search may read.

    Attributes:
        inputs: All of it; None where nothing was measured, and on workers that do not search.
        why: Why nothing was measured; empty where something was.
    """

    inputs: PlannerInputs | None
    why: str = ""


def decided_options(config: TrainConfig, given: Collection[str] = ()) -> frozenset[str]:
    """The options that somebody set: those that were named, and those that are not at their default."""
    defaults = {field.name: field.default for field in fields(TrainConfig)}
    differing = {name for name, default in defaults.items() if getattr(config, name) != default}
    left = set()
    if config.searches:  # `auto` of a single option leaves it to the search
        left = {name for name in ("compress", "memory_format") if getattr(config, name) == "auto"}
    return (frozenset(given) & defaults.keys() | differing) - left


def needs_replicas(config: TrainConfig, named: Collection[str]) -> str:
    """The named option that acts on what replicas exchange, so that it does nothing with one; empty where none does."""
    asked = {
        f"--compress {config.compress}": "compress" in named and _changes_gradients(config),
        f"--sync {config.sync}": "sync" in named and config.local_steps is not None,
        "--batch-norm sync": "batch_norm" in named and config.batch_norm == "sync",
    }
    return next((option for option, set_ in asked.items() if set_), "")


def needs_stages(config: TrainConfig, named: Collection[str]) -> str:
    """The named option that acts on stages, so that it does nothing for a whole model; empty where none does."""
    asked = {
        f"--schedule {config.schedule}": "schedule" in named and config.schedule is not None,
        f"--placement {config.placement}": "placement" in named and config.placement is not None,
        f"--recompute {' '.join(map(str, config.recompute))}": "recompute" in named and bool(config.recompute),
        f"--timeline {config.timeline}": "timeline" in named and config.timeline is not None,
    }
    return next((option for option, set_ in asked.items() if set_), "")


def _changes_gradients(config: TrainConfig) -> bool:
    return not config.chooses and not read_policy(config.compress).changes_nothing


def fixed_by(
    config: TrainConfig, decided: Collection[str], workers: int, names: Sequence[str], named: Collection[str] = ()
) -> Fixed:
    """What options leave to the search, and what not.

    Args:
        config: The options.
        decided: Those that somebody set.
        workers: Workers of the job, all of which take part.
        names: Parameters of the model.
        named: Those that must have an effect in the plan.
    """

    def wish(option: str) -> Any:
        return getattr(config, option) if option in decided else None

    memory_format, kernels, codecs = None, None, None
    if "memory_format" in decided and config.memory_format != "auto":
        memory_format = config.memory_format
    elif config.channels_last or config.uses_kernels:
        memory_format = "channels_last"
    if "kernels" in decided:
        kernels = "tuned" if config.uses_kernels else "stock"
    if "compress" in decided and not config.chooses:
        policy = read_policy(config.compress)
        codecs = {name: text for name in names if (text := policy.text_of(name)) != "none"}
    return Fixed(
        workers=workers,
        stages=wish("stages"),
        replicas=wish("replicas"),
        micro_batches=wish("micro_batches"),
        schedule=wish("schedule"),
        placement=wish("placement"),
        memory_format=memory_format,
        kernels=kernels,
        codecs=codecs,
        exchanged=bool(needs_replicas(config, named)),
        staged=bool(needs_stages(config, named)),
    )


def not_modelled(config: TrainConfig) -> str:
    """An option that the simulator knows nothing of, so that a prediction would be wrong; empty where there is none."""
    reasons = {
        "--compile": config.compile,
        "--recompute": bool(config.recompute),
        "--cuda-graph": config.cuda_graph,
        "--batch-norm sync": config.batch_norm == "sync",
        "--schedule zero_bubble": config.schedule == "zero_bubble",
        f"--recipe {config.recipe}": config.recipe != "none",
        f"--sync {config.sync}": config.sync != "allreduce",
        f"--double-buffer {config.double_buffer}": config.double_buffer not in (None, "off"),
        f"--select-batch {config.select_batch}": bool(config.select_batch),
        f"--kernels {config.kernels}": config.kernels.strip() not in ("off", "auto"),
    }
    return next((option for option, set_ in reasons.items() if set_), "")


def measure_inputs(
    model: nn.Module,
    config: TrainConfig,
    world: World,
    sample_shape: Sequence[int],
    steps: int,
    fixed: Fixed,
    name: str,
    announce: Callable[[str], None] = lambda text: None,
) -> Measured:
    """Measure what a search reads, or find it in the cache; a collective.

    Args:
        model: The whole model, as built; it is moved to this worker's device, and left as it was otherwise.
        config: Options.
        world: All workers.
        sample_shape: Of one sample.
        steps: Of the run.
        fixed: What is not searched for.
        name: What to call the model.
        announce: Told what is being measured, and how long it may take.

    Raises:
        SyncError: A worker died or did not answer in time.
    """
    model.to(world.device)
    sizes = _sizes(model, config.batch_size, world.size, fixed)
    formats = _formats(fixed, sample_shape)
    off = fixed.kernels == "stock" or os.environ.get("HYBRIDPAR_KERNELS") == "off"
    kernels = not off and world.device.type == "cpu" and has_tuned_kernels(model)
    wanted = _codecs(config, world, fixed)
    key: dict[str, object] = {
        "model": model_fingerprint(model),
        "name": name,
        "sample": list(sample_shape),
        "batch": config.batch_size,
        "sizes": sizes,
        "formats": formats,
        "kernels": kernels,
        "amp": config.amp,
        "optimizer": config.optimizer,
        "codecs": wanted,
        "devices": device_name(world.device),
        "hosts": sorted(Counter(str(one) for one in world.gather(host_identity())).values()),
        "cores": len(available_cores()),
        "threads": torch.get_num_threads(),
        "allocator": describe_allocator(),
        "torch": str(torch.__version__),
    }
    kept = _kept(key, steps) if world.is_main else None
    cached = bool(world.gather(kept is not None)[0])
    if not cached:
        why, kept = _measure(model, config, world, sample_shape, steps, key, announce)
        if why:
            return Measured(None, why)
    if world.size > 1:
        announce(f"planning: measuring the links between {world.size} workers")
    cluster = measure_cluster(world, ways=_ways(wanted, world))
    if not cached:
        if wanted:
            announce("planning: timing ways to compress gradients")
        kept = _with_rates(kept, model, world, key)  # by now what codecs need has been built
    if world.size > 1:
        announce("planning: running some steps of plain data parallelism")
    why, took = _rehearse(model, config, world, sample_shape, cluster, key)
    if why:
        return Measured(None, why)
    return Measured(None if kept is None else _inputs(config, cluster, fixed, kept, name, took))


def _rehearse(
    model: nn.Module,
    config: TrainConfig,
    world: World,
    sample_shape: Sequence[int],
    cluster: ClusterSpec,
    key: Mapping[str, Any],
) -> tuple[str, tuple[Rehearsal, ...]]:
    """What a step of data parallelism takes, measured or remembered; a collective.

    Returns:
        Why it could not be measured, or nothing; and the steps, where they say something.
    """
    if world.size == 1:
        return "", ()
    draw = torch.Generator().manual_seed(0)
    example = torch.randn(key["sizes"][-1], *sample_shape, generator=draw).to(world.device)
    with _CollectiveErrors(world) as first, autocast(config.amp, world.device):
        took = measure_rehearsal(
            model,
            example,
            world,
            cluster,
            copies=optimizer_copies(config),
            bucket_bytes=config.bucket_bytes,
            memory_format=key["formats"][0],
            cache=folder(),
            note=config.amp,
        )
    if first.problem:
        return first.problem, ()
    return "", took


def _measure(
    model: nn.Module,
    config: TrainConfig,
    world: World,
    sample_shape: Sequence[int],
    steps: int,
    key: Mapping[str, Any],
    announce: Callable[[str], None],
) -> tuple[str, _Kept | None]:
    """Measure the model, all but the rates of codecs; a collective.

    Returns:
        Why that was not done, or nothing; and on rank 0 what was measured.
    """
    draw = torch.Generator().manual_seed(0)
    examples = [torch.randn(size, *sample_shape, generator=draw).to(world.device) for size in key["sizes"]]
    formats, kernels = list(key["formats"]), bool(key["kernels"])
    announce("planning: timing a step of the model (--plan none skips planning)")
    with _CollectiveErrors(world) as first, autocast(config.amp, world.device):
        first.value = _step_ms(model, examples[-1]) / 1e3
    if first.problem:
        return first.problem, None
    slowest, worth = first.value, WORTH * steps * first.value
    beside = _CORE_SECONDS + (_LINK_SECONDS if world.size > 1 else 0.0)
    complete = True
    while (needs := beside + slowest * _steps(key["sizes"], formats, kernels)) > min(MOST_SECONDS, worth):
        if not kernels and len(formats) == 1:
            break
        complete, kernels, formats = False, False, formats if kernels else formats[:1]
    if needs > worth:
        why = f"measuring would take {needs:,.1f} s, more than half of {steps:,} steps of {1e3 * slowest:,.0f} ms"
        return why, None
    announce(f"planning: measuring the model, about {max(1.0, needs):.0f} s in all (--plan none skips planning)")
    if world.device.type == "cpu":
        prepare_aside(map(parse_codec, _rated(world, key)))
    with autocast(config.amp, world.device):
        crowd = measure_crowd(model, examples[-1], world, steps=CROWD_STEPS)  # a step has run on all workers before
    kept: _Kept | None = None
    with _CollectiveErrors(world) as second, autocast(config.amp, world.device):
        if world.is_main:
            profile = profile_model(
                model,
                examples,
                passes=PASSES,
                formats=formats,
                kernels=kernels,
                lanes=(2,) if world.device.type == "cuda" or torch.get_num_threads() > 1 else (),
                optimizer_copies=optimizer_copies(config),
                crowd=crowd,
            )
            overhead = measure_hand_over(world.device) if world.device.type == "cpu" else 0.0
            kept = _Kept(profile, {}, overhead, complete, steps)
    return second.problem, None if second.problem else kept


def _with_rates(kept: _Kept | None, model: nn.Module, world: World, key: Mapping[str, Any]) -> _Kept | None:
    """What was measured of the model, now with the codecs, and keep it; a collective."""
    trained = [one for one in model.parameters() if one.requires_grad]
    rates = measure_rates(_rated(world, key), trained, world.size, world.device, world=world)
    if kept is None:
        return None
    kept = replace(kept, rates=rates)
    if kept.profile.noise <= MOST_NOISE:  # else a warning has said so
        store(KIND, key, _KEPT.dump_python(kept, mode="json", exclude_defaults=True))
    return kept


def _rated(world: World, key: Mapping[str, Any]) -> list[str]:
    """The codecs whose rates are measured: those that a plan may have, and one that may be rehearsed."""
    return sorted({*key["codecs"], CODEC}) if _carries_codecs(world) else list(key["codecs"])


class _CollectiveErrors:
    """Context that makes a problem of one worker everybody's, and a figure the largest of any; a collective at its end.

    Nothing that is measured for a plan may end the run that it is for, so every error counts.
    """

    def __init__(self, world: World) -> None:
        self._world, self.value, self.problem = world, 0.0, ""

    def __enter__(self) -> _CollectiveErrors:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        if error is not None and not isinstance(error, Exception):
            return False
        mine = "" if error is None else f"{type(error).__name__}: {error}"
        if isinstance(error, HybridparError):
            mine = error.what
        answers = [one for one in self._world.gather((mine, self.value)) if isinstance(one, tuple)]
        self.problem = next((str(text) for text, _ in answers if text), "")
        self.value = max(float(value) for _, value in answers)
        return True


def _kept(key: Mapping[str, Any], steps: int) -> _Kept | None:
    """What was measured before; None where it was made small for a run much shorter than this one."""
    try:
        kept = _KEPT.validate_python(load(KIND, key))
    except (ValidationError, HybridparError):  # a damaged file is measured again
        return None
    if kept.profile.noise > MOST_NOISE:
        return None
    return kept if kept.complete or steps <= 2 * kept.steps else None


def optimizer_copies(config: TrainConfig) -> int:
    """Tensors per parameter that the optimizer keeps."""
    if config.optimizer == "adamw":
        return 2
    return 1 if config.momentum > 0 else 0


def _inputs(
    config: TrainConfig, cluster: ClusterSpec, fixed: Fixed, kept: _Kept, name: str, took: Sequence[Rehearsal]
) -> PlannerInputs:
    """What was measured, as a search reads it, with what earlier runs corrected."""
    if fixed.codecs is not None:
        fixed = replace(fixed, codecs={one: text for one, text in fixed.codecs.items() if text in kept.rates})
    inputs = PlannerInputs(
        replace(kept.profile, info=kept.profile.info.model_copy(update={"name": name})),
        cluster,
        config.batch_size,
        config.fidelity,
        kept.rates,
        optimizer_copies=optimizer_copies(config),
        bucket_bytes=config.bucket_bytes,
        sync_lanes=config.sync_lanes,
        overhead_ms=kept.overhead_ms,
        # Each part of a step needs two samples, wherever it is computed.
        most_micro_batches=max(1, min(32, config.batch_size // (2 * cluster.workers))),
        fixed=fixed,
    )
    return calibrated(rehearsed(inputs, took))


def _sizes(model: nn.Module, batch: int, workers: int, fixed: Fixed) -> list[int]:
    """Sizes of micro-batches to profile: all that can be where they are few, else some that lines are drawn through."""
    whole = max(2, -(-batch // workers))
    if fixed.micro_batches is not None:
        counts = [fixed.replicas] if fixed.replicas else [one for one in range(1, workers + 1) if workers % one == 0]
        found = {max(2, -(-batch // (count * fixed.micro_batches))) for count in counts}
        return sorted({min(found), max(found)})
    if any(isinstance(module, _BATCH_NORMS) for module in model.modules()):
        return [whole]  # they normalise over a micro-batch, so its size stays
    return sorted({max(2, whole // 16), max(2, whole // 4), whole})


def _formats(fixed: Fixed, sample_shape: Sequence[int]) -> list[str]:
    if fixed.memory_format is not None:
        return [fixed.memory_format]
    return ["contiguous", "channels_last"] if len(sample_shape) == 3 else ["contiguous"]


def _codecs(config: TrainConfig, world: World, fixed: Fixed) -> list[str]:
    """What gradients may travel as; workers that share memory only add."""
    if not _carries_codecs(world):
        return []
    if fixed.codecs is not None:
        return sorted(set(fixed.codecs.values()))
    return list(planned_codecs(config.fidelity))


def _ways(codecs: Sequence[str], world: World) -> tuple[str, ...]:
    """Which ways of using links a plan may take."""
    if codecs:
        return WAYS
    return STRIPED_WAYS if _carries_codecs(world) else PLAIN_WAYS


def _carries_codecs(world: World) -> bool:
    """Whether gradients can travel as a codec: process groups carry it, shared memory only adds."""
    return world.size > 1 and isinstance(world.lane_sums[0], BackendSum)


def _steps(sizes: Sequence[int], formats: Sequence[str], kernels: bool) -> float:
    """What profiling takes, in steps at the largest size."""
    ways = len(formats) * (2 if kernels else 1)
    turns = 2 * TURNS * ways if ways > 1 else 0
    return _STEPS_EACH * ways * sum(sizes) / sizes[-1] + turns + _STEPS_REST * len(formats) + _STEPS_BESIDE


def _step_ms(model: nn.Module, example: torch.Tensor) -> float:
    """One training step of the whole model, after one that is not counted."""
    clock = Clock(example.device)
    with untouched(model, training=True):
        try:
            whole_step_ms(model, (example,), clock)
            return whole_step_ms(model, (example,), clock)
        except HybridparError:
            raise
        except Exception as error:
            raise HybridparError(f"a training step of the model fails: {type(error).__name__}: {error}") from error
