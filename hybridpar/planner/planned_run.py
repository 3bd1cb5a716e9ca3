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
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor, nn

from hybridpar.comm.world import World
from hybridpar.compress.policy import agree_on_policy, is_auto
from hybridpar.config import TrainConfig
from hybridpar.errors import HybridparError, PlanError, SyncError, UsageError
from hybridpar.models import model_fingerprint, parameter_count
from hybridpar.models.deferred import is_deferred
from hybridpar.models.state_dicts import require_saved, require_unwrapped
from hybridpar.optim.build import state_copies
from hybridpar.plan import ModelInfo, Plan, ResolvedPlan, parse_plan, read_plan
from hybridpar.planner.fixed import (
    decided_options,
    fixed_by,
    needs_replicas,
    needs_stages,
    not_modelled,
)
from hybridpar.planner.resolve import cut_for_recompute, resolve
from hybridpar.schedule.layout import Layout

if TYPE_CHECKING:  # a run without a search does not import the planner
    from hybridpar.planner.trials import OpenTrial

_log = logging.getLogger(__name__)

#: Options that decide what samples and weights are, and nothing that a plan says.
_NO_KNOBS = frozenset(field.name for field in fields(TrainConfig)) - {
    *("replicas", "micro_batches", "schedule", "recompute", "offload", "placement", "compress"),
    *("memory_format", "kernels", "amp", "compile", "cuda_graph", "stages", "sync"),
}


#: What is followed, if anything, and what to tell of it at the start.
_Followed = tuple[Plan | None, tuple[str, ...]]


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
    stored: Path | None = None,
    decided: Collection[str] | None = None,
    plan: Plan | None = None,
    announce: Callable[[str], None] = lambda text: None,
    open_trial: OpenTrial | None = None,
) -> PlannedRun:
    """Find the plan of a run; a collective.

    Ways to compute a step and the best plans are timed by steps that `open_trial` makes; without it none is searched.
    """
    config = cut_for_recompute(config, world.size)
    # A script's own loop decides what there is to exchange; so does the plan of a run that is resumed, or of a file.
    named = decided_options(config) if decided is None and stored is None else frozenset()
    if config.plan_file is not None:
        named &= config.given or frozenset()
    decided, insists = decided_options(config) if decided is None else decided, "plan" in (config.given or ())
    names = [path for path, _ in model.named_parameters()]
    agree_on_policy(config.compress, names, world, config.fidelity)
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
    choice: _Followed = None, ()
    if plan is None and config.chooses:
        from hybridpar.planner.codecs import other_types

        if why := other_types(model):
            config, choice = replace(config, compress="none"), (None, (f"auto     none: {why}",))
    if plan is not None:
        choice = _follow_given(model, config, world, plan, decided, name, sample_shape)
    elif not config.searches:
        pass
    elif stored is not None:
        stored_text, problem = world.from_main(lambda: _stored_plan(stored))
        if stored_text is not None:
            choice = _follow_stored(model, config, world, parse_plan(json.loads(stored_text)), decided)
        elif problem:
            choice = _unplanned(f"that of the run cannot be read, so its options decide: {problem}")
    elif open_trial is None:
        choice = _unplanned("no worker holds all of the model to measure it") if insists else choice
    elif why := _not_worth(sample_shape, steps):
        choice = _unplanned(why) if insists or None not in (sample_shape, steps) else choice
    elif option := not_modelled(config):
        choice = _unplanned(f"no prediction knows {option}")
    else:
        from hybridpar.models.state import same_random
        from hybridpar.planner.decide import decide_plan
        from hybridpar.planner.inputs import Question

        fixed = fixed_by(config, decided, world.size, names, named)
        question = Question(name, tuple(sample_shape or ()), config, fixed, frozenset(decided), steps)
        with same_random([world.device.index or 0] if world.device.type == "cuda" else []):
            try:
                decision = decide_plan(model, world, question, open_trial, announce)
                choice = decision.plan, (*choice[1], *decision.lines)
            except SyncError:
                raise
            except HybridparError as error:
                choice = None, (*choice[1], *_unplanned(error.what)[1])
    followed, lines = choice
    resolved = resolve(config, world.size, followed, decided, model=info, device=world.device.type)
    _require_effect(config, named, world.size, resolved.layout)
    if is_auto(resolved.sync.codec):  # there was nothing to search with
        from hybridpar.planner.codecs import choose_codecs

        how = config.fidelity, config.exchange.bucket_bytes, resolved.layout.replicas
        codec, chosen = choose_codecs(model, world, *how)
        resolved, lines = resolved.with_codec(codec), (*lines, *chosen)
    return PlannedRun(resolved, lines)


def _require_effect(config: TrainConfig, named: Collection[str], workers: int, layout: Layout | None = None) -> None:
    """Refuse a named option that would do nothing."""
    replicas = workers if layout is None else layout.replicas
    if replicas == 1 and (option := needs_replicas(config, named)):
        raise UsageError(
            f"{option} has no effect with one replica on {workers} worker(s)",
            "It acts on what replicas of the model exchange, and one replica exchanges nothing.",
            f"Leave it out, or start more workers: --nproc {2 * workers}."
            if workers == 1
            else f"Leave it out, or ask for more replicas: --replicas 2 or --nproc {2 * workers}.",
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
    config = cut_for_recompute(config, world.size)
    asked, decided = config, decided_options(config)
    if config.plan_file is None and plan is None:
        replicas = resolve(config, world.size).layout.replicas
        samples = config.samples_per_step if example is None else example.shape[0] * replicas * config.micro_batches
        asked = replace(config, replicas=replicas, batch_size=samples)
        # Between two exchanges of an outer loop the workers' models differ, which a script would have to know.
        decided |= {"stages", "replicas", "micro_batches", "sync"}
    planned = plan_run(
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
    for line in planned.lines if world.is_main else ():
        _log.info(line)
    return planned


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
    fingerprint_here = "unreadable" if plan is None else hashlib.sha256(plan.to_json().encode()).hexdigest()[:12]
    everyone = [str(answer) for answer in world.gather(fingerprint_here)]
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


def _follow_given(
    model: nn.Module,
    config: TrainConfig,
    world: World,
    plan: Plan,
    decided: Collection[str],
    name: str,
    sample_shape: Sequence[int] | None,
) -> _Followed:
    from hybridpar.partition.planning import require_model
    from hybridpar.planner.inputs import check_made_for
    from hybridpar.planner.links import measure_cluster

    require_model(plan, model, name)
    if plan.inputs is not None:
        check_made_for(plan, measure_cluster(world))
    followed, note = _as_followed(config, plan, decided, world.size, sample_shape)
    origin = f"from {config.plan_file}" if config.plan_file is not None else "as given"
    return followed, (f"plan     {origin}{note}",)


def _follow_stored(
    model: nn.Module, config: TrainConfig, world: World, plan: Plan, decided: Collection[str]
) -> _Followed:
    """Go on by the plan of the run; one that does not fit any more is left, and none is made in its place."""
    count = len(plan.partition.stages)
    if plan.workers != world.size:
        return _unplanned(f"the run's own plan is for {plan.workers} worker(s), and here are {world.size}")
    if "stages" in decided and config.stages != count:
        return _unplanned(f"--stages {config.stages} is not what the run's own plan says")
    if count > 1:
        from hybridpar.partition.planning import require_model

        require_model(plan, model, plan.model.name)
    followed, note = _as_followed(config, plan, decided, world.size)
    return followed, (f"plan     as the run began with, not searched for again{note}",)


def _as_followed(
    config: TrainConfig, plan: Plan, decided: Collection[str], workers: int, shape: Sequence[int] | None = None
) -> tuple[Plan, str]:
    """The plan, without its prediction where that does not hold here, and what to say of it."""
    agrees = False  # the user decided nothing otherwise than the plan says
    with contextlib.suppress(HybridparError):  # raised where it is resolved for good, if options are wrong
        agrees = resolve(config, workers, plan, decided) == resolve(config, workers, plan, _NO_KNOBS & set(decided))
    if not agrees:
        note = ""
    elif plan.inputs is not None and plan.is_edited:
        note = ", which was edited: what was predicted does not hold"
    elif plan.inputs is not None and (other := _made_for_other(config, plan, shape)):
        note = f", which was made for {other}: its prediction does not hold here"
    else:
        step_ms = None if plan.predicted is None else plan.predicted.step_ms
        return plan, "" if step_ms is None else f", predicted {step_ms:,.1f} ms a step"
    return plan.model_copy(update={"inputs": None, "predicted": None, "checksum": None}), note


def _made_for_other(config: TrainConfig, plan: Plan, sample_shape: Sequence[int] | None) -> str:
    """What a plan was searched for and this run is not, so that it takes other steps than were predicted."""
    from hybridpar.planner.inputs import inputs_of_plan

    inputs = inputs_of_plan(plan)
    differences = []
    if inputs.batch != config.samples_per_step:
        differences.append(f"a batch of {inputs.batch}, not {config.samples_per_step}")
    if sample_shape is not None and plan.model.input and tuple(plan.model.input) != tuple(sample_shape):
        shapes = ("x".join(map(str, shape)) for shape in (plan.model.input, sample_shape))
        differences.append("samples of {}, not {}".format(*shapes))
    if inputs.optimizer_copies != state_copies(config):
        differences.append(
            f"an optimizer with {inputs.optimizer_copies} tensors per parameter, not {state_copies(config)}"
        )
    return ", ".join(differences)


def _stored_plan(path: Path) -> tuple[str | None, str]:
    """A run's plan, where it was laid out by one; and why it cannot be read, where it is there."""
    try:
        plan = read_plan(path)
    except HybridparError as error:
        return None, error.what if path.exists() else ""
    return plan.to_json() if plan.checksum is not None and plan.placement is not None else None, ""


def _not_worth(sample_shape: Sequence[int] | None, steps: int | None) -> str:
    from hybridpar.planner.probes import LEAST_STEPS

    if sample_shape is None:
        return "there is no example of inputs, in floating point, to measure with"
    if steps is None:
        return "the length of the run is not known"
    if steps < LEAST_STEPS:
        return f"a run of {steps} steps is over before planning pays, which is from {LEAST_STEPS} on"
    return ""


def _unplanned(why: str) -> tuple[None, tuple[str, ...]]:
    return None, (f"plan     none: {why}",)
