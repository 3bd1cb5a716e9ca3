"""Compares the training loss after a hundred steps with every compression method.

Digits at 32x32, 16 per rank, SGD with momentum 0.9 and one learning rate for all: no method is tuned here, which the
accuracy table does. The loss of a step is the mean over the ranks, before the update; what counts is the mean of the
last ten steps, over the seeds. A seed stands for weights, order and augmentation of the images, and what codecs draw.
Nothing here depends on time, so a busy machine does not matter.
"""

from __future__ import annotations

import json
import statistics
from itertools import count, islice
from pathlib import Path

import torch.distributed as dist

from benchmarks.pipeline.checks import Check, append_checks, print_checks
from benchmarks.rig.rank import link, process_group
from benchmarks.rig.records import read_dicts
from benchmarks.sync.methods import TINY, Setting, Workplace, make_method
from hybridpar.config import TrainConfig
from hybridpar.data import TrainBatches, load_dataset
from hybridpar.errors import UsageError
from hybridpar.models import seed_everything

STEPS, LAST = 100, 10
RATE = 0.005


def measure(quick: bool, methods: list[str], seeds: int, output: str | None, peers: str | None) -> None:
    """Train with every method in this rank, and write a row after each in rank 0.

    Args:
        quick: A small net and few steps.
        methods: Their names.
        seeds: How many seeds.
        output: Folder for the table.
        peers: Folder with the peers' checkouts.
    """
    steps, last = (4, 2) if quick else (STEPS, LAST)
    rows: list[Check] = []
    with process_group(timeout=180) as (rank, ranks):
        trained = f"{_setting(quick, 0)}, digits, rate {RATE}, {ranks} ranks, {steps} steps, {seeds} seeds"
        known = [_known(trained, output)]
        dist.broadcast_object_list(known)
        for name in methods:
            if name in known[0]:
                if rank == 0:
                    print(f"{name}: in the table already", flush=True)
                continue
            try:
                found = [_train(name, seed, steps, quick, rank, ranks, peers) for seed in range(seeds)]
            except UsageError as error:  # the same on all ranks
                if rank == 0:
                    print(f"no loss of {name}: {error.what}", flush=True)
                continue
            if rank == 0:
                ends = [statistics.fmean(one[-last:]) for one in found]
                early = {str(at): statistics.fmean(one[at - 1] for one in found) for at in (20, 50) if at <= steps}
                row = Check(
                    setting=trained,
                    link=link(),
                    what=f"loss, {name}",
                    value=statistics.fmean(ends),
                    low=min(ends),
                    high=max(ends),
                    extra=json.dumps({"by_seed": [round(end, 4) for end in ends], "at_step": early}),
                )
                rows.append(row)
                print(f"{name}: {row.value:.3f} [{row.low:.3f}, {row.high:.3f}]", flush=True)
                if output is not None:
                    append_checks([row], Path(output) / "loss.csv")  # at once: the next one takes minutes
    if rows:
        print_checks(rows, "sync")


def _known(trained: str, output: str | None) -> set[str]:
    """Methods of which the table has a row for this setting, so that a run goes on where it was stopped."""
    rows = [] if output is None else read_dicts(Path(output) / "loss.csv")
    return {row["what"].removeprefix("loss, ") for row in rows if row["setting"] == trained}


def _setting(quick: bool, seed: int) -> Setting:
    return Setting(TINY, 32, 4, RATE, seed) if quick else Setting(rate=RATE, seed=seed)


def _train(name: str, seed: int, steps: int, quick: bool, rank: int, ranks: int, peers: str | None) -> list[float]:
    """Mean loss over the ranks in each step."""
    setting = _setting(quick, seed)
    batches = TrainBatches(
        load_dataset(TrainConfig(data="digits", seed=seed)),
        seed=seed,
        batch_size=setting.batch * ranks,
        rank=rank,
        workers=ranks,
        micro_batches=1,
    )
    place = Workplace(setting, rank, ranks, Path(peers) if peers else None)
    method = None
    try:
        method = make_method(name, place)
        seed_everything(1000 * seed + rank)  # what peers draw at random
        endless = (batch for epoch in count() for batch in batches.epoch(epoch))
        mine = [method.step(*batch.micro_batches[0]) for batch in islice(endless, steps)]
    finally:
        if method is not None:
            method.close()
        place.close()
    everybody: list[list[float]] = [[]] * ranks
    dist.all_gather_object(everybody, mine)
    return [statistics.fmean(losses) for losses in zip(*everybody, strict=True)]
