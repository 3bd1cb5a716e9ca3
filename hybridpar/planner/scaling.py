"""How many workers are worth having, by a search for each number of workers."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hybridpar.errors import HybridparError
from hybridpar.planner.cuts import CutLibrary
from hybridpar.planner.inputs import PlannerInputs
from hybridpar.planner.search import Answer, Progress, find_plan
from hybridpar.planner.space import DATA_PARALLEL


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
    for place, count in enumerate(counts):
        try:
            answer = find_plan(inputs, workers=count, library=library, advise=False)
            plain = answer.baselines.get(DATA_PARALLEL)
            points.append(Point(count, answer, None if plain is None else plain.score))
        except HybridparError as error:
            points.append(Point(count, None, None, error.what))
        if progress is not None:
            progress(place + 1, len(counts))
    return points
