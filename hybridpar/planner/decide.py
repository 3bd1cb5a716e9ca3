"""Decides how a run is trained: measures, searches, and lets the best plans take real steps.

Of the plans that the search ranks first, those of different kinds that are predicted to be nearly as fast as the best
one are run for some steps, in turns, and the clock chooses. What was chosen is kept with what it was chosen from.
"""

from __future__ import annotations

import contextlib
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor, nn

from hybridpar.comm.world import World
from hybridpar.config import TrainConfig
from hybridpar.errors import HybridparError, SyncError
from hybridpar.models.deferred import is_deferred
from hybridpar.partition.profile import Progress, intra_op_threads
from hybridpar.plan import Plan, parse_plan
from hybridpar.planner.codecs import proof_lines
from hybridpar.planner.evaluate import Outcome
from hybridpar.planner.explain import caveats, describe
from hybridpar.planner.inputs import Question
from hybridpar.planner.probes import measure_inputs
from hybridpar.planner.record import plan_of
from hybridpar.planner.search import DATA_PARALLEL, Answer, find_plan
from hybridpar.planner.trials import FIRST_STEPS, OpenTrial, as_problem, random_batch, time_in_turns, timed
from hybridpar.planner.ways import Way, compute_of_way

#: Plans that take a few steps before a run; their rounds, and seconds after which there is no other.
FINALISTS, ROUNDS, MOST_SECONDS = 4, 5, 1.5

#: They are predicted to take at most this multiple of the best; plain data parallelism the latter, since predictions
#: were as far as 57 % off and it is what a run would do without a plan.
NEAR, NEAR_PLAIN = 1.3, 2.0

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
            gap = self.measured_ms[index] - chosen_ms
            return f"{gap:+,.1f} ms" if gap >= 0 else f"{gap:+,.1f} ms, within the noise, and less simple"
        return "chosen: the fastest" if chosen_ms <= min(self.measured_ms) else "chosen: the simplest within the noise"


def finalists(answer: Answer, count: int) -> list[Outcome]:
    """The plans that are worth running: the chosen one, plain data parallelism, and those predicted to be near it.

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
    near = [
        outcome
        for outcome in dict.fromkeys([*chosen, *best])
        if outcome.score <= (NEAR_PLAIN if outcome == plain else NEAR) * answer.chosen.score
    ]
    return sorted(near, key=lambda outcome: outcome.score)


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


@dataclass(frozen=True)
class Decision:
    """What was decided; on rank 0 also what it was decided from.

    Attributes:
        plan: The fastest plan.
        lines: Why.
        answer: What the search predicted.
        result: What the plans took that were run; None where none was.
    """

    plan: Plan
    lines: tuple[str, ...]
    answer: Answer | None = None
    result: Verified | None = None


def decide_plan(
    model: nn.Module,
    world: World,
    question: Question,
    open_trial: OpenTrial,
    announce: Callable[[str], None],
    progress: Progress | None = None,
) -> Decision:
    """The fastest plan; a HybridparError says why there is none; a collective."""
    begun = time.perf_counter()
    inputs, way = measure_inputs(model, question, world, open_trial=open_trial, announce=announce, progress=progress)
    options = question.options
    compute = compute_of_way(options, way)
    answers: list[tuple[Answer, list[Outcome]]] = []

    def predict() -> list[str]:
        """The plans that are worth a few steps."""
        announce("planning: predicting the ways to divide the work")
        answer = find_plan(inputs)
        outcomes = finalists(answer, FINALISTS)
        # A few steps do not show what an outer loop takes, and a model that is not held whole takes none.
        if answer.chosen.candidate.codec.every > 1 or is_deferred(model):
            outcomes = [answer.chosen]
        answers.append((answer, outcomes))
        return [plan_of(answer, outcome, compute).to_json() for outcome in outcomes]

    texts = world.from_main(predict, long=True)
    plans = [parse_plan(json.loads(text)) for text in texts]
    times: list[list[float]] = [[]]  # a single plan need not run
    if len(plans) > 1:
        announce(f"planning: running some steps of the {len(plans)} best plans")
        example = random_batch(question.sample_shape, options.samples_per_step, world.device)
        times = run_in_turns(plans, model, options, world, example, open_trial)
        if not any(times):
            raise HybridparError("none of the plans that were predicted to be best runs here")
    timed_plans = [index for index, row in enumerate(times) if row]

    decisions: list[Decision] = []

    def decide() -> tuple[str, tuple[str, ...]]:
        answer, outcomes = answers[0]
        run = [outcomes[index] for index in timed_plans]
        result = verified(run, [times[index] for index in timed_plans]) if run else None
        outcome = answer.chosen if result is None else result.chosen
        plan = plan_of(answer, outcome, compute)
        if result is not None and plan.predicted is not None:  # what was measured is what the run is to take
            step_ms = round(result.step_ms_of(outcome), 3)
            plan = plan.model_copy(update={"predicted": plan.predicted.model_copy(update={"step_ms": step_ms})})
        lines = said(answer, outcome, plan, way, len(run), time.perf_counter() - begun, result)
        decisions.append(Decision(plan, lines, answer, result))
        return plan.to_json(), lines

    text, lines = world.from_main(decide)
    return decisions[0] if decisions else Decision(parse_plan(json.loads(text)), lines)


def run_in_turns(
    plans: Sequence[Plan],
    model: nn.Module,
    options: TrainConfig,
    world: World,
    example: Tensor,
    open_trial: OpenTrial,
    rounds: int = ROUNDS,
    seconds: float = MOST_SECONDS,
) -> list[list[float]]:
    """Milliseconds of steps of plans, none of a plan that cannot run here; a collective."""
    threads: int | None = None
    with contextlib.ExitStack() as stack:
        steps = {}
        for index, plan in enumerate(plans):
            assert plan.compute is not None
            threads = plan.compute.threads
            chosen = replace(options, **plan.compute.options)
            opening = as_problem(partial(open_trial, model, chosen, world, example, plan))
            try:
                with intra_op_threads(threads):
                    trial = stack.enter_context(contextlib.closing(world.on_all(opening)))
                for _ in range(FIRST_STEPS):
                    timed(trial.step, world, threads)
            except SyncError:
                raise
            except HybridparError:
                continue
            steps[str(index)] = trial.step
        times = time_in_turns(steps, world, rounds=rounds, seconds=seconds, threads=threads)
    return [times.get(str(index), []) for index in range(len(plans))]


def said(
    answer: Answer,
    outcome: Outcome,
    plan: Plan,
    way: Way | None,
    count: int,
    seconds: float,
    result: Verified | None = None,
) -> tuple[str, ...]:
    """What was chosen, what it won, and what planning cost: `count` plans were run for it, and so many seconds."""
    step_ms = result.step_ms_of if result is not None else lambda outcome: outcome.step_ms
    assert plan.predicted is not None
    assert plan.predicted.step_ms is not None
    line = f"plan     {describe(outcome.candidate, answer)}, about {_ms(plan.predicted.step_ms)} a step"
    others = (other for other in answer.ranked if _kind(other) != _kind(outcome))
    if (other := next(others, None)) is not None:
        gap = step_ms(other) * other.candidate.codec.steps - step_ms(outcome) * outcome.candidate.codec.steps
        difference = "as fast within the noise" if other in answer.ties or gap < 0 else f"+{_ms(gap)}"
        line += f" (next best: {describe(other.candidate, answer)}, {difference})"
    lines = [line]
    if way is not None:
        lines += [f"         {text}" for text in _worth_lines(way)]
        plain = answer.baselines.get(DATA_PARALLEL)
        if plain is not None:
            baseline = step_ms(plain) + way.plain_ms - max(way.step_ms)
            cost = f"planning took {seconds:.1f} s{f', {count} plans were run' * (count > 0)}"
            lines.append(f"         {cost}; without it a step takes about {_ms(baseline)}")
    choice = outcome.candidate.codec
    if (outer := choice.outer) is not None:
        exchange_ms = outer.every * sum(answer.evaluator.outer(outcome.candidate)[:2])
        lines.append(
            f"         an exchange takes about {_ms(exchange_ms)}, so it is made every {outer.every} steps only"
        )
        lines.append(f"         expected, as ResNet-18 on digits showed: {outer}")
    lines += [f"         {line}" for line in proof_lines(choice.codecs.values())]
    if fewer := _fewer_workers(answer):
        lines.append(f"         {fewer}")
    return (*lines, *(f"         {caveat}" for caveat in caveats(answer.inputs)))


def _worth_lines(way: Way) -> list[str]:
    """What each way to compute a step was worth."""
    tried = [
        f"{worth.name} {worth.ratio:.2f}x{', chosen' * worth.chosen}" for worth in way.worths if worth.ratio is not None
    ]
    lines = [f"a step takes, with {'; '.join(tried)}"] if tried else []
    return lines + [f"not {worth.name}: {worth.why_not}" for worth in way.worths if worth.why_not]


def _kind(outcome: Outcome) -> tuple[object, ...]:
    """What tells ways to divide the work apart; cuts, placements and schedules are details of it."""
    candidate = outcome.candidate
    layout = candidate.layout
    return layout.stages, layout.replicas, candidate.micro_batches, candidate.codec


def _ms(time: float) -> str:
    return f"{time:,.0f} ms" if time >= 10 else f"{time:,.1f} ms"


def _fewer_workers(answer: Answer) -> str:
    """Whether fewer workers than were started would be faster, beyond the noise; empty where they would not.

    On a CPU they are predicted with their own cores alone, though they would get those of the others as well.
    """
    inputs, fixed = answer.inputs, answer.inputs.fixed
    if inputs.workers == 1 or fixed.replicas is not None or fixed.stages not in (None, 1):
        return ""
    library = answer.evaluator.space.library
    fewer = find_plan(replace(inputs, fixed=replace(fixed, workers=None)), library=library)
    candidate, step = fewer.chosen.candidate, fewer.chosen.step_ms
    workers, count = candidate.layout.workers, candidate.micro_batches
    if workers >= inputs.workers or step * (1 + answer.noise) >= answer.chosen.step_ms:
        return ""
    same = f" --micro-batches {count}" if inputs.profile.batch_norm and count > 1 else ""
    return f"fewer would be faster: {_ms(step)} a step with --nproc {workers}{same}"
