"""Why: BatchNorm reads what a convolution has just written, only to sum it up; the convolution could do that itself.

Depthwise convolutions of MobileNetV2 and the BatchNorm with ReLU6 behind them, forward, batch 32, channels_last, one
thread: as they are, and with a convolution that leaves sums and sums of squares per channel, so that the norm's first
pass falls away. Each side writes results to the caches or past them, as is better for itself. `free` is the convolution
without sums and the norm without its first pass: what could be gained at most.

    python -m benchmarks.kernels.epilogue

Writes results/epilogue.csv. Sums of strips are merged once more than they would have to be, as the norm's own small
phase in between runs too.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import torch
import tyro
from torch import Tensor

from benchmarks.kernels.common import RESULTS, print_aligned, same_allocator, setting, write_rows
from benchmarks.rig.paired import balanced_orders
from benchmarks.rig.stats import bootstrap_ratio
from hybridpar.errors import HybridparError
from hybridpar.kernel_build import Session
from hybridpar.kernel_builder import Builder, Request
from hybridpar.tvm_kernels import norm_kernels
from hybridpar.tvm_kernels.database import default_database
from hybridpar.tvm_kernels.kernel import Variant
from hybridpar.tvm_kernels.schedules.norm_rows import APPLY, JOIN, REDUCE, TABLE_ROWS, TRACK
from hybridpar.tvm_kernels.shapes import ConvShape, Direction, Layout
from hybridpar.tvm_kernels.space import reject

SHAPES = (
    "32x96x112x112 k3x3 s2x2 p1x1 d1x1",
    "32x144x56x56 k3x3 s1x1 p1x1 d1x1",
    "32x192x28x28 k3x3 s1x1 p1x1 d1x1",
    "32x384x14x14 k3x3 s1x1 p1x1 d1x1",
)
#: What the pair of operations would have to gain for this to be built.
WORTH = 1.05
#: Bytes of a result that is written past the caches, as the norm does it.
PAST_CACHES = 16 << 20
#: Largest difference of sums from float64, relative to the largest.
MOST_ERROR = 1e-5
_SCHEDULE = Path(__file__).with_name("epilogue_schedule.py")
#: Seconds to choose a tile by.
_GLANCE = 0.4


@dataclass(frozen=True, kw_only=True)
class Options:
    """Measure what statistics from the convolution's epilogue would gain."""

    rounds: int = 40
    """Rounds to keep."""
    output: Path = RESULTS / "epilogue.csv"
    """Table to write."""


class Pair:
    """A convolution and the norm behind it, on data of their own.

    Args:
        shape: Of the convolution.
    """

    def __init__(self, shape: ConvShape) -> None:
        self.shape = shape
        draw = torch.Generator().manual_seed(0)
        sizes = (shape.batch, shape.channels, shape.height, shape.width)
        last = torch.channels_last
        self._inputs = [torch.randn(sizes, generator=draw).contiguous(memory_format=last) for _ in range(2)]
        self._turn = count()
        self.weight = torch.randn((shape.channels, 1, *shape.kernel), generator=draw)
        #: Of the size and layout of the convolution's result.
        self.like = torch.empty(shape.batch, shape.channels, shape.out_height, shape.out_width, memory_format=last)
        self._plan = norm_kernels.plan_rows(self.like.numel() // shape.channels, shape.channels)
        self._parameters = torch.ones(shape.channels), torch.zeros(shape.channels)
        self._running = torch.zeros(shape.channels), torch.ones(shape.channels)

    def next_input(self) -> Tensor:
        """Inputs take turns, so that none is in a cache."""
        return self._inputs[next(self._turn) % len(self._inputs)]

    @functools.cached_property
    def _sums(self) -> Tensor:
        """Room for statistics, with those of some tensor."""
        room = self._plan.scratch()
        self._run_norm(torch.randn(self.like.shape).contiguous(memory_format=torch.channels_last), room, REDUCE)
        return room

    def normalise(self, y: Tensor, reduce: bool) -> Tensor:
        """The norm, with or without its pass for the statistics; without it they are those of an earlier call."""
        return self._run_norm(y, self._sums, JOIN | APPLY | TRACK | (REDUCE if reduce else 0))

    def _run_norm(self, y: Tensor, sums: Tensor, phases: int) -> Tensor:
        z, table = torch.empty_like(y), torch.empty(TABLE_ROWS, self._plan.width)
        places = [one.data_ptr() for one in (y, *self._parameters, *self._running, z, table, sums)]
        stream = int(z.numel() * 4 >= PAST_CACHES)
        kernel = norm_kernels.table()["norm_forward_relu6"]
        kernel(*places, *self._plan.numbers, 0, self._plan.segments, phases, stream, 1e-5, 0.1)
        return z


def candidates(shape: ConvShape) -> Iterator[dict[str, int]]:
    """The tile that was found for the convolution alone, with results written to the caches or past them."""
    found = [
        dict(one.parameters)
        for one in default_database().records
        if (one.shape, one.direction, one.layout) == (shape.text, Direction.FORWARD, Layout.CHANNELS_LAST)
    ]
    own = {name: value for name, value in found[0].items() if isinstance(value, int)}
    for one in (own | {"stream": 0}, own | {"stream": 1}):
        if reject(shape, Direction.FORWARD, Layout.CHANNELS_LAST, one) is None:
            yield one


def build(pair: Pair, parameters: dict[str, int], builder: Builder, kind: str) -> Callable[[], Tensor]:
    """A convolution with the norm behind it, as one function: `plain`, `summed` or `free`.

    Raises:
        HybridparError: The sums are wrong.
    """
    shape, summed = pair.shape, kind == "summed"
    variant = Variant(shape, Direction.FORWARD, Layout.CHANNELS_LAST, parameters)
    request = Request((_SCHEDULE,), {"shape": shape.text, "parameters": parameters}) if summed else variant.request()
    built = builder.build(request)
    functions = Session().load(built.image, built.names, keep=False)
    strips = variant.phases[1][1]
    extra = shape.channels * (1 + 2 * strips) if summed else 0
    scratch = torch.zeros(variant.scratch_bytes // 4 + extra)
    sums = torch.empty(2, shape.channels, dtype=torch.float64)

    def convolve() -> Tensor:
        y = torch.empty_like(pair.like)
        places = (pair.next_input().data_ptr(), pair.weight.data_ptr(), 0, y.data_ptr(), scratch.data_ptr())
        for name, many in variant.phases:
            functions[name](*places, 0, many)
        if summed:
            functions["merge"](*places[:3], sums.data_ptr(), places[4], 0, strips)
        return y

    if summed:
        y = convolve().double()
        right = torch.stack([y.sum((0, 2, 3)), y.square().sum((0, 2, 3))])
        if float((sums - right).abs().max() / right.abs().max()) > MOST_ERROR:
            raise HybridparError(f"the sums of {shape.text} are wrong with {parameters}")
    return lambda: pair.normalise(convolve(), reduce=kind == "plain")


def best(pair: Pair, builder: Builder, kind: str) -> tuple[Callable[[], Tensor], dict[str, int]]:
    """The tile with which a side is fastest."""
    found = []
    for parameters in candidates(pair.shape):
        run = build(pair, parameters, builder, kind)
        run()
        times, end = [], time.perf_counter() + _GLANCE
        while len(times) < 3 or time.perf_counter() < end:
            began = time.thread_time()
            run()
            times.append(time.thread_time() - began)
        found.append((min(times), len(found), run, parameters))
    _, _, run, parameters = min(found)
    return run, parameters


def measure(text: str, builder: Builder, options: Options) -> dict[str, object]:
    """The row of a layer. Times are those that the thread ran."""
    pair = Pair(ConvShape.parse(text))
    (plain, tile), (summed, other) = (best(pair, builder, kind) for kind in ("plain", "summed"))
    methods = {"plain": plain, "summed": summed, "free": build(pair, tile, builder, "free")}
    orders = balanced_orders(methods, seed=0)
    ms: dict[str, list[float]] = {name: [] for name in methods}
    for _ in range(options.rounds):
        for name in next(orders):
            began = time.thread_time()
            methods[name]()
            ms[name].append(1e3 * (time.thread_time() - began))
    gain, most = bootstrap_ratio(ms["plain"], ms["summed"]), bootstrap_ratio(ms["plain"], ms["free"])
    row: dict[str, object] = {"shape": text, "activation": "relu6"}
    row |= {f"{name}_ms": f"{statistics.median(own):.4f}" for name, own in ms.items()}
    row |= {f"least_{name}_ms": f"{min(own):.4f}" for name, own in ms.items()}
    row |= {"gain": f"{gain.median:.4f}", "low": f"{gain.low:.4f}", "high": f"{gain.high:.4f}"}
    row |= {"gain_if_free": f"{most.median:.4f}", "rounds": options.rounds}
    for name, parameters in (("plain", tile), ("summed", other)):
        row[f"{name}_tile"] = " ".join(f"{key}={value}" for key, value in parameters.items())
    return row | {"worth_it": gain.median >= WORTH} | setting()


def main(options: Options) -> None:
    """Measure all layers."""
    torch.set_num_threads(1)
    rows = []
    with Builder() as builder:
        for text in SHAPES:
            rows.append(measure(text, builder, options))
            print(f"{text}: {rows[-1]['gain']} times as fast, {rows[-1]['gain_if_free']} if sums were free", flush=True)
    write_rows(options.output, rows)
    columns = ("shape", "plain_ms", "summed_ms", "free_ms", "gain", "low", "high", "gain_if_free", "worth_it")
    print_aligned([columns, *([str(row[one]) for one in columns] for row in rows)])


if __name__ == "__main__":
    same_allocator("benchmarks.kernels.epilogue")
    main(tyro.cli(Options, description=__doc__))
