"""Times fused BatchNorm with activation against torch's two operations, shape by shape.

For each shape of norm and activation in MobileNetV2 and EfficientNet-B0 at batch 8 and 32 and images of 160x160:
forward and backward through autograd, torch against the kernels and against torch.compile, in the same rounds, on
tensors that take turns so that none is in a cache. The floor is what the least passes over memory take at the speed of
copies: forward reads a tensor twice and writes one, backward reads two twice and writes one.

Run from the root of the repository, on an idle machine; it takes about fifteen minutes:
    python -m benchmarks.kernels.norms [--threads N]
Adds to results/norms.csv a row for each shape, and one for all layers of a network together: `shape` is then `all`, and
what is chosen is the kernels for tensors that `norm_swap` lets run on them, and torch elsewhere.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torchvision import models

from benchmarks.kernels.common import RESULTS, measure_speed, setting
from benchmarks.rig.launch import run_command
from benchmarks.rig.paired import Paired, paired
from benchmarks.rig.records import append_dicts, print_markdown
from hybridpar.errors import HybridparError
from hybridpar.machine.process import tune_this_process
from hybridpar.tvm_kernels import norm_kernels
from hybridpar.tvm_kernels.batch_norm_act import fused_batch_norm_act
from hybridpar.tvm_kernels.layers import tunable_layers
from hybridpar.tvm_kernels.norm_swap import least_values
from hybridpar.tvm_kernels.shapes import NormShape

MODELS = ("mobilenet_v2", "efficientnet_b0")
#: Of a network whose layers are added up: times torch's speed, and part of the floor's. Promised for MobileNetV2.
TARGET, TARGET_FLOOR = 1.6, 0.65
#: Small shapes are timed several calls at once: as many as have so many values together, but not more than so many.
AT_ONCE, MOST_CALLS = 1 << 20, 20
#: Bytes that the tensors of a shape which take turns come to, and most sets of them.
COLD, MOST_SETS = 128 << 20, 8
EPS = 1e-5

#: How torch's side activates: in place, as torchvision's networks have it.
IN_PLACE: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda z: z,
    "relu": functional.relu_,
    "relu6": lambda z: functional.relu6(z, inplace=True),
    "silu": lambda z: functional.silu(z, inplace=True),
}

Row = dict[str, object]


@dataclass(frozen=True, kw_only=True)
class Options:
    """Measure fused norms against torch, shape by shape."""

    batches: tuple[int, ...] = (8, 32)
    """Images of a step."""
    size: int = 160
    """Rows and columns of an image."""
    threads: int = 1
    """Of torch."""
    rounds: int = 20
    """Rounds to keep of each shape, at least 20."""
    output: Path = RESULTS / "norms.csv"
    """Table to add rows to."""


def stock(x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, variance: Tensor, *options: Any) -> Tensor:
    """Torch's two operations, with the arguments of the fused one."""
    training, momentum, eps, activation = options
    normed = functional.batch_norm(x, mean, variance, weight, bias, training, momentum, eps)
    return IN_PLACE[activation](normed)


def bytes_of(shape: NormShape) -> int:
    """Of the input in float32."""
    return 4 * shape.rows * shape.channels


def steps_of(shape: NormShape, forward: Callable[..., Tensor]) -> Callable[[], None]:
    """Forward and backward pass of a norm with its activation, on tensors that take turns."""
    sets = min(MOST_SETS, max(1, math.ceil(COLD / bytes_of(shape))))
    # As many pixels as the norm has rows, (1, C, H, W), channels last.
    height = next(rows for rows in range(math.isqrt(shape.rows), 0, -1) if shape.rows % rows == 0)
    image = torch.randn(1, shape.channels, height, shape.rows // height).contiguous(memory_format=torch.channels_last)
    tensors = itertools.cycle([(image.clone().requires_grad_(), image.clone()) for _ in range(sets)])
    weight, bias = (torch.ones(shape.channels, requires_grad=True) for _ in range(2))
    running = torch.zeros(shape.channels), torch.ones(shape.channels)

    def step() -> None:
        x, gradient = next(tensors)
        out = forward(x, weight, bias, *running, True, 0.1, EPS, shape.act)
        torch.autograd.grad(out, (x, weight, bias), gradient)

    return step


def measure(shape: NormShape, rounds: int) -> tuple[Paired, float]:
    """Torch, torch.compile and the kernels in the same rounds; and the seconds of the first compiled call."""
    torch.compiler.reset()  # or shapes seen before would be guards of this one
    compiled = steps_of(shape, torch.compile(stock, dynamic=False))
    began = time.monotonic()
    compiled()
    seconds = time.monotonic() - began
    methods = {"stock": steps_of(shape, stock), "fused": steps_of(shape, fused_batch_norm_act), "compiled": compiled}
    repeats = max(1, min(MOST_CALLS, AT_ONCE // (shape.rows * shape.channels)))
    return paired(methods, rounds, repeats=repeats), seconds


def rows_of(
    layers: Mapping[NormShape, int], measured: Mapping[NormShape, tuple[Paired, float]], bandwidth: float
) -> list[Row]:
    """A row for each shape of a network, and one for all of its layers."""
    rows: list[Row] = []
    totals: Counter[str] = Counter()
    for shape, count in sorted(layers.items()):
        times, seconds = measured[shape]
        ratio = times.ratio("stock", "fused")
        is_fused = shape.rows * shape.channels >= least_values()
        ms = {f"{name}_ms": times.median_ms(name) for name in ("stock", "fused", "compiled")}
        ms["chosen_ms"] = ms["stock_ms"] / ratio.median if is_fused else ms["stock_ms"]
        ms["floor_ms"] = 1e3 * 8 * bytes_of(shape) / bandwidth
        row: Row = {
            "shape": f"{shape.rows}x{shape.channels} {shape.act}",
            "layers": count,
            **ms,
            "compile_s": seconds,
            "loaded": times.loaded,
        }
        row |= {"times_stock": ratio.median, "low": ratio.low, "high": ratio.high}
        row |= {"best_stock_ms": times.min_ms("stock"), "best_fused_ms": times.min_ms("fused")}
        row |= {
            "compiled_times_stock": times.ratio("stock", "compiled").median,
            "verdict": ("stock", "tuned")[is_fused],
        }
        rows.append(row)
        totals.update({name: count * value for name, value in ms.items()} | {"layers": count, "compile_s": seconds})
    gain = totals["stock_ms"] / totals["chosen_ms"]
    is_met = gain >= TARGET and totals["floor_ms"] / totals["chosen_ms"] >= TARGET_FLOOR
    loaded = any(row["loaded"] for row in rows)
    total: Row = {"shape": "all", **totals, "loaded": loaded, "times_stock": gain, "verdict": ("missed", "met")[is_met]}
    rows.append(total | {"compiled_times_stock": totals["stock_ms"] / totals["compiled_ms"]})
    for row in rows:
        row["floor_share"] = float(str(row["floor_ms"])) / float(str(row["chosen_ms"]))
    return [{name: f"{cell:.4f}" if isinstance(cell, float) else cell for name, cell in row.items()} for row in rows]


def show(title: str, rows: Sequence[Row]) -> None:
    """Print what matters."""
    columns: tuple[str, ...] = ("shape", "layers", "stock_ms", "fused_ms", "compiled_ms", "chosen_ms", "floor_ms")
    columns += ("times_stock", "floor_share", "verdict")
    print(f"\n{title}")
    print_markdown(columns, [[row.get(column, "") for column in columns] for row in rows])


def main(options: Options) -> None:
    """Measure every shape once, and add to the table after each network."""
    tune_this_process(1)
    torch.set_num_threads(options.threads)
    if not norm_kernels.table():
        raise HybridparError("there are no kernels of norms here", fix="See the log for why.")
    _, bandwidth = measure_speed()
    measured: dict[NormShape, tuple[Paired, float]] = {}
    for name, batch in itertools.product(MODELS, options.batches):
        _, norms = tunable_layers(models.get_model(name), (batch, 3, options.size, options.size))
        layers = Counter(norm.shape for norm in norms)
        for shape in sorted(layers.keys() - measured.keys()):
            measured[shape] = measure(shape, options.rounds)
        rows = rows_of(layers, measured, bandwidth)
        show(f"{name}, batch {batch}", rows)
        common = {"model": name, "batch": batch, "copies_gb_s": f"{bandwidth / 1e9:.1f}"} | setting()
        append_dicts(options.output, [row | common for row in rows])


if __name__ == "__main__":
    run_command(main, Options)
