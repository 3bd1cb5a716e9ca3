"""Draws the figures of the documents as SVG: time over link speed, tiles of kernels, the partition of a ResNet, a
step's timeline, and the actions of a step.

    python docs/draw_figures.py                      all of them
    python docs/draw_figures.py timeline             one
    python docs/draw_figures.py --record timeline    measure a step anew first; the same for partition

They are drawn from committed rows and records, and the actions from a simulation, so the same files give the same
pictures.
"""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from hybridpar.schedule.costs import BucketCost, Costs, Link
from hybridpar.schedule.layout import Layout as StageLayout
from hybridpar.schedule.program import lower
from hybridpar.schedule.schedules import ScheduleRequest, make
from hybridpar.schedule.simulate import simulate
from hybridpar.tvm_kernels.cuda_space import bank_conflicts, lane_addresses
from hybridpar.tvm_kernels.schedules import cpu_gather, cuda, geometry
from hybridpar.tvm_kernels.shapes import ConvShape, Direction, KernelKey, Layout

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
BLUE, ORANGE, GREEN, PURPLE = COLOURS = ("#4c72b0", "#dd8452", "#55a868", "#8172b3")
GREY, LIGHT = "#999999", "#dbe4f0"

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

#: A layer of MobileNetV2, and the CPU whose record of it is drawn.
LAYER, CPU = ConvShape.parse("64x144x56x56 k3x3 s1x1 p1x1 d1x1"), "AMD EPYC 25fc08b1"
#: Columns and virtual threads of a thread, of 32 side by side: the same tile with and without bank conflicts.
SPLITS = ((2, 1), (1, 2))
SPLIT_LAYER = ConvShape.parse("1x8x64x256 k3x3 s1x1 p1x1 d1x1")
#: Threads that are drawn of these 32.
DRAWN = 8

#: What `--record` measured: times of units, and of the actions of a step.
STAGES = ROOT / "benchmarks/partition/results/stages.json"
STEP = ROOT / "benchmarks/pipeline/results/timeline.json"

#: What is drawn of a timeline: forward and backward passes, sums of gradients, and the optimizer's step.
KINDS = {"F": ("forward", BLUE), "B": ("backward", GREEN), "s": ("sum of gradients", ORANGE), "o": ("optimizer", GREY)}
#: The step of the run that is recorded.
TIMELINE_STEP = 5
TIMELINE_RUN = (
    "train resnet18 --data synthetic --image-size 64 --batch-size 32 --steps 8 --plan none --checkpoints never "
    "--nproc 4 --stages 2 --replicas 2 --micro-batches 4 --schedule 1f1b"
)
#: Rows of the actions of a step, and their colours, by the queue that runs them.
QUEUES = {"compute": GREY, "send": "#64b5cd", "receive": "#64b5cd", "sync": ORANGE, "control": PURPLE}


@contextmanager
def figure(name: str, width: float, height: float) -> Iterator[Figure]:
    """A figure that is saved as `docs/images/NAME.svg`, equal for equal numbers."""
    style = {"svg.hashsalt": name, "svg.fonttype": "none", "font.size": 9, "font.family": "sans-serif"}
    with mpl.rc_context(style | {"axes.spines.top": False, "axes.spines.right": False, "axes.titlesize": 9}):
        drawn = Figure(figsize=(width, height), layout="constrained")
        yield drawn
        drawn.savefig(IMAGES / f"{name}.svg", metadata={"Date": None})


def link_speed() -> None:
    """Time of a step of ResNet-18 on two workers over the speed of the link between them."""
    with (ROOT / "benchmarks/sync/results/links.csv").open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["date"].startswith(DAY) and row["device"] == DEVICE]
    times = {(row["method"], row["link"]): float(row["median_ms"]) for row in rows if row["ranks"] == "2"}
    with figure("link-speed", 6.4, 3.2) as drawn:
        axes = drawn.add_subplot()
        for colour, (method, label) in zip(COLOURS, METHODS.items(), strict=True):
            values = [times[method, link] for link in LINKS]
            style = ":" if method == "none" else "-"
            axes.plot(list(LINKS.values()), values, style, marker="o", color=colour, label=label)
            shift, side = {"ddp": ((-6, 2), "right"), "ddp-psgd4": ((0, 5), "center")}.get(method, ((0, -12), "center"))
            for index, value in enumerate(values):
                axes.annotate(f"{value:,.0f}", (index, value), shift, textcoords="offset points", ha=side)
        axes.set(yscale="log", ylim=(30, 8000), ylabel="ms a step", xlabel="link between two workers")
        axes.legend(frameon=False)


def tiling() -> None:
    """The two levels of tiles of a depthwise convolution on a GPU and a CPU, and what virtual threads do to banks."""
    with figure("tiling", 8.0, 5.6) as drawn:
        above, below = drawn.subfigures(2, 1, height_ratios=(3.5, 1))
        block, strip = above.subplots(1, 2)
        draw_block(block)
        draw_strip(strip)
        draw_banks(below.add_subplot())
        for axes in (block, strip):
            axes.set(xlim=(-2, LAYER.out_width + 1), ylim=(LAYER.out_height + 1, -2), aspect="equal")
            axes.set(xlabel="columns of an image", ylabel="rows")


def draw_box(axes: Axes, rows: range, columns: range, colour: str = "none", edge: str = GREY, line: str = "-") -> None:
    """A tile of an image."""
    at, size = (columns.start, rows.start), (len(columns), len(rows))
    axes.add_patch(Rectangle(at, *size, facecolor=colour, edgecolor=edge, linestyle=line, linewidth=0.8))


def draw_block(axes: Axes) -> None:
    """A GPU's blocks of threads, and what a thread of the first one computes."""
    key = KernelKey(Direction.FORWARD, LAYER, Layout.CONTIGUOUS, 1, "a GPU")
    tile = cuda.Tile(**cuda.default(key))
    sizes = cuda.Tiling(key, tile)
    (tall, wide), (high, across), (top, left) = sizes.block, sizes.shared, sizes.first
    for row in range(0, LAYER.out_height, tall):
        for column in range(0, LAYER.out_width, wide):
            here = range(column, min(column + wide, LAYER.out_width))
            draw_box(axes, range(row, row + tall), here, "none" if row or column else LIGHT)
    draw_box(axes, range(top, top + high), range(left, left + across), edge="black", line="--")
    thread_y, thread_x, step = 1, 2, tile.threads_x * tile.columns
    for begin in range(thread_x * tile.columns, wide, step):
        rows = range(thread_y * tile.rows, (thread_y + 1) * tile.rows)
        draw_box(axes, rows, range(begin, begin + tile.columns), ORANGE, ORANGE)
    axes.set_title(
        f"GPU. Blue: {tall} x {wide} results of a block; dashed:\n"
        f"its {high} x {across} inputs in shared memory.\n"
        f"Orange: a thread of {tile.threads_y} x {tile.threads_x}, as {tile.virtual} virtual\n"
        f"threads of {tile.rows} x {tile.columns} results in registers",
        loc="left",
    )


def draw_strip(axes: Axes) -> None:
    """A CPU's strips, and the tiles of the second one."""
    lines = (ROOT / "hybridpar/tvm_kernels/kernels.jsonl").read_text(encoding="utf-8").splitlines()
    wanted = {"shape": LAYER.text, "device": CPU, "direction": "forward", "threads": 1, "layout": "channels_last"}
    record = next(record for record in map(json.loads, lines) if wanted.items() <= record.items())
    tile = cpu_gather.Tile(**record["parameters"])
    for row in range(0, LAYER.out_height, tile.strip):
        draw_box(axes, range(row, row + tile.strip), range(LAYER.out_width), LIGHT if row == tile.strip else "none")
    for row in range(tile.strip, 2 * tile.strip, tile.tile_rows):
        for span in geometry.spans(geometry.axis(LAYER, Direction.FORWARD, 1), tile.tile_columns):
            for begin in range(span.start, span.start + span.count * span.width, span.width):
                is_first = row == tile.strip and begin == 0
                columns = range(begin, begin + span.width)
                draw_box(axes, range(row, row + tile.tile_rows), columns, ORANGE if is_first else "none", "white")
    axes.set_title(
        f"CPU. Blue: a strip of {tile.strip} rows,\n"
        f"done before the next one.\n"
        f"Orange: a tile of {tile.tile_rows} x {tile.tile_columns} results\n"
        f"of {tile.lanes} channels in registers",
        loc="left",
    )


def draw_banks(axes: Axes) -> None:
    """Which threads compute which columns of a block, and which banks of shared memory they read at once."""
    labels = []
    for at, (columns, virtual) in enumerate(SPLITS):
        tile = cuda.Tile(1, 1, 32, 8, virtual, columns, 2, 0)
        sizes = cuda.Tiling(KernelKey(Direction.FORWARD, SPLIT_LAYER, Layout.CONTIGUOUS, 1, "a GPU"), tile)
        draw_box(axes, range(2 * at, 2 * at + 1), range(sizes.block[1]), "#eeeeee", "none")
        for column in range(sizes.block[1]):
            if (thread := column // columns % tile.threads_x) < DRAWN:
                draw_box(axes, range(2 * at, 2 * at + 1), range(column, column + 1), LIGHT, "white")
                axes.text(column + 0.5, 2 * at + 0.5, str(thread), ha="center", va="center", fontsize=7)
        banks = ", ".join(str(address // 4 % 32) for address in lane_addresses(sizes)[:4])
        accesses = round(bank_conflicts(sizes))
        labels.append(
            f"columns={columns}, virtual={virtual}\nbanks {banks}, ...: {accesses} access{'es' if accesses > 1 else ''}"
        )
    axes.set_yticks([2 * at + 0.5 for at in range(len(SPLITS))], labels)
    axes.set(xlim=(0, 64), ylim=(2 * len(SPLITS) - 1, 0))
    axes.set_xlabel(f"columns of a block, and which of 32 threads computes them; threads 0 to {DRAWN - 1} are drawn")


def partition() -> None:
    """Which units of ResNet-18 are in which of four stages, and how long they take."""
    with figure("partition", 7.2, 2.4) as drawn:
        axes = drawn.add_subplot()
        begin = 0
        for index, units in enumerate(json.loads(STAGES.read_text(encoding="utf-8"))["stages"]):
            bars = [ms for _, ms in units]
            label = f"stage {index}: {sum(bars):.1f} ms"
            axes.bar(range(begin, begin + len(bars)), bars, color=COLOURS[index], width=0.9, label=label)
            begin += len(bars)
        axes.legend(frameon=False, loc="upper left")
        axes.set(xlabel="units of the traced graph, in order", ylabel="ms, forward and backward")


def record_partition() -> None:
    """Measure the units of ResNet-18 here, and cut it."""
    import torch
    from torchvision.models import resnet18

    from hybridpar.partition import partition_model

    made = partition_model(resnet18(num_classes=10), torch.randn(8, 3, 64, 64), stages=4, passes=3)
    times = {unit.name: round(unit.ms, 4) for unit in made.graph.units}
    stages = [[[name, times[name]] for name in stage.units] for stage in made.plan.partition.stages]
    save(STAGES, {"model": "resnet18", "images": [8, 3, 64, 64], "stages": stages})


def save(path: Path, measured: dict[str, Any]) -> None:
    """Write what was measured, with day and machine; a line for each unit or action."""
    from hybridpar.machine.devices import cpu_name

    facts = {
        "date": datetime.now(UTC).date().isoformat(),
        "device": f"{cpu_name()}, {os.cpu_count()} cores",
        **measured,
    }
    text = re.sub(r"\[\s+([^\[\]{}]*?)\s+\]", lambda row: f"[{' '.join(row[1].split())}]", json.dumps(facts, indent=2))
    path.write_text(f"{text}\n", encoding="utf-8")


def record_timeline() -> None:
    """Train a pipeline of two stages in two replicas here, and keep a step of it."""
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        command = [sys.executable, "-m", "hybridpar", *TIMELINE_RUN.split()]
        subprocess.run([*command, "--run-dir", f"{folder}/run", "--timeline", str(trace)], check=True, cwd=ROOT)
        events = json.loads(trace.read_text())["traceEvents"]
    workers = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    lanes = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}
    rows: dict[str, list[tuple[str, float, float]]] = {
        f"{workers[pid]}, {lanes[pid, tid].split()[0]}": []
        for pid, tid in sorted(lanes)
        if lanes[pid, tid].startswith(("compute", "sync")) and not workers[pid].startswith("predicted")
    }
    for event in events:
        row = f"{workers.get(event['pid'])}, {lanes.get((event['pid'], event.get('tid')), '').partition(' ')[0]}"
        if row in rows and event["ph"] == "X" and event["args"].get("step") == TIMELINE_STEP:
            rows[row].append((event["name"].split()[0], event["ts"] / 1e3, event["dur"] / 1e3))
    begin = min(start for actions in rows.values() for _, start, _ in actions)
    length = max(start + taken - begin for actions in rows.values() for _, start, taken in actions)
    shifted = {
        row: [(name, round(start - begin, 3), round(taken, 3)) for name, start, taken in actions]
        for row, actions in rows.items()
    }
    save(STEP, {"command": f"hybridpar {TIMELINE_RUN}", "step_ms": round(length, 3), "rows": shifted})


def timeline() -> None:
    """A step of a pipeline of two stages in two replicas, whose gradients travel while it computes."""
    step = json.loads(STEP.read_text(encoding="utf-8"))
    rows, length = step["rows"], step["step_ms"]
    with figure("timeline", 8.0, 0.3 * len(rows) + 1.0) as drawn:
        axes = drawn.add_subplot()
        for at, actions in enumerate(rows.values()):
            for name, start, taken in actions:
                draw_action(axes, at, start, taken, KINDS[name[0]][1])
                if name[0] in "FB" and taken > length / 30:
                    axes.text(start + taken / 2, at, name, ha="center", va="center", color="white", fontsize=7)
        axes.set_yticks(range(len(rows)), list(rows))
        axes.invert_yaxis()
        axes.set(xlim=(0, length), xlabel="ms since the step began")
        handles = [Patch(color=colour, label=label) for label, colour in KINDS.values()]
        drawn.legend(handles=handles, loc="outside upper center", ncols=len(handles), frameon=False)


def draw_action(axes: Axes, row: int, start: float, taken: float, colour: str) -> None:
    """A bar for what a lane did."""
    axes.broken_barh([(start, taken)], (row - 0.4, 0.8), color=colour, edgecolor="white", linewidth=0.5)


def step() -> None:
    """What the two workers of a replica do in a step, by the queue that does it; the times are made up."""
    layout = StageLayout.dealt(stages=2, lanes=2)
    program = lower(make("1f1b", ScheduleRequest(layout, micro_batches=3)), layout, buckets=[2, 2])
    sums = (BucketCost(8, ready=0.5, wire_ms=2.5), BucketCost(8, wire_ms=2.5))
    link, buckets = Link(latency_ms=3.2), (sums, sums)
    costs = Costs((3, 3), (5, 5), step_ms=(2.5, 2.5), link=link, buckets=buckets, replicas=2, control_ms=3)
    simulated = simulate(program, costs)
    rows = [(worker, queue) for worker in range(2) for queue in QUEUES]
    with figure("step", 8.0, 3.4) as drawn:
        axes = drawn.add_subplot()
        for span in simulated.timeline:
            at, text = rows.index((span.worker, span.queue)), str(span.action)
            colour = KINDS[text[1]][1] if text[1] in "FB" else QUEUES[span.queue]
            draw_action(axes, at, span.start_ms, span.duration_ms, colour)
            if span.duration_ms:
                middle = (span.start_ms + span.end_ms) / 2
                axes.text(middle, at, text, ha="center", va="center", color="white", fontsize=5.5)
            else:
                axes.text(span.start_ms - 0.2, at, text, ha="right", va="center", color=colour, fontsize=5.5)
        axes.set_yticks(range(len(rows)), [f"worker {worker}, {queue}" for worker, queue in rows])
        axes.invert_yaxis()
        axes.set(xlim=(0, simulated.step_ms), xlabel="time", xticks=[])


FIGURES = {"link-speed": link_speed, "tiling": tiling, "partition": partition, "timeline": timeline, "step": step}
RECORDS = {"partition": record_partition, "timeline": record_timeline}


def main() -> None:
    """Draw the figures that are named, or all; with `--record` measure them first, where they are measured."""
    IMAGES.mkdir(exist_ok=True)
    record, names = "--record" in sys.argv, [word for word in sys.argv[1:] if word != "--record"]
    for name in names or FIGURES:
        if record and name in RECORDS:
            RECORDS[name]()
        FIGURES[name]()


if __name__ == "__main__":
    main()
