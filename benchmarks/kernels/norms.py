"""Why: a fused norm is worth its code only where it beats torch's two operations, shape by shape.

For each shape of norm and activation in MobileNetV2 and EfficientNet-B0 at batch 8 and 32: forward and backward through
autograd, torch against the kernels, interleaved, on tensors that take turns so that none is warm. The floor is four
copies of the tensor, timed in the same rounds: forward reads it twice and writes it once, backward reads it and its
gradient twice and writes once, which is eight passes where a copy has two.

Run from the root of the repository, on an idle machine, both sides with an allocator that keeps its memory:
    MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=8589934592 python -m benchmarks.kernels.norms [--threads N]
Writes results/norms.csv. A machine with a load average above 2.5 is refused.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import math
import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional
from torchvision import models

from benchmarks.rig.paired import Paired, paired
from hybridpar.errors import UsageError
from hybridpar.tvm_kernels.batch_norm_act import batch_norm_then
from hybridpar.tvm_kernels.norm_choice import NormShape, norm_shapes

MODELS = ("mobilenet_v2", "efficientnet_b0")
BATCHES = (8, 32)
SIZE = 160
#: Bytes over which tensors take turns: more than the last cache of a common CPU holds.
COLD = 128 << 20
OUTPUT = Path(__file__).parent / "results" / "norms.csv"
COLUMNS = (
    *("model", "batch", "threads", "shape", "layers", "stock_ms", "fused_ms", "floor_ms"),
    *("stock_over_fused", "low", "high", "floor_share", "loaded"),
)

IN_PLACE: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda z: z,
    "relu": functional.relu_,
    "relu6": lambda z: functional.relu6(z, inplace=True),
    "silu": lambda z: functional.silu(z, inplace=True),
}


def measure(shape: NormShape, rounds: int) -> Paired:
    """Torch, the kernels and the copies, in the same rounds."""
    form = (1, shape.channels, shape.rows // _height(shape.rows), _height(shape.rows))
    turns = max(3, math.ceil(COLD / (8 * shape.rows * shape.channels)))

    def images() -> list[Tensor]:
        return [torch.randn(form).contiguous(memory_format=torch.channels_last) for _ in range(turns)]

    inputs, gradients, copies = images(), images(), images()
    for x in inputs:
        x.requires_grad_()
    weight, bias = torch.ones(shape.channels, requires_grad=True), torch.zeros(shape.channels, requires_grad=True)
    running = torch.zeros(shape.channels), torch.ones(shape.channels)
    turn = itertools.count()

    def stock() -> None:
        own = next(turn) % turns
        x = inputs[own]
        y = IN_PLACE[shape.act](functional.batch_norm(x, *running, weight, bias, True, 0.1, 1e-5))
        torch.autograd.grad(y, (x, weight, bias), gradients[own])

    def fused() -> None:
        own = next(turn) % turns
        x = inputs[own]
        y = batch_norm_then(x, weight, bias, *running, True, 0.1, 1e-5, shape.act)
        torch.autograd.grad(y, (x, weight, bias), gradients[own])

    def floor() -> None:
        for _ in range(4):
            own = next(turn) % turns
            copies[own].copy_(gradients[own])

    repeats = max(1, (1 << 20) // (shape.rows * shape.channels))
    return paired({"stock": stock, "fused": fused, "floor": floor}, rounds, repeats=repeats)


def _height(rows: int) -> int:
    return next(one for one in range(math.isqrt(rows), 0, -1) if rows % one == 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    if os.getloadavg()[0] > 2.5:
        raise UsageError(
            f"the load average is {os.getloadavg()[0]:.1f}",
            "Numbers of a busy machine say nothing about the kernels.",
            "Measure when it is idle.",
        )
    torch.set_num_threads(options.threads)
    OUTPUT.parent.mkdir(exist_ok=True)
    with OUTPUT.open("w", newline="") as file:
        table = csv.DictWriter(file, COLUMNS)
        table.writeheader()
        for name, batch in itertools.product(MODELS, BATCHES):
            model = getattr(models, name)(weights=None)
            layers = Counter(norm_shapes(model, torch.zeros(batch, 3, SIZE, SIZE)).values())
            totals = dict.fromkeys(("stock", "fused", "floor"), 0.0)
            for shape, count in sorted(layers.items()):
                found = measure(shape, options.rounds)
                ratio = found.ratio("stock", "fused")
                ms = {one: found.median_ms(one) for one in totals}
                totals = {one: totals[one] + count * ms[one] for one in totals}
                cells = (name, batch, options.threads, shape.text, count, *(f"{value:.3f}" for value in ms.values()))
                shares = (ratio.median, ratio.low, ratio.high, ms["floor"] / ms["fused"])
                row = (*cells, *(f"{value:.3f}" for value in shares), found.loaded)
                table.writerow(dict(zip(COLUMNS, row, strict=True)))
                print(*row)
            print(
                f"{name} batch {batch}: {totals['stock']:.1f} -> {totals['fused']:.1f} ms, "
                f"{totals['stock'] / totals['fused']:.2f}x, {totals['floor'] / totals['fused']:.0%} of the floor",
                file=sys.stderr,
            )


if __name__ == "__main__":
    main()
