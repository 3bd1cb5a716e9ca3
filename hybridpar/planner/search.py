"""Finds the candidate with the least time to the same result, and the simplest of those that are equally fast.

Candidates are simulated in the order of their lower bounds. As soon as the bound of the next one is above all that
could still matter, the rest is left out: it cannot change the answer. Two plans that are closer than the noise of the
profile are equal, whatever the digits say; of all that are equal to the fastest the simplest is chosen.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

from hybridpar.errors import PlanError
from hybridpar.planner.bounds import lower_bound_ms
from hybridpar.planner.cuts import Cut, CutLibrary
from hybridpar.planner.evaluate import Evaluator, Outcome
from hybridpar.planner.inputs import PlannerInputs
from hybridpar.planner.space import Candidate, Shape, Space

#: Told how many candidates were looked at, and of how many.
Progress = Callable[[int, int], None]

#: Of two predictions of one simulator, differences below this are rounding.
LEAST_NOISE = 1e-9


@dataclass(frozen=True)
class Answer:
    """What a search found.

    Attributes:
        chosen: The plan to use: the simplest of `ties`.
        ties: All plans that the profile's noise cannot tell from the fastest one, the simplest first.
        ranked: All plans that were simulated and fit into memory, the fastest first.
        baselines: Plain data parallelism and one device, by name; None where one does not fit into memory.
        noise: Relative difference up to which plans are equal.
        considered: Number of candidates.
        simulated: Of how many a step was simulated.
        evaluator: What predicted them.
    """

    chosen: Outcome
    ties: tuple[Outcome, ...]
    ranked: tuple[Outcome, ...]
    baselines: dict[str, Outcome | None]
    noise: float
    considered: int
    simulated: int
    evaluator: Evaluator

    @property
    def fastest(self) -> Outcome:
        """The plan with the least score, whether the noise can tell it from others or not."""
        return self.ranked[0]


def find_plan(
    inputs: PlannerInputs,
    *,
    workers: int | None = None,
    keep: int = 5,
    prune: bool = True,
    library: CutLibrary | None = None,
    progress: Progress | None = None,
    advise: bool = True,
) -> Answer:
    """Search for the best plan.

    Args:
        inputs: Everything that the search reads.
        workers: Workers that may be used; default: all.
        keep: How many of the best plans are to be right, as exhaustive enumeration would have them.
        prune: Leave out what cannot be among them; False simulates everything.
        library: Cuts of the same model, where another search has made them.
        progress: Told now and then how far it is.
        advise: Where no plan fits, look for a batch with which one would.

    Returns:
        The chosen plan, those that are as good, and the others that were simulated.

    Raises:
        PlanError: No plan fits into the memory; the message says what is missing, and the nearest that fits. Or what
            is decided leaves no plan.
    """
    evaluator = Evaluator(Space(inputs, workers, library))
    space, noise = evaluator.space, max(inputs.profile.resolution, LEAST_NOISE)
    candidates = list(space.candidates())
    if not candidates:
        raise _nothing_left(space)
    baselines: dict[str, Outcome | None] = {}
    known: dict[Candidate, Outcome] = {}
    for name, candidate in space.baselines().items():
        known[candidate] = evaluator.outcome(candidate)
        baselines[name] = known[candidate] if _fits(evaluator, known[candidate]) else None
    fitting = [outcome for outcome in known.values() if _fits(evaluator, outcome)]
    best = heapq.nsmallest(keep, (one.score for one in fitting))
    place = 0
    for bound, candidate in _by_bound(evaluator, candidates):
        if prune and best and bound > max(best[0] * (1 + noise), best[-1] if len(best) >= keep else float("inf")):
            break
        place += 1
        if progress is not None and place % 64 == 0:
            progress(place, len(candidates))
        if candidate in known or not _may_fit(evaluator, candidate, make_order=True):
            continue
        known[candidate] = outcome = evaluator.outcome(candidate)
        if _fits(evaluator, outcome):
            fitting.append(outcome)
            best = heapq.nsmallest(keep, (*best, outcome.score))
    if progress is not None:
        progress(len(candidates), len(candidates))
    if not fitting:
        raise _too_little_memory(evaluator, candidates, advise)
    ranked = sorted(fitting, key=lambda one: (one.score, one.candidate.simplicity))
    equal = [one for one in ranked if one.score <= ranked[0].score * (1 + noise)]
    ties = sorted(equal, key=lambda one: one.candidate.simplicity)
    return Answer(ties[0], tuple(ties), tuple(ranked), baselines, noise, len(candidates), len(known), evaluator)


def _by_bound(evaluator: Evaluator, candidates: Sequence[Candidate]) -> Iterator[tuple[float, Candidate]]:
    """Candidates that may fit into memory with what their score is at least, the least first.

    At first a candidate has the bound that holds for all codecs, which many share. Only when it is the
    next one by that, and may fit into memory, its own bound is made, and it waits for its turn by that one.
    """
    choices = evaluator.space.codec_choices

    @cache
    def bound_of(shape: Shape, cut: Cut, codec: int, variant: int, exchange: bool) -> float:
        candidate = Candidate(shape, cut, "", codec, variant)
        costs = evaluator.costs(candidate, exchange=exchange)
        return lower_bound_ms(evaluator.layout(candidate), costs, shape.micro_batches)

    heap = [
        (bound_of(one.shape, one.cut, 0, one.variant, False) * choices[one.codec].steps, place, one, False)
        for place, one in enumerate(candidates)
    ]
    heapq.heapify(heap)
    while heap:
        bound, place, one, final = heapq.heappop(heap)
        if not final and not _may_fit(evaluator, one):
            continue
        if final or one.shape.replicas == 1:  # where nothing is exchanged, the first bound is its own
            yield bound, one
            continue
        own = bound_of(one.shape, one.cut, one.codec, one.variant, True) * choices[one.codec].steps
        heapq.heappush(heap, (max(bound, own), place, one, True))


def _fits(evaluator: Evaluator, outcome: Outcome) -> bool:
    return outcome.memory_bytes <= evaluator.limit(outcome.candidate)


def _may_fit(evaluator: Evaluator, candidate: Candidate, *, make_order: bool = False) -> bool:
    """Whether a candidate may fit, by what its schedule keeps at least."""
    return evaluator.least_memory(candidate, make_order=make_order) <= evaluator.limit(candidate)


def _too_little_memory(evaluator: Evaluator, candidates: Sequence[Candidate], advise: bool) -> PlanError:
    """The error that says how much is missing, and what would fit."""
    nearest = min(candidates, key=lambda one: (evaluator.least_memory(one) - evaluator.limit(one), one.simplicity))
    # What no schedule goes below may still be less than what the schedules at hand reach.
    alike = [one for one in candidates if (one.shape, one.cut) == (nearest.shape, nearest.cut)]
    outcome = min((evaluator.outcome(one) for one in alike), key=lambda one: one.memory_bytes)
    need, have = outcome.memory_bytes, evaluator.limit(outcome.candidate)
    shape = outcome.candidate.shape
    fix = f"The nearest that fits needs devices of {_up(need)} MB"
    if advise and (fewer := _largest_batch(evaluator, outcome.candidate)):
        fix += f", or a batch of {fewer} samples"
    return PlanError(
        f"no plan fits into {have / 1e6:,.1f} MB per device: the smallest needs {_up(need)} MB, "
        f"{_up(need - have)} MB more",
        f"It has {shape.stages} stage(s) on {shape.workers} worker(s) with {shape.micro_batches} micro-batch(es); each "
        "worker holds all parameters, its own gradients and optimizer state, and activations that wait.",
        f"{fix}.",
    )


def _nothing_left(space: Space) -> PlanError:
    """The error that says what is decided, as together that leaves nothing."""
    fixed = space.inputs.fixed
    said = {
        name: value for name, value in vars(fixed).items() if name not in ("codecs", "parts", "exchanged", "staged")
    }
    told = [f"{name} {value}" for name, value in said.items() if value is not None]
    told += ["several replicas"] * fixed.exchanged + ["several stages"] * fixed.staged
    return PlanError(
        f"what is decided leaves no plan for {space.workers} worker(s): {', '.join(told) or 'nothing'}",
        "Stages x replicas use all workers that are asked for, and stages are units of the model.",
        "Leave more of it to the search.",
    )


def _largest_batch(evaluator: Evaluator, candidate: Candidate) -> int:
    """The most samples with which a candidate fits, found by halves, as it needs more for more; 0 where none do."""
    inputs, library = evaluator.space.inputs, evaluator.space.library
    low, high = 0, inputs.batch  # fits, or is no batch; does not fit
    least = max(evaluator.space.workers, candidate.shape.replicas * candidate.shape.micro_batches)
    while high - max(low, least - 1) > 1:
        middle = (max(low, least - 1) + high) // 2
        tried = Evaluator(Space(replace(inputs, batch=middle), evaluator.space.workers, library))
        if _fits(tried, tried.outcome(candidate)):
            low = middle
        else:
            high = middle
    return low


def _up(size: float) -> str:
    """Megabytes with one decimal, rounded up, so that the number given really works."""
    return f"{-(-size // 1e5) / 10:,.1f}"
