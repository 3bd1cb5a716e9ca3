"""Times fused BatchNorm with activation against torch's two operations, shape by shape.

For each shape of norm and activation in MobileNetV2 and EfficientNet-B0 at batch 8 and 32 and images of 160x160:
forward and backward through autograd, torch against the kernels and against torch.compile, in the same rounds, on
tensors that take turns so that none is warm. The floor is what the least passes over memory take at the speed of copies
of that size, which is measured first: forward reads a tensor twice and writes one, backward reads two twice and writes
one.

Run from the root of the repository, on an idle machine; it takes about fifteen minutes:
    python -m benchmarks.kernels.norms [--threads N]
Adds to results/norms.csv a row for each shape, and one for all layers of a network together: `shape` is then `all`, and
what is chosen is the kernels for tensors that `norm_swap` lets run on them, and torch elsewhere.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
import tyro
from torch import Tensor
from torch.nn import functional
from torchvision import models

from benchmarks.kernels.common import RESULTS, print_aligned, same_allocator, setting
from benchmarks.kernels.norm_bench import IN_PLACE, NormBench
from benchmarks.kernels.roofline import measure_copies, norm_floor_ms
from benchmarks.rig.paired import Paired, paired
from benchmarks.rig.records import append_dicts
from hybridpar.errors import HybridparError
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


@dataclass(frozen=True)
class Found:
    """What was measured of a shape; times in milliseconds.

    Attributes:
        times: Of `stock`, `fused` and `compiled`.
        compile_s: Seconds of the first compiled call.
        floor_ms: Of the least passes.
        error: Against float64.
    """

    times: Paired
    compile_s: float
    floor_ms: float
    error: float


def _stock(x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, variance: Tensor, *given: Any) -> Tensor:
    """What torch.compile is given: torch's two operations, with the arguments of the fused one."""
    training, momentum, eps, activation = given
    normed = functional.batch_norm(x, mean, variance, weight, bias, training, momentum, eps)
    return IN_PLACE[activation](normed)


def measure(shape: NormShape, rounds: int, copies: Sequence[tuple[int, float]]) -> Found:
    """Torch and the kernels in the same rounds."""
    bench = NormBench(shape)
    repeats = max(1, min(MOST_CALLS, AT_ONCE // (shape.rows * shape.channels)))
    torch.compiler.reset()  # or shapes seen before would be guards of this one
    compiled = torch.compile(_stock, dynamic=False)
    began = time.monotonic()
    bench.run(compiled)
    compile_s = time.monotonic() - began
    ways = {
        "stock": bench.instead,
        "fused": lambda: bench.run(fused_batch_norm_act),
        "compiled": lambda: bench.run(compiled),
    }
    times = paired(ways, rounds, repeats=repeats)
    return Found(
        times, compile_s, norm_floor_ms(shape, copies, torch.get_num_threads()), bench.errors(fused_batch_norm_act)[0]
    )


def rows_of(model: str, batch: int, layers: Mapping[NormShape, int], found: Mapping[NormShape, Found]) -> list[Row]:
    """A row for each shape of a network, and one for all of its layers."""
    common = {"model": model, "batch": batch}
    rows: list[Row] = []
    stock_ms = fused_ms = chosen_ms = floor_ms = logs = compiled_ms = compile_s = 0.0
    for shape, often in sorted(layers.items()):
        one = found[shape]
        ratio = one.times.ratio("stock", "fused")
        stock, fused = one.times.median_ms("stock"), one.times.median_ms("fused")
        chosen = ratio.median if shape.rows * shape.channels >= least_values() else 1.0
        stock_ms, fused_ms = stock_ms + often * stock, fused_ms + often * fused
        chosen_ms, floor_ms = chosen_ms + often * stock / chosen, floor_ms + often * one.floor_ms
        logs += often * math.log(chosen)
        compiled = one.times.median_ms("compiled")
        compiled_ms, compile_s = compiled_ms + often * compiled, compile_s + one.compile_s
        times = (stock, fused, stock / chosen, one.floor_ms)
        ratios = (ratio.median, ratio.low, ratio.high, chosen)
        best = (one.times.min_ms("stock"), one.times.min_ms("fused"))
        rows.append(common | _cells(shape.text, often, times, ratios, best) | {"loaded": one.times.loaded})
        rows[-1] |= {"error": f"{one.error:.1e}", "verdict": "stock" if chosen == 1.0 else "tuned"}
        rows[-1] |= _compiled_cells(compiled, one.times.ratio("stock", "compiled").median, one.compile_s)
    ratio_of_sums = stock_ms / chosen_ms
    mean = math.exp(logs / sum(layers.values()))
    total = _cells(
        "all",
        sum(layers.values()),
        (stock_ms, fused_ms, chosen_ms, floor_ms),
        (ratio_of_sums, math.nan, math.nan, mean),
        (math.nan, math.nan),
    )
    met = ratio_of_sums >= TARGET and floor_ms / chosen_ms >= TARGET_FLOOR
    promised = model == "mobilenet_v2" and batch == 32
    total |= {"loaded": any(row["loaded"] for row in rows), "error": ""}
    total |= {"verdict": ("met" if met else "missed") if promised else ""}
    rows.append(common | total | _compiled_cells(compiled_ms, stock_ms / compiled_ms, compile_s))
    return rows


def _compiled_cells(ms: float, ratio: float, seconds: float) -> Row:
    return {"compiled_ms": f"{ms:.4f}", "compiled_times_stock": f"{ratio:.4f}", "compile_s": f"{seconds:.1f}"}


def _cells(shape: str, layers: int, times: Sequence[float], ratios: Sequence[float], best: Sequence[float]) -> Row:
    """Cells of a row; for all layers together `as_chosen` is the geometric mean over layers."""
    stock, fused, chosen, floor = times
    return {
        "shape": shape,
        "layers": layers,
        "stock_ms": f"{stock:.4f}",
        "fused_ms": f"{fused:.4f}",
        "chosen_ms": f"{chosen:.4f}",
        "floor_ms": f"{floor:.4f}",
        **dict(zip(("times_stock", "low", "high", "as_chosen"), (f"{one:.4f}" for one in ratios), strict=True)),
        "best_stock_ms": f"{best[0]:.4f}",
        "best_fused_ms": f"{best[1]:.4f}",
        "floor_share": f"{floor / chosen:.4f}",
    }


def show(rows: Sequence[Row]) -> None:
    """Print what matters."""
    columns: tuple[str, ...] = ("shape", "layers", "stock_ms", "fused_ms", "compiled_ms", "floor_ms", "times_stock")
    columns += ("low", "high", "floor_share")
    print(f"\n{rows[0]['model']}, batch {rows[0]['batch']}")
    print_aligned([(*columns, "verdict"), *([str(row[one]) for one in (*columns, "verdict")] for row in rows)])
    total = rows[-1]
    print(
        f"all layers: {total['stock_ms']} -> {total['chosen_ms']} ms, {total['times_stock']}x as chosen "
        f"(geometric mean {total['as_chosen']}x), {float(str(total['floor_share'])):.0%} of the floor",
        flush=True,
    )


def main(options: Options) -> None:
    """Measure every shape once, and add to the table after each network."""
    torch.set_num_threads(options.threads)
    if not norm_kernels.table():
        raise HybridparError("there are no kernels of norms here", fix="See the log for why.")
    began = time.monotonic()
    copies = measure_copies()
    found: dict[NormShape, Found] = {}
    where = setting() | {"copies_gb_s": " ".join(f"{size >> 20}MiB:{rate / 1e9:.1f}" for size, rate in copies)}
    for name, batch in product(MODELS, options.batches):
        model = models.get_model(name)
        _, norms = tunable_layers(model, (batch, 3, options.size, options.size))
        layers = Counter(norm.shape for norm in norms)
        for shape in sorted(layers):
            if shape not in found:
                found[shape] = measure(shape, options.rounds, copies)
        fresh = rows_of(name, batch, layers, found)
        show(fresh)
        append_dicts(options.output, [row | where for row in fresh])
    print(f"\n{time.monotonic() - began:.0f} s; written to {options.output}")


if __name__ == "__main__":
    same_allocator()
    main(tyro.cli(Options))
