"""Measures the units of a model on the device where it will run.

Every pass runs the whole graph at the true micro-batch, and plain steps of the unsplit model run between the passes.
The minimum over passes is the time of a unit; a machine that others use only ever adds to it. How far two halves of
the passes disagree is the profile's noise, and no partition is called better by less than that. One factor, the median
plain step over the sum of the units, calibrates the level: a training takes steps as they come, not the best of them.

Each unit is a stage, which the splitter makes. All stages run forward, then all run backward with the true gradients.
Between stages the autograd graph is cut, so that the backward pass of each can be timed, but no tensor is copied: the
cut is an autograd function that hands over the same memory, which also lets operations work in place as they do in
the model.

Also estimates the times of units from a device's speed, without running the model.

The roofline model (Williams, Waterman and Patterson, 2009): a unit takes as long as its arithmetic at the device's
peak or its memory traffic at the device's bandwidth, whichever is longer, and never less than what it costs to start
it. Caches and how well a kernel fits are left out, so it is good enough to balance stages, not to predict times.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import torch
from pydantic import Field

from hybridpar.errors import UsageError
from hybridpar.models.state import untouched
from hybridpar.partition.graph import UnitGraph
from hybridpar.partition.nest import tensor_leaves
from hybridpar.partition.split import split_model
from hybridpar.partition.stage import Stage
from hybridpar.partition.units import ModelUnits

_Positive = Annotated[float, Field(ge=0, allow_inf_nan=False)]

#: Called after every pass with the number of passes done and in all.
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class UnitTimes:
    """Times of all units of a model.

    Attributes:
        forward_ms: Forward time of every unit, calibrated.
        backward_ms: Backward time of every unit, calibrated.
        step_ms: Time of a plain step of the unsplit model; the sum of all units where nothing was measured.
        noise: Relative difference between two halves of the passes, weighted by time; 0 where nothing was measured.
        source: `measured` or `analytic`.
    """

    forward_ms: tuple[_Positive, ...]
    backward_ms: tuple[_Positive, ...]
    step_ms: _Positive
    noise: _Positive = 0.0
    source: Literal["measured", "analytic"] = "measured"


def measure_units(
    units: ModelUnits,
    inputs: Sequence[torch.Tensor],
    *,
    passes: int = 5,
    threads: int | None = None,
    progress: Progress | None = None,
) -> UnitTimes:
    """Measure every unit of a model inside whole training steps.

    Args:
        units: The model and its units, on the device they will run on.
        inputs: One micro-batch on that device, at the dtype and memory format of the training.
        passes: Passes over the graph; the minimum counts. At least 2, so that noise can be told.
        threads: Intra-op threads on CPU; None keeps the present number.
        progress: Told after every pass.

    Returns:
        Times of all units, and how sure they are.

    Raises:
        UsageError: `passes` or `threads` is too small, or the model's training step fails.
    """
    if threads is not None and threads < 1:
        raise UsageError(f"{threads} threads", "Work needs at least one.", "Use --threads 1 or more.")
    if passes < 2:
        raise UsageError(
            f"{passes} pass(es) cannot tell the noise",
            "A profile compares two halves of its passes.",
            "Use passes=5.",
        )
    clock = Clock(inputs[0].device)
    given = dict(zip((node.name for node in units.train.placeholders), inputs, strict=True))
    say = progress or (lambda done, total: None)
    with untouched(units.model, training=True) as copied, intra_op_threads(threads):
        traced = replace(units.traced, constants=copied(dict(units.traced.constants)))
        each = replace(units, traced=traced, evaluate=None)  # a stage of each unit, for training
        stages = split_model(each, range(len(units.graph)), in_place=True)
        # Gradients are there in all micro-batches but the first, and adding to them is the usual case.
        for parameter in units.model.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        try:
            whole_step_ms(units.model, inputs, clock)
        except Exception as error:  # the model's code, which may raise anything
            raise UsageError(
                f"a training step of {type(units.model).__name__} fails: {type(error).__name__}: {error}",
                "Units are measured in whole forward and backward passes of the model as it is.",
                "Mend the model.",
            ) from error
        step_times(stages, given, clock)
        passed, steps = [], []
        for done in range(passes):
            passed.append(step_times(stages, given, clock))
            # Twice: a whole step now and then pays for memory that the allocator had given back, a unit never does.
            steps += [whole_step_ms(units.model, inputs, clock) for _ in range(2)]
            say(done + 1, passes)
    return _summarise(torch.tensor(passed, dtype=torch.float64), statistics.median(steps))


def _summarise(rows: torch.Tensor, step_ms: float) -> UnitTimes:
    """Reduce passes x units x (forward, backward) to times and noise."""
    best = rows.amin(dim=0)
    total = float(best.sum()) or 1.0  # a clock may be too coarse to see anything at all
    halves = (rows[0::2].amin(dim=0) - rows[1::2].amin(dim=0)).abs()
    forward, backward = (best * (step_ms / total)).unbind(dim=1)
    return UnitTimes(tuple(forward.tolist()), tuple(backward.tolist()), step_ms, float(halves.sum()) / total)


@dataclass(frozen=True)
class Roofline:
    """What a device can do at most.

    Attributes:
        flops_per_second: Peak arithmetic.
        bytes_per_second: Memory bandwidth.
        launch_ms: Least time of any operation.
    """

    flops_per_second: float
    bytes_per_second: float
    launch_ms: float


#: A generic server core with 8-wide fused multiply-add units at 2.5 GHz, at half its peak as convolutions reach it.
_CPU_CORE_FLOPS = 2.5e9 * 2 * 8 * 2 / 2
_CPU_BYTES = 10e9


def device_roofline(device: torch.device, threads: int | None = None) -> Roofline:
    """The roofline of a device: what a CUDA device says of itself, or a generic CPU with so many threads."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        clock = getattr(properties, "clock_rate", 1_500_000) * 1e3
        memory_clock = getattr(properties, "memory_clock_rate", 5_000_000) * 1e3
        bus_bytes = getattr(properties, "memory_bus_width", 384) / 8
        lanes = properties.multi_processor_count * 128
        return Roofline(lanes * 2 * clock, 2 * memory_clock * bus_bytes, 0.005)
    count = threads or torch.get_num_threads()
    return Roofline(_CPU_CORE_FLOPS * count, _CPU_BYTES, 0.005)


def estimate_units(graph: UnitGraph, roofline: Roofline) -> UnitTimes:
    """Times of all units by the roofline model.

    The forward pass reads inputs and parameters and writes outputs. The backward pass does twice the arithmetic
    (gradients of input and of weight; once where no input needs a gradient), reads what was saved and the incoming
    gradient, and writes the gradients of inputs and parameters.
    """
    incoming = [0] * len(graph)
    incoming_gradient = [0] * len(graph)
    for value in graph.values:
        for consumer in value.consumers:
            incoming[consumer] += value.bytes
            incoming_gradient[consumer] += value.gradient_bytes
    forward, backward = [], []
    for index, unit in enumerate(graph.units):
        moved = incoming[index] + unit.parameter_bytes + unit.output_bytes
        forward.append(_time(unit.flops, moved, roofline))
        arithmetic = unit.flops * ((1 if incoming_gradient[index] else 0) + (1 if unit.parameter_bytes else 0))
        moved = incoming[index] + incoming_gradient[index] + unit.output_bytes + 2 * unit.parameter_bytes
        backward.append(_time(arithmetic, moved, roofline))
    return UnitTimes(tuple(forward), tuple(backward), sum(forward) + sum(backward), source="analytic")


def _time(flops: int, moved: int, roofline: Roofline) -> float:
    return 1e3 * max(flops / roofline.flops_per_second, moved / roofline.bytes_per_second, roofline.launch_ms / 1e3)


class _Border(torch.autograd.Function):
    """Identity that starts a new autograd graph on the same memory, and adds up the gradients that arrive, by name."""

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, box: list[torch.Tensor], name: str, gradients: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        ctx.name, ctx.gradients = name, gradients
        return box.pop().data  # not detach(): that would be a view, and views made here may not be changed in place

    @staticmethod
    def backward(ctx: Any, *given: torch.Tensor) -> tuple[None, None, None, None]:
        before = ctx.gradients.get(ctx.name)
        ctx.gradients[ctx.name] = given[0] if before is None else before + given[0]
        return None, None, None, None


class Clock:
    """Takes times on the device where the work runs: the host clock on CPU, events in the stream on CUDA."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def mark(self) -> Any:
        """Now, in the order of the work that was issued."""
        if self.device.type != "cuda":
            return time.perf_counter() * 1e3
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    def elapsed(self, spans: Sequence[tuple[Any, Any]]) -> list[float]:
        """Milliseconds from the first mark of each span to its second, once all work is done."""
        if self.device.type != "cuda":
            return [end - start for start, end in spans]
        torch.cuda.synchronize(self.device)
        return [float(start.elapsed_time(end)) for start, end in spans]


@contextmanager
def intra_op_threads(count: int | None) -> Iterator[None]:
    """So many intra-op threads on a CPU inside of the block, and as many as before afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(before if count is None else count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def step_times(stages: Sequence[Stage], inputs: Mapping[str, torch.Tensor], clock: Clock) -> list[tuple[float, float]]:
    """Milliseconds forward and backward of stages in one step; the gradient of what the last returns is ones."""
    values, gradients = dict(inputs), dict[str, torch.Tensor]()
    last_use = {tensor.name: stage for stage in stages for tensor in stage.inputs}

    def enter(name: str, stage: Stage) -> torch.Tensor:
        value = values.pop(name) if last_use[name] is stage else values[name]
        if not value.requires_grad:
            return value
        received: torch.Tensor = _Border.apply(torch.zeros((), requires_grad=True), [value], name, gradients)
        return received

    sent: list[dict[str, torch.Tensor]] = []
    forward, backward = [], []
    for stage in stages:
        given = [enter(tensor.name, stage) for tensor in stage.inputs]
        start = clock.mark()
        output = stage.forward(*given)
        forward.append((start, clock.mark()))
        del given
        leaves = [leaf for _, leaf in tensor_leaves(output)]
        names = [tensor.name for tensor in stage.outputs] or [f"output {index}" for index in range(len(leaves))]
        sent.append(dict(zip(names, leaves, strict=True)))
        values |= sent[-1]
    gradients |= {name: torch.ones_like(leaf) for name, leaf in sent[-1].items() if leaf.requires_grad}
    values.clear()
    del output, leaves
    while sent:
        roots = [(leaf, gradients.pop(name)) for name, leaf in sent.pop().items() if name in gradients]
        start = clock.mark()
        if roots:
            torch.autograd.backward([leaf for leaf, _ in roots], [gradient for _, gradient in roots])
        backward.append((start, clock.mark()))
        del roots
    return list(zip(clock.elapsed(forward), clock.elapsed(backward[::-1]), strict=True))


def whole_step_ms(model: Callable[..., Any], inputs: Sequence[torch.Tensor], clock: Clock) -> float:
    """Time of a plain forward and backward pass of the unsplit model, without optimizer, in milliseconds."""
    start = clock.mark()
    leaves = [leaf for _, leaf in tensor_leaves(model(*inputs)) if leaf.requires_grad]
    torch.autograd.backward(leaves, [torch.ones_like(leaf) for leaf in leaves])
    return clock.elapsed([(start, clock.mark())])[0]
