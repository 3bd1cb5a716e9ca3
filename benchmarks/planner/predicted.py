"""Compares predicted with measured step times of many plans, and the chosen plan with the best one.

Plans over the whole predicted range take turns, torch's DDP among them. From the same steps come two tables: the error
of every prediction, and how much slower the chosen plan is than the best one. They are apart because wrong predictions
can still lead to a good choice, and the reverse.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple
from functools import partial
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from benchmarks.planner.common import (
    ON_DIGITS,
    QUICK,
    SETTINGS,
    Drawn,
    Reference,
    drawn_plans,
    make_trial,
    measured_inputs,
)
from benchmarks.planner.turns import Running, in_turns
from benchmarks.rig import load
from benchmarks.rig.checks import Check, check_of, write_checks
from benchmarks.rig.paired import FOREIGN_LOAD, total
from benchmarks.rig.rank import link, process_group
from benchmarks.rig.task import Loop, Setting
from hybridpar.comm.world import World
from hybridpar.config import TrainConfig
from hybridpar.plan import Plan
from hybridpar.planner.ways import compute_of_way

DDP = "torch's DDP"
#: What is promised of the chosen plan: over the best one measured, and over torch's DDP in float32.
REGRET_AT_MOST, DDP_AT_MOST = 1.05, 1.02


def measure(models: list[str], plans: int, rounds: int, seconds: float, quick: bool, tables: dict[str, str]) -> None:
    """Predict and measure plans of every model on this link; rank 0 writes the rows.

    Args:
        models: Names of settings.
        plans: How many of each, at least.
        rounds: Steps of each visit of a plan.
        seconds: After which no new round of visits begins.
        quick: A small net.
        tables: Files of the tables `predicted` and `regret`; without them rows are printed only.
    """
    with process_group(timeout=900) as (rank, _):
        world = World.join(lanes=2, timeout=900)
        for setting in [QUICK] if quick else [(SETTINGS | ON_DIGITS)[name] for name in models]:
            reference = Reference(setting, world)
            drawn, chosen = draw(setting, plans, world)
            made: dict[str, Callable[[], Running]] = {DDP: partial(_ddp, setting, world)}
            made |= {plan.name: partial(_plan, setting, plan.plan, world) for plan in drawn}
            speeds: dict[str, list[float]] = {name: [] for name in made}
            before = load.account()
            times = in_turns(
                made,
                world,
                rounds,
                seconds,
                after=lambda name: speeds[name].append(reference.slower()),  # noqa: B023
            )
            cores = load.foreign_cores(before, load.account(), total)
            busy = f"foreign load {cores:.2f} cores{', loaded' if cores > FOREIGN_LOAD else ''}"
            if rank == 0:
                slower = {name: statistics.median(ratios) for name, ratios in speeds.items()}
                rows = [error_row(setting, plan, times[plan.name], slower[plan.name], busy) for plan in drawn]
                write_checks(rows, tables.get("predicted"), "predicted")
                write_checks(regret_rows(setting, drawn, chosen, times, busy), tables.get("regret"), "regret")
        world.close()


def draw(setting: Setting, plans: int, world: World) -> tuple[list[Drawn], dict[str, str]]:
    """Plans of a setting, drawn by rank 0 from what all workers measured; a collective."""
    inputs, way = measured_inputs(setting, world, "lossy")

    def on_main() -> tuple[list[tuple[Any, ...]], dict[str, str]]:
        compute = compute_of_way(TrainConfig(), way)
        drawn, chosen = drawn_plans(inputs, plans, compute)
        return [astuple(plan) for plan in drawn], chosen

    rows, chosen = world.from_main(on_main)
    return [Drawn(*row) for row in rows], chosen


def _plan(setting: Setting, plan: Plan, world: World) -> Running:
    trial = make_trial(setting, plan, world)
    return Running(trial.step, trial.close, trial.interval)


def _ddp(setting: Setting, world: World) -> Running:
    """DDP in float32, as its documentation sets it up."""
    images, labels = setting.noise()
    part = images.tensor_split(world.size)[world.rank], labels.tensor_split(world.size)[world.rank]
    return Running(partial(Loop(setting, DistributedDataParallel).step, *part))


def error_row(setting: Setting, plan: Drawn, times: Sequence[float], slower: float, busy: str) -> Check:
    """The error of a plan: what was predicted over the median that was measured, less one.

    How much slower the machine was than when it was measured for the prediction is noted, and not corrected for.
    """
    real = statistics.median(times)
    errors = [plan.predicted_ms / time - 1 for time in times]
    return Check(
        setting=str(setting),
        link=link(),
        what=f"error of the predicted step: {plan.name}",
        value=plan.predicted_ms / real - 1,
        low=min(errors),
        high=max(errors),
        extra=f"predicted {plan.predicted_ms:.1f} ms (place {plan.position}), measured {real:.1f} ms; "
        f"machine {slower:.3f} times as slow; {busy}",
    )


def regret_rows(
    setting: Setting,
    drawn: Sequence[Drawn],
    chosen: Mapping[str, str],
    times: Mapping[str, Sequence[float]],
    busy: str,
) -> list[Check]:
    """How much slower the chosen plan is than the best that was measured, and than DDP, for each fidelity.

    A step counts with the steps to the same loss. Ratios are taken between visits of the same round.
    """
    rows = []
    steps = {plan.name: plan.steps for plan in drawn}
    scores = {name: [steps.get(name, 1.0) * time for time in visits] for name, visits in times.items()}
    for fidelity, name in chosen.items():
        allowed = [plan.name for plan in drawn if fidelity in plan.fidelities]
        best = min(allowed, key=lambda other: statistics.median(scores[other]))
        for what, other, at_most, note in (
            ("best", best, REGRET_AT_MOST, f"; best of {len(allowed)}: {best}"),
            ("DDP fp32", DDP, DDP_AT_MOST, ""),
        ):
            ratios = [mine / theirs for mine, theirs in zip(scores[name], scores[other], strict=True)]
            extra = f"{name}{note}; {busy}"
            rows.append(
                check_of(setting, link(), f"chosen over {what}, {fidelity}", ratios, at_most=at_most, extra=extra)
            )
    return rows
