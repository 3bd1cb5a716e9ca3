"""Times two pipeline lanes in one process against one thread that runs the same micro-batches, on two cores.

Micro-batches have a cost of their own, so the table also has the whole batch at once, on one and on two intra-op
threads, for users whose memory allows it.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from benchmarks.pipeline.methods import ByHand, Method, Ours, require_same_loss
from benchmarks.pipeline.setups import TINY, WORK, Setting, cut_on_main, problem
from benchmarks.rig.paired import FOREIGN_LOAD, paired
from benchmarks.rig.rank import process_group
from benchmarks.rig.rows import row
from benchmarks.rig.table import append_rows, check_csv, print_rows
from hybridpar.comm.world import World

AT_MOST = 1 / 1.4
SETTINGS = tuple(Setting("resnet18", side, batch, count) for side, batch in ((64, 16), (112, 32)) for count in (8, 4))
QUICK = (Setting(TINY, 16, 8, 4),)


def measure(quick: bool, rounds: int, keep_busy: bool, output: str | None) -> None:
    """Measure every setting in this process, and write the rows."""
    with process_group():
        world = World()
        for setting in QUICK if quick else SETTINGS:
            count = setting.micro_batches
            plans = {
                stages: cut_on_main(setting, problem(stages, 1, kind, lanes=2, micro_batches=count), world)
                for stages, kind in ((2, "linear"), (4, "loop"))
            }
            whole = replace(setting, micro_batches=1)
            parts: dict[str, Method] = {
                "micro-batches, 1 thread": ByHand(setting, 1),
                "micro-batches, 2 intra-op threads": ByHand(setting, 2),
                "hybridpar, 2 lanes, 2 stages, 1f1b": Ours(setting, plans[2], world, "1f1b"),
                "hybridpar, 2 lanes, 4 stages, greedy": Ours(setting, plans[4], world, "greedy"),
            }
            parts["whole batch, 1 thread"] = ByHand(whole, 1)
            parts["whole batch, 2 intra-op threads"] = ByHand(whole, 2)
            # On a busy machine intra-op threads spin for each other, and a step takes ten times as long.
            methods = {name: method for name, method in parts.items() if not (quick and "intra-op" in name)}
            require_same_loss({name: method for name, method in methods.items() if "whole" not in name})
            limit = float("inf") if keep_busy else FOREIGN_LOAD
            result = paired({name: method.step for name, method in methods.items()}, rounds, foreign_load=limit)
            rows = []
            for baseline in methods:
                if baseline.startswith("hybridpar"):
                    continue
                for name in methods:
                    ours = name.startswith("hybridpar")
                    if name != baseline and not ours:
                        continue
                    promised = ours and baseline == "micro-batches, 1 thread"
                    rows.append(
                        row(
                            result,
                            name,
                            baseline,
                            claim="pipeline",
                            setting=str(setting),
                            target=AT_MOST if promised else None,
                            extra={"work": WORK, "stage_ms": [one.ms for one in plans[2].partition.stages]},
                        )
                    )
            for method in methods.values():
                method.close()
            print_rows(rows)
            if output is not None:
                append_rows(Path(output), rows)
                check_csv(Path(output))
