"""Times pipeline parallelism against DistributedDataParallel on two ranks.

On a slow link a pipeline can be faster: it sends activations where data parallelism sends all gradients.

Two ranks, the same model and global batch. The baseline is DistributedDataParallel in its fastest documented form:
gradients are views of its buckets, no buffers are broadcast, the graph is static. On the loopback, where both have all
the bandwidth that they can use, the ratio is reported without a target.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from benchmarks.pipeline.methods import Method, Ours
from benchmarks.pipeline.setups import TINY, WORK, Setting, cut_on_main, optimizer_of
from benchmarks.rig.network import bits_per_second
from benchmarks.rig.paired import FOREIGN_LOAD, paired
from benchmarks.rig.rank import link, process_group, sent_bytes
from benchmarks.rig.rows import row
from benchmarks.rig.table import append_rows, check_csv, print_rows
from hybridpar.comm.world import World
from hybridpar.schedule.costs import Link
from hybridpar.schedule.layout import Layout

LINKS = ("100mbit", "loopback")
#: Settings, and what the ratio is promised to be at most on 100 Mbit/s.
SETTINGS = ((Setting("resnet18", 32, 32, 4), 1 / 12), (Setting("resnet18", 112, 32, 4), 0.4))
QUICK = ((Setting(TINY, 16, 16, 2), None),)
SCHEDULES = ("1f1b", "greedy")


class Ddp:
    """DistributedDataParallel on this rank's half of the batch."""

    def __init__(self, setting: Setting, rank: int, ranks: int) -> None:
        self._model = DistributedDataParallel(
            setting.build(), gradient_as_bucket_view=True, broadcast_buffers=False, static_graph=True
        )
        self._optimizer = optimizer_of(self._model)
        self._images, self._labels = setting.data(ranks, rank)
        self._loss = torch.zeros(())

    def step(self) -> None:
        """One step."""
        self._optimizer.zero_grad()
        loss = F.cross_entropy(self._model(self._images), self._labels)
        loss.backward()
        self._optimizer.step()
        self._loss = loss.detach()

    def loss(self) -> float:
        """Mean loss of the batch in the last step. A collective."""
        total = self._loss.double()
        dist.all_reduce(total)
        return float(total) / dist.get_world_size()

    def close(self) -> None:
        """Nothing to end."""


def measure(quick: bool, rounds: int, keep_busy: bool, output: str | None) -> None:
    """Measure every setting in this rank, and write the rows in rank 0."""
    bits = bits_per_second(link())
    wire = Link(0.1, bits / 8) if bits else Link()
    with process_group() as (rank, ranks):
        world = World.join(lanes=1)
        for setting, promised in QUICK if quick else SETTINGS:
            plan = cut_on_main(setting, Layout.dealt(2, 2), world, link_speed=wire.bytes_per_second)
            methods: dict[str, Method] = {"ddp fp32": Ddp(setting, rank, ranks)}
            for schedule in SCHEDULES:
                methods[f"hybridpar {schedule}, 2 stages"] = Ours(setting, plan, world, schedule, link=wire)
            sent: dict[str, int] = {}
            for name, method in methods.items():
                method.step()  # the first step finds shapes and cuts buckets
                method.step()
                dist.barrier()
                before = sent_bytes()
                method.step()
                sent[name] = sent_bytes() - before
            limit = float("inf") if keep_busy else FOREIGN_LOAD
            result = paired({name: method.step for name, method in methods.items()}, rounds, foreign_load=limit)
            for method in methods.values():
                method.close()
            if rank == 0:
                rows = [
                    row(
                        result,
                        name,
                        "ddp fp32",
                        claim="pipeline",
                        setting=f"{setting} (DDP: whole halves of the batch)",
                        link=link(),
                        ranks=ranks,
                        target=promised if bits and name != "ddp fp32" else None,
                        extra={"work": WORK} | ({"sent_bytes_of_rank_0": sent[name]} if bits else {}),
                    )
                    for name in methods
                ]
                print_rows(rows)
                if output is not None:
                    append_rows(Path(output), rows)
                    check_csv(Path(output))
        world.close()
