"""Finds the plan of a run: the file that is named, the plan of the run that is resumed, or the answer of a search.

By default the search covers everything that the user's options leave open. `hybridpar.planner.resolve` then joins what
was found with these options.

Rank 0 searches and all workers follow its answer, so that noise cannot make two of them disagree. A plan from a file is
read by every worker, and all must have read the same.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor, nn

from hybridpar.comm.world import World
from hybridpar.compress.policy import agree_on_policy, is_auto
from hybridpar.config import TrainConfig
from hybridpar.config.optimizer import state_copies
from hybridpar.errors import HybridparError, PlanError, SyncError, UsageError
from hybridpar.models import model_fingerprint, parameter_count
from hybridpar.models.deferred import is_deferred
from hybridpar.models.state_dicts import require_saved, require_unwrapped
from hybridpar.partition.unit_runner import intra_op_threads
from hybridpar.plan import ModelInfo, Plan, ResolvedPlan, parse_plan, read_plan
from hybridpar.planner.fixed import (
    decided_options,
    fixed_by,
    needs_replicas,
    needs_stages,
    not_modelled,
)
from hybridpar.planner.resolve import resolve
from hybridpar.schedule.layout import Layout

if TYPE_CHECKING:  # a run without a search does not import the planner
    from hybridpar.planner.evaluate import Outcome
    from hybridpar.planner.inputs import PlannerInputs
    from hybridpar.planner.probes import Question
    from hybridpar.planner.search import Answer
    from hybridpar.planner.trials import OpenTrial
    from hybridpar.planner.ways import Way

_log = logging.getLogger(__name__)

#: Where a run keeps everything that the search read, and what it predicted.
_DETAILS = ", details in plan.json"

#: Options that decide what samples and weights are, and nothing that a plan says.
_NO_KNOBS = frozenset(field.name for field in fields(TrainConfig)) - {
    *("replicas", "micro_batches", "schedule", "recompute", "offload", "placement", "bucket_mb", "compress"),
    *("memory_format", "kernels", "amp", "compile", "cuda_graph", "stages", "sync"),
}


#: Plans that take a few steps before a run, if they are predicted to take at most this multiple of the best; their
#: rounds, and seconds after which there is no other.
FINALISTS, NEAR, ROUNDS, MOST_SECONDS = 4, 1.3, 5, 1.5

#: What is followed, if anything, and what to tell of it at the start.
_Found = tuple[Plan | None, tuple[str, ...]]


@dataclass(frozen=True)
class PlannedRun:
    """What a run is to do.

    Attributes:
        plan: The plan.
        lines: What to tell at the start.
    """

    plan: ResolvedPlan
    lines: tuple[str, ...] = ()


def plan_run(
    model: nn.Module,
    config: TrainConfig,
    world: World,
    *,
    sample_shape: Sequence[int] | None,
    steps: int | None,
    name: str,
    given: Collection[str] = (),
    stored: Path | None = None,
    decided: Collection[str] | None = None,
    plan: Plan | None = None,
    announce: Callable[[str], None] = lambda text: None,
    open_trial: OpenTrial | None = None,
) -> PlannedRun:
    """Find the plan of a run; a collective.

    Ways to compute a step and the best plans are timed by steps that `open_trial` makes; without it none is searched.
    """
    # A script's own loop decides what there is to exchange; so does the plan of a run that is resumed, or of a file.
    named = decided_options(config, given) if decided is None and stored is None else frozenset()
    if config.plan_file is not None:
        named &= set(given)
    decided = decided_options(config, given) if decided is None else decided
    names = [path for path, _ in model.named_parameters()]
    agree_on_policy(config.compress, names, world.gather, config.fidelity)
    _require_effect(config, named, world.size)
    require_unwrapped(model)
    require_saved(model)
    info = ModelInfo(
        name=name,
        fingerprint=model_fingerprint(model),
        parameters=parameter_count(model),
        input=tuple(sample_shape) if sample_shape is not None else None,
    )
    plan = plan or _read_own_plan(config, world)
    found: _Found = None, ()
    nothing = ""  # for a codec to be chosen by
    if plan is None and config.chooses:
        from hybridpar.planner.choice import nothing_to_choose, other_types

        if config.searches and (why := other_types(model)):
            config, found = replace(config, compress="none"), (None, (f"auto     none: {why}",))
        elif not config.searches:
            config, decided = _settled(config, world, decided)
            nothing = nothing_to_choose(model, world, config.fidelity, config.replicas or 1)
    if plan is not None:
        found = _follow_given(model, config, world, plan, decided, name, sample_shape)
    elif not config.searches and (not config.chooses or nothing):
        pass
    elif stored is not None:
        kept = world.from_main(lambda: _stored_plan(stored, world.size))
        if kept is not None:
            found = _follow_stored(model, config, world, parse_plan(json.loads(kept)), decided)
    elif open_trial is None:
        found = _unplanned("no worker holds all of the model to measure it") if "plan" in given else found
    elif why := _not_worth(sample_shape, steps):
        found = _unplanned(why) if "plan" in given else found
    elif option := not_modelled(config):
        found = _unplanned(f"no prediction knows {option}")
    else:
        from hybridpar.models.random_state import same_random
        from hybridpar.planner.probes import Question
        from hybridpar.tvm_kernels.swap import has_tuned_kernels

        fixed = fixed_by(config, decided, world.size, names, named)
        if fixed.kernels == "tuned" and not has_tuned_kernels(model):
            fixed = replace(fixed, kernels=None)  # of a model without such layers stock and tuned are the same
        question = Question.of_run(config, fixed, name, sample_shape or (), steps, decided)
        with same_random([world.device.index or 0] if world.device.type == "cuda" else []):
            planned, said = _search(model, world, question, open_trial, announce)
            found = planned, (*found[1], *said)
    followed, lines = found
    resolved = resolve(config, world.size, followed, decided, model=info, device=world.device.type)
    _require_effect(config, named, world.size, resolved.layout)
    if is_auto(resolved.sync.codec):  # there was nothing to search with
        from hybridpar.planner.choice import choose_codecs

        how = config.fidelity, config.bucket_bytes, resolved.layout.replicas
        codec, chosen = choose_codecs(model, world, *how)
        resolved, lines = resolved.with_codec(codec), (*lines, *chosen)
    return PlannedRun(resolved, lines)


def _settled(config: TrainConfig, world: World, decided: Collection[str]) -> tuple[TrainConfig, Collection[str]]:
    """Options that leave nothing but the codec to the search, and the names of all others."""
    plan = resolve(config, world.size, None, decided, device=world.device.type)
    settled = replace(
        config,
        replicas=plan.layout.replicas,
        schedule=plan.pipeline.schedule,
        placement=config.placement or plan.layout.kind,
        memory_format="channels_last" if plan.channels_last else "contiguous",
    )
    return settled, frozenset(option.name for option in fields(TrainConfig)) - {"compress"}


def _require_effect(config: TrainConfig, named: Collection[str], workers: int, layout: Layout | None = None) -> None:
    """Refuse a named option that would do nothing."""
    replicas = workers if layout is None else layout.replicas
    if replicas == 1 and (option := needs_replicas(config, named)):
        raise UsageError(
            f"{option} has no effect with one replica on {workers} worker(s)",
            "It acts on what replicas of the model exchange, and one replica exchanges nothing.",
            f"Leave it out, or start more workers: --workers {2 * workers}."
            if workers == 1
            else f"Leave it out, or ask for more replicas: --replicas 2 or --workers {2 * workers}.",
        )
    if layout is not None and layout.stages == 1 and (option := needs_stages(config, named)):
        raise UsageError(
            f"{option} without stages has no effect",
            "It acts on the stages of a pipeline, and the model is trained as a whole.",
            "Leave it out, or add --stages 2.",
        )


def plan_loop(
    model: nn.Module,
    config: TrainConfig,
    world: World,
    example: Tensor | None,
    steps: int | None,
    name: str | None,
    plan: Plan | None = None,
    open_trial: OpenTrial | None = None,
) -> PlannedRun:
    """The plan of a training loop in a script, which divides batches and knows its stages itself; a collective."""
    asked, decided = config, decided_options(config)
    if config.plan_file is None and plan is None:
        replicas = resolve(config, world.size).layout.replicas
        samples = config.batch_size if example is None else example.shape[0] * replicas * config.micro_batches
        asked = replace(config, replicas=replicas, batch_size=samples)
        # Between two exchanges of an outer loop the workers' models differ, which a script would have to know.
        decided |= {"stages", "replicas", "micro_batches", "sync"}
    found = plan_run(
        model,
        asked,
        world,
        # A model is measured with random numbers, which indices are not.
        sample_shape=tuple(example.shape[1:]) if example is not None and example.is_floating_point() else None,
        steps=steps,
        name=name or type(model).__name__,
        decided=decided,
        plan=plan,
        open_trial=None if is_deferred(model) else open_trial,
    )
    for line in found.lines if world.is_main else ():
        _log.info(line.removesuffix(_DETAILS))  # there is no run directory here
    return found


def _read_own_plan(config: TrainConfig, world: World) -> Plan | None:
    """The plan's file that the options name, if they do; a collective."""
    if config.plan_file is None:
        return None
    plan: Plan | None = None
    problem: HybridparError | None = None
    try:
        plan = read_plan(config.plan_file)
    except HybridparError as error:
        problem = error
    mine = "unreadable" if plan is None else hashlib.sha256(plan.to_json().encode()).hexdigest()[:12]
    everyone = [str(answer) for answer in world.gather(mine)]
    if problem is not None:
        raise problem
    if len(set(everyone)) > 1:
        table = "\n".join(f"  rank {rank}: {fingerprint}" for rank, fingerprint in enumerate(everyone))
        raise PlanError(
            f"the workers have read different plans from {config.plan_file}:\n{table}",
            "All workers follow one plan.",
            "Copy the same file to every host.",
        )
    return plan


def _as_followed(config: TrainConfig, plan: Plan, decided: Collection[str], workers: int) -> Plan:
    """The plan, without its prediction where the user decided otherwise than it says."""
    with contextlib.suppress(HybridparError):  # raised where it is resolved for good, if options are wrong
        if resolve(config, workers, plan, decided) == resolve(config, workers, plan, _NO_KNOBS & set(decided)):
            return plan
    return _unpredicted(plan)


def _follow_given(
    model: nn.Module,
    config: TrainConfig,
    world: World,
    plan: Plan,
    decided: Collection[str],
    name: str,
    sample_shape: Sequence[int] | None,
) -> _Found:
    from hybridpar.partition.planning import require_model
    from hybridpar.planner.inputs import check_made_for
    from hybridpar.planner.links import measure_cluster

    require_model(plan, model, name)
    if plan.inputs is not None:
        check_made_for(plan, measure_cluster(world))
    followed = _as_followed(config, plan, decided, world.size)
    told = _expected(followed)
    if followed.inputs is not None and followed.is_edited:
        followed, told = _unpredicted(followed), ", which was edited: what was predicted does not hold"
    if followed.inputs is not None and (other := _made_for_other(config, followed, sample_shape)):
        followed, told = _unpredicted(followed), f", which was made for {other}: its prediction does not hold here"
    place = f"from {config.plan_file}" if config.plan_file is not None else "as given"
    return followed, (f"plan     {place}{told}",)


def _made_for_other(config: TrainConfig, plan: Plan, sample_shape: Sequence[int] | None) -> str:
    """What a plan was searched for and this run is not, so that it takes other steps than were predicted."""
    from hybridpar.planner.inputs import inputs_of_plan

    inputs = inputs_of_plan(plan)
    told = []
    if inputs.batch != config.batch_size:
        told.append(f"a batch of {inputs.batch}, not {config.batch_size}")
    if sample_shape is not None and plan.model.input and tuple(plan.model.input) != tuple(sample_shape):
        shapes = ("x".join(map(str, shape)) for shape in (plan.model.input, sample_shape))
        told.append("samples of {}, not {}".format(*shapes))
    if inputs.optimizer_copies != state_copies(config):
        told.append(f"an optimizer with {inputs.optimizer_copies} tensors per parameter, not {state_copies(config)}")
    return ", ".join(told)


def _unpredicted(plan: Plan) -> Plan:
    return plan.model_copy(update={"inputs": None, "predicted": None, "checksum": None})


def _follow_stored(model: nn.Module, config: TrainConfig, world: World, plan: Plan, decided: Collection[str]) -> _Found:
    """Go on by the plan of the run; one that does not fit any more is left, and none is made in its place."""
    count = len(plan.partition.stages)
    if plan.workers != world.size:
        return _unplanned(f"the run's own plan is for {plan.workers} worker(s), and here are {world.size}")
    if "stages" in decided and config.stages != count:
        return _unplanned(f"--stages {config.stages} is not what the run's own plan says")
    if count > 1:
        from hybridpar.partition.planning import require_model

        require_model(plan, model, plan.model.name)
    followed = _as_followed(config, plan, decided, world.size)
    if followed.inputs is not None and _made_for_other(config, followed, None):
        followed = _unpredicted(followed)
    return followed, (f"plan     as the run began with, not searched for again{_expected(followed)}",)


def set_aside(place: Path) -> None:
    """Keep the plan of a run that goes on without it, under the number of its workers: with these it is
    taken up again.
    """
    plan = _usable(place)
    if plan is not None:
        with contextlib.suppress(OSError):
            place.replace(_aside(place, plan.workers))


def _stored_plan(place: Path, workers: int) -> str | None:
    """A run's plan, where it was laid out by one: if there are several the one for so many workers."""
    found = [plan for plan in (_usable(place), _usable(_aside(place, workers))) if plan is not None]
    fitting = [plan for plan in found if plan.workers == workers]
    return (fitting or found)[0].to_json() if found else None


def _aside(place: Path, workers: int | None) -> Path:
    return place.with_name(f"{place.stem}-{workers}-workers{place.suffix}")


def _usable(place: Path) -> Plan | None:
    """A plan that laid a run out; what cannot be read is as none."""
    try:
        plan = read_plan(place)
    except HybridparError:
        return None
    return plan if plan.checksum is not None and plan.placement is not None else None


def _not_worth(sample_shape: Sequence[int] | None, steps: int | None) -> str:
    from hybridpar.planner.probes import LEAST_STEPS

    if sample_shape is None:
        return "there is no example of inputs, in floating point, to measure with"
    if steps is None:
        return "the length of the run is not known"
    if steps < LEAST_STEPS:
        return f"a run of {steps} steps is over before planning pays, which is from {LEAST_STEPS} on"
    return ""


def _search(
    model: nn.Module, world: World, question: Question, open_trial: OpenTrial, announce: Callable[[str], None]
) -> _Found:
    """Measure, and take the fastest plan; where that fails the run goes on without a plan."""
    from hybridpar.planner.probes import measure_inputs
    from hybridpar.planner.record import plan_of
    from hybridpar.planner.search import finalists, find_plan, verified
    from hybridpar.planner.ways import compute_of_way

    begun = time.perf_counter()
    try:
        measured = measure_inputs(model, question, world, open_trial=open_trial, announce=announce)
    except SyncError:
        raise
    except HybridparError as error:
        return _unplanned(error.what)
    inputs, way = measured.inputs, measured.way
    compute = {"compute": compute_of_way(question.options or TrainConfig(), way)}
    found: list[tuple[Answer, list[Outcome]]] = []

    def predict() -> tuple[tuple[str, ...], list[str]]:
        """Why there is no plan, or the plans that are worth a few steps."""
        announce("planning: predicting the ways to divide the work")
        try:
            answer = find_plan(inputs)
        except PlanError as error:
            return _unplanned(error.what)[1], []
        outcomes = [one for one in finalists(answer, FINALISTS) if one.score <= NEAR * answer.chosen.score]
        found.append((answer, outcomes))
        return (), [plan_of(answer, one).model_copy(update=compute).to_json() for one in outcomes]

    why_not, texts = world.from_main(predict)
    if why_not:
        return None, why_not
    plans = [parse_plan(json.loads(text)) for text in texts]
    times = _run_finalists(plans, model, question, world, open_trial, announce)

    def decide() -> tuple[str, tuple[str, ...]]:
        answer, outcomes = found[0]
        run = [outcomes[index] for index in times]
        result = verified(answer, run, list(times.values())) if times else None
        outcome = answer.chosen if result is None else result.chosen
        plan = plan_of(answer, outcome).model_copy(update=compute)
        if result is not None:
            step_ms = result.measured_ms[run.index(outcome)]
            plan = _with_step(plan, step_ms)
        return plan.to_json(), _told(answer, outcome, plan, inputs, way, len(times), time.perf_counter() - begun)

    text, lines = world.from_main(decide)
    return parse_plan(json.loads(text)), lines


def _with_step(plan: Plan, step_ms: float) -> Plan:
    """The plan with the time of its steps as it was measured, which is what the run is to take."""
    assert plan.predicted is not None
    return plan.model_copy(update={"predicted": plan.predicted.model_copy(update={"step_ms": round(step_ms, 3)})})


def _run_finalists(
    plans: Sequence[Plan],
    model: nn.Module,
    question: Question,
    world: World,
    open_trial: OpenTrial,
    announce: Callable[[str], None],
) -> dict[int, list[float]]:
    """Milliseconds of steps of the best plans, by index, which take turns; none of a single plan; a collective."""
    from hybridpar.planner.trials import FIRST_STEPS, random_batch, time_in_turns

    if len(plans) < 2:
        return {}
    announce(f"planning: running some steps of the {len(plans)} best plans")
    example = random_batch(question.sample_shape, question.batch, world.device)
    with contextlib.ExitStack() as stack:
        steps = {}
        for index, plan in enumerate(plans):
            assert question.options is not None
            assert plan.compute is not None
            options = replace(question.options, **plan.compute.options)
            opening = partial(open_trial, model, options, world, example, plan)
            with intra_op_threads(plan.compute.threads), contextlib.suppress(UsageError):
                trial = stack.enter_context(contextlib.closing(world.on_all(opening)))
                for _ in range(FIRST_STEPS):
                    trial.step()
                steps[str(index)] = trial.step
        threads = plans[0].compute.threads if plans[0].compute is not None else None
        times = time_in_turns(steps, world, rounds=ROUNDS, seconds=MOST_SECONDS, threads=threads)
    return {index: times[str(index)] for index in range(len(plans)) if str(index) in times}


def _unplanned(why: str) -> tuple[None, tuple[str, ...]]:
    return None, (f"plan     none: {why}",)


def _expected(plan: Plan) -> str:
    predicted = plan.predicted.step_ms if plan.predicted is not None else None
    return f", predicted {predicted:,.1f} ms a step" if predicted is not None else ""


def _told(
    answer: Answer,
    outcome: Outcome,
    plan: Plan,
    inputs: PlannerInputs,
    way: Way | None,
    timed: int,
    seconds: float,
) -> tuple[str, ...]:
    """What was chosen, what it won, and what planning cost."""
    from hybridpar.planner.codecs import proof_lines
    from hybridpar.planner.explain import brief, caveats
    from hybridpar.planner.space import DATA_PARALLEL

    assert plan.predicted is not None
    assert plan.predicted.step_ms is not None
    line = f"plan     {brief(outcome.candidate, answer)}, about {_ms(plan.predicted.step_ms)} a step"
    others = (other for other in answer.ranked if _kind(other) != _kind(outcome))
    if (other := next(others, None)) is not None:
        gap = other.score - outcome.score
        difference = (
            "as fast within the noise" if other in answer.ties else f"{'+' if gap >= 0 else '-'}{_ms(abs(gap))}"
        )
        line += f" (next best: {brief(other.candidate, answer)}, {difference})"
    lines = [line]
    if way is not None:
        lines += [f"         {text}" for text in _worth_lines(way)]
        plain = answer.baselines.get(DATA_PARALLEL)
        if plain is not None:
            baseline = plain.step_ms + way.plain_ms - max(way.step_ms)
            cost = f"planning took {seconds:.1f} s{f', {timed} plans were run' * (timed > 0)}"
            lines.append(f"         {cost}; without it a step takes about {_ms(baseline)}{_DETAILS}")
    choice = answer.evaluator.space.codec_choices[outcome.candidate.codec]
    if (outer := choice.outer) is not None:
        exchange_ms = outer.every * sum(answer.evaluator.outer(outcome.candidate)[:2])
        lines.append(
            f"         an exchange takes about {_ms(exchange_ms)}, so it is made every {outer.every} steps only"
        )
        lines.append(f"         expected, as ResNet-18 on digits showed: {outer.told()}")
    lines += [f"         {line}" for line in proof_lines(choice.codecs.values())]
    if fewer := _fewer_workers(answer, inputs):
        lines.append(f"         {fewer}")
    return (*lines, *(f"         {one}" for one in caveats(inputs)))


def _worth_lines(way: Way) -> list[str]:
    """What each way to compute a step was worth."""
    tried = [
        f"{worth.name} {worth.ratio:.2f}x{', chosen' * worth.chosen}" for worth in way.worths if worth.ratio is not None
    ]
    lines = [f"a step takes, with {'; '.join(tried)}"] if tried else []
    return lines + [f"not {worth.name}: {worth.why_not}" for worth in way.worths if worth.why_not]


def _kind(outcome: Outcome) -> tuple[object, ...]:
    """What tells ways to divide the work apart; cuts, placements and schedules are details of it."""
    one = outcome.candidate
    layout = one.layout
    return layout.stages, layout.replicas, layout.lanes_each, one.micro_batches, one.codec, one.variant


def _ms(time: float) -> str:
    return f"{time:,.0f} ms" if time >= 10 else f"{time:,.1f} ms"


def _fewer_workers(answer: Answer, inputs: PlannerInputs) -> str:
    """Whether fewer workers than were started would be faster, beyond the noise; empty where they would not.

    On a CPU they are predicted with their own cores alone, though they would get those of the others as well.
    """
    from hybridpar.planner.search import find_plan

    fixed = inputs.fixed
    if inputs.workers == 1 or fixed.replicas is not None or fixed.stages not in (None, 1):
        return ""
    library = answer.evaluator.space.library
    fewer = find_plan(replace(inputs, fixed=replace(fixed, workers=None)), library=library)
    candidate, step = fewer.chosen.candidate, fewer.chosen.step_ms
    workers, count = candidate.layout.workers, candidate.micro_batches
    if workers >= inputs.workers or step * (1 + answer.noise) >= answer.chosen.step_ms:
        return ""
    same = f" --micro-batches {count}" if inputs.profile.batch_norm and count > 1 else ""
    return f"fewer would be faster: {_ms(step)} a step with --workers {workers}{same}"
