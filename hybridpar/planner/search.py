"""Finds the candidate with the least time to the same result, and the simplest of those that are equally fast.

Candidates are simulated in the order of their lower bounds. As soon as the bound of the next one is above all that
could still matter, the rest is left out: it cannot change the answer. Two plans that are closer than the noise of the
profile are equal, whatever the digits say; of all that are equal to the fastest the simplest is chosen.

Candidates are left out by a lower bound of their step time, without simulating them: `lower_bound_ms` never exceeds
what the simulator says of any schedule of a candidate (it is admissible), so a candidate whose bound is above what is
already reached may be left out, and the search still answers what exhaustive enumeration answers. Tests compare both.

Also chooses among the best plans by the times that they took when they were run.
"""

from __future__ import annotations

import heapq
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from hybridpar.errors import PlanError
from hybridpar.planner.cuts import Cut, CutLibrary
from hybridpar.planner.evaluate import Evaluator, Outcome
from hybridpar.planner.inputs import PlannerInputs
from hybridpar.planner.space import DATA_PARALLEL, Candidate, Space
from hybridpar.schedule.actions import Kind
from hybridpar.schedule.costs import Costs
from hybridpar.schedule.layout import Edge, Layout
from hybridpar.schedule.schedules import SCHEDULES


def lower_bound_ms(layout: Layout, costs: Costs, micro_batches: int) -> float:
    """Time that no schedule of these stages beats.

    The largest of the following, each of which every simulated step takes at least; sharing a processor or links, and
    waiting in queues, only adds to the durations used here.

    1. *Lanes.* A lane runs M forward and M backward passes of each of its stages, one at a time. Before the first of
       them, some micro-batch has gone forward through all stages before one of the lane's (`head`, the longest path of
       passes and transfers). The last thing that a lane runs is a backward pass, and afterwards that micro-batch's
       gradient goes back through the stages before (`tail`). So: least head + M (F + B) + least tail.
    2. *One micro-batch.* It goes forward to the last stage and back to the first: the longest path through it. That is
       (head + F + B + tail) of each stage, as a stage's backward pass follows its forward pass.
    3. *Links.* The first bucket of a stage is ready no earlier than after M forward passes, M - 1 backward passes and
       its part of the last one, and the head. From the earliest of these on, all buckets of a worker pass over its
       link, which carries no more than one at its full speed.
    4. *Processor.* All that a worker computes, encodes and decodes, divided by its lanes.

    Where a step commits as a whole, the agreement and the shortest optimizer step come after everything of 1 to 3.
    """
    stages = range(layout.stages)
    forward = [costs.compute_ms(stage, Kind.FORWARD) for stage in stages]
    backward = [costs.compute_ms(stage, Kind.BACKWARD) for stage in stages]
    head, tail = _paths(layout, costs, forward, backward)
    longest = 0.0
    for lane in range(layout.lanes):
        own = layout.stages_on(lane)
        work = micro_batches * sum(forward[stage] + backward[stage] for stage in own)
        longest = max(longest, min(head[stage] for stage in own) + work + min(tail[stage] for stage in own))
    longest = max(longest, *(head[stage] + forward[stage] + backward[stage] + tail[stage] for stage in stages))
    if costs.replicas > 1:
        longest = max(longest, _links(layout, costs, micro_batches, forward, backward, head))
    longest += costs.control_ms + min(costs.compute_ms(stage, Kind.STEP) for stage in stages)
    return max(longest, _processors(layout, costs, micro_batches, forward, backward))


def _paths(
    layout: Layout, costs: Costs, forward: list[float], backward: list[float]
) -> tuple[list[float], list[float]]:
    """For every stage the time before its first forward pass, and the time after its last backward pass."""
    head, tail = [0.0] * layout.stages, [0.0] * layout.stages
    for stage in range(layout.stages):
        for edge in layout.into(stage):
            arrival = head[edge.source] + forward[edge.source] + _transfer(layout, costs, edge, edge.bytes)
            head[stage] = max(head[stage], arrival)
            if edge.gradient_bytes > 0:
                rest = _transfer(layout, costs, edge, edge.gradient_bytes, back=True) + backward[edge.source]
                tail[stage] = max(tail[stage], rest + tail[edge.source])
    return head, tail


def _transfer(layout: Layout, costs: Costs, edge: Edge, size: int, back: bool = False) -> float:
    if not layout.crosses(edge):
        return 0.0
    pair = (layout.home(edge.source), layout.home(edge.target))
    link = costs.links.get(pair[::-1] if back else pair, costs.link)
    return link.latency_ms + link.wire_ms(size)


def _links(
    layout: Layout, costs: Costs, count: int, forward: list[float], backward: list[float], head: list[float]
) -> float:
    """When the last bucket of any worker is through, at the earliest."""
    last = 0.0
    for worker in range(layout.workers):
        begin, wire = float("inf"), 0.0
        for stage in range(layout.stages):
            buckets = costs.buckets[stage] if stage < len(costs.buckets) else ()
            if layout.home(stage) != worker or not buckets:
                continue
            ready = min(one.ready for one in buckets)
            passes = count * forward[stage] + (count - 1) * backward[stage]
            begin = min(begin, head[stage] + passes + ready * backward[stage])
            wire += sum(one.wire_ms or 0.0 for one in buckets)
        if wire > 0 and costs.sync_shares_link:
            last = max(last, begin + wire)
    return last


def _processors(layout: Layout, costs: Costs, count: int, forward: list[float], backward: list[float]) -> float:
    needed = [0.0] * layout.workers
    for stage in range(layout.stages):
        home = layout.home(stage)
        needed[home] += count * (forward[stage] + backward[stage]) + costs.compute_ms(stage, Kind.STEP)
        if costs.replicas > 1 and stage < len(costs.buckets):
            needed[home] += sum(one.encode_ms + one.decode_ms for one in costs.buckets[stage])
    return max(time / max(1, layout.worker_of.count(worker)) for worker, time in enumerate(needed))


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
        baselines[name] = known[candidate] if known[candidate].fits else None
    fitting = [outcome for outcome in known.values() if outcome.fits]
    best = heapq.nsmallest(keep, (one.score for one in fitting))
    for saving in (False, True):
        if saving:  # only memory makes it worth to compute activations again, or to hand parameters round
            if fitting:
                break
            candidates += space.candidates(saving=True)
        place = 0
        for bound, candidate in _by_bound(evaluator, candidates):
            if prune and best and bound > max(best[0] * (1 + noise), best[-1] if len(best) >= keep else float("inf")):
                break
            place += 1
            if progress is not None and place % 64 == 0:
                progress(place, len(candidates))
            if candidate in known or not evaluator.may_fit(candidate, make_order=True):
                continue
            known[candidate] = outcome = evaluator.outcome(candidate)
            if outcome.fits:
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
    def bound_of(
        layout: Layout, count: int, cut: Cut, codec: int, variant: int, sharded: bool, exchange: bool
    ) -> float:
        candidate = Candidate(layout, count, cut, "", codec, variant, sharded)
        return max(
            lower_bound_ms(
                evaluator.layout(candidate, replica),
                evaluator.costs(candidate, exchange=exchange, replica=replica),
                count,
            )
            for replica in layout.kinds
        )

    def _first(one: Candidate) -> float:
        return bound_of(one.layout, one.micro_batches, one.cut, 0, one.variant, one.sharded, False)

    heap = [
        (0.0 if choices[one.codec].every > 1 else _first(one) * choices[one.codec].steps, place, one, False)
        for place, one in enumerate(candidates)
    ]
    heapq.heapify(heap)
    while heap:
        bound, place, one, final = heapq.heappop(heap)
        if not final and not evaluator.may_fit(one):
            continue
        if final or one.layout.replicas == 1:  # where nothing is exchanged, the first bound is its own
            yield bound, one
            continue
        own = (
            bound_of(one.layout, one.micro_batches, one.cut, one.codec, one.variant, one.sharded, True)
            * choices[one.codec].steps
        )
        heapq.heappush(heap, (max(bound, own), place, one, True))


def _too_little_memory(evaluator: Evaluator, candidates: Sequence[Candidate], advise: bool) -> PlanError:
    """The error that says how much is missing, and what would fit."""
    missing = {one: evaluator.missing(one) for one in candidates}
    ordered = sorted(candidates, key=lambda one: (missing[one], one.simplicity))
    outcome = evaluator.outcome(ordered[0])
    # What no schedule goes below may still be less than what the schedules at hand reach.
    for one in ordered[1:MOST_NEAR]:
        short = outcome.memory_bytes - outcome.limit_bytes
        if missing[one] >= short:
            break
        other = evaluator.outcome(one)
        if other.memory_bytes - other.limit_bytes < short:
            outcome = other
    need, have = outcome.memory_bytes, outcome.limit_bytes
    layout = outcome.candidate.layout
    fix = f"The nearest that fits needs devices of {_up(need)} MB"
    if advise:
        if more := least_workers(evaluator, evaluator.space.workers + 1):
            fix += f", or {more[0]} workers of this memory"
        kinds: dict[object, Candidate] = {}
        for one in (outcome.candidate, *ordered):
            kinds.setdefault((one.layout, one.micro_batches, one.cut.saving, one.sharded), one)
        if fewer := max(_largest_batch(evaluator, one) for one in kinds.values()):
            fix += f", or a batch of {fewer} samples"
    return PlanError(
        f"no plan fits into {have / 1e6:,.1f} MB per device: the smallest needs {_up(need)} MB, "
        f"{_up(need - have)} MB more",
        f"It has {layout.stages} stage(s) on {layout.workers} worker(s) with {outcome.candidate.micro_batches} "
        f"micro-batch(es)"
        f"{outcome.candidate.cut.saving and ', ' + outcome.candidate.cut.saving}"
        f"{', the optimizer divided' * outcome.candidate.sharded}; each worker holds parameters, gradients and "
        "optimizer state of its stages, and activations that wait.",
        f"{fix}.",
    )


#: Plans that are simulated to find the one that needs least memory.
MOST_NEAR = 64
#: More workers are not asked for to make a model fit.
MOST_WORKERS = 32


def least_workers(evaluator: Evaluator, first: int = 1) -> tuple[int, Candidate] | None:
    """How many workers of the memory of the cluster's smallest device the model needs at least."""
    inputs, library = evaluator.space.inputs, evaluator.space.library
    last = min(inputs.cluster.hosts, key=lambda one: math.inf if one.memory is None else one.memory)
    alone = inputs.cluster.between is None
    for workers in range(first, min(MOST_WORKERS, inputs.batch) + 1):
        host = last.model_copy(update={"count": 1 if alone else workers, "devices": workers if alone else 1})
        cluster = inputs.cluster.model_copy(update={"hosts": (host,)})
        space = Space(replace(inputs.on(cluster), fixed=replace(inputs.fixed, workers=workers)), workers, library)
        tried = Evaluator(space)
        for saving in (False, True):
            for one in space.candidates(saving):
                quick = one.variant == 0 and not SCHEDULES.get(one.schedule).searches
                if quick and tried.may_fit(one) and tried.may_fit(one, make_order=True):
                    return workers, one
    return None


def _nothing_left(space: Space) -> PlanError:
    """The error that says what is decided, as together that leaves nothing."""
    fixed = space.inputs.fixed
    apart = ("codecs", "parts", "every_step", "exchanged", "staged", "equal")
    said = {name: value for name, value in vars(fixed).items() if name not in apart}
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
    least = max(evaluator.space.workers, candidate.layout.replicas * candidate.micro_batches)
    while high - max(low, least - 1) > 1:
        middle = (max(low, least - 1) + high) // 2
        tried = Evaluator(Space(replace(inputs, batch=middle), evaluator.space.workers, library))
        if tried.outcome(candidate).fits:
            low = middle
        else:
            high = middle
    return low


def _up(size: float) -> str:
    """Megabytes with one decimal, rounded up, so that the number given really works."""
    return f"{-(-size // 1e5) / 10:,.1f}"


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
    """
    workers = answer.evaluator.space.workers
    found: dict[tuple[object, ...], Outcome] = {}
    plain = answer.baselines.get(DATA_PARALLEL)
    for one in (answer.chosen, *([] if plain is None else [plain]), *answer.ranked):
        layout = one.candidate.layout
        if layout.stages > 1 and layout.workers not in (1, workers):
            continue  # a pipeline on a part of the workers cannot run beside the others
        if answer.evaluator.space.codec_choices[one.candidate.codec].every > 1:
            continue  # a few steps do not show what it takes
        key = (round(one.score, 3), layout.stages, layout.replicas, one.candidate.codec, one.candidate.variant)
        found.setdefault(key, one)
    must = list(found.values())[: 1 if plain is None or plain == answer.chosen else 2]
    best = sorted(found.values(), key=lambda one: one.score)[:count]
    return sorted({one.candidate: one for one in (*must, *best)}.values(), key=lambda one: one.score)


def verified(answer: Answer, outcomes: Sequence[Outcome], times: Sequence[Sequence[float]]) -> Verified:
    """Choose by what was measured.

    Two plans are told apart where the median of their differences, round by round, is further from nothing than twice
    its standard error: what slowed a whole round down cancels. What takes more steps to the same result counts them.
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
