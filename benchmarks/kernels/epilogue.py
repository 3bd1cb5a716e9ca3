"""Times depthwise convolutions that also compute the sums that the following BatchNorm needs.

BatchNorm's first pass only reads what the convolution has just written, so the convolution can save it that pass.

Depthwise convolutions of MobileNetV2 and the BatchNorm with ReLU6 behind them, forward in training, batch 32,
channels_last, one thread, as the swapped layers run: on the kernel of each alone, and with a convolution that leaves
its moments, so that the norm's first pass falls away, whether or not a record would say that it pays. Its results are
written to the caches or past them, as a tune finds it. `free` is the convolution without sums and a norm that has
moments all the same: what could be gained at most.

    python -m benchmarks.kernels.epilogue

Writes results/epilogue.csv. The convolution's own tile is what the package or this machine's user database knows.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import torch
import tyro
from torch import Tensor, nn

from benchmarks.kernels.common import RESULTS, print_aligned, same_allocator, setting
from benchmarks.rig.paired import balanced_orders
from benchmarks.rig.records import write_dicts
from benchmarks.rig.stats import bootstrap_ratio
from hybridpar.codegen.compile_pool import Builder
from hybridpar.errors import HybridparError
from hybridpar.tvm_kernels.choice import Choices, active_choices, use_choices
from hybridpar.tvm_kernels.database import Database, default_database
from hybridpar.tvm_kernels.kernel import make_kernels
from hybridpar.tvm_kernels.machine import cpu_fingerprint
from hybridpar.tvm_kernels.moments import attach_moments, take_moments
from hybridpar.tvm_kernels.operation import operations
from hybridpar.tvm_kernels.operations.batch_norm import NORM_OP, NormRecord
from hybridpar.tvm_kernels.operations.depthwise_batch_norm import CONV_NORM_OP, ConvNormRecord, conv_norm_key
from hybridpar.tvm_kernels.record import KernelRecord, Record
from hybridpar.tvm_kernels.shapes import ConvNormShape, ConvShape, Direction, Layout
from hybridpar.tvm_kernels.swap import optimize
from hybridpar.tvm_kernels.tuner import tune

SHAPES = (
    "32x96x112x112 k3x3 s2x2 p1x1 d1x1",
    "32x144x56x56 k3x3 s1x1 p1x1 d1x1",
    "32x192x28x28 k3x3 s1x1 p1x1 d1x1",
    "32x384x14x14 k3x3 s1x1 p1x1 d1x1",
)
#: What the pair of operations has to gain.
WORTH = 1.05
#: Seconds in which the convolution that leaves its moments is chosen.
_CHOOSING = 1.0
#: A record that wins, whatever it is of: what runs is not for these records to say.
_WINS = {"ms": 1.0, "stock_ms": 2.0, "error": 0.0}


@dataclass(frozen=True, kw_only=True)
class Options:
    """Measure what a norm gains by moments from the convolution in front of it."""

    rounds: int = 40
    """Rounds to keep."""
    output: Path = RESULTS / "epilogue.csv"
    """Table to write."""


def tile_of(shape: ConvShape) -> dict[str, int]:
    """The tile that was found for a convolution alone.

    Raises:
        HybridparError: There is none.
    """
    for one in default_database().records:
        if (one.what(), one.layout) == ((Direction.FORWARD, shape), Layout.CHANNELS_LAST):
            return one.numbers
    raise HybridparError(
        f"no tile is known for {shape.text}",
        "What is compared is the best kernel of the convolution alone.",
        "Run `hybridpar tune mobilenet_v2 --batch 32` first.",
    )


class Pair:
    """A convolution and the norm behind it as swapped layers, on data of their own.

    Args:
        shape: Of the two.
        alone: The convolution's tile.
        summing: Its tile where it leaves moments.
    """

    def __init__(self, shape: ConvNormShape, alone: Mapping[str, int], summing: Mapping[str, int]) -> None:
        one = shape.convolution
        sizes = (one.batch, one.channels, one.height, one.width)
        torch.manual_seed(0)
        # Inputs take turns, so that none is in a cache.
        self._inputs = [torch.randn(sizes).contiguous(memory_format=torch.channels_last) for _ in range(2)]
        self._turn = count()
        numbers = {"stride": one.stride, "padding": one.padding, "dilation": one.dilation}
        self.conv = nn.Conv2d(one.channels, one.channels, one.kernel, groups=one.channels, bias=False, **numbers)  # type: ignore[arg-type]
        self.norm = nn.BatchNorm2d(one.channels)
        records = _records(shape, alone, summing)
        before = active_choices()
        optimize(nn.Sequential(self.conv, self.norm, nn.ReLU6()), Database(records=records[:2]))
        self._apart = active_choices()
        self._together = Choices(Database(records=records))
        use_choices(before)
        self._moments: Tensor | None = None

    def convolved(self, together: bool) -> Tensor:
        """The convolution's result, with its moments or without."""
        use_choices(self._together if together else self._apart)
        y: Tensor = self.conv(self._inputs[next(self._turn) % 2])
        return y

    def plain(self) -> Tensor:
        """Both as they are."""
        return self._normed(self.convolved(together=False))

    def summed(self) -> Tensor:
        """With moments from the convolution."""
        return self._normed(self.convolved(together=True))

    def free(self) -> Tensor:
        """With moments that are there already, those of an earlier call."""
        if self._moments is None:
            self._moments = self.moments()
        y = self.convolved(together=False)
        attach_moments(y, self._moments)
        return self._normed(y)

    def moments(self) -> Tensor:
        """Those that the convolution leaves.

        Raises:
            HybridparError: It leaves none.
        """
        found = take_moments(self.convolved(together=True))
        if found is None:
            raise HybridparError("the convolution leaves no moments", "Its kernel cannot be had here; see the log.")
        return found

    def _normed(self, y: Tensor) -> Tensor:
        z: Tensor = self.norm(y)
        return z


def _records(shape: ConvNormShape, alone: Mapping[str, int], summing: Mapping[str, int]) -> list[Record]:
    """What says that a pair runs on these tiles."""
    norm, where = shape.norm, {"device": cpu_fingerprint(), "threads": torch.get_num_threads()}
    convolution = {"direction": Direction.FORWARD, "shape": shape.convolution.text, "layout": Layout.CHANNELS_LAST}
    of_norm = {"rows": norm.rows, "channels": norm.channels, "activation": norm.act}
    both = {"shape": shape.convolution.text, "activation": shape.act, "ms": 1.0, "apart_ms": 2.0, "error": 0.0}
    told: list[tuple[type[Record], dict[str, object], str]] = [
        (KernelRecord, {**convolution, **_WINS, "parameters": dict(alone)}, "depthwise_conv2d"),
        (NormRecord, {**of_norm, **_WINS}, NORM_OP),
        (ConvNormRecord, {**both, "parameters": dict(summing)}, CONV_NORM_OP),
    ]
    return [
        kind.model_validate({**fields, **where, "versions": dict(operations()[op, "cpu"].versions)})
        for kind, fields, op in told
    ]


def measure(text: str, builder: Builder, options: Options) -> dict[str, object]:
    """The row of a layer. Times are those that the thread ran."""
    shape = ConvNormShape(ConvShape.parse(text), "relu6")
    tile = tile_of(shape.convolution)
    kernels = make_kernels(_records(shape, tile, tile)[:2])
    parts = list(zip((tile, {}), kernels, strict=True))
    found, *_ = tune(conv_norm_key(shape, 1, cpu_fingerprint()), _CHOOSING, parts=parts, builder=builder)
    pair = Pair(shape, tile, found.parameters)
    methods: dict[str, Callable[[], Tensor]] = {"plain": pair.plain, "summed": pair.summed, "free": pair.free}
    ms: dict[str, list[float]] = {name: [] for name in methods}
    with torch.no_grad():
        pair.moments()
        for method in methods.values():
            method()
        orders = balanced_orders(methods, seed=0)
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
    for name, parameters in (("plain", tile), ("summed", found.parameters)):
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
    write_dicts(options.output, rows)
    columns = ("shape", "plain_ms", "summed_ms", "free_ms", "gain", "low", "high", "gain_if_free", "worth_it")
    print_aligned([columns, *([str(row[one]) for one in columns] for row in rows)])


if __name__ == "__main__":
    same_allocator()
    main(tyro.cli(Options, description=__doc__))
