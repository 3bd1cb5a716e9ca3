"""Times pipeline parallelism against `torch.distributed.pipelining`, with every schedule that it has.

Two ranks on one machine, torch over gloo, hybridpar over gloo and over the shared memory that it takes by default.
First the same two stages under the same schedule; then the best that each of the two can do. The best are found in two
short runs, alike for both sides, and measured again for the table, together with torch's 1F1B.

What is compared has stock BatchNorm, as torch's side has it. What users of hybridpar get by default pools the
statistics of all micro-batches, which is more work; it has rows of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.pipeline.methods import SCHEDULES_OF_TORCH, Method, Ours, Theirs, fastest, require_same_loss
from benchmarks.pipeline.setups import TINY, WORK, Setting, cut_on_main, problem
from benchmarks.rig.paired import FOREIGN_LOAD, paired
from benchmarks.rig.rank import link, process_group
from benchmarks.rig.rows import Row, row
from benchmarks.rig.table import append_rows, check_csv, print_rows
from hybridpar.comm.world import World
from hybridpar.plan import Plan
from hybridpar.sync.options import SyncOptions

SETTINGS = (Setting("resnet18", 112, 32, 8), Setting("mobilenet_v2", 112, 32, 8))
QUICK = (Setting(TINY, 16, 16, 4),)

SAME_AT_MOST = 1.0
BEST_OVER_1F1B_AT_MOST = 0.96
BEST_OVER_BEST_AT_MOST = 1.0
#: Stock BatchNorm, so that both sides do the same work.
STOCK = SyncOptions(pool_batch_norm=False)
POOLED = "pooled BatchNorm"
#: In a first run both sides choose so many candidates, in a second one their best of them.
CANDIDATES = 3
ROUNDS_TO_CHOOSE = (4, 12)
SIDES = ("torch", "hybridpar")

#: Stages and placement that ours is tried with beyond one stage per rank, each with these schedules.
LAYOUTS = ((2, "linear"), (4, "loop"), (4, "v"), (6, "loop"))
SCHEDULES = {"linear": ("1f1b", "gpipe", "greedy"), "loop": ("interleaved", "greedy"), "v": ("greedy",)}


def measure(quick: bool, rounds: int, keep_busy: bool, output: str | None, models: list[str]) -> None:
    """Measure every setting in this rank, and write the rows in rank 0."""
    with process_group() as (rank, _):
        worlds = {"gloo": World.join(lanes=1, shared_memory=False), "": World.join(lanes=1)}
        for setting in QUICK if quick else SETTINGS:
            if models and setting.model not in models:
                continue
            count = setting.micro_batches
            plans = {
                (stages, kind): cut_on_main(setting, problem(stages, 2, kind, micro_batches=count), worlds[""])
                for stages, kind in LAYOUTS
            }
            limit = float("inf") if keep_busy else FOREIGN_LOAD
            rows = _same(setting, plans[2, "linear"], worlds, rank, rounds, limit)
            rows += _best(setting, plans, worlds, rank, rounds, limit)
            if rank == 0:
                print_rows(rows)
                if output is not None:
                    append_rows(Path(output), rows)
                    check_csv(Path(output))
        for world in worlds.values():
            world.close()


def _same(setting: Setting, plan: Plan, worlds: dict[str, World], rank: int, rounds: int, limit: float) -> list[Row]:
    """The same stages under the same schedule."""
    methods: dict[str, Method] = {}
    for ours, theirs in (("1f1b", "Schedule1F1B"), ("gpipe", "ScheduleGPipe")):
        methods[f"torch {theirs}"] = Theirs(setting, plan, theirs, rank)
        for kind, world in worlds.items():
            methods[f"hybridpar {ours}, {kind or 'shared memory'}"] = Ours(setting, plan, world, ours, sync=STOCK)
    methods[f"hybridpar 1f1b, shared memory, {POOLED}"] = Ours(setting, plan, worlds[""], "1f1b")
    loss = require_same_loss(methods)
    result = paired({name: method.step for name, method in methods.items()}, rounds, foreign_load=limit)
    notes = _notes(methods, plan) | {"loss": loss}
    _close(methods)
    rows = []
    for name in methods:
        baseline = "torch ScheduleGPipe" if "gpipe" in name.lower() else "torch Schedule1F1B"
        target = None if name.startswith("torch") or POOLED in name else SAME_AT_MOST
        rows.append(_row(result, name, baseline, setting, target, notes | _own_notes(methods[name])))
    return rows


def _best(
    setting: Setting, plans: dict[tuple[int, str], Plan], worlds: dict[str, World], rank: int, rounds: int, limit: float
) -> list[Row]:
    """The best of ours against torch's 1F1B and against the best of torch's."""
    makers: dict[str, Callable[[], Method]] = {}
    for name, layout in SCHEDULES_OF_TORCH.items():
        makers[f"torch {name}"] = partial(Theirs, setting, plans[layout], name, rank)
    for layout in LAYOUTS:
        for schedule in SCHEDULES[layout[1]]:
            key = f"hybridpar {schedule}, {layout[0]} stages, {layout[1]}"
            makers[key] = partial(Ours, setting, plans[layout], worlds[""], schedule, sync=STOCK)
    methods = {name: make() for name, make in makers.items()}
    require_same_loss(methods)
    steps = {name: method.step for name, method in methods.items()}
    medians = fastest(steps, ROUNDS_TO_CHOOSE[0])
    few = [name for side in SIDES for name in _ranked(medians, side)[:CANDIDATES]]
    again = fastest({name: steps[name] for name in few}, ROUNDS_TO_CHOOSE[1])
    theirs, ours = (_ranked(again, side)[0] for side in SIDES)
    chosen = {name: methods.pop(name) for name in dict.fromkeys(("torch Schedule1F1B", theirs, ours))}
    _close(methods)
    layout = next(one for one in LAYOUTS if f"{one[0]} stages, {one[1]}" in ours)
    schedule = next(one for one in SCHEDULES[layout[1]] if ours.startswith(f"hybridpar {one},"))
    chosen[f"{ours}, {POOLED}"] = Ours(setting, plans[layout], worlds[""], schedule)
    chosen[f"{ours}, {POOLED}"].step()
    result = paired({name: method.step for name, method in chosen.items()}, rounds, foreign_load=limit)
    tried, tried_again = (
        {name: round(value, 1) for name, value in sorted(found.items(), key=lambda item: item[1])}
        for found in (medians, again)
    )
    notes = {"tried_ms": tried, "tried_again_ms": tried_again, **_notes(chosen, plans[layout])}
    _close(chosen)
    rows = [
        _row(result, name, "torch Schedule1F1B", setting, BEST_OVER_1F1B_AT_MOST if name == ours else None, notes)
        for name in chosen
    ]
    if theirs != "torch Schedule1F1B":
        rows.append(_row(result, theirs, theirs, setting, None, notes))
    rows.append(_row(result, ours, theirs, setting, BEST_OVER_BEST_AT_MOST, notes))
    return rows


def _ranked(medians: dict[str, float], side: str) -> list[str]:
    """The methods of a side, the fastest first."""
    return sorted((name for name in medians if name.startswith(side)), key=medians.__getitem__)


def _row(result: Any, name: str, baseline: str, setting: Setting, target: float | None, notes: dict[str, Any]) -> Row:
    return row(
        result,
        name,
        baseline,
        claim="pipeline",
        setting=str(setting),
        link=link(),
        ranks=2,
        target=None if name == baseline else target,
        extra=notes,
    )


def _notes(methods: dict[str, Method], plan: Plan) -> dict[str, Any]:
    return {
        "work": WORK,
        "stage_ms": [stage.ms for stage in plan.partition.stages],
        "cut_bytes": [stage.cut_bytes for stage in plan.partition.stages],
    }


def _own_notes(method: Method) -> dict[str, Any]:
    if not isinstance(method, Ours) or method.outcome is None:
        return {}
    return {"guard": True, "bubble": round(method.outcome.spans.bubble, 4)}


def _close(methods: dict[str, Method]) -> None:
    for method in methods.values():
        method.close()
