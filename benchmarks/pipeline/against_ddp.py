"""Times pipeline parallelism against DistributedDataParallel on two ranks.

On a slow link a pipeline can be faster: it sends activations where data parallelism sends all gradients.

Two ranks, the same model and global batch. On the loopback, where both have all the bandwidth that they can use, the
ratio is reported without a target.
"""

from __future__ import annotations

from benchmarks.pipeline.methods import WORK, Ddp, Method, Ours, cut_on_main, describe
from benchmarks.rig.network import bits_per_second
from benchmarks.rig.paired import paired
from benchmarks.rig.rank import link, process_group
from benchmarks.rig.rows import row, write_rows
from benchmarks.rig.task import TINY, Setting, bytes_of
from hybridpar.comm.world import World
from hybridpar.config import TrainConfig

LINKS = ("100mbit", "loopback")
#: Settings, and what the ratio is promised to be at most on 100 Mbit/s.
SETTINGS = ((Setting("resnet18", 32, 32), 1 / 12), (Setting("resnet18", 112, 32), 0.4))
QUICK = ((Setting(TINY, 16, 16), None),)
BASELINE = "ddp fp32"


def measure(quick: bool, rounds: int, keep_busy: bool, output: str | None) -> None:
    """Measure every setting in this rank, and write the rows in rank 0."""
    bits, micro_batches = bits_per_second(link()), 2 if quick else 4
    with process_group() as (rank, ranks):
        world = World.join()
        for setting, promised in QUICK if quick else SETTINGS:
            plan = cut_on_main(setting, world, micro_batches, link_speed=bits / 8 if bits else None)
            methods: dict[str, Method] = {BASELINE: Ddp(setting, rank, ranks)}
            for schedule in ("1f1b", "greedy"):
                config = TrainConfig(schedule=schedule, micro_batches=micro_batches)
                methods[f"hybridpar {schedule}, 2 stages"] = Ours(setting, plan, world, config)
            sent = {}
            for name, method in methods.items():
                method.step()  # the first step finds shapes and cuts buckets
                method.step()
                sent[name] = bytes_of(method.step)
            result = paired({name: method.step for name, method in methods.items()}, rounds, keep_busy=keep_busy)
            for method in methods.values():
                method.close()
            if rank == 0:
                words = f"{describe(setting, micro_batches)} (DDP: whole halves of the batch)"
                common = {"claim": "pipeline", "setting": words, "link": link()}
                extras = {name: {"work": WORK, "sent_bytes_of_rank_0": sent[name]} for name in methods}
                target = promised if bits else None
                rows = [
                    row(result, name, BASELINE, **common, ranks=ranks, target=target, extra=extra)
                    for name, extra in extras.items()
                ]
                write_rows(rows, output)
        world.close()
