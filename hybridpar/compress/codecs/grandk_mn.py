"""Codec `grandk_mn`: random-k elements that all workers agree on, rounded to a shared grid.

GlobalRandK-MaxNorm: Vineeth S, "Quantization for Distributed Optimization", arXiv 2109.12497. All elements of a
parameter stand in a queue, in an order drawn from a seed that workers share. Each step sends the next k of them,
rounded as in `qsgd_mn`, or on two grids as in `qsgd_mn_ts` with `levels=4/8`; when the queue is empty it is drawn anew.
So each element goes exactly once in ceil(N / k) steps.

With error feedback the others wait in the residual, and so does what was rounded off. Elements that do not go are 0 on
all workers: had each its own gradient there instead, as in the author's code, replicas would drift apart. Without error
feedback what is sent is multiplied with N / k, which makes the result unbiased, and noisy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from hybridpar.compress.codec import CODECS, LargeTensorCodec, TensorSpec
from hybridpar.compress.codecs.qsgd_mn import BITS, GridsCoder, steps_of
from hybridpar.compress.codecs.topk import share
from hybridpar.compress.memory import WORKER
from hybridpar.compress.packing import magnitude
from hybridpar.compress.quantised import cut_stripes
from hybridpar.spec import AT_MOST_1


@CODECS.register("grandk_mn", "GlobalRandK-MaxNorm: the next elements of a queue that all workers share, rounded")
@dataclass(frozen=True, kw_only=True)
class GlobalRandomK(LargeTensorCodec):
    """Elements in turn, on a grid that all workers share.

    Attributes:
        rate: Share of a parameter's elements that is sent.
        levels: Bits of the grid, or of several grids as in `qsgd_mn_ms`.
    """

    rate: Annotated[float, AT_MOST_1] = 0.01
    levels: tuple[Annotated[int, BITS], ...] = (4,)
    kernels = ("cpu", "cuda")
    reads_state = True
    feedback: bool = True

    def __post_init__(self) -> None:
        steps_of(self.name, self.levels)

    def coder(self, spec: TensorSpec) -> QueueCoder:
        return QueueCoder(spec, self.rate, steps_of(self.name, self.levels))


class QueueCoder(GridsCoder):
    """Sends the next elements of a queue."""

    def __init__(self, spec: TensorSpec, rate: float, steps: Sequence[int]) -> None:
        turns = math.ceil(spec.count / share(rate, spec.count))
        self._turns = cut_stripes(spec.count, 1, turns)  # the first ones may be longer by an element
        super().__init__(spec, steps, count=math.ceil(spec.count / turns))
        self._queue, self._drawn = torch.empty(0), -1
        self._picked = torch.zeros(self._count, dtype=torch.float32, device=spec.device)
        self._all = torch.empty(0)

    def _begin(self) -> None:
        super()._begin()
        self._all, indices = self._values, self._next()
        self._values = self._picked.zero_()
        picked = self._picked[: indices.numel()]
        torch.index_select(self._all, 0, indices, out=picked)
        # A number that is not finite is seen by all in the step in which it comes, whoever's turn it is: 0 or NaN.
        picked.add_(magnitude(self.gradient) * 0)

    def write(self, index: int, parts: Sequence[Tensor]) -> None:
        super().write(index, parts)
        if self.memory[WORKER].keeps and index == len(self.rounds) - 1:
            indices = self._next()
            self._all.index_copy_(0, indices, self._picked[: indices.numel()])

    def finish(self, out: Tensor) -> None:
        super().finish(self._picked)
        indices = self._next()
        if not self.memory[WORKER].keeps:
            self._picked.mul_(len(self._turns))
        out.zero_()
        out.index_copy_(0, indices, self._picked[: indices.numel()])

    def _next(self) -> Tensor:
        """Indices of the elements whose turn it is, equal on all workers."""
        queue, turn = divmod(self.steps, len(self._turns))
        if queue != self._drawn:
            draw = torch.Generator().manual_seed(self.spec.draw_seed("queue", queue))
            order = torch.randperm(self.spec.count, generator=draw, dtype=torch.int32, device="cpu")
            self._queue, self._drawn = order.to(self.spec.device), queue
        start, stop = self._turns[turn]
        return self._queue[start:stop].to(torch.int64)
