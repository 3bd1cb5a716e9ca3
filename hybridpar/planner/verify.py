"""Chooses among the best plans by the times that they took when they were run."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hybridpar.planner.evaluate import Outcome
from hybridpar.planner.search import Answer
from hybridpar.planner.space import DATA_PARALLEL

#: Plans that are nearer than this are equal, however often they were run.
LEAST_DIFFERENCE = 0.01


@dataclass(frozen=True)
class Verified:
    """Finalists with what they took.

    Attributes:
        outcomes: The finalists, by prediction.
        times: Of each, milliseconds of its steps, of the slowest worker.
        chosen: The one to use: of all that the noise cannot tell from the fastest, the simplest.
        noise: Relative difference up to which two of them are equal.
    """

    outcomes: tuple[Outcome, ...]
    times: tuple[tuple[float, ...], ...]
    chosen: Outcome
    noise: float

    @property
    def measured_ms(self) -> list[float]:
        """The median step of each."""
        return [statistics.median(times) for times in self.times]


def finalists(answer: Answer, count: int) -> list[Outcome]:
    """The plans that are worth running: the chosen one, plain data parallelism, and the best by prediction.

    Of plans that differ only in their schedule or cut and are predicted equal, as ties may be hundreds, one is enough.

    Args:
        answer: Of the search.
        count: How many of the best; the other two come on top where they are not among them.
    """
    workers = answer.evaluator.space.workers
    found: dict[tuple[object, ...], Outcome] = {}
    plain = answer.baselines[DATA_PARALLEL]
    for one in (answer.chosen, *([] if plain is None else [plain]), *answer.ranked):
        shape = one.candidate.shape
        if shape.stages > 1 and shape.workers not in (1, workers):
            continue  # a pipeline on a part of the workers cannot run beside the others
        key = (round(one.score, 3), shape.stages, shape.replicas, one.candidate.codec, one.candidate.variant)
        found.setdefault(key, one)
    must = list(found.values())[: 1 if plain is None or plain == answer.chosen else 2]
    best = sorted(found.values(), key=lambda one: one.score)[:count]
    return sorted({one.candidate: one for one in (*must, *best)}.values(), key=lambda one: one.score)


def verified(answer: Answer, outcomes: Sequence[Outcome], times: Sequence[Sequence[float]]) -> Verified:
    """Choose by what was measured.

    Two plans are told apart where the median of their differences, round by round, is further from nothing than twice
    its standard error: what slowed a whole round down cancels. What takes more steps to the same result counts them.

    Args:
        answer: Of the search.
        outcomes: The finalists.
        times: Of each, milliseconds of its steps, in the same rounds.

    Returns:
        The finalists with their times, and the plan to use.
    """
    steps = [answer.evaluator.space.codec_choices[one.candidate.codec].steps for one in outcomes]
    scores = [[factor * time for time in own] for factor, own in zip(steps, times, strict=True)]
    best = min(range(len(outcomes)), key=lambda place: statistics.median(scores[place]))
    level = statistics.median(scores[best])
    doubts = [_doubt(own, scores[best]) / level for place, own in enumerate(scores) if place != best]
    noise = max(LEAST_DIFFERENCE, statistics.median(doubts) if doubts else 0.0)
    equal = []
    for place, own in enumerate(scores):
        apart = statistics.median(one - other for one, other in zip(own, scores[best], strict=True))
        if apart <= max(LEAST_DIFFERENCE * level, _doubt(own, scores[best])):
            equal.append(outcomes[place])
    chosen = min(equal, key=lambda one: one.candidate.simplicity)
    return Verified(tuple(outcomes), tuple(map(tuple, times)), chosen, noise)


def _doubt(own: Sequence[float], other: Sequence[float]) -> float:
    """Twice the standard error of the median difference of two rows, from the median deviation of the differences.

    1.4826 and 1.2533 are those of a normal distribution.
    """
    differences = [one - two for one, two in zip(own, other, strict=True)]
    middle = statistics.median(differences)
    deviation = statistics.median(abs(one - middle) for one in differences)
    return 2 * 1.2533 * 1.4826 * deviation / math.sqrt(len(differences))


def verdicts(result: Verified, names: Mapping[object, str]) -> list[tuple[str, float, float, float, str]]:
    """The table: name, predicted and measured milliseconds, by how much of the prediction it took longer, and what
    became of each.

    Args:
        result: What was measured.
        names: Of candidates, in words.
    """
    measured = result.measured_ms
    chosen = measured[result.outcomes.index(result.chosen)]
    rows = []
    for outcome, real in zip(result.outcomes, measured, strict=True):
        told = f"{real - chosen:+,.1f} ms"
        if outcome == result.chosen:
            fastest = real <= min(measured)
            told = (
                "chosen: the fastest" if fastest else f"chosen: equal to the fastest within {100 * result.noise:.1f} %"
            )
        rows.append((names[outcome.candidate], outcome.step_ms, real, real / outcome.step_ms - 1, told))
    return rows
