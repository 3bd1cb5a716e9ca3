"""How many workers are worth having, by a search for each number of workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hybridpar.errors import HybridparError
from hybridpar.planner.cuts import CutLibrary
from hybridpar.planner.explain import describe
from hybridpar.planner.inputs import PlannerInputs
from hybridpar.planner.search import DATA_PARALLEL, Answer, Progress, find_plan


@dataclass(frozen=True)
class Point:
    """The best plan for a number of workers.

    Attributes:
        workers: Workers that there are.
        answer: What the search found; None where there is no plan.
        why: Why there is no plan.
    """

    workers: int
    answer: Answer | None
    why: str = ""

    @property
    def step_ms(self) -> float | None:
        """Step of the best plan, in time to the same result."""
        return None if self.answer is None else self.answer.fastest.score

    @property
    def plain_ms(self) -> float | None:
        """Step of plain data parallelism over the workers; None where it does not fit."""
        plain = None if self.answer is None else self.answer.baselines.get(DATA_PARALLEL)
        return None if plain is None else plain.score


def worker_counts(most: int) -> list[int]:
    """The points of a curve: powers of two and the last one, and of clusters up to 64 workers all numbers up to 8."""
    few = range(1, min(most, 8) + 1) if most <= 64 else ()
    return sorted({*few, *(1 << power for power in range(most.bit_length())), most})


def scaling_curve(inputs: PlannerInputs, progress: Progress | None = None) -> list[Point]:
    """The best plan for every number of workers of a cluster; the batch stays the same (strong scaling).

    Layers that normalise over a micro-batch do so over as many samples in all plans, so that these give one result.
    """
    # Whether fewer workers would do is what the curve is there to say.
    inputs = replace(inputs, fixed=replace(inputs.fixed, workers=None)).same_result()
    counts = worker_counts(inputs.workers)
    points, library = [], CutLibrary(inputs.profile)
    for done, count in enumerate(counts, 1):
        try:
            points.append(Point(count, find_plan(inputs, workers=count, library=library, advise=False)))
        except HybridparError as error:
            points.append(Point(count, None, error.what))
        if progress is not None:
            progress(done, len(counts))
    return points


def curve_lines(points: Sequence[Point]) -> list[str]:
    """The scaling curve as a table."""
    lines = [f"{'workers':>8} {'best ms':>10} {'plain ms':>10} {'speed-up':>9}  plan"]
    first, parts = None, 1
    for point in points:
        best = plain = gain = "-"
        text = point.why
        if point.answer is not None:
            score = point.answer.fastest.score
            first = first or score
            best, gain = f"{score:,.1f}", f"{first / score:,.2f}"
            plain = "-" if point.plain_ms is None else f"{point.plain_ms:,.1f}"
            text = describe(point.answer.fastest.candidate, point.answer)
            parts = point.answer.evaluator.space.inputs.fixed.parts or 1
        lines.append(f"{point.workers:>8} {best:>10} {plain:>10} {gain:>9}  {text}")
    if parts > 1:
        lines.append(
            f"BatchNorm: all of these normalise over 1/{parts} of the batch at a time, so that they give the same "
            f"result; replicas are numbers that divide {parts}"
        )
    return lines
