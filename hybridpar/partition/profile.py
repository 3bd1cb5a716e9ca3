"""Measures the units of a model on the device where it will run.

Every pass runs the whole graph at the true micro-batch, and plain steps of the unsplit model run between the passes.
The minimum over passes is the time of a unit; a machine that others use only ever adds to it. How far two halves of
the passes disagree is the profile's noise, and no partition is called better by less than that. One factor, the median
plain step over the sum of the units, calibrates the level: a training takes steps as they come, not the best of them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from hybridpar.errors import UsageError
from hybridpar.partition.graph import UnitGraph
from hybridpar.partition.state import untouched
from hybridpar.partition.unit_runner import Clock, UnitRunner, intra_op_threads, whole_backward_ms, whole_step_ms
from hybridpar.partition.units import ModelUnits

#: Called after every pass with the number of passes done and in all.
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class UnitTimes:
    """Times of all units of a model.

    Attributes:
        forward_ms: Forward time of every unit, calibrated.
        backward_ms: Backward time of every unit, calibrated.
        step_ms: Time of a plain step of the unsplit model; the sum of all units where nothing was measured.
        calibration: Factor from the units' raw times to these.
        noise: Relative difference between two halves of the passes, weighted by time; 0 where nothing was measured.
        spread: Relative difference between slowest and fastest pass, weighted by time.
        source: `measured` or `analytic`.
    """

    forward_ms: tuple[float, ...]
    backward_ms: tuple[float, ...]
    step_ms: float
    calibration: float = 1.0
    noise: float = 0.0
    spread: float = 0.0
    source: Literal["measured", "analytic"] = "measured"

    def apply(self, graph: UnitGraph) -> UnitGraph:
        """The graph with these times.

        Args:
            graph: Units in the same order.
        """
        return graph.with_times(list(zip(self.forward_ms, self.backward_ms, strict=True)))


def measure_units(
    units: ModelUnits,
    inputs: Sequence[torch.Tensor],
    *,
    passes: int = 5,
    threads: int | None = None,
    own_time: bool = False,
    progress: Progress | None = None,
) -> UnitTimes:
    """Measure every unit of a model inside whole training steps.

    Args:
        units: The model and its units, on the device they will run on.
        inputs: One micro-batch, at the dtype and memory format of the training.
        passes: Passes over the graph; the minimum counts. At least 2, so that noise can be told.
        threads: Intra-op threads on CPU; None keeps the present number.
        own_time: As for `Clock`; only with one thread.
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
            "Use --passes 5.",
        )
    device = next((tensor.device for tensor in (*units.model.parameters(), *inputs)), torch.device("cpu"))
    clock = Clock(device, own_time=own_time)
    runner = UnitRunner(units, inputs)
    rows: list[list[tuple[float, float]]] = []
    steps: list[float] = []
    with untouched(units.model, training=True), intra_op_threads(threads):
        for parameter in units.model.parameters():
            # Gradients exist in all micro-batches but the first, so accumulating into them is the normal case.
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        why = "Units are measured in whole forward and backward passes of the model as it is."
        _first_step(units.model, inputs, clock, why, "Mend the model, or plan without running it: --no-measure.")
        runner.step(clock)
        for done in range(passes):
            rows.append(runner.step(clock))
            # Twice: a whole step now and then pays for memory that the allocator had given back, a unit never does.
            steps += [whole_step_ms(units.model, inputs, clock) for _ in range(2)]
            if progress is not None:
                progress(done + 1, passes)
    return _summarise(torch.tensor(rows, dtype=torch.float64), statistics.median(steps))


def measure_backward_ms(model: torch.nn.Module, inputs: Sequence[torch.Tensor], passes: int = 3) -> float:
    """Time of the backward pass of a whole model, in milliseconds; the minimum over passes counts.

    Args:
        model: The model, on the device and with the threads that it will be trained with. It is left as it was.
        inputs: One micro-batch, at the dtype and memory format of the training.
        passes: Measured passes, after one that is not counted.

    Raises:
        UsageError: The model's training step fails.
    """
    clock = Clock(next((tensor.device for tensor in (*model.parameters(), *inputs)), torch.device("cpu")))
    with untouched(model, training=True):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        why = "What gradient sync can hide behind is measured by a backward pass of the model as it is."
        fix = "Mend the model or the example of its inputs, or name a codec instead of `auto`."
        _first_step(model, inputs, clock, why, fix)
        return min(whole_backward_ms(model, inputs, clock) for _ in range(passes))


def _first_step(model: torch.nn.Module, inputs: Sequence[torch.Tensor], clock: Clock, why: str, fix: str) -> None:
    """Warm up; whatever the model's own step raises, it raises here."""
    try:
        whole_step_ms(model, inputs, clock)
    except Exception as error:
        raise UsageError(
            f"a training step of {type(model).__name__} fails: {type(error).__name__}: {error}", why, fix
        ) from error


def _summarise(rows: torch.Tensor, step_ms: float) -> UnitTimes:
    """Reduce passes x units x (forward, backward) to times and noise."""
    best = rows.amin(dim=0)
    total = float(best.sum())
    halves = (rows[0::2].amin(dim=0) - rows[1::2].amin(dim=0)).abs()
    spread = rows.amax(dim=0) - best
    calibration = step_ms / total if total > 0 else 1.0
    total = total or 1.0  # a clock may be too coarse to see anything at all
    return UnitTimes(
        tuple((best[:, 0] * calibration).tolist()),
        tuple((best[:, 1] * calibration).tolist()),
        step_ms,
        calibration,
        float(halves.sum()) / total,
        float(spread.sum()) / total,
    )


def steadied(tries: Sequence[UnitTimes]) -> UnitTimes:
    """One measurement of several: of every unit the least time, as something else can only have added to the others.

    The noise is that of the best one, or how far the two least times of the units lie apart, where that is less: two
    measurements that agree are right, however wrong a third one is.

    Args:
        tries: Measurements of the same units.
    """
    if len(tries) < 2:
        return tries[0] if tries else UnitTimes((), (), 0.0, noise=math.inf)
    best = min(tries, key=lambda one: one.noise)
    ahead, back = (
        [sorted(times)[:2] for times in zip(*(getattr(one, name) for one in tries), strict=True)]
        for name in ("forward_ms", "backward_ms")
    )
    total = sum(least for least, _ in (*ahead, *back))
    apart = sum(second - least for least, second in (*ahead, *back)) / total if total > 0 else 0.0
    return replace(
        best,
        forward_ms=tuple(least for least, _ in ahead),
        backward_ms=tuple(least for least, _ in back),
        step_ms=min(one.step_ms for one in tries),
        noise=min(best.noise, apart),
    )
