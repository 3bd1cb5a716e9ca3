"""Why: what a search reads is measured where the run will be: on its workers, at its micro-batch, with its threads.

CPU workers of one host share caches and memory, so all of them profile the model at once, and rank 0's figures count.
What was measured is kept, by everything that it depends on; the next run of the same kind reads it in a moment.

Measuring must cost less than it can gain. A run of few steps is not planned at all; of a longer one a step is timed,
and the profile is made smaller, or left out, where it would take more than a fifth of the run or a quarter of a minute.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError
from torch import nn

from hybridpar.compress import read_policy
from hybridpar.config import TrainConfig
from hybridpar.errors import HybridparError
from hybridpar.models import model_fingerprint
from hybridpar.partition.state import untouched
from hybridpar.partition.unit_runner import Clock, whole_step_ms
from hybridpar.pipeline.collective import BackendSum
from hybridpar.pipeline.world import World
from hybridpar.planner.calibrate import calibrated
from hybridpar.planner.fixed import Fixed
from hybridpar.planner.inputs import PlannerInputs
from hybridpar.planner.links import WorkerLinks, measure_cluster
from hybridpar.planner.measure import has_tuned_kernels, measure_rates, profile_model
from hybridpar.planner.profile import ModelProfile
from hybridpar.planner.steps import planned_codecs
from hybridpar.planner.store import load, store
from hybridpar.process import describe_allocator
from hybridpar.replica_engine import autocast

#: Steps of the shortest run that is planned.
LEAST_STEPS = 100

#: Part of the run that measuring may take.
WORTH = 0.2

#: Seconds that measuring takes at most, where that leaves anything to choose from.
MOST_SECONDS = 15.0

#: Passes of a profile; what one costs in steps, and what else there is to measure, in seconds.
PASSES = 3
_STEPS_EACH = 4 + 3 * PASSES
_BESIDE_SECONDS = 1.0

#: What is kept.
KIND = "profile"

_BATCH_NORMS = nn.modules.batchnorm._BatchNorm


@dataclass(frozen=True)
class _Kept:
    """What was measured of a model.

    Attributes:
        profile: Its units.
        rates: As in `PlannerInputs`.
        complete: Whether all was measured that there is, whatever it took.
        steps: Of the run that it was measured for.
    """

    profile: ModelProfile
    rates: dict[str, dict[int, tuple[float, float]]]
    complete: bool
    steps: int


_KEPT: TypeAdapter[_Kept] = TypeAdapter(_Kept)


@dataclass(frozen=True)
class Measured:
    """What a search may read.

    Attributes:
        inputs: All of it; None where nothing was measured, and on workers that do not search.
        why: Why nothing was measured; empty where something was.
        links: Of the workers.
        cached: Whether the profile had been measured before.
    """

    inputs: PlannerInputs | None
    why: str = ""
    links: WorkerLinks | None = None
    cached: bool = False


def decided_options(config: TrainConfig, given: Collection[str] = ()) -> frozenset[str]:
    """The options that somebody set: those that were named, and those that are not at their default."""
    defaults = {field.name: field.default for field in fields(TrainConfig)}
    differing = {name for name, default in defaults.items() if getattr(config, name) != default}
    return frozenset(given) & defaults.keys() | differing


def fixed_by(config: TrainConfig, decided: Collection[str], workers: int, names: Sequence[str]) -> Fixed:
    """What options leave to the search, and what not.

    Args:
        config: The options.
        decided: Those that somebody set.
        workers: Workers of the job, all of which take part.
        names: Parameters of the model.
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

    Raises:
        SyncError: A worker died or did not answer in time.
    """
    model.to(world.device)
    links = measure_cluster(world)
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
        "workers": [[one.machine, one.name, one.threads] for one in links.places],
        "allocator": describe_allocator(),
    }
    kept = _kept(key, steps) if world.is_main else None
    cached = bool(world.gather(kept is not None)[0])
    if not cached:
        why, kept = _measure(model, config, world, sample_shape, steps, key)
        if why:
            return Measured(None, why, links)
    if kept is None:
        return Measured(None, "", links, cached)
    return Measured(_inputs(config, links, fixed, kept, name), "", links, cached)


def _measure(
    model: nn.Module, config: TrainConfig, world: World, sample_shape: Sequence[int], steps: int, key: Mapping[str, Any]
) -> tuple[str, _Kept | None]:
    """Measure the model on all workers at once, and keep it; a collective.

    Returns:
        Why that was not done, or nothing; and on rank 0 what was measured.
    """
    draw = torch.Generator().manual_seed(0)
    examples = [torch.randn(size, *sample_shape, generator=draw).to(world.device) for size in key["sizes"]]
    formats, kernels = list(key["formats"]), bool(key["kernels"])
    with _told_to_all(world) as first, autocast(config, world.device):
        first.value = _step_ms(model, examples[-1]) / 1e3
    if first.problem:
        return first.problem, None
    slowest, worth = first.value, WORTH * steps * first.value
    complete = True
    while _seconds(slowest, key["sizes"], formats, kernels) > min(MOST_SECONDS, worth) and (
        kernels or len(formats) > 1
    ):
        complete, kernels, formats = False, False, formats if kernels else formats[:1]
    if (needs := _seconds(slowest, key["sizes"], formats, kernels)) > worth:
        return (
            f"measuring would take {needs:,.1f} s, more than a fifth of {steps:,} steps of {1e3 * slowest:,.0f} ms",
            None,
        )
    profile: ModelProfile | None = None
    rates: dict[str, dict[int, tuple[float, float]]] = {}
    with _told_to_all(world) as second, autocast(config, world.device):
        if world.is_main or world.device.type == "cpu":  # neighbours on a CPU slow each other down
            profile = profile_model(
                model, examples, passes=PASSES, formats=formats, kernels=kernels, optimizer_copies=_copies(config)
            )
            rates = measure_rates(key["codecs"], profile.parameters, world.size, world.device)
    if second.problem:
        return second.problem, None
    if profile is None or not world.is_main:
        return "", None
    kept = _Kept(profile, rates, complete, steps)
    store(KIND, key, _KEPT.dump_python(kept, mode="json", exclude_defaults=True))
    return "", kept


class _told_to_all:
    """Context that makes a problem of one worker everybody's, and a figure the largest of any; a collective at its end.

    Nothing that is measured for a plan may end the run that it is for, so every error counts.
    """

    def __init__(self, world: World) -> None:
        self._world, self.value, self.problem = world, 0.0, ""

    def __enter__(self) -> _told_to_all:
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
    except ValidationError:
        return None
    return kept if kept.complete or steps <= 2 * kept.steps else None


def _inputs(config: TrainConfig, links: WorkerLinks, fixed: Fixed, kept: _Kept, name: str) -> PlannerInputs:
    """What was measured, as a search reads it, with what earlier runs corrected."""
    cluster, profile = links.spec, kept.profile
    if fixed.codecs is not None:
        fixed = replace(fixed, codecs={one: text for one, text in fixed.codecs.items() if text in kept.rates})
    inputs = PlannerInputs(
        replace(profile, info=profile.info.model_copy(update={"name": name})),
        cluster,
        config.batch_size,
        config.fidelity,
        kept.rates,
        optimizer_copies=_copies(config),
        bucket_bytes=config.bucket_bytes,
        sync_lanes=config.sync_lanes,
        # Each part of a step needs two samples, wherever it is computed.
        most_micro_batches=max(1, min(32, config.batch_size // (2 * cluster.workers))),
        fixed=fixed,
    )
    return calibrated(inputs)


def _sizes(model: nn.Module, batch: int, workers: int, fixed: Fixed) -> list[int]:
    """Sizes of micro-batches to profile: all that can be where they are few, else two that lines are drawn through."""
    whole = max(2, -(-batch // workers))
    if fixed.micro_batches is not None:
        replicas = (
            [fixed.replicas] if fixed.replicas else [count for count in range(1, workers + 1) if workers % count == 0]
        )
        found = {max(2, -(-batch // (count * fixed.micro_batches))) for count in replicas}
        return sorted({min(found), max(found)})
    if any(isinstance(module, _BATCH_NORMS) for module in model.modules()):
        return [whole]  # they normalise over a micro-batch, so its size stays
    return sorted({max(2, whole // 4), whole})


def _formats(fixed: Fixed, sample_shape: Sequence[int]) -> list[str]:
    if fixed.memory_format is not None:
        return [fixed.memory_format]
    return ["contiguous", "channels_last"] if len(sample_shape) == 3 else ["contiguous"]


def _codecs(config: TrainConfig, world: World, fixed: Fixed) -> list[str]:
    """What gradients may travel as; workers that share memory only add."""
    if world.size == 1 or not isinstance(world.lane_sums[0], BackendSum):
        return []
    if fixed.codecs is not None:
        return sorted(set(fixed.codecs.values()))
    return list(planned_codecs(config.fidelity))


def _seconds(step: float, sizes: Sequence[int], formats: Sequence[str], kernels: bool) -> float:
    """What profiling takes, from the seconds of a step at the largest size."""
    share = sum(sizes) / sizes[-1]
    return _BESIDE_SECONDS + _STEPS_EACH * step * share * len(formats) * (2 if kernels else 1)


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


def _copies(config: TrainConfig) -> int:
    """Tensors that the optimizer keeps per parameter."""
    return 1 if config.optimizer == "sgd" else 2
