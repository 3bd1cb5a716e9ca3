"""Times the trainer against a hand-written loop (one worker) and DistributedDataParallel (two workers).

Same model, data, optimizer, threads and allocator on both sides. The trainer's guard against non-finite gradients and
its pooled BatchNorm statistics are on, as they are by default; the baselines have neither.

    python -m benchmarks.trainer.main                    # all settings, as root for the shaped link
    python -m benchmarks.trainer.main --links loopback
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.rig.launch import measure_in_ranks, possible_links, run_command
from benchmarks.rig.network import LOOPBACK, Network
from benchmarks.rig.paired import paired
from benchmarks.rig.rank import process_group
from benchmarks.rig.rows import row, write_rows
from benchmarks.rig.task import Loop, Setting
from hybridpar import TrainConfig, Trainer
from hybridpar.comm.world import World

SETTINGS = (Setting("resnet18", 32, 32), Setting("resnet18", 32, 16), Setting("mobilenet_v2", 96, 16))
#: What a step may take over that of a loop by hand on one worker, and over DDP's on two.
ALONE_AT_MOST, DDP_AT_MOST = 1.02, 1.03


@dataclass(frozen=True, kw_only=True)
class Options:
    """Measure the trainer against a loop written by hand and against DDP."""

    links: tuple[str, ...] = (LOOPBACK, "1gbit")
    """Links for two workers; one worker alone is always measured."""
    rounds: int = 30
    """Rounds to keep."""
    output: Path = Path(__file__).parent / "results" / "trainer.csv"
    """Table to add the rows to."""


def main(options: Options) -> None:
    """Start the ranks for every link."""
    for ranks, link in ((1, LOOPBACK), *((2, link) for link in possible_links(options.links))):
        with Network(ranks, link) as network:
            arguments = {"link": "none" if ranks == 1 else link, "rounds": options.rounds, "output": options.output}
            measure_in_ranks(network, "benchmarks.trainer.main", arguments)


def measure(link: str, rounds: int, output: str) -> None:
    """Measure every setting in this rank, and write the rows in rank 0."""
    with process_group() as (rank, ranks):
        for setting in SETTINGS:
            world = World.join(lanes=2) if ranks > 1 else World()
            batch = setting.noise(rank)
            loops, at_most = {"loop by hand": Loop(setting)}, ALONE_AT_MOST
            if ranks > 1:
                views = partial(DistributedDataParallel, gradient_as_bucket_view=True)
                loops = {"ddp": Loop(setting, views), "ddp, buckets apart": Loop(setting, DistributedDataParallel)}
                loops["no sync"], at_most = Loop(setting), DDP_AT_MOST
            baseline = next(iter(loops))
            trainers = {
                name: Trainer(setting.build(), setting.optimizer, nn.CrossEntropyLoss(), config, world=world)
                for name, config in (
                    ("hybridpar", TrainConfig()),
                    ("hybridpar, no guard, local BatchNorm", TrainConfig(guard=False, batch_norm="local")),
                )
            }
            methods: dict[str, Any] = {name: partial(loop.step, *batch) for name, loop in loops.items()}
            methods |= {name: partial(trainer.step, batch) for name, trainer in trainers.items()}
            result = paired(methods, rounds)
            for trainer in trainers.values():
                trainer.close()
            if rank == 0:
                extra = {"transport": world.transport, "optimizer": "SGD, momentum 0.9, fused"}
                common: dict[str, Any] = {"claim": "trainer", "link": link, "ranks": ranks, "extra": extra}
                targets = {name: at_most if name in trainers else None for name in methods}
                write_rows(
                    [
                        row(result, name, baseline, setting=f"{setting} per rank", target=target, **common)
                        for name, target in targets.items()
                    ],
                    output,
                )


if __name__ == "__main__":
    run_command(main, Options)
