"""Times the outer loop on slow links against computing alone, and joins the tables of accuracy and of predicted steps.

    python -m benchmarks.outer.main --table rate          # as root: blocks of H steps with an exchange, and without one
    python -m benchmarks.outer.main --table predicted     # time to 97 %, predicted beside measured
    python -m benchmarks.outer.main --table picture       # of the accuracies that are there
    python -m benchmarks.outer.main --table rate --quick  # small, and nothing is written: does it run?

`rate`: all workers compute H steps of ResNet-18 on 32 images each, once in an outer loop, whose block ends with the
arrival of what is exchanged, and once each for itself, in turn. `predicted`: steps to 97 % do not depend on the link,
so a time is the product of two that were measured apart, steps of `accuracy.csv` and the time of a step of
`benchmarks/planner`'s `predicted.csv`, and is predicted by the planner's expected steps and its predicted step.
"""

from __future__ import annotations

import json
import math
import os
import re
import statistics
import sys
import time
from collections import defaultdict
from contextlib import closing
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from benchmarks.outer.accuracy import BATCH, RESULTS, SYNC, Run, steps_to_target
from benchmarks.rig.command import run_command
from benchmarks.rig.launch import launch
from benchmarks.rig.network import Network
from benchmarks.rig.rank import link, process_group, sent_bytes
from benchmarks.rig.records import append_dicts, read_dicts, read_records, write_dicts
from benchmarks.rig.rows import commit, device
from hybridpar.comm.world import World, all_reduce_bytes
from hybridpar.config import TrainConfig
from hybridpar.models import build_model
from hybridpar.planner.codecs import STEPS_TO_TARGET
from hybridpar.planner.outer_steps import expected_steps
from hybridpar.train.trainer import Trainer

_TOLD = "OUTER_BENCH"


@dataclass(frozen=True, kw_only=True)
class Options:
    """Measure the outer loop."""

    table: Literal["rate", "predicted", "picture"] = "rate"
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
    steps: Path = Path("benchmarks/planner/results/predicted.csv")
    """`predicted`: predicted and measured steps."""
    quick: bool = False
    """A small model and few steps, and nothing is written."""
    output: Path = RESULTS
    """Folder of the tables."""


def main(options: Options) -> int:
    """Start the workers, or be one of them."""
    if _TOLD in os.environ:
        work(options)
        return 0
    if options.table != "rate":
        {"picture": picture, "predicted": predicted}[options.table](options)
        return 0
    with Network(options.workers, options.link) as network:
        launch(["-m", "benchmarks.outer.main", *sys.argv[1:]], network, timeout=1200, environment={_TOLD: "1"})
    return 0


def work(options: Options) -> None:
    """What a worker does."""
    with process_group(timeout=600) as (rank, _):
        row = rate(options)
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
    outer = TrainConfig(**common, sync=f"outer:{every},fragments={fragments},delay={delay}", compress=options.codec)
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


def predicted(options: Options) -> None:
    """Time to the target of plain data parallelism, of a codec and of an outer loop, predicted beside measured."""
    found: dict[tuple[str, int, str], list[float]] = defaultdict(list)
    for run in read_records(Run, options.output / "accuracy.csv"):
        if run.epochs == 10 and run.workers == options.workers and (steps := steps_to_target(run)) is not None:
            found[run.model, run.every, run.codec if run.method in ("mean", "codec") else run.method].append(steps)
    rows: dict[tuple[str, str, int, str], dict[str, Any]] = {}  # the last one that was taken counts
    for line in read_dicts(options.steps):
        kind = _kind(line["what"])
        told = re.search(r"predicted ([\d.]+) ms .*measured ([\d.]+) ms", line["extra"])
        model = line["setting"].partition(",")[0]
        if kind is None or told is None or not line["setting"].endswith(f"32x32 images, batch {BATCH}"):
            continue
        every, codec = kind
        took, plain = found[model, every, SYNC if kind == PLAIN else codec], found[model, 1, SYNC]
        if not took or not plain:
            continue
        row = expected_steps(every, options.workers, codec, 230) if every > 1 else None
        factor = row.factor if row is not None else 1.0 if kind == PLAIN else STEPS_TO_TARGET[codec]
        expects = float(told[1]) * statistics.fmean(plain) * factor / 1e3
        measured = float(told[2]) * statistics.fmean(took) / 1e3
        rows[model, line["link"], every, codec] = {
            **{"date": line["date"], "model": model, "link": line["link"], "every": every, "codec": codec},
            **{"predicted_ms": float(told[1]), "measured_ms": float(told[2]), "runs": len(took)},
            **{"expected_steps": round(statistics.fmean(plain) * factor, 1)},
            **{"measured_steps": round(statistics.fmean(took), 1)},
            **{"predicted_s": round(expects, 1), "measured_s": round(measured, 1)},
            "error": round(expects / measured - 1, 4),
        }
    write_dicts(options.output / "predicted.csv", [*rows.values()])
    errors = [abs(row["error"]) for row in rows.values()]
    print(f"{len(rows)} rows, median error {statistics.median(errors) if errors else math.nan:.1%}")
    for model, place in sorted({key[:2] for key in rows}):
        own = [row for key, row in rows.items() if key[:2] == (model, place)]
        chosen, best = min(own, key=itemgetter("predicted_s")), min(own, key=itemgetter("measured_s"))
        over = chosen["measured_s"] / best["measured_s"]
        print(f"{model}, {place}: H {chosen['every']} {chosen['codec']}, {over:.2f} times the best of {len(own)}")


#: An exchange of every step, of gradients as they are.
PLAIN = 1, "none"


def _kind(what: str) -> tuple[int, str] | None:
    """Steps from one exchange to the next, and the codec, of a plan of whole models; None for others."""
    told = re.fullmatch(
        r"error of the \w+ step: data parallel over 2 devices(?:, (?:an exchange every (\d+) steps)?(?: as )?(.*))?",
        what,
    )
    return None if told is None else (int(told[1] or 1), told[2] or "none")


def picture(options: Options) -> None:
    """Draw accuracy against H for each number of workers and codec."""
    folder = options.output
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    runs = [run for run in read_records(Run, folder / "accuracy.csv") if (run.epochs, run.model) == (10, "resnet18")]
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
