"""Times tuned depthwise convolutions against torch's, per shape and direction, called as users call them.

They are timed anew because the fastest time of a search may be partly luck; as there on tensors that are in no cache,
by `ConvBench`.

Seventeen convolutions of MobileNetV2, EfficientNet-B0 and ConvNeXt-T in all directions, each tuned beforehand for a
number of seconds. The operation, on whatever its records choose, against torch in both memory formats, in the same
rounds; the ratio is to the faster of torch's two.

    python -m benchmarks.kernels.depthwise                                # tunes what has no record, then the table
    python -m benchmarks.kernels.depthwise --threads 2
    python -m benchmarks.kernels.depthwise --dtype bfloat16 --batches 8   # on CPUs with AVX512_BF16
    python -m benchmarks.kernels.depthwise --report                       # geometric means of the rows that are there

Rows are written as they come, and what is there is not measured again.
"""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch

from benchmarks.kernels.common import RESULTS, measure_speed, multiply_adds, setting, torchs_ways
from benchmarks.rig.launch import run_command
from benchmarks.rig.paired import paired
from benchmarks.rig.records import append_dicts, print_markdown, read_records
from hybridpar.machine.process import tune_this_process
from hybridpar.tvm_kernels.choice import Choices, active_choices, use_choices
from hybridpar.tvm_kernels.conv_bench import ConvBench
from hybridpar.tvm_kernels.database import Database, read_database
from hybridpar.tvm_kernels.machine import cpu_fingerprint
from hybridpar.tvm_kernels.op import depthwise_conv2d
from hybridpar.tvm_kernels.shapes import ConvShape, Direction, KernelKey, Layout
from hybridpar.tvm_kernels.tune import search_all

#: Net, channels, size of the image, edge of the kernel, stride.
SHAPES = (
    *(("mb", 32, 112, 3, 1), ("mb", 96, 112, 3, 2), ("mb", 144, 56, 3, 1), ("mb", 144, 56, 3, 2)),
    *(("mb", 192, 28, 3, 1), ("mb", 384, 14, 3, 1), ("mb", 576, 14, 3, 1), ("mb", 576, 14, 3, 2), ("mb", 960, 7, 3, 1)),
    *(("ef", 144, 56, 5, 2), ("ef", 240, 28, 5, 1), ("ef", 672, 14, 5, 1), ("ef", 672, 14, 5, 2)),
    *(("cn", 96, 56, 7, 1), ("cn", 192, 28, 7, 1), ("cn", 384, 14, 7, 1), ("cn", 768, 7, 7, 1)),
)
#: Of the data; those of a search are others.
SEED = 1000
#: Shortest time of one method in a round; faster calls are repeated.
LEAST_MS = 2.0
#: What the geometric mean over the shapes was promised to be, by threads and direction.
PROMISED: dict[int, dict[str, float]] = {
    1: {"forward": 1.5, "input_gradient": 2.0, "weight_gradient": 4.5},
    2: {"forward": 1.4, "input_gradient": 1.8, "weight_gradient": 4.0},
}
#: The same in bfloat16.
BFLOAT16_PROMISED = 1.5


@dataclass(frozen=True, kw_only=True)
class Options:
    """Time depthwise convolutions against torch."""

    threads: int = 1
    """That each side may use."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of all tensors."""
    batches: tuple[int, ...] = (8, 32)
    """Images at a time."""
    seconds: float = 8.0
    """To search for each shape and direction that has no record."""
    rounds: int = 20
    """Rounds to keep for each row."""
    records: Path = Path("runs/kernels/depthwise.jsonl")
    """Database to tune into and to choose from."""
    report: bool = False
    """Print what the rows say, and measure nothing."""
    output: Path = RESULTS / "depthwise.csv"
    """Table of the rows."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One direction of one shape. Times are medians in milliseconds.

    Attributes:
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

    name: str
    shape: str
    direction: str
    layout: str
    threads: int
    device: str
    dtype: str
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
    def key(self) -> tuple[str, str, int, str, str]:
        """What makes it this row."""
        return self.shape, self.direction, self.threads, self.device, self.dtype


def main(options: Options) -> None:
    """Tune, measure, report."""
    if not options.report:
        measure_missing(options)
    report(read_records(Row, options.output))


def measure_missing(options: Options) -> None:
    """Tune and measure what the table lacks."""
    tune_this_process(1)
    torch.set_num_threads(options.threads)
    done, device = {row.key for row in read_records(Row, options.output)}, cpu_fingerprint()
    left = [
        (name, KernelKey(direction, shape, Layout.CHANNELS_LAST, options.threads, device, options.dtype))
        for batch in options.batches
        for name, shape in named_shapes(batch)
        for direction in Direction
        if (shape.text, direction.value, options.threads, device, options.dtype) not in done
    ]
    options.records.parent.mkdir(parents=True, exist_ok=True)
    known = read_database(options.records) if options.records.exists() else Database("none")
    if missing := [key for _, key in left if known.best(key) is None]:
        # As long a search for each: the table is of all of them, whatever they take.
        search_all(dict.fromkeys(missing, 1.0), options.records, options.seconds * len(missing))
    speed, choices = measure_speed(), Choices(read_database(options.records))
    use_choices(choices)
    with torch.no_grad():
        for name, key in left:
            row = measure(name, key, choices, speed, options.rounds)
            append_dicts(options.output, [setting() | {"shapes": "listed"} | asdict(row)])
            print(f"{name:14} {key.shape.text:40} {key.direction:16} {row.runs_on:7} {row.ratio:6.2f}x", flush=True)


def named_shapes(batch: int) -> Iterator[tuple[str, ConvShape]]:
    """The shapes with their names; paddings keep the size of the image, or halve it."""
    for net, channels, size, edge, stride in SHAPES:
        pad = edge // 2
        shape = ConvShape(batch, channels, size, size, (edge, edge), (stride, stride), (pad, pad), (1, 1))
        yield f"{net}{channels}_{size}{'s2' if stride == 2 else ''}", shape


def measure(name: str, key: KernelKey, choices: Choices, speed: tuple[float, float], rounds: int) -> Row:
    """Time one direction of one shape: the operation, and torch in both memory formats."""
    operation, stock, error = operations(key)
    methods = {"operation": operation, **stock}
    repeats = {which: max(1, math.ceil(LEAST_MS / once(method))) for which, method in methods.items()}
    result = paired(methods, rounds, repeats=repeats)
    ratio = result.ratio(min(stock, key=result.median_ms), "operation")
    per_second, bandwidth = speed
    return Row(
        name=name,
        shape=key.shape.text,
        direction=key.direction,
        layout=key.layout.value,
        threads=key.threads,
        device=key.device,
        dtype=key.dtype,
        runs_on="torch" if choices.decide(key).kernel is None else "kernel",
        own_ms=round(result.median_ms("operation"), 4),
        last_ms=round(result.median_ms("channels_last"), 4),
        contiguous_ms=round(result.median_ms("contiguous"), 4),
        floor_ms=round(1e3 * max(multiply_adds(key.shape) / per_second, key.least_bytes / bandwidth), 4),
        ratio=round(ratio.median, 3),
        low=round(ratio.low, 3),
        high=round(ratio.high, 3),
        best_ratio=round(min(map(result.min_ms, stock)) / result.min_ms("operation"), 3),
        error=float(f"{error:.2g}"),
        rounds=result.rounds,
        loaded=result.loaded,
    )


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
    bench = ConvBench(key, SEED)
    stock = {name.removeprefix("torch "): way for name, way in torchs_ways(bench).items()}
    kernel = None if choices is None else choices.decide(key).kernel
    if key.direction == Direction.FORWARD:
        numbers = shape.stride, shape.padding, shape.dilation
        operands = [(x, weight, None, *numbers) for x, _, weight in bench.operands(key.layout)]
        calls = [functools.partial(depthwise_conv2d, *arguments) for arguments in operands]
        return bench.in_turn(calls), stock, bench.error_of(calls[0]())
    if kernel is None:
        return bench.instead, stock, bench.stock_error
    return lambda: bench.run(kernel), stock, bench.error(kernel)


def report(rows: Sequence[Row]) -> None:
    """Print geometric means by device, threads, batch and direction."""
    groups: dict[tuple[str, str, int, int, str], list[Row]] = defaultdict(list)
    for row in rows:
        groups[row.device, row.dtype, row.threads, int(row.shape.partition("x")[0]), row.direction].append(row)
    titles = ("device", "dtype", "threads", "batch", "direction", "on kernels", "times as fast", "by shortest", "least")
    lines = []
    for (device, dtype, threads, batch, direction), group in sorted(groups.items()):
        means = [statistics.geometric_mean(getattr(row, name) for row in group) for name in ("ratio", "best_ratio")]
        floor = statistics.geometric_mean(min(1.0, row.floor_ms / row.own_ms) for row in group)
        kernels = f"{sum(row.runs_on == 'kernel' for row in group)} of {len(group)}"
        numbers = [f"{value:.2f}" for value in (*means, min(row.ratio for row in group))]
        promised = PROMISED.get(threads, {}).get(direction, "-") if dtype == "float32" else BFLOAT16_PROMISED
        lines.append((device, dtype, threads, batch, direction, kernels, *numbers, f"{floor:.0%}", promised))
    print_markdown((*titles, "of floor", "promised"), lines)


if __name__ == "__main__":
    run_command(main, Options)
