"""Codec `dgc`: deep gradient compression, top-k of momentum that each worker keeps.

Deep Gradient Compression: Lin, Han, Mao, Wang, Dally, "Deep Gradient Compression: Reducing the Communication Bandwidth
for Distributed Training", ICLR 2018. On each worker, for every parameter:

    u <- m u + g        w <- w + u        the k largest of |w| are sent, and w and u there become 0

u is the momentum (momentum correction), w what was not sent yet; clearing u where w was sent (momentum factor masking)
keeps stale momentum from pulling twice. Local clipping bounds |g| of a parameter by clip / sqrt(K) before that. The
share that is sent starts at 1/4 and falls to a quarter of itself every `ramp` steps until it is `rate`: 75 %, 93.75 %,
98.44 %, 99.6 %, 99.9 % left out, as in the paper.

Vectors and small parameters are sent in full: u itself is sent, and nothing is cleared. As every parameter has
its momentum here, the optimizer must have none: SGD with momentum 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridpar.compress.codec import CODECS, NO_RESIDUAL, Codec, Kept, Residual, Round, TensorSpec
from hybridpar.compress.redivide import KeepingCoder
from hybridpar.compress.sparse import Picks, check_rate, largest
from hybridpar.errors import check

#: What the share that is sent is multiplied with from one level of the warm-up to the next; also its first value.
_FALL = 0.25


@CODECS.register(
    "dgc", "deep gradient compression: top-k of momentum that each worker keeps; optimizer without momentum"
)
@dataclass(frozen=True)
class DeepGradient(Codec):
    """The largest elements of accumulated momentum.

    Attributes:
        rate: Share of a parameter's elements that is sent, in the end.
        momentum: m; the optimizer's own is 0.
        ramp: Steps of each level of the warm-up; 0 for none.
        clip: A parameter's gradient on a worker is made no longer than clip / sqrt(workers); 0 for any length.
        least: Parameters with fewer elements are sent in full; so are vectors.
    """

    rate: float = 0.001
    momentum: float = 0.9
    ramp: int = 100
    clip: float = 0.0
    least: int = 1000
    name = "dgc"
    biased = True
    stateful = True
    castable = True
    takes_feedback = False
    refuses_momentum = True

    def __post_init__(self) -> None:
        check_rate(self.rate, 0.001)
        check(0 <= self.momentum < 1, f"momentum={self.momentum:g}", "It is at least 0 and below 1.", "Use 0.9.")
        check(self.ramp >= 0, f"ramp={self.ramp}", "It is a number of steps.", "Use 0 for no warm-up.")
        check(0 <= self.clip < math.inf, f"clip={self.clip:g}", "It is a length.", "Use 0 for none.")
        check(self.least >= 1, f"least={self.least}", "It is a number of elements.", "Use 1 or more.")

    def bind(self, spec: TensorSpec) -> MomentumCoder:
        return MomentumCoder(spec, self, len(spec.shape) > 1 and spec.count >= self.least)


class MomentumCoder(KeepingCoder):
    """Accumulates momentum, and sends the largest of it.

    Args:
        spec: The parameter.
        config: How.
        sparse: Whether a share is sent; else all.
    """

    def __init__(self, spec: TensorSpec, config: DeepGradient, sparse: bool) -> None:
        super().__init__(spec)
        self._config, self._sparse = config, sparse
        self._momentum = Kept(spec.count, spec.device)
        self._unsent = Kept(spec.count if sparse else 0, spec.device)
        self.kept = {"momentum": self._momentum, "unsent": self._unsent}

    @property
    def rate(self) -> float:
        """Share that the next step sends."""
        if not self._sparse:
            return 1.0
        level = self._steps // self._config.ramp if self._config.ramp else math.inf
        return max(self._config.rate, _FALL ** (level + 1))

    @property
    def rounds(self) -> tuple[Round, ...]:
        """One, gathered; or a sum where that is cheaper."""
        return (self._picks.round,)

    def begin(self, gradient: Tensor, residuals: Mapping[str, Residual] = NO_RESIDUAL) -> None:
        if self._config.clip:
            gradient = gradient * self._shorten(gradient)
        torch.add(gradient, self._momentum.now, alpha=self._config.momentum, out=self._momentum.next)
        if self._sparse:
            torch.add(self._unsent.now, self._momentum.next, out=self._unsent.next)

    def write(self, index: int, parts: Sequence[Tensor]) -> None:
        if not self._sparse:
            parts[0].copy_(self._momentum.next)
            return
        picks = self._picks
        places = largest(self._unsent.next, picks.picked, self._scratch)
        values = self._unsent.next.index_select(0, places)
        sent = picks.write(values, places, parts[0])
        self._unsent.next.index_copy_(0, places, values - sent)
        self._momentum.next.index_fill_(0, places, 0.0)

    def finish(self, out: Tensor) -> None:
        self._picks.read(self._received, out, self.spec.divisor)

    @property
    def _picks(self) -> Picks:
        spec = self.spec
        return Picks.of(spec, self.rate) if self._sparse else Picks(spec.count, spec.count, torch.float32, spec.workers)

    def _shorten(self, gradient: Tensor) -> Tensor:
        """What makes the gradient short enough, 0-d; not finite gradients stay not finite."""
        norm: Tensor = torch.linalg.vector_norm(gradient, dtype=torch.float64)
        return (self._config.clip / math.sqrt(self.spec.workers) / norm).clamp(max=1.0).to(torch.float32)
