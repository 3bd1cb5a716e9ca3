"""Times the outer loop on slow links, against computing alone and against DistributedDataParallel with its own hooks.

    python -m benchmarks.outer.main --table rate          # blocks of H steps with an exchange, and without one
    python -m benchmarks.outer.main --table target --hook powersgd --link 10mbit+50ms
    python -m benchmarks.outer.main --table picture       # of the accuracies that are there
    python -m benchmarks.outer.main --table rate --quick  # small, and nothing is written: does it run?

As root, for the links. `rate`: all workers compute H steps of ResNet-18 on 32 images each, once in an outer loop, whose
block ends with the arrival of what is exchanged, and once each for itself, in turn. `target`: DDP with a hook trains
ResNet-18 on digits until 97 % of the test images are right; what does not get there in the time that there is goes on
for as many steps as runs of `accuracy` took, at the mean time of the steps that were made.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from benchmarks.outer.accuracy import BATCH, RESULTS, SYNC, TARGET, Run, steps_to_target
from benchmarks.rig.command import run_command
from benchmarks.rig.launch import launch
from benchmarks.rig.network import Network
from benchmarks.rig.rank import link, process_group, sent_bytes
from benchmarks.rig.records import append_dicts, read_records
from benchmarks.rig.rows import commit, device
from hybridpar.comm.world import World, all_reduce_bytes
from hybridpar.config import TrainConfig
from hybridpar.data import TestBatches, TrainBatches, load_dataset
from hybridpar.models import build_model, seed_everything
from hybridpar.optim.build import Rates, build_optimizer
from hybridpar.optim.schedule import rate_factor
from hybridpar.train.evaluation import evaluate
from hybridpar.train.trainer import Trainer

_TOLD = "OUTER_BENCH"


@dataclass(frozen=True, kw_only=True)
class Options:
    """Measure the outer loop."""

    table: Literal["rate", "target", "picture"] = "rate"
    """What to measure."""
    link: str = "10mbit+50ms"
    """Between the workers."""
    workers: int = 2
    """How many."""
    every: int = 32
    """`rate`: H."""
    codec: str = "onebit"
    """`rate`: what progress is sent as."""
    fragments: int = 4
    """`rate`: parts that are sent one after the other."""
    delay: int = 7
    """`rate`: steps that sending one may take."""
    rounds: int = 5
    """`rate`: blocks of each kind."""
    hook: Literal["none", "fp16", "powersgd"] = "powersgd"
    """`target`: what DDP sends gradients as."""
    lr: float = 0.02
    """`target`: learning rate."""
    seed: int = 1
    """`target`: of the run."""
    epochs: int = 10
    """`target`: length of the run, which the learning rate follows."""
    seconds: float = 480.0
    """`target`: after which a run is ended."""
    quick: bool = False
    """A small model and few steps, and nothing is written."""
    output: Path = RESULTS
    """Folder of the tables."""


def main(options: Options) -> int:
    """Start the workers, or be one of them."""
    if _TOLD in os.environ:
        work(options)
        return 0
    if options.table == "picture":
        picture(options.output)
        return 0
    with Network(options.workers, options.link) as network:
        launch(["-m", "benchmarks.outer.main", *sys.argv[1:]], network, timeout=1200, environment={_TOLD: "1"})
    return 0


def work(options: Options) -> None:
    """What a worker does."""
    with process_group(timeout=600) as (rank, _):
        row = rate(options) if options.table == "rate" else target(options)
    if rank == 0:
        row |= {"commit": commit(), "device": device(), "load": round(os.getloadavg()[0], 1)}
        print(json.dumps(row), flush=True)
        if not options.quick:
            append_dicts(options.output / f"{options.table}.csv", [row])


def rate(options: Options) -> dict[str, Any]:
    """Steps per second of an outer loop over those of computing alone, and bytes per step."""
    every, fragments, delay = (8, 2, 1) if options.quick else (options.every, options.fragments, options.delay)
    batch = torch.randn(BATCH // 2, 3, 32, 32), torch.randint(0, 10, (BATCH // 2,))
    common: dict[str, Any] = {"plan": "none", "lr": 0.005}
    outer = TrainConfig(
        **common, sync=f"outer:{every}", compress=options.codec, outer_fragments=fragments, outer_delay=delay
    )
    times: dict[str, list[float]] = {"outer": [], "alone": []}
    counted, declared = [], []
    with (
        closing(World.join(shared_memory=False, timeout=600)) as world,
        Trainer(_model(options), config=outer, world=world) as looped,
        Trainer(_model(options), config=TrainConfig(**common), world=World()) as alone,
    ):
        for number in range(1 + (2 if options.quick else options.rounds)):
            for name, trainer in (("outer", looped), ("alone", alone)):
                world.barrier()
                before, began, sent = _bytes(), time.perf_counter(), 0
                for _ in range(every):
                    sent += trainer.step(batch).outcome.bytes_sent
                trainer.wait()
                took = time.perf_counter() - began
                if not number:  # the first block of each warms up
                    continue
                times[name].append(took / every)
                if name == "outer":
                    declared.append(sent / every)
                    counted.append((_bytes() - before) / every)
        size = 4 * sum(one.numel() for one in looped.model.parameters())
    ddp = all_reduce_bytes(size, options.workers)
    ratios = [one / other for one, other in zip(times["alone"], times["outer"], strict=True)]
    return {
        "link": link(),
        "workers": options.workers,
        "every": every,
        "codec": options.codec,
        "fragments": fragments,
        "delay": delay,
        "alone_ms": round(1e3 * statistics.median(times["alone"]), 1),
        "outer_ms": round(1e3 * statistics.median(times["outer"]), 1),
        "of_computing": round(statistics.median(ratios), 4),
        "least": round(min(ratios), 4),
        "most": round(max(ratios), 4),
        "bytes_per_step": round(statistics.fmean(declared), 1),
        "counted_bytes_per_step": round(statistics.fmean(counted), 1),
        "fewer_than_ddp": round(ddp / statistics.fmean(declared), 1),
        "rounds": len(ratios),
    }


def target(options: Options) -> dict[str, Any]:
    """Seconds until DDP with a hook reaches the target, from the start of its first step."""
    config = TrainConfig(seed=options.seed, lr=options.lr, epochs=options.epochs)
    data = load_dataset(config)
    rank, size = dist.get_rank(), dist.get_world_size()
    share: dict[str, Any] = {"rank": rank, "workers": size, "loader_workers": 0}
    batches = TrainBatches(data, seed=options.seed, batch_size=BATCH, micro_batches=1, **share)
    seed_everything(options.seed)
    model = _model(options)
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True, broadcast_buffers=False, static_graph=True)
    if options.hook == "fp16":
        ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif options.hook == "powersgd":
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer = build_optimizer(model, config)
    rates, each = Rates(optimizer), batches.steps_per_epoch
    total = each * (1 if options.quick else options.epochs)
    began, done, reached, before = time.perf_counter(), 0, None, 0.0
    accuracy = 0.0
    over = torch.zeros(1)
    for epoch in range(options.epochs):
        ddp.train()
        for batch in batches.epoch(epoch):
            ((images, labels),) = batch.micro_batches
            rates.set(rate_factor(done, each * options.epochs, each, config))
            optimizer.zero_grad()
            nn.functional.cross_entropy(ddp(images), labels).backward()
            optimizer.step()
            done += 1
            over[0] = float(time.perf_counter() - began > options.seconds or done >= total)
            dist.all_reduce(over, dist.ReduceOp.MAX)
            if over[0]:
                break
        model.eval()
        test = TestBatches(data, batch_size=BATCH, rank=0, workers=1, loader_workers=0)
        accuracy = 100 * evaluate(model, nn.functional.cross_entropy, test, World()).accuracy
        # All workers have the same weights, and statistics of their own: worker 0's count.
        told = torch.tensor([accuracy])
        dist.broadcast(told, 0)
        accuracy = float(told)
        if accuracy >= TARGET and not over[0]:
            reached = each * (epoch + (TARGET - before) / max(accuracy - before, 1e-9))
            break
        before = accuracy
        if over[0]:
            break
    seconds = time.perf_counter() - began
    runs = read_records(Run, RESULTS / "accuracy.csv")
    known = [steps for run in runs if run.method == SYNC and (steps := steps_to_target(run))]
    steps = reached or (statistics.fmean(known) if known else None)
    return {
        "link": link(),
        "workers": size,
        "hook": options.hook,
        "lr": options.lr,
        "seed": options.seed,
        "epochs": options.epochs,
        "steps": done,
        "step_ms": round(1e3 * seconds / done, 1),
        "accuracy": round(accuracy, 3),
        "steps_to_target": None if steps is None else round(steps, 1),
        "seconds_to_target": None if steps is None else round(seconds / done * steps, 1),
        "is_measured": reached is not None,
    }


def picture(folder: Path) -> None:
    """Draw accuracy against H for each number of workers and codec."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    runs = [run for run in read_records(Run, folder / "accuracy.csv") if run.epochs == 10]
    counts = sorted({run.workers for run in runs})
    figure, axes = pyplot.subplots(1, max(1, len(counts)), figsize=(3 * len(counts), 3), sharey=True, squeeze=False)
    for axis, workers in zip(axes[0], counts, strict=True):
        base = [run.accuracy for run in runs if (run.workers, run.method) == (workers, SYNC)]
        if base:
            axis.axhline(statistics.fmean(base), color="0.5", linewidth=1, label="synchronous")
        for codec, colour in (("none", "tab:blue"), ("onebit", "tab:orange")):
            own = [run for run in runs if (run.workers, run.codec, run.method) == (workers, codec, "mean")]
            heights = {every: [run.accuracy for run in own if run.every == every] for every in {r.every for r in own}}
            places = sorted(heights)
            axis.plot(places, [statistics.fmean(heights[at]) for at in places], "-", color=colour, label=codec)
            for at in places:
                axis.plot([at] * len(heights[at]), heights[at], "o", color=colour, markersize=3)
        axis.set_xscale("log", base=2)
        axis.set_title(f"{workers} workers", fontsize=10)
        axis.set_xlabel("H")
    axes[0][0].set_ylabel("test accuracy, %")
    axes[0][0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(folder / "accuracy.svg")


def _model(options: Options) -> nn.Module:
    torch.manual_seed(0)
    if options.quick and options.table == "rate":
        return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 10))
    return build_model("resnet18", 10)


def _bytes() -> int:
    return sent_bytes() if link() != "loopback" else 0


if __name__ == "__main__":
    run_command(main, Options, __doc__)
