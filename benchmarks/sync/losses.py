"""Compares the training loss after a hundred steps with every compression method.

Digits at 32x32, 16 per rank, SGD with momentum 0.9 and one learning rate for all: no method is tuned here, which the
accuracy table does. The loss of a step is the mean over the ranks, before the update; what counts is the mean of the
last ten steps, over the seeds. A seed stands for weights, order and augmentation of the images, and what codecs draw.
Nothing here depends on time, so a busy machine does not matter.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from itertools import count, islice
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.rig.checks import Check, write_checks
from benchmarks.rig.rank import link, process_group
from benchmarks.rig.records import read_dicts
from benchmarks.rig.task import TINY, Setting
from benchmarks.sync.methods import Job, make_methods
from hybridpar.config import TrainConfig
from hybridpar.data import TrainBatches, load_dataset

STEPS, LAST = 100, 10
RATE = 0.005


def measure(quick: bool, methods: list[str], seeds: int, output: str | None, peers: str | None) -> None:
    """Train with every method in this rank, and write a row after each in rank 0.

    Args:
        quick: A small net and few steps.
        methods: Their names; those of which the table has a row for this setting are left out.
        seeds: How many seeds.
        output: The table.
        peers: Folder with the peers' checkouts.
    """
    steps, last = (4, 2) if quick else (STEPS, LAST)
    setting = Setting(TINY if quick else "resnet18", 32, 4 if quick else 16, RATE)
    with process_group(timeout=180) as (rank, ranks):
        job = Job(setting, rank, ranks, Path(peers) if peers else None)
        trained = f"{setting} per rank, digits, rate {RATE}, {ranks} ranks, {steps} steps, {seeds} seeds"
        rows = [] if output is None else read_dicts(Path(output))
        known = [{row["what"].removeprefix("loss, ") for row in rows if row["setting"] == trained}]
        dist.broadcast_object_list(known)
        for name in methods:
            if name in known[0]:
                continue
            losses = [_train(name, replace(job, setting=replace(setting, seed=seed)), steps) for seed in range(seeds)]
            if rank == 0 and all(losses):
                ends = [statistics.fmean(run[-last:]) for run in losses]
                early = {str(at): statistics.fmean(run[at - 1] for run in losses) for at in (20, 50) if at <= steps}
                row = Check(
                    setting=trained,
                    link=link(),
                    what=f"loss, {name}",
                    value=statistics.fmean(ends),
                    low=min(ends),
                    high=max(ends),
                    extra=json.dumps({"by_seed": [round(end, 4) for end in ends], "at_step": early}),
                )
                write_checks([row], output, "sync")  # at once: the next one takes minutes


def _train(name: str, job: Job, steps: int) -> list[float]:
    """Mean loss over the ranks in each step; none where the method cannot be made."""
    setting = job.setting
    batches = TrainBatches(
        load_dataset(TrainConfig(data="digits", seed=setting.seed)),
        seed=setting.seed,
        batch_size=setting.batch * job.ranks,
        rank=job.rank,
        workers=job.ranks,
        micro_batches=1,
    )
    made = make_methods([name], job)
    torch.manual_seed(1000 * setting.seed + job.rank)  # what peers draw at random
    endless = (batch.micro_batches[0] for epoch in count() for batch in batches.epoch(epoch))
    mine = [float(method.step(*batch)) for method in made.values() for batch in islice(endless, steps)]
    for method in made.values():
        method.close()
    job.close()
    everybody: list[list[float]] = [[]] * job.ranks
    dist.all_gather_object(everybody, mine)
    return [statistics.fmean(losses) for losses in zip(*everybody, strict=True)]
