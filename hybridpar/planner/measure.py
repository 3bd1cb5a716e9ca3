"""Measures a model for the planner: times of its units per memory format and kernels, and rates of codecs."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from torch import nn

from hybridpar.comm.world import World
from hybridpar.compress import parse_codec
from hybridpar.errors import HybridparError
from hybridpar.machine.process import host_identity
from hybridpar.machine.steady import least_apart
from hybridpar.models import model_fingerprint, parameter_count
from hybridpar.models.deferred import is_deferred
from hybridpar.models.state import untouched
from hybridpar.partition.graph_facts import state_of
from hybridpar.partition.profile import Progress, UnitTimes, device_roofline, estimate_units, measure_lanes
from hybridpar.partition.profile_cache import device_name, machine_key, measured_profile
from hybridpar.partition.trace import TracedModel, trace_model
from hybridpar.partition.unit_runner import Clock, whole_step_ms
from hybridpar.partition.units import ModelUnits, find_units
from hybridpar.plan import ModelInfo
from hybridpar.planner.profile import ModelProfile, Parameter, SizedTimes, Variant
from hybridpar.planner.rates import measure_codec
from hybridpar.planner.step_costs import StepCosts, measure_step_costs
from hybridpar.planner.store import NOISE, remembered, steadied
from hybridpar.tvm_kernels.swap import has_tuned_kernels, optimize, restore

_WAYS = ("encode", "decode")

#: No profile is measured once more after so many seconds: a machine that is busy for longer is not worth waiting for.
MOST_SECONDS = 5.0

#: In which ways to compute a model are compared, a step of each that counts and one before it.
TURNS = 3


#: Layers that normalise over the micro-batch.
_BATCH_NORMS = (nn.modules.batchnorm._BatchNorm,)


def profile_model(
    model: nn.Module,
    examples: Sequence[torch.Tensor],
    *,
    name: str | None = None,
    measure: bool = True,
    passes: int = 5,
    formats: Sequence[str] = ("contiguous",),
    kernels: bool = False,
    lanes: Sequence[int] = (),
    optimizer_copies: int | None = None,
    crowd: Mapping[int, float] | None = None,
    compiled: bool = False,
    progress: Progress | None = None,
    announce: Callable[[str], None] | None = None,
) -> ModelProfile:
    """Find out what the planner needs to know of a model.

    Args:
        model: The model.
        examples: Inputs of micro-batches, each of a size to profile.
        name: What to call the model; default: its class.
        measure: Run units; else their times are estimated.
        passes: Over each unit.
        formats: Memory formats.
        kernels: Profile tuned kernels as well, where the model has layers that they are for.
        lanes: Numbers of lanes of a worker to time beside each other.
        optimizer_copies: Tensors per parameter that the optimizer keeps; None leaves the rest of a step out.
        crowd: How much slower workers of a host are beside so many others.
        compiled: The model is trained through torch.compile.
        progress: Called as units are measured.
        announce: Called with what comes next.

    Returns:
        Units, parameters and times of the model, without its weights.
    """
    say = announce or (lambda line: None)
    variants: list[Variant] = []
    units: ModelUnits | None = None
    traced: dict[str, TracedModel] = {}
    whole = measure and not is_deferred(model)
    tuned = ("stock", "tuned") if kernels and whole and has_tuned_kernels(model) else ("stock",)
    co_run: dict[int, float] = {}
    gain: float | None = None
    rest: dict[str, StepCosts] = {}
    ascending = sorted(examples, key=len)
    first, largest = ascending[0], ascending[-1]
    try:
        ways = list(itertools.product(formats, tuned))
        for form, kernel in ways:
            sizes, noises = [], []
            for example in ascending:
                given = set_way(model, example, form, kernel)
                say(f"profiling {form}, {kernel} kernels, micro-batches of {len(given)}")
                if kernel not in traced:
                    traced[kernel] = trace_model(model, (given,))
                found = find_units(traced[kernel], (given,))
                times = _times(found, given, measure, passes, progress)
                sizes.append(SizedTimes(len(given), times.forward_ms, times.backward_ms))
                noises.append(times.noise)
                units = units or found
            if whole and optimizer_copies is not None and form not in rest:
                say(f"measuring the rest of a step, {form}")
                rest[form] = StepCosts(**steadied("step", partial(_step_costs, model, given, optimizer_copies)))
            update_ms = rest[form].update_ms if form in rest else None
            variants.append(Variant(form, kernel, tuple(sizes), max(noises), update_ms))
        if whole and (compiled or len(ways) > 1):
            say("timing the compiled model" if compiled else "comparing memory formats and kernels in turns")
            steps = steadied("turns", partial(_steps_in_turns, model, largest, ways, compiled))
            factors = [steps[_way_name(one.memory_format, one.kernels)] / one.step_ms for one in variants]
            variants = [one.scaled(factor) for one, factor in zip(variants, factors, strict=True)]
            gain = factors[0] if compiled else None
        restore(model).to(memory_format=torch.contiguous_format)
        for count in lanes if whole else ():
            say(f"measuring {count} lanes beside each other")
            co_run[count] = max(1.0, steadied("lanes", partial(_co_run, model, largest, count))["co_run"])
    finally:
        restore(model).to(memory_format=torch.contiguous_format)
    assert units is not None
    return ModelProfile(
        info=ModelInfo(
            name=name or type(model).__name__,
            fingerprint=model_fingerprint(model),
            parameters=parameter_count(model),
            input=tuple(first.shape[1:]),
        ),
        graph=units.graph,
        samples=first.shape[0],
        parameters=parameters_of(units),
        variants=tuple(variants),
        batch_norm=any(isinstance(module, _BATCH_NORMS) for module in model.modules()),
        counts=any(graphs.unrepeatable or graphs.draws for graphs in traced.values()),
        device=device_name(first.device),
        threads=torch.get_num_threads(),
        source="measured" if measure else "analytic",
        co_run=co_run,
        crowd=dict(crowd or {}),
        update_ms=variants[0].update_ms,
        collect_ms=rest[formats[0]].collect_ms if rest else 0.0,
        accumulate_ms=rest[formats[0]].accumulate_ms if rest else 0.0,
        compiled=gain,
        versions={"torch": str(torch.__version__)},
    )


def set_way(model: nn.Module, example: torch.Tensor, form: str, kernel: str = "stock") -> torch.Tensor:
    """Let a model compute in one of its ways."""
    layout = torch.channels_last if form == "channels_last" else torch.contiguous_format
    restore(model).to(memory_format=layout)
    if kernel == "tuned":
        optimize(model)
    return example.contiguous(memory_format=layout if example.dim() == 4 else torch.contiguous_format)


def _steps_in_turns(
    model: nn.Module, example: torch.Tensor, ways: Sequence[tuple[str, str]], compiled: bool
) -> dict[str, float]:
    """Milliseconds of a step, maybe compiled, in each way to compute a model, and their noise.

    The ways take turns, so that what the machine does meanwhile disturbs all of them alike.

    Units are timed one way after the other, seconds apart, in which a shared machine changes by more than ways differ.
    What disturbs a step can only have added to it, so ways are compared by their least; how much longer a step usually
    takes is found from all ways together.
    """
    clock, times = Clock(example.device), {way: list[float]() for way in ways}
    run = torch.compile(model) if compiled else model

    def turn(way: tuple[str, str]) -> float:
        given = set_way(model, example, *way)
        with untouched(model, training=True):
            whole_step_ms(run, (given,), clock)  # weights have just moved
            return whole_step_ms(run, (given,), clock)

    for _ in range(TURNS):
        for way in ways:
            times[way].append(turn(way))
    usual = statistics.median(time / min(own) for own in times.values() for time in own)
    noise = max(least_apart(own) for own in times.values())
    return {_way_name(*way): usual * min(own) for way, own in times.items()} | {NOISE: noise}


def _way_name(form: str, kernel: str) -> str:
    return f"{form}, {kernel}"


def parameters_of(units: ModelUnits) -> tuple[Parameter, ...]:
    """The trained parameters of a model, each with the first unit that uses it."""
    home: dict[int, int] = {}
    for index, nodes in enumerate(units.nodes):
        for one in (one for node in nodes for one in state_of(units.traced, node)):
            home.setdefault(id(one), index)
    # A parameter that no unit uses has no gradient to exchange.
    return tuple(
        Parameter(name, tuple(one.shape), home[id(one)])
        for name, one in units.model.named_parameters()
        if one.requires_grad and id(one) in home
    )


def measure_rates(
    codecs: Sequence[str],
    parameters: Iterable[Parameter | torch.nn.Parameter],
    workers: int,
    device: torch.device,
    *,
    world: World | None = None,
    cache: Path | None = None,
) -> dict[str, dict[int, tuple[float, float]]]:
    """How fast codecs are on a device; those that fit no layer, or cannot run here, are left out."""
    shapes = sorted({tuple(one.shape) for one in parameters})
    tried_by = min(max(workers, 2), 8)
    beside = Counter(world.gather(host_identity())).most_common(1)[0][1] if world is not None else 1
    key = {
        "shapes": shapes,
        "beside": beside,
        "workers": tried_by,
        **machine_key(device),
    }
    rates: dict[str, dict[int, tuple[float, float]]] = {}
    for text in codecs:
        measure = partial(_rate, text, shapes, tried_by, device)
        of_all = measure if world is None else partial(_rate_of_all, world, measure)
        found = remembered("codec", {**key, "codec": text}, cache, of_all, world)
        counts = sorted({int(name.partition(" ")[0]) for name in found})
        if counts:
            rates[text] = {count: (found[f"{count} encode"], found[f"{count} decode"]) for count in counts}
    return rates


def _rate(text: str, shapes: Sequence[tuple[int, ...]], workers: int, device: torch.device) -> dict[str, float]:
    """Milliseconds by number of elements and direction; nothing where the codec fits no layer, or cannot run here."""
    try:
        rate = measure_codec(parse_codec(text), shapes, workers, device)
    except HybridparError:
        return {}
    tried = {} if rate is None else rate.tried
    times = {f"{count} {way}": took for count, both in tried.items() for way, took in zip(_WAYS, both, strict=True)}
    return times if rate is None else times | {NOISE: rate.noise}


def _rate_of_all(world: World, measure: Callable[[], dict[str, float]]) -> dict[str, float]:
    """The mean of what all measure at the same time; a collective."""
    world.barrier()
    told: list[dict[str, float]] = world.gather(measure())  # type: ignore[assignment]
    means = {name: statistics.mean(one[name] for one in told) for name in told[0] if all(name in one for one in told)}
    return means | {NOISE: max(one.get(NOISE, 0.0) for one in told)}


def _times(
    units: ModelUnits,
    example: torch.Tensor,
    measure: bool,
    passes: int,
    progress: Progress | None,
) -> UnitTimes:
    if not measure:
        return estimate_units(units.graph, device_roofline(example.device, None))
    return measured_profile(
        units, (example,), passes=passes, threads=None, cache=None, progress=progress, seconds=MOST_SECONDS
    )


def _co_run(model: nn.Module, example: torch.Tensor, lanes: int) -> dict[str, float]:
    slower, noise = measure_lanes(model, (example,), lanes)
    return {"co_run": slower, NOISE: noise}


def _step_costs(model: nn.Module, example: torch.Tensor, copies: int) -> dict[str, float]:
    return asdict(measure_step_costs(model, example, copies=copies))
