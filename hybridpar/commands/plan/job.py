"""`hybridpar plan` on several workers: measures the links between them, searches, and can run the best plans."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import nn

from hybridpar.comm.world import World
from hybridpar.commands.plan.partition import ProgressBar
from hybridpar.commands.plan.search import measured_inputs, prepare, report, search
from hybridpar.commands.plan.trials import FIRST_STEPS, Trial, random_batch, time_plans
from hybridpar.config import TrainConfig
from hybridpar.errors import UsageError
from hybridpar.models import build_model, require_trained, seed_everything
from hybridpar.partition.profile_cache import cache_directory
from hybridpar.partition.request import parse_shape
from hybridpar.plan import Plan, parse_plan
from hybridpar.planner.links import measure_cluster
from hybridpar.planner.measure import Together, measure_rates
from hybridpar.planner.record import plan_of
from hybridpar.planner.rehearse import measure_rehearsal
from hybridpar.planner.request import PlanRequest
from hybridpar.planner.step_costs import measure_crowd
from hybridpar.planner.steps import planned_codecs
from hybridpar.planner.verify import finalists, verified
from hybridpar.run.worker import tune_worker

if TYPE_CHECKING:
    from hybridpar.planner.evaluate import Outcome
    from hybridpar.planner.inputs import PlannerInputs
    from hybridpar.planner.search import Answer

#: Seconds for which workers wait for the one that measures the model and searches.
PATIENCE = 3600.0

#: Steps of each finalist, in turns, where there is time for them.
ROUNDS = 15


def run_plan_job(request: PlanRequest) -> int:
    """Search for a plan as one worker of a job, and run the finalists where that was asked for.

    Every worker measures; the first one searches, prints and writes.

    Raises:
        HybridparError: The request cannot be met; on all workers.
    """
    prepare(request)
    world = World.join(lanes=2, timeout=PATIENCE)
    try:
        if request.workers not in (None, world.size):
            raise UsageError(
                f"--workers {request.workers} in a job of {world.size}",
                "The workers that measure are those that are planned for.",
                "Leave it out, or start as many.",
            )
        base = TrainConfig(batch_size=request.batch_size)
        tune_worker(base, world)
        with ProgressBar(quiet=not world.is_main) as bar:
            _plan(request, world, bar, base)
    finally:
        world.close()
    return 0


def _plan(request: PlanRequest, world: World, bar: ProgressBar, base: TrainConfig) -> None:
    seed_everything(request.seed)
    model = build_model(request.model, request.classes).to(world.device)
    require_trained(model, request.model)
    bar.announce("measuring links")
    cluster = measure_cluster(world, fresh=not request.cache)
    shape = parse_shape(request.input)
    each = max(2, min(-(-request.batch_size // world.size), 64))
    images, _ = random_batch(shape, each, request.classes, world.device)
    bar.announce("measuring workers beside each other")
    kept = cache_directory() if request.cache else None
    crowd = measure_crowd(model, images, world, cache=kept)
    bar.announce("timing codecs")
    trained = [one for one in model.parameters() if one.requires_grad]
    # Those of a looser fidelity too: what it would gain is said.
    codecs = planned_codecs("lossy") if world.size > 1 else ()
    rates = measure_rates(codecs, trained, world.size, world.device, world=world, cache=kept)
    bar.announce("running plain data parallelism for some steps")
    took = measure_rehearsal(model, images, world, cluster, copies=request.optimizer_copies, cache=kept)
    found: list[tuple[PlannerInputs, Answer, list[Outcome]]] = []

    def decide() -> list[str]:
        inputs = measured_inputs(request, cluster, bar, Together(crowd, rates, took))
        answer = search(inputs, bar)
        found.append((inputs, answer, finalists(answer, request.verify) if request.verify else []))
        return [plan_of(answer, one).to_json() for one in found[0][2]]

    texts = world.from_main(decide)
    times = _run([parse_plan(json.loads(text)) for text in texts], model, request, world, bar, base) if texts else []

    def tell() -> None:
        inputs, answer, outcomes = found[0]
        report(request, inputs, answer, bar, verified(answer, outcomes, times) if times else None)

    world.from_main(tell)


def _run(
    plans: Sequence[Plan], model: nn.Module, request: PlanRequest, world: World, bar: ProgressBar, base: TrainConfig
) -> list[list[float]]:
    """Milliseconds of the steps of plans, which live side by side and take turns; a collective."""
    shape = parse_shape(request.input)
    images, targets = random_batch(shape, request.batch_size, request.classes, world.device)
    trials: list[Trial] = []
    try:
        for place, plan in enumerate(plans):
            bar.announce(f"starting finalist {place + 1} of {len(plans)}")
            trials.append(Trial(plan, model, images, targets, world, base))
            for _ in range(FIRST_STEPS):
                trials[-1].step()
        bar.announce("running the finalists in turns")
        steps = {str(place): trial.step for place, trial in enumerate(trials)}
        times = time_plans(steps, world, rounds=ROUNDS, seconds=request.verify_seconds)
        return [times[str(place)] for place in range(len(trials))]
    finally:
        for trial in trials:
            trial.close()
