"""Base of codecs that agree on one scale for all workers before they send codes.

QSGD-MaxNorm on one grid or on several, and TernGrad, begin alike: a round in which the largest magnitude of all workers
is reduced by maximum. What follows is on that scale, and is the codec's own.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hybridpar.compress import kernels
from hybridpar.compress.codec import NO_RESIDUAL, Collective, Residual, Round, TensorSpec
from hybridpar.compress.noise import Noise, NoisyCoder
from hybridpar.compress.packing import magnitude


class ScaledCoder(NoisyCoder):
    """Agrees on a scale in round 0; the rounds after it are a subclass's.

    Args:
        spec: The parameter.
        rounds: Those that follow the first.
        rounding: How values are rounded, see `hybridpar.compress.noise`.
    """

    def __init__(self, spec: TensorSpec, rounds: Sequence[Round], rounding: str = "random") -> None:
        super().__init__(spec, [Round(Collective.MAX, torch.float32, (1,)), *rounds])
        self._noise = Noise(spec, rounding)
        #: v: the gradient, and what is left from the steps before, where that is kept.
        self._values = torch.empty(0)
        #: What was agreed on, one element; infinite where a value of any worker is not finite.
        self._scale = torch.empty(0)
        #: The same to divide by: 1 where all values are 0.
        self._divisor = torch.empty(0)

    def begin(self, gradient: Tensor, residuals: Mapping[str, Residual] = NO_RESIDUAL) -> None:
        super().begin(gradient, residuals)
        self._values = self._residual.take(gradient, 0)

    def write(self, index: int, parts: Sequence[Tensor]) -> None:
        if index == 0:
            self._write_scale(parts[0])
        else:
            self._write_codes(index, parts)

    def read(self, index: int, parts: Sequence[Tensor]) -> None:
        if index == 0:
            self._scale = parts[0]
            # Dividing first makes the largest value exactly 1, and a denormal scale harmless.
            self._divisor = torch.where(self._scale > 0, self._scale, 1.0)
        else:
            self._read_codes(index, parts)

    def _write_scale(self, out: Tensor) -> None:
        """Write this worker's scale, one element."""
        write_scale(self._values, out)

    @abstractmethod
    def _write_codes(self, index: int, parts: Sequence[Tensor]) -> None:
        """As `write`, for the rounds after the first."""

    def _read_codes(self, index: int, parts: Sequence[Tensor]) -> None:
        """As `read`, for the rounds after the first."""
        super().read(index, parts)


def scale_of(values: Tensor) -> Tensor:
    """Largest magnitude, 0-d; infinite where a value is not finite, as NaN has no place in a maximum."""
    return magnitude(values).nan_to_num(nan=torch.inf, posinf=torch.inf)


def write_scale(values: Tensor, out: Tensor) -> None:
    """Set `out`, of one element, to `scale_of` the values."""
    if not kernels.largest(values, out):
        out.copy_(scale_of(values))
