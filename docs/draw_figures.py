"""Draws the figures of the documents as SVG: time over link speed, the partition of a ResNet, and a step's timeline.

    python docs/draw_figures.py

The first is drawn from committed rows of `benchmarks/sync`. For the others a model is cut and trained here, for half a
minute.
"""

from __future__ import annotations

import csv
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import matplotlib as mpl
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torchvision.models import resnet18

from hybridpar.partition import partition_model

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
#: Colours of forward passes, backward passes, and sums of gradients in a timeline.
KINDS = {"F": "#4c72b0", "B": "#55a868", "sync": "#dd8452"}
COLOURS = ("#4c72b0", "#dd8452", "#55a868", "#8172b3")

#: Methods of `links.csv`, and what they are called here.
METHODS = {
    "ddp": "DistributedDataParallel, float32",
    "ddp-psgd4": "torch's PowerSGD hook, rank 4",
    "hook:powersgd:rank=4": "hybridpar.DataParallel, rank 4",
    "none": "no exchange",
}
LINKS = {"100mbit": "100 Mbit/s", "1gbit": "1 Gbit/s", "loopback": "one machine"}
#: The run that README's table is from.
DAY, DEVICE = "2026-11-24T19", "AMD EPYC, 2 cores"


@contextmanager
def figure(name: str, width: float, height: float) -> Iterator[Axes]:
    """Axes to draw on, saved as `docs/images/NAME.svg`, equal for equal numbers."""
    with mpl.rc_context({"svg.hashsalt": name, "svg.fonttype": "none", "font.size": 9, "font.family": "sans-serif"}):
        drawn = Figure(figsize=(width, height), layout="constrained")
        axes = drawn.add_subplot()
        axes.spines[["top", "right"]].set_visible(False)
        yield axes
        drawn.savefig(IMAGES / f"{name}.svg", metadata={"Date": None})


def link_speed() -> None:
    """Time of a step of ResNet-18 on two workers over the speed of the link between them."""
    with (ROOT / "benchmarks/sync/results/links.csv").open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["date"].startswith(DAY) and row["device"] == DEVICE]
    times = {(row["method"], row["link"]): float(row["median_ms"]) for row in rows if row["ranks"] == "2"}
    with figure("link-speed", 6.4, 3.2) as axes:
        for colour, (method, label) in zip(COLOURS, METHODS.items(), strict=True):
            values = [times[method, link] for link in LINKS]
            style = ":" if method == "none" else "-"
            axes.plot(list(LINKS.values()), values, style, marker="o", color=colour, label=label)
            shift, side = {"ddp": ((-6, 2), "right"), "ddp-psgd4": ((0, 5), "center")}.get(method, ((0, -12), "center"))
            for place, value in enumerate(values):
                axes.annotate(f"{value:,.0f}", (place, value), shift, textcoords="offset points", ha=side)
        axes.set(yscale="log", ylim=(30, 8000), ylabel="ms a step", xlabel="link between two workers")
        axes.legend(frameon=False)


def partition() -> None:
    """Which units of ResNet-18 are in which of four stages, and how long they take."""
    made = partition_model(resnet18(num_classes=10), torch.randn(8, 3, 64, 64), stages=4, passes=3)
    times = {unit.name: unit.ms for unit in made.graph.units}
    with figure("partition", 7.2, 2.4) as axes:
        begin = 0
        for index, stage in enumerate(made.plan.partition.stages):
            bars = [times[name] for name in stage.units]
            label = f"stage {index}: {sum(bars):.1f} ms"
            axes.bar(range(begin, begin + len(bars)), bars, color=COLOURS[index], width=0.9, label=label)
            begin += len(bars)
        axes.legend(frameon=False, loc="upper left")
        axes.set(xlabel="units of the traced graph, in order", ylabel="ms, forward and backward")


def timeline() -> None:
    """The fifth step of a pipeline of two stages in two replicas, whose gradients travel while it computes."""
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        options = "--data synthetic --image-size 64 --batch-size 32 --steps 8 --plan none --checkpoints never"
        layout = "--nproc 4 --stages 2 --replicas 2 --micro-batches 4 --schedule 1f1b"
        command = [sys.executable, "-m", "hybridpar", "train", "resnet18", *options.split(), *layout.split()]
        subprocess.run([*command, "--run-dir", f"{folder}/run", "--timeline", str(trace)], check=True, cwd=ROOT)
        events = json.loads(trace.read_text())["traceEvents"]
    step = next(event for event in events if event["name"] == "step 5")
    begin, length = step["ts"] / 1e3, step["dur"] / 1e3
    lanes = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}
    workers = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    workers = {pid: name for pid, name in workers.items() if not name.startswith("predicted")}
    rows = [lane for lane in sorted(lanes) if lane[0] in workers and lanes[lane].startswith(("compute", "sync"))]
    with figure("timeline", 8.0, 3.2) as axes:
        for event in events:
            row = (event["pid"], event["tid"])
            if row not in rows or event["ph"] != "X" or event["args"].get("step") != 5:
                continue
            kind = event["name"][0] if event["cat"] == "compute" and event["name"][0] in "FB" else event["cat"]
            at, height = rows.index(row), 0.8
            axes.broken_barh(
                [(event["ts"] / 1e3 - begin, event["dur"] / 1e3)],
                (at - height / 2, height),
                color=KINDS.get(kind, "#999999"),
                edgecolor="white",
                linewidth=0.5,
            )
            if kind in "FB" and event["dur"] / 1e3 > length / 30:
                middle = (event["ts"] + event["dur"] / 2) / 1e3 - begin
                axes.text(middle, at, event["name"].split()[0], ha="center", va="center", color="white", fontsize=7)
        labels = [f"{workers[pid]}, {lanes[pid, tid].split()[0]}" for pid, tid in rows]
        axes.set_yticks(range(len(rows)), labels)
        axes.invert_yaxis()
        axes.set(xlim=(0, length), xlabel="ms since the step began")


def main() -> None:
    """Draw all of them."""
    IMAGES.mkdir(exist_ok=True)
    link_speed()
    partition()
    timeline()


if __name__ == "__main__":
    main()
