"""Data of one norm with its activation, and the two ways to compute a training step's forward and backward of it.

Both run as in training, through autograd and on tensors that take turns, so that none is still in the caches. Torch's
side does the activation in place, as torchvision's networks have it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hybridpar.tvm_kernels.batch_norm_act import STOCK
from hybridpar.tvm_kernels.conv_bench import turns
from hybridpar.tvm_kernels.measure import Bench, Call, Rotation, relative_error
from hybridpar.tvm_kernels.shapes import NormShape

#: Most tensors that take turns.
TURNS = 8
#: Values on which the error is taken.
_CHECKED = 1 << 20
EPS = 1e-5

#: How torch's side activates.
IN_PLACE: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda z: z,
    "relu": functional.relu_,
    "relu6": lambda z: functional.relu6(z, inplace=True),
    "silu": lambda z: functional.silu(z, inplace=True),
}


class NormBench(Bench):
    """One norm."""

    def __init__(self, shape: NormShape, threads: int = 1, seed: int = 0) -> None:
        self.shape, self.threads, self.seed = shape, threads, seed
        draw = torch.Generator().manual_seed(seed)
        sets = min(TURNS, turns(shape.bytes))
        x, gradient = images(shape, draw), images(shape, draw)
        # The same values at other places: drawing them takes longer than what is measured.
        self._inputs = [x.clone().requires_grad_() for _ in range(sets)]
        self._gradients = [gradient.clone() for _ in range(sets)]
        self._rotation = Rotation(sets)
        self._weight = torch.ones(shape.channels, requires_grad=True)
        self._bias = torch.zeros(shape.channels, requires_grad=True)
        self._running = torch.zeros(shape.channels), torch.ones(shape.channels)

    def run(self, kernel: Any) -> None:
        """Forward and backward by the kernels."""
        self._step(lambda x: kernel(x, self._weight, self._bias, *self._running, True, 0.1, EPS, self.shape.act))

    @property
    def instead(self) -> Call:
        """Forward and backward by torch."""
        return self._stock

    def _stock(self) -> None:
        given = *self._running, self._weight, self._bias, True, 0.1, EPS
        self._step(lambda x: IN_PLACE[self.shape.act](functional.batch_norm(x, *given)))

    def _step(self, forward: Callable[[Tensor], Tensor]) -> None:
        def call(place: int) -> None:
            x = self._inputs[place]
            torch.autograd.grad(forward(x), (x, self._weight, self._bias), self._gradients[place])

        self._rotation.compute(call)

    def errors(self, kernel: Any) -> tuple[float, float]:
        """The largest error of result and gradients against float64, each relative to its largest value."""
        draw, shape = torch.Generator().manual_seed(self.seed), self.shape
        part = NormShape(min(shape.rows, max(2, _CHECKED // shape.channels)), shape.channels, shape.act)
        x, gradient = images(part, draw), images(part, draw)
        weight, bias = torch.rand(shape.channels, generator=draw) + 0.5, torch.randn(shape.channels, generator=draw)

        def stock(x: Tensor, weight: Tensor, bias: Tensor, *_: Any) -> Tensor:
            return STOCK[shape.act](functional.batch_norm(x, None, None, weight, bias, True, 0.0, EPS))

        def results(compute: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
            own = [one.to(dtype).requires_grad_() for one in (x, weight, bias)]
            y = compute(*own, None, None, True, 0.0, EPS, shape.act)
            return [y.detach(), *torch.autograd.grad(y, own, gradient.to(dtype))]

        true = results(stock, torch.float64)
        own, torchs = (max(map(relative_error, results(one, torch.float32), true)) for one in (kernel, stock))
        return own, torchs


def images(shape: NormShape, draw: torch.Generator | None = None) -> Tensor:
    """One random image of as many pixels as a norm has rows, (1, C, H, W), channels last."""
    height = next(one for one in range(math.isqrt(shape.rows), 0, -1) if shape.rows % one == 0)
    sizes = (1, shape.channels, height, shape.rows // height)
    return torch.randn(sizes, generator=draw).contiguous(memory_format=torch.channels_last)
