"""How many workers are worth having: by the equation of 1-bit SGD, and by a search for each number of workers.

The equation is that of 1-bit SGD (Seide et al., Interspeech 2014, equation 4): data parallelism stops paying where
computing, which K workers divide, takes as long as exchanging gradients, which they do not.

Also draws the step time over the number of workers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hybridpar.errors import HybridparError, UsageError
from hybridpar.partition.draw import save_picture
from hybridpar.planner.cuts import CutLibrary
from hybridpar.planner.inputs import PlannerInputs
from hybridpar.planner.search import Answer, Progress, find_plan
from hybridpar.planner.space import DATA_PARALLEL

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class KHat:
    """The equation's figures, in milliseconds.

    Per step and worker, computing takes (samples x per_sample + post) / K + update, and communicating exchange / ratio.

    Attributes:
        samples: Samples of a step; half of them where double buffering sends one half while it computes the other.
        per_sample_ms: Forward and backward pass of a sample.
        post_ms: Passes over the model that the workers divide (C x T_post).
        exchange_ms: Exchanging float32 gradients (T_float).
        ratio: By how much a codec makes them smaller (Z).
        update_ms: What every worker does with the result, undivided (T_upd).

    Raises:
        UsageError: A value is out of its range; the message says which.
    """

    samples: float
    per_sample_ms: float
    exchange_ms: float
    ratio: float = 1.0
    post_ms: float = 0.0
    update_ms: float = 0.0

    def __post_init__(self) -> None:
        rules = (
            ("samples", 0 < self.samples < math.inf),
            ("per_sample_ms", 0 < self.per_sample_ms < math.inf),
            ("exchange_ms", 0 <= self.exchange_ms < math.inf),
            ("ratio", self.ratio > 0),
            ("post_ms", 0 <= self.post_ms < math.inf),
            ("update_ms", 0 <= self.update_ms < math.inf),
        )
        for name, holds in rules:
            if not holds:
                raise UsageError(f"{name} is {getattr(self, name)}", "Times and sizes are finite and at least 0.")

    @property
    def divided_ms(self) -> float:
        """What K workers divide."""
        return self.samples * self.per_sample_ms + self.post_ms

    @property
    def saturates(self) -> bool:
        """Whether the equation holds: the exchange takes longer than what it could always hide behind."""
        return self.exchange_ms / self.ratio > self.update_ms

    @property
    def unclamped(self) -> float:
        """The equation as it stands; infinite outside of its domain."""
        return self.divided_ms / (self.exchange_ms / self.ratio - self.update_ms) if self.saturates else math.inf

    @property
    def workers(self) -> float:
        """The number of workers at which computing takes as long as communicating, at least 1.

        Infinite where no number of workers saturates the link.
        """
        return max(1.0, self.unclamped)

    def speedup(self, workers: float) -> float:
        """Of K workers over one, where one exchanges nothing, and K do both at a time.

        Args:
            workers: K.
        """
        if workers == 1:
            return 1.0
        alone = self.divided_ms + self.update_ms
        return alone / max(self.divided_ms / workers + self.update_ms, self.exchange_ms / self.ratio)

    def told(self) -> str:
        """The number in words, with its domain."""
        if not self.saturates:
            return (
                f"unbounded by communication: exchanging takes {self.exchange_ms / self.ratio:,.1f} ms, and every "
                f"worker spends {self.update_ms:,.1f} ms on its update anyway"
            )
        if self.unclamped < 1:
            return f"1 ({self.unclamped:.2f} by the equation: exchanging takes longer than all of the computing)"
        return f"{self.unclamped:,.1f}"


def k_hat(inputs: PlannerInputs) -> KHat:
    """The equation for a model on a cluster.

    The exchange is that of a ring, whose limit for many workers is twice the gradient over the slowest link; the
    optimizer's passes over the model count as undivided, as each worker makes all of them. Nothing is double buffered.

    Args:
        inputs: Of the search.
    """
    cluster, profile = inputs.cluster, inputs.profile
    workers = cluster.by_worker
    host = workers[0][1]
    each = max(1, inputs.batch // max(1, inputs.workers))
    forward, backward = profile.variants[0].unit_ms(each)
    levels = [level for level in (cluster.inside, cluster.between) if level is not None]
    exchange = max(
        (2e3 * profile.parameter_bytes / (level.bandwidth * level.efficiency.all_reduce) for level in levels),
        default=0.0,
    )
    passes = 3 + 2 * inputs.optimizer_copies
    update = 1e3 * passes * profile.parameter_bytes / host.memory_bandwidth if host.memory_bandwidth else 0.0
    if profile.update_ms is not None:
        update = profile.update_ms / host.throughput
    per_sample = (sum(forward) + sum(backward)) / (each * host.throughput)
    return KHat(inputs.batch, per_sample, exchange, update_ms=update)


@dataclass(frozen=True)
class Point:
    """The best plan for a number of workers, and plain data parallelism over them.

    Attributes:
        workers: Workers that there are.
        answer: What the search found; None where there is no plan.
        plain_ms: Step of plain data parallelism; None where it does not fit.
        why: Why there is no plan.
    """

    workers: int
    answer: Answer | None
    plain_ms: float | None
    why: str = ""

    @property
    def step_ms(self) -> float | None:
        """Step of the best plan, in time to the same result."""
        return None if self.answer is None else self.answer.fastest.score


def worker_counts(most: int) -> list[int]:
    """The points of a curve: powers of two and the last one, and of clusters up to 64 workers all numbers up to 8.

    Args:
        most: The largest number of workers.
    """
    few = range(1, min(most, 8) + 1) if most <= 64 else ()
    return sorted({*few, *(1 << power for power in range(most.bit_length())), most})


def scaling_curve(inputs: PlannerInputs, progress: Progress | None = None) -> list[Point]:
    """The best plan for every number of workers of a cluster; the batch stays the same (strong scaling).

    Layers that normalise over a micro-batch do so over as many samples in all plans, so that these give one result.

    Args:
        inputs: Of the search.
        progress: Told which point of how many is done.
    """
    # Whether fewer workers would do is what the curve is there to say.
    inputs = replace(inputs, fixed=replace(inputs.fixed, workers=None)).same_result()
    counts = worker_counts(inputs.workers)
    points, library = [], CutLibrary(inputs.profile)
    for place, count in enumerate(counts):
        try:
            answer = find_plan(inputs, workers=count, keep=1, library=library, advise=False)
            plain = answer.baselines.get(DATA_PARALLEL)
            points.append(Point(count, answer, None if plain is None else plain.score))
        except HybridparError as error:
            points.append(Point(count, None, None, error.what))
        if progress is not None:
            progress(place + 1, len(counts))
    return points


def draw_curve(points: Sequence[Point], equation: KHat, title: str, path: Path) -> None:
    """Draw the time of a step over the number of workers.

    Args:
        points: The curve.
        equation: 1-bit SGD's, which is drawn as a line at the number of workers that it gives.
        title: Above the picture.
        path: The file; its ending says which format.

    Raises:
        UsageError: The file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    best = [(point.workers, point.step_ms) for point in points if point.step_ms is not None]
    plain = [(point.workers, point.plain_ms) for point in points if point.plain_ms is not None]
    if best:
        count, first = best[0]
        axes.plot([at for at, _ in best], [first * count / at for at, _ in best], color="0.7", ls=":", label="linear")
        axes.plot(*zip(*best, strict=True), marker="o", label="best plan")
    if plain:
        axes.plot(*zip(*plain, strict=True), marker="x", ls="--", label="plain data parallelism")
    most = max(point.workers for point in points)
    if math.isfinite(equation.workers) and equation.workers <= most:
        label = f"1-bit SGD's equation: {equation.workers:,.1f}"
        axes.axvline(equation.workers, color="tab:green", lw=1, ls="-.", label=label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks([point.workers for point in points], [f"{point.workers:,}" for point in points])
    axes.xaxis.minorticks_off()
    _label_times(axes)
    axes.set_xlabel("workers")
    axes.set_ylabel("step, in time to the same result (ms)")
    axes.set_title(title)
    axes.legend()
    save_picture(figure, path)


def _label_times(axes: Axes) -> None:
    """Ticks of a logarithmic axis that can be read: 1, 2 and 5 of every decade, or in a short range steps alike."""
    from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

    low, high = axes.get_ylim()
    if high >= 8 * low:
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    else:
        found = MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]).tick_values(low, high)
        axes.set_yticks([tick for tick in found if low <= tick <= high])
    axes.yaxis.set_major_formatter("{x:,.5g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
