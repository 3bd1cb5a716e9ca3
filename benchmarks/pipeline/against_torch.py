"""Times pipeline parallelism against `torch.distributed.pipelining`: the same stages under the same schedule.

Two ranks on one machine, torch over gloo, hybridpar over gloo and over the shared memory that it takes by default.
What is compared has stock BatchNorm, as torch's side has it. What users of hybridpar get by default pools the
statistics of all micro-batches, which is more work; it has a row of its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.pipeline.methods import Method, Ours, Theirs, require_same_loss
from benchmarks.pipeline.setups import TINY, WORK, Setting, cut_on_main
from benchmarks.rig.paired import FOREIGN_LOAD, paired
from benchmarks.rig.rank import link, process_group
from benchmarks.rig.rows import Row, row
from benchmarks.rig.table import append_rows, check_csv, print_rows
from hybridpar.comm.world import World
from hybridpar.plan import Plan
from hybridpar.schedule.layout import Layout
from hybridpar.sync.options import SyncOptions

SETTINGS = (Setting("resnet18", 112, 32, 8), Setting("mobilenet_v2", 112, 32, 8))
QUICK = (Setting(TINY, 16, 16, 4),)

SAME_AT_MOST = 1.0
#: Stock BatchNorm, so that both sides do the same work.
STOCK = SyncOptions(pool_batch_norm=False)
POOLED = "pooled BatchNorm"


def measure(quick: bool, rounds: int, keep_busy: bool, output: str | None, models: list[str]) -> None:
    """Measure every setting in this rank, and write the rows in rank 0."""
    with process_group() as (rank, _):
        worlds = {"gloo": World.join(lanes=1, shared_memory=False), "": World.join(lanes=1)}
        for setting in QUICK if quick else SETTINGS:
            if models and setting.model not in models:
                continue
            plan = cut_on_main(setting, Layout.dealt(2, 2), worlds[""])
            limit = float("inf") if keep_busy else FOREIGN_LOAD
            rows = _same(setting, plan, worlds, rank, rounds, limit)
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
