"""Codec `onebit_adam`: gradients at first, then the momentum of Adam in one bit per value.

1-bit Adam: Tang, Gan, Awan, Rajbhandari, Li, Lian, Liu, Zhang, He, "1-bit Adam: Communication Efficient Large-Scale
Training with Adam's Convergence Speed", ICML 2021 (arXiv 2102.02888), Algorithm 1. For the first `warm` steps gradients
are sent in full precision. From then on, with the momentum m that all workers share:

    m_i = beta m + (1 - beta) g_i        sent is C(m_i + d_i), kept is d_i        worker i
    mean of these, plus d, encoded again, kept is d                               owner of a stripe
    m = what arrives                                                              everybody

What arrives is m and no gradient: the optimizer must know (`hybridpar.optim.onebit_adam`). C is the two means per
group of `onebit`, or, as the paper has it, a sign and one level that keeps the norm (`levels=norm`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hybridpar.compress.codec import CODECS, NO_RESIDUAL, Codec, Full, Kept, Residual, Scratch, TensorSpec, WarmUpCoder
from hybridpar.compress.codecs.onebit import OneBit, quantiser_of
from hybridpar.compress.packing import ALIGN, at_least, bits_size, level_and_bits, pack_bits, unpack_bits
from hybridpar.compress.quantised import Quantiser, ShardedCoder, put
from hybridpar.compress.redivide import KeepingCoder
from hybridpar.errors import check, check_choice

_LEVELS = ("means", "norm")


@CODECS.register("onebit_adam", "1-bit Adam: gradients at first, then Adam's momentum in one bit; for its optimizer")
@dataclass(frozen=True)
class OneBitAdam(Codec):
    """Gradients in full precision, then momentum as signs.

    Attributes:
        warm: Number of first steps that are sent in full precision; the optimizer must know the same number.
        beta: Factor of the momentum, the first of Adam's betas.
        levels: `means`: as `onebit`; `norm`: one level per stripe, its norm over the root of its size, as the paper.
        least: As of `onebit`: what has shorter groups is sent in full precision, and so are vectors.
    """

    warm: int = 0
    beta: float = 0.9
    levels: str = "means"
    least: int = 32
    name = "onebit_adam"
    biased = True
    stateful = True
    feedback = True
    kernels = ("cpu", "cuda")
    refuses_momentum = True
    gives_sums = False

    def __post_init__(self) -> None:
        check(self.warm >= 0, f"warm={self.warm}", "It is a number of steps.", "Use 0 for none.")
        check(0 <= self.beta < 1, f"beta={self.beta:g}", "It is at least 0 and below 1.", "Use 0.9.")
        check_choice("levels", self.levels, _LEVELS, "It says what signs are multiplied with.")
        self._signs()

    def fits(self, shape: Sequence[int]) -> bool:
        """Whether there is anything."""
        return math.prod(shape) > 0

    def bind(self, spec: TensorSpec) -> MomentumCoder:
        signs = self._signs()
        if not signs.fits(spec.shape):
            return MomentumCoder(spec, self, None)
        return MomentumCoder(spec, self, ScaledSigns() if self.levels == "norm" else quantiser_of(signs, spec.shape))

    def _signs(self) -> OneBit:
        return OneBit(least=self.least)


class MomentumCoder(KeepingCoder, WarmUpCoder):
    """Exchanges the gradient of a parameter, and later its momentum.

    Args:
        spec: The parameter.
        config: How.
        quantiser: How a stripe of momentum becomes bytes; None for full precision.
    """

    def __init__(self, spec: TensorSpec, config: OneBitAdam, quantiser: Quantiser | None) -> None:
        full = Full(spec)
        super().__init__(spec, full, full if quantiser is None else ShardedCoder(spec, quantiser))
        self._config = config
        self.residuals = self._later.residuals
        self._momentum = Kept(spec.count, spec.device)
        self.kept = {"momentum": self._momentum}

    @property
    def warm(self) -> bool:
        """Whether the next step exchanges a gradient."""
        return self._steps < self._config.warm

    def begin(self, gradient: Tensor, residuals: Mapping[str, Residual] = NO_RESIDUAL) -> None:
        if self.warm:
            for key, count in self.residuals.items():  # nothing is left out, whatever the last attempt left there
                residual = residuals[key]
                if residual.keeps:
                    residual.again(torch.empty(count, device="meta"), 0).zero_()
            self._first.begin(gradient)
            return
        beta, spec = self._config.beta, self.spec
        # Workers' messages are added: where nothing divides the sum, each brings its part of the shared momentum.
        part = beta * spec.divisor / spec.workers
        mine = torch.mul(self._momentum.now, part, out=self._momentum.next).add_(gradient, alpha=1 - beta)
        self._later.begin(mine, residuals)

    def finish(self, out: Tensor) -> None:
        """The gradient, or the momentum."""
        super().finish(out)
        if self.warm:
            torch.lerp(self._momentum.now, out, 1 - self._config.beta, out=self._momentum.next)
        else:
            self._momentum.next.copy_(out)

    def _divided(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """The momentum is equal on all workers."""
        return {}


class ScaledSigns(Quantiser):
    """Signs and one level per stripe, its norm over the root of its size: [level][bits]."""

    @property
    def unit(self) -> int:
        """Bits fill bytes."""
        return 8

    def size(self, shape: Sequence[int]) -> int:
        """A level, one bit per value."""
        return ALIGN + bits_size(shape[0])

    def encode(self, values: Tensor, residual: Residual, out: Tensor, scratch: Scratch) -> None:
        """Zero counts as plus."""
        count = values.numel()
        v = residual.take(values, 0)
        level, packed = level_and_bits(out, count)
        level.copy_(torch.linalg.vector_norm(v) / math.sqrt(count))
        bits = scratch.take("bits", count, torch.bool)
        at_least(v, 0.0, bits)
        pack_bits(bits, packed)
        if residual.keeps:
            v.sub_(_signs(bits, level, scratch))

    def read(self, message: Tensor, out: Tensor, scratch: Scratch, divisor: int, *, add: bool) -> None:
        level, packed = level_and_bits(message, out.numel())
        put(_signs(unpack_bits(packed, out.numel()), level / divisor, scratch), out, add=add)


def _signs(bits: Tensor, level: Tensor, scratch: Scratch) -> Tensor:
    return scratch.take("half", bits.numel()).copy_(bits).mul_(2).sub_(1).mul_(level)
