"""Compares predicted with measured step times of many plans, and the chosen plan with the best one.

Plans over the whole predicted range take turns, torch's DDP among them, each alone in its processes for some steps as
in a training. From the same steps come two tables: the error of every prediction, and how much slower the chosen plan
is than the best one.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from benchmarks.pipeline.checks import Check, write_checks
from benchmarks.planner.common import (
    CLASSES,
    QUICK,
    RATE,
    SETTINGS,
    Drawn,
    ForeignLoad,
    Reference,
    Setting,
    drawn_plans,
    make_trial,
    measured_inputs,
)
from benchmarks.planner.regret import regret_rows
from benchmarks.rig.rank import link, process_group
from hybridpar.comm.world import World
from hybridpar.config import TrainConfig
from hybridpar.models.random_state import give_back_memory
from hybridpar.planner.inputs import PlannerInputs
from hybridpar.planner.trials import FIRST_STEPS, random_batch
from hybridpar.planner.ways import Way, compute_of_way
from hybridpar.train.trial import Trial

DDP = "torch's DDP"
#: Visits of every plan, and seconds of one after its first steps.
LEAST_VISITS, MOST_VISITS, VISIT_SECONDS = 2, 4, 2.5


def measure(
    models: list[str],
    plans: int,
    rounds: int,
    seconds: float,
    quick: bool,
    tables: dict[str, str | None],
) -> None:
    """Predict and measure plans of every model on this link; rank 0 writes the rows.

    Args:
        models: Names of settings.
        plans: How many of each, at least.
        rounds: Steps of each visit of a plan.
        seconds: After which no new round of visits begins.
        quick: A small net.
        tables: Files of the tables `predicted` and `regret`; None prints only.
    """
    with process_group(timeout=900) as (rank, _):
        world = World.join(lanes=2, timeout=900)
        for setting in [QUICK] if quick else [SETTINGS[name] for name in models]:
            reference = Reference(setting, world)
            inputs, way = measured_inputs(setting, world, "lossy")

            def draw(
                inputs: PlannerInputs = inputs, way: Way | None = way
            ) -> tuple[list[tuple[Any, ...]], dict[str, str]]:
                drawn, chosen = drawn_plans(inputs, plans, compute_of_way(TrainConfig(), way))
                return [astuple(one) for one in drawn], chosen

            told, chosen = world.from_main(draw)
            drawn = [Drawn(*one) for one in told]
            with ForeignLoad(world) as load:
                times, slower = measured(setting, drawn, world, rounds, seconds, reference)
            if rank == 0:
                rows = [error_row(setting, one, times[one.name], load.told, slower[one.name]) for one in drawn]
                write_checks(rows, tables["predicted"], "predicted")
                regrets = regret_rows(setting, drawn, chosen, times, times[DDP], load.told)
                write_checks(regrets, tables["regret"], "regret")
        world.close()


def measured(
    setting: Setting, drawn: list[Drawn], world: World, rounds: int, seconds: float, reference: Reference
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Steps of plans and of DDP, which take turns; a collective.

    Each is visited as often as there is time for, at least twice, in changing order; nothing else lives in the
    processes meanwhile.

    Args:
        setting: What is trained.
        drawn: The plans.
        world: All workers of the job.
        rounds: Steps of a visit that count, at most; at least three do.
        seconds: No new round of visits begins later than this.
        reference: Tells how fast the machine is.

    Returns:
        The median milliseconds of every visit by name, and how much slower the machine was then than before.
    """
    made: dict[str, Callable[[], Running]] = {
        one.name: lambda one=one: planned(make_trial(setting, one.plan, world))  # type: ignore[misc]
        for one in drawn
    }
    made[DDP] = lambda: Running(_ddp(setting, world), lambda: None)
    speeds: dict[str, list[float]] = {name: [] for name in made}
    times = in_turns(made, world, rounds, seconds, after=lambda name: speeds[name].append(reference.slower()))
    return times, {name: statistics.median(own) for name, own in speeds.items()}


@dataclass(frozen=True)
class Running:
    """Something that takes steps.

    Attributes:
        step: Takes one, to its end.
        close: Ends it.
        interval: Steps that are taken and timed together: from one exchange of an outer loop to the next.
    """

    step: Callable[[], object]
    close: Callable[[], object]
    interval: int = 1


def planned(trial: Trial) -> Running:
    """A plan that is tried."""
    return Running(trial.step, trial.close, trial.interval)


def in_turns(
    made: Mapping[str, Callable[[], Running]],
    world: World,
    rounds: int,
    seconds: float,
    after: Callable[[str], object] = lambda name: None,
) -> dict[str, list[float]]:
    """Steps of several that take turns, each alone in its turn; a collective.

    Args:
        made: Makes each, by name.
        world: All workers of the job.
        rounds: Steps of a visit that count, at most; at least three do.
        seconds: No new round of visits begins later than this.
        after: Called with the name after every visit.

    Returns:
        The milliseconds of a step in every visit by name: of a worker the median over steps, and of these the most.
    """
    times: dict[str, list[float]] = {name: [] for name in made}
    begin = time.perf_counter()
    for number in range(MOST_VISITS):
        late: list[bool] = world.gather(time.perf_counter() - begin > seconds)  # type: ignore[assignment]
        if number >= LEAST_VISITS and any(late):
            break
        for name in made if number % 2 == 0 else [*reversed([*made])]:
            give_back_memory()  # a training begins with an empty heap
            running = made[name]()
            try:
                times[name].append(_visit(running, world, rounds))
            finally:
                running.close()
            del running
            after(name)
    return times


def _visit(running: Running, world: World, rounds: int) -> float:
    """Milliseconds of a step, of the slowest worker; a collective.

    As in a training, workers wait for what they need of each other and for nothing else between steps.
    """

    def took() -> float:
        began = time.perf_counter()
        for _ in range(running.interval):
            running.step()
        return 1e3 * (time.perf_counter() - began) / running.interval

    world.barrier()
    first: list[float] = world.gather([took() for _ in range(FIRST_STEPS)][-1])  # type: ignore[assignment]
    count = max(3, min(rounds, int(1e3 * VISIT_SECONDS / max(first) / running.interval)))
    told: list[float] = world.gather(statistics.median(took() for _ in range(count)))  # type: ignore[assignment]
    return max(told)


def _ddp(setting: Setting, world: World) -> Callable[[], None]:
    """A step of DDP in float32, as its documentation sets it up."""
    images = random_batch((3, setting.side, setting.side), setting.batch, world.device)
    targets = torch.arange(setting.batch, device=world.device) % CLASSES
    mine = images.tensor_split(world.size)[world.rank], targets.tensor_split(world.size)[world.rank]
    model = DistributedDataParallel(setting.build())
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9, fused=True)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(mine[0]), mine[1]).backward()
        optimizer.step()

    return step


def error_row(setting: Setting, one: Drawn, times: list[float], load: str, slower: float | None = None) -> Check:
    """The error of a plan: what was predicted over the median that was measured, less one.

    Args:
        setting: What is trained.
        one: The plan.
        times: Milliseconds of its steps, or of visits.
        load: How busy the machine was otherwise, in words.
        slower: How much slower the machine was than when it was measured for the prediction; told, and not corrected
            for. None where it was not measured.
    """
    real = statistics.median(times)
    speed = "" if slower is None else f"machine {slower:.3f} times as slow; "
    errors = sorted(one.predicted_ms / time - 1 for time in times)
    return Check(
        setting=str(setting),
        link=link(),
        what=f"error of the predicted step: {one.name}",
        value=one.predicted_ms / real - 1,
        low=errors[0],
        high=errors[-1],
        extra=f"predicted {one.predicted_ms:.1f} ms (place {one.place}), measured {real:.1f} ms; {speed}{load}",
    )
