"""Times pipeline parallelism against `torch.distributed.pipelining`: the same stages under the same schedule.

Two ranks on one machine, torch over gloo, hybridpar over gloo and over the shared memory that it takes by default.
What is compared has stock BatchNorm, as torch's side has it. What users of hybridpar get by default pools the
statistics of all micro-batches, which is more work; it has a row of its own.
"""

from __future__ import annotations

from benchmarks.pipeline.methods import WORK, Method, Ours, Theirs, cut_on_main, describe, require_same_loss
from benchmarks.rig.paired import paired
from benchmarks.rig.rank import link, process_group
from benchmarks.rig.rows import row, write_rows
from benchmarks.rig.task import TINY, Setting
from hybridpar.comm.world import World
from hybridpar.config import TrainConfig

SETTINGS = (Setting("resnet18", 112, 32), Setting("mobilenet_v2", 112, 32))
QUICK = (Setting(TINY, 16, 16),)
AT_MOST = 1.0
POOLED = "pooled BatchNorm"


def measure(quick: bool, rounds: int, keep_busy: bool, output: str | None) -> None:
    """Measure every setting in this rank, and write the rows in rank 0."""
    micro_batches = 4 if quick else 8
    with process_group() as (rank, _):
        worlds = {"gloo": World.join(shared_memory=False), "shared memory": World.join()}
        for setting in QUICK if quick else SETTINGS:
            plan = cut_on_main(setting, worlds["gloo"], micro_batches)
            # The torch method that each method is compared with.
            methods: dict[str, Method] = {}
            baselines: dict[str, str] = {}

            def add(name: str, method: Method, theirs: str) -> None:
                methods[name], baselines[name] = method, f"torch {theirs}"  # noqa: B023

            for schedule, theirs in (("1f1b", "Schedule1F1B"), ("gpipe", "ScheduleGPipe")):
                add(f"torch {theirs}", Theirs(setting, plan, micro_batches, theirs, rank), theirs)
                config = TrainConfig(schedule=schedule, micro_batches=micro_batches, batch_norm="local")
                for name, world in worlds.items():
                    add(f"hybridpar {schedule}, {name}", Ours(setting, plan, world, config), theirs)
            config = TrainConfig(schedule="1f1b", micro_batches=micro_batches)
            ours = Ours(setting, plan, worlds["shared memory"], config)
            add(f"hybridpar 1f1b, shared memory, {POOLED}", ours, "Schedule1F1B")
            extra = {
                "work": WORK,
                "loss": require_same_loss(methods),
                "stage_ms": [stage.ms for stage in plan.partition.stages],
                "cut_bytes": [stage.cut_bytes for stage in plan.partition.stages],
            }
            result = paired({name: method.step for name, method in methods.items()}, rounds, keep_busy=keep_busy)
            for method in methods.values():
                method.close()
            if rank == 0:
                common = {"claim": "pipeline", "setting": describe(setting, micro_batches), "link": link()}
                targets = {name: None if POOLED in name else AT_MOST for name in methods}
                rows = [
                    row(result, name, baselines[name], **common, ranks=2, target=target, extra=extra)
                    for name, target in targets.items()
                ]
                write_rows(rows, output)
        for world in worlds.values():
            world.close()
