"""Times tuned depthwise convolutions against torch's, per shape and direction, called as users call them.

They are timed anew because the fastest time of a search may be partly luck; as there on tensors that are in no cache,
by `ConvBench`.

Seventeen convolutions of MobileNetV2, EfficientNet-B0 and ConvNeXt-T, or some drawn at random, in all directions, each
tuned beforehand for a number of seconds. The operation, on whatever its records choose, against torch in both memory
formats, in the same rounds; the ratio is to the faster of torch's two.

    python -m benchmarks.kernels.depthwise                                # tunes what has no record, then the table
    python -m benchmarks.kernels.depthwise --threads 2
    python -m benchmarks.kernels.depthwise --random 6 --seconds 20        # a minute for each shape
    python -m benchmarks.kernels.depthwise --report                       # geometric means of the rows that are there

All sides run under one allocator that keeps its memory. Rows are written as they come, and what is there is not
measured again.
"""

from __future__ import annotations

import functools
import math
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import tyro

from benchmarks.kernels.common import RESULTS, same_allocator, setting
from benchmarks.kernels.roofline import Speed, measure_speed, multiply_adds
from benchmarks.rig.paired import Paired, paired
from benchmarks.rig.records import append_dicts, read_records
from hybridpar.codegen.compile_pool import Builder
from hybridpar.tvm_kernels.choice import Choices, active_choices, use_choices
from hybridpar.tvm_kernels.conv_bench import ConvBench
from hybridpar.tvm_kernels.database import Database, read_database
from hybridpar.tvm_kernels.machine import cpu_fingerprint
from hybridpar.tvm_kernels.op import depthwise_conv2d
from hybridpar.tvm_kernels.operation import KernelKey
from hybridpar.tvm_kernels.shapes import ConvShape, Direction, Layout
from hybridpar.tvm_kernels.tune import search_all

RECORDS = Path("runs/kernels/depthwise.jsonl")

#: Net, channels, size of the image, edge of the kernel, stride.
LISTED = (
    *(("mb", 32, 112, 3, 1), ("mb", 96, 112, 3, 2), ("mb", 144, 56, 3, 1), ("mb", 144, 56, 3, 2)),
    *(("mb", 192, 28, 3, 1), ("mb", 384, 14, 3, 1), ("mb", 576, 14, 3, 1), ("mb", 576, 14, 3, 2), ("mb", 960, 7, 3, 1)),
    *(("ef", 144, 56, 5, 2), ("ef", 240, 28, 5, 1), ("ef", 672, 14, 5, 1), ("ef", 672, 14, 5, 2)),
    *(("cn", 96, 56, 7, 1), ("cn", 192, 28, 7, 1), ("cn", 384, 14, 7, 1), ("cn", 768, 7, 7, 1)),
)
#: Of the data; those of a search are others.
SEED = 1000
#: Shortest time of one method in a round; faster calls are repeated.
LEAST_MS = 2.0
#: What the geometric mean over the listed shapes was promised to be, by threads (or for random shapes) and direction.
PROMISED: dict[str, dict[str, float]] = {
    "listed, 1 thread": {"forward": 1.5, "input_gradient": 2.0, "weight_gradient": 4.5},
    "listed, 2 threads": {"forward": 1.4, "input_gradient": 1.8, "weight_gradient": 4.0},
    "random, 1 thread": {"forward": 1.2, "input_gradient": 1.5, "weight_gradient": 2.5},
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """Time depthwise convolutions against torch."""

    threads: int = 1
    """That each side may use."""
    batches: tuple[int, ...] = (8, 32)
    """Images at a time."""
    random: int = 0
    """So many shapes drawn at random instead of those listed."""
    seconds: float = 8.0
    """To search for each shape and direction that has no record."""
    rounds: int = 20
    """Rounds to keep for each row."""
    records: Path = RECORDS
    """Database to tune into and to choose from."""
    tune_only: bool = False
    """Search, and measure nothing."""
    report: bool = False
    """Print what the rows say, and measure nothing."""
    output: Path = RESULTS / "depthwise.csv"
    """Table of the rows."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One direction of one shape. Times are medians in milliseconds.

    Attributes:
        shapes: "listed" or "random".
        device: The CPU, as records name it; rows of another one are measured anew.
        runs_on: "kernel" where the record chose one, else "torch".
        own_ms: The operation as chosen.
        last_ms: Torch in channels_last.
        contiguous_ms: Torch in contiguous memory.
        floor_ms: What neither arithmetic nor memory can beat.
        ratio: Median over the rounds of the faster torch over the operation; `low` to `high` is its 95 % interval.
        best_ratio: The same of the shortest times.
        error: Largest difference of the operation from float64, relative to the largest value.
        loaded: Whether other processes used the cores meanwhile.
    """

    shapes: str
    name: str
    shape: str
    direction: str
    layout: str
    threads: int
    device: str
    runs_on: str
    own_ms: float
    last_ms: float
    contiguous_ms: float
    floor_ms: float
    ratio: float
    low: float
    high: float
    best_ratio: float
    error: float
    rounds: int
    loaded: bool

    @property
    def key(self) -> tuple[str, str, str, int, str]:
        """What makes it this row."""
        return self.shape, self.direction, self.layout, self.threads, self.device


def main(options: Options) -> int:
    """Tune, measure, report."""
    if options.report:
        report(read_records(Row, options.output))
        return 0
    same_allocator()
    torch.set_num_threads(options.threads)
    layout = Layout.CHANNELS_LAST
    shapes = [(name, shape) for batch in options.batches for name, shape in named_shapes(batch, options.random)]
    done = {row.key for row in read_records(Row, options.output)}
    left = [
        (name, KernelKey(direction, shape, layout, options.threads, cpu_fingerprint()))
        for name, shape in shapes
        for direction in Direction
        if (shape.text, direction.value, layout.value, options.threads, cpu_fingerprint()) not in done
    ]
    options.records.parent.mkdir(parents=True, exist_ok=True)
    keys = [key for _, key in left]
    known = read_database(options.records) if options.records.exists() else Database("none")
    if missing := [key for key in keys if known.best(key) is None]:
        # As long for each of them, whatever it takes: the table is of all.
        search_all(missing, options.records, options.seconds * len(missing), weigher=evenly)
    if options.tune_only:
        return 0
    with Builder() as builder:
        speed = measure_speed(builder)
    choices = Choices(read_database(options.records))
    use_choices(choices)
    with torch.no_grad():
        for name, key in left:
            row = measure(name, key, choices, speed, options)
            append_dicts(options.output, [asdict(row) | setting() | asdict(row)])
            print(f"{name:14} {key.shape.text:40} {key.direction:16} {row.runs_on:7} {row.ratio:6.2f}x", flush=True)
    report(read_records(Row, options.output))
    return 0


def evenly(counts: Mapping[KernelKey, int]) -> dict[KernelKey, float]:
    """As long a search for each: the table is of all of them, whatever they take."""
    return dict.fromkeys(counts, 1.0)


def named_shapes(batch: int, count: int) -> Iterator[tuple[str, ConvShape]]:
    """The listed shapes, or so many random ones, with their names."""
    if not count:
        for net, channels, size, edge, stride in LISTED:
            yield f"{net}{channels}_{size}{'s2' if stride == 2 else ''}", shape_of(batch, channels, size, edge, stride)
        return
    draw = random.Random(1)
    for place in range(count):
        edge, stride = draw.choice((3, 5, 7)), draw.choice((1, 2))
        size = draw.choice((7, 10, 14, 20, 28, 40, 56))
        yield f"random{place}", shape_of(batch, 8 * draw.randint(2, 96 if size < 40 else 24), size, edge, stride)


def shape_of(batch: int, channels: int, size: int, edge: int, stride: int) -> ConvShape:
    """A convolution of square images that keeps their size, or halves it."""
    pad = edge // 2
    return ConvShape(batch, channels, size, size, (edge, edge), (stride, stride), (pad, pad), (1, 1))


def measure(name: str, key: KernelKey, choices: Choices, speed: Speed, options: Options) -> Row:
    """Time one direction of one shape: the operation, and torch in both memory formats."""
    own, stock, error = operations(key)
    result = timed({"own": own, **stock}, options.rounds)
    better = min(stock, key=result.median_ms)
    ratio = result.ratio(better, "own")
    floor = speed.floor_ms(multiply_adds(key.shape), key.shape.least_bytes, key.threads)
    return Row(
        shapes="random" if options.random else "listed",
        name=name,
        shape=key.shape.text,
        direction=key.direction,
        layout=key.layout.value,
        threads=key.threads,
        device=key.device,
        runs_on="torch" if choices.decide(key).kernel is None else "kernel",
        own_ms=round(result.median_ms("own"), 4),
        last_ms=round(result.median_ms("channels_last"), 4),
        contiguous_ms=round(result.median_ms("contiguous"), 4),
        floor_ms=round(floor, 4),
        ratio=round(ratio.median, 3),
        low=round(ratio.low, 3),
        high=round(ratio.high, 3),
        best_ratio=round(min(result.min_ms(one) for one in stock) / result.min_ms("own"), 3),
        error=float(f"{error:.2g}"),
        rounds=result.rounds,
        loaded=result.loaded,
    )


def timed(methods: dict[str, Callable[[], object]], rounds: int) -> Paired:
    """Time methods in turn, each often enough in a round that the clock does not matter."""
    repeats = {name: max(1, math.ceil(LEAST_MS / once(method))) for name, method in methods.items()}
    return paired(methods, rounds, repeats=repeats)


def once(method: Callable[[], object]) -> float:
    """Milliseconds of one call, roughly."""
    method()
    begin = time.perf_counter()
    method()
    return max(1e-3, 1e3 * (time.perf_counter() - begin))


def operations(key: KernelKey) -> tuple[Callable[[], object], dict[str, Callable[[], object]], float]:
    """The operation, torch in both memory formats, and the operation's error; all on tensors that are in no cache.

    Forward is called as users call it, gradients as the backward pass calls them.
    """
    shape, choices = key.shape, active_choices()
    bench = ConvBench(shape, key.direction, key.layout, key.threads, SEED)
    stock = {layout.value: bench.ways[f"torch {layout}"] for layout in (Layout.CHANNELS_LAST, Layout.CONTIGUOUS)}
    kernel = None if choices is None else choices.decide(key).kernel
    if key.direction == Direction.FORWARD:
        numbers = shape.stride, shape.padding, shape.dilation
        operands = [(x, weight, None, *numbers) for x, _, weight in bench.operands(key.layout)]
        calls = [functools.partial(depthwise_conv2d, *one) for one in operands]
        return bench.in_turn(calls), stock, bench.error_of(calls[0]())
    if kernel is None:
        return bench.instead, stock, bench.stock_error
    return lambda: bench.run(kernel), stock, bench.error(kernel)


def report(rows: Sequence[Row]) -> None:
    """Print geometric means by setting and direction."""
    groups: dict[tuple[str, str, str, int, str], list[Row]] = defaultdict(list)
    for row in rows:
        batch = int(row.shape.partition("x")[0])
        setting = f"{row.shapes}, {row.threads} thread{'s' if row.threads > 1 else ''}"
        groups[row.device, setting, row.layout, batch, row.direction].append(row)
    titles = (
        "device",
        "shapes",
        "layout",
        "batch",
        "direction",
        "on kernels",
        "times as fast",
        "by shortest",
        "least",
        "of floor",
    )
    print("|", " | ".join((*titles, "promised")), "|")
    print("|", " | ".join(["---"] * (len(titles) + 1)), "|")
    for (device, setting, layout, batch, direction), own in sorted(groups.items()):
        means = [statistics.geometric_mean(values) for values in ([r.ratio for r in own], [r.best_ratio for r in own])]
        floor = statistics.geometric_mean(min(1.0, row.floor_ms / row.own_ms) for row in own)
        kernels = f"{sum(row.runs_on == 'kernel' for row in own)} of {len(own)}"
        promised = PROMISED.get(setting, {}).get(direction)
        numbers = [f"{value:.2f}" for value in (*means, min(row.ratio for row in own))]
        cells = (device, setting, layout, batch, direction, kernels, *numbers, f"{floor:.0%}", promised or "-")
        print("|", " | ".join(map(str, cells)), "|")


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options, description=__doc__)))
