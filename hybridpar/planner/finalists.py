"""Chooses among the best plans of a search by the times that they took when they were run."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from hybridpar.planner.evaluate import Outcome
from hybridpar.planner.search import DATA_PARALLEL, Answer

#: Plans that are nearer than this are equal, however often they were run.
LEAST_DIFFERENCE = 0.01


@dataclass(frozen=True)
class Verified:
    """Finalists with what they took.

    Attributes:
        outcomes: The finalists.
        measured_ms: The median step of each.
        chosen: The one to use: of all that the noise cannot tell from the fastest, the simplest.
    """

    outcomes: tuple[Outcome, ...]
    measured_ms: tuple[float, ...]
    chosen: Outcome

    def step_ms_of(self, outcome: Outcome) -> float:
        """What a plan took, or where it was not run what it was predicted to take."""
        return self.measured_ms[self.outcomes.index(outcome)] if outcome in self.outcomes else outcome.step_ms

    def verdict(self, index: int) -> str:
        """What became of a finalist."""
        chosen_ms = self.measured_ms[self.outcomes.index(self.chosen)]
        if self.outcomes[index] != self.chosen:
            return f"{self.measured_ms[index] - chosen_ms:+,.1f} ms"
        return "chosen: the fastest" if chosen_ms <= min(self.measured_ms) else "chosen: the simplest within the noise"


def finalists(answer: Answer, count: int) -> list[Outcome]:
    """The plans that are worth running: the chosen one, plain data parallelism, and the best by prediction.

    They differ in stages, replicas, placement or codec: what differs in less is predicted well enough.
    """
    plain = answer.baselines.get(DATA_PARALLEL)
    must = [answer.chosen] if plain is None else [answer.chosen, plain]
    kinds: dict[tuple[object, ...], Outcome] = {}
    for outcome in (*must, *answer.ranked):
        layout, codec = outcome.candidate.layout, outcome.candidate.codec
        if layout.stages > 1 and layout.workers not in (1, answer.evaluator.space.workers):
            continue  # a pipeline on a part of the workers cannot run beside the others
        if codec.outer is None:  # a few steps do not show what an outer loop takes
            kinds.setdefault((layout.stages, layout.replicas, layout.kind, codec), outcome)
    best = sorted(kinds.values(), key=lambda outcome: outcome.score)[:count]
    chosen = [outcome for outcome in must if outcome in kinds.values()]
    return sorted(dict.fromkeys([*chosen, *best]), key=lambda outcome: outcome.score)


def verified(outcomes: Sequence[Outcome], times: Sequence[Sequence[float]]) -> Verified:
    """Choose by the milliseconds of the steps of each plan, which took turns.

    Two plans are told apart where the median of their differences, round by round, is further from nothing than twice
    its standard error: what slowed a whole round down cancels. What takes more steps to the same result counts them.
    """
    scores = [
        [outcome.candidate.codec.steps * time for time in row] for outcome, row in zip(outcomes, times, strict=True)
    ]
    best = min(scores, key=statistics.median)
    level, equal = statistics.median(best), []
    for outcome, row in zip(outcomes, scores, strict=True):
        differences = [score - least for score, least in zip(row, best, strict=True)]
        if statistics.median(differences) <= max(LEAST_DIFFERENCE * level, _doubt(differences)):
            equal.append(outcome)
    chosen = min(equal, key=lambda outcome: outcome.candidate.simplicity)
    return Verified(tuple(outcomes), tuple(map(statistics.median, times)), chosen)


def _doubt(differences: Sequence[float]) -> float:
    """Twice the standard error of the median, from the median deviation.

    1.4826 and 1.2533 are those of a normal distribution.
    """
    middle = statistics.median(differences)
    deviation = statistics.median(abs(difference - middle) for difference in differences)
    return 2 * 1.2533 * 1.4826 * deviation / math.sqrt(len(differences))
