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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hybridpar.compress.codec import (
    CODECS,
    NO_RESIDUAL,
    WORKER,
    LargeTensorCodec,
    OuterCoder,
    Residual,
    TensorSpec,
)
from hybridpar.compress.codecs.qsgd_mn_ms import GridsCoder, read_levels
from hybridpar.compress.feedback import KeptResidual
from hybridpar.compress.packing import magnitude
from hybridpar.compress.quantised import cut_stripes
from hybridpar.compress.sparse import check_rate, share


@CODECS.register("grandk_mn", "GlobalRandK-MaxNorm: the next elements of a queue that all workers share, rounded")
@dataclass(frozen=True)
class GlobalRandomK(LargeTensorCodec):
    """Elements in turn, on a grid that all workers share.

    Attributes:
        rate: Share of a parameter's elements that is sent.
        levels: Bits of the grid, or of several grids as in `qsgd_mn_ms`.
        least: Parameters with fewer elements are sent in full precision, and so are vectors.
    """

    rate: float = 0.01
    levels: str = "4"
    least: int = 1000
    name = "grandk_mn"
    biased = True
    stateful = True
    reads_state = True
    feedback = True

    def __post_init__(self) -> None:
        check_rate(self.rate, 0.01)
        read_levels(self.levels)
        super().__post_init__()

    def bind(self, spec: TensorSpec) -> QueueCoder:
        return QueueCoder(spec, self.rate, read_levels(self.levels))


class QueueCoder(OuterCoder):
    """Sends the next elements of a queue."""

    def __init__(self, spec: TensorSpec, rate: float, steps: Sequence[int]) -> None:
        turns = math.ceil(spec.count / share(rate, spec.count))
        self._phases = cut_stripes(spec.count, 1, turns)  # the first ones may be longer by one
        self._most = math.ceil(spec.count / turns)
        super().__init__(spec, GridsCoder(replace(spec, shape=(self._most,)), steps))
        self.residuals = {WORKER: spec.count}
        self._steps = 0
        self._queue, self._drawn = torch.empty(0), -1
        self._picked = torch.zeros(self._most, dtype=torch.float32, device=spec.device)
        self._left = KeptResidual.zeros(self._most, spec.device)
        self._places = torch.empty(0)
        self._values = torch.empty(0)

    def begin(self, gradient: Tensor, residuals: Mapping[str, Residual] = NO_RESIDUAL) -> None:
        super().begin(gradient, residuals)
        self._values = self._residual.take(gradient, 0)
        self._places = self._next()
        self._picked.zero_()
        picked = self._picked[: self._places.numel()]
        picked.copy_(self._values.index_select(0, self._places))
        # A number that is not finite is seen by all in the step in which it comes, whoever's turn it is: 0 or NaN.
        picked.add_(magnitude(gradient) * 0)
        self._inner.begin(self._picked, {WORKER: self._left} if self._residual.keeps else NO_RESIDUAL)

    def write(self, index: int, parts: Sequence[Tensor]) -> None:
        self._inner.write(index, parts)
        if self._residual.keeps and index == len(self.rounds) - 1:
            self._values.index_copy_(0, self._places, self._left.pending[: self._places.numel()])

    def finish(self, out: Tensor) -> None:
        self._inner.finish(self._picked)
        if not self._residual.keeps:
            self._picked.mul_(len(self._phases))
        out.zero_()
        out.index_copy_(0, self._places, self._picked[: self._places.numel()])

    def commit(self) -> None:
        self._inner.commit()
        self._steps += 1

    def state_dict(self) -> dict[str, Any]:
        """How many steps counted: that says where the queue is, and what is drawn."""
        return self._inner.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._inner.load_state_dict(state)
        self._steps = int(state["steps"])

    def _next(self) -> Tensor:
        """Places of the elements whose turn it is, equal on all workers."""
        queue, turn = divmod(self._steps, len(self._phases))
        if queue != self._drawn:
            draw = torch.Generator().manual_seed(self.spec.draw_seed("queue", queue))
            self._queue = torch.randperm(self.spec.count, generator=draw, dtype=torch.int32, device="cpu").to(
                self.spec.device
            )
            self._drawn = queue
        start, stop = self._phases[turn]
        return self._queue[start:stop].to(torch.int64)
