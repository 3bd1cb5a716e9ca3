"""Why: no compression is what every codec is measured against, and what travels where a codec does not fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridpar.compress.codec import CODECS, Codec, Coder, Collective, Round, TensorSpec
from hybridpar.compress.residual import NO_RESIDUAL, Residual


@CODECS.register("none", "full precision; every codec falls back to it where it does not fit")
@dataclass(frozen=True)
class NoCompression(Codec):
    """The gradient as it is: one all-reduce of float32, bit for bit what it is without codecs."""

    name = "none"
    biased = False
    castable = True

    def bind(self, spec: TensorSpec) -> Full:
        """See `Codec`."""
        return Full(spec)


class Full(Coder):
    """All elements, in the type in which the spec wants messages to travel.

    In a type shorter than float32 each worker sends g / K, as the sum of g might leave the range of float16.
    """

    def __init__(self, spec: TensorSpec) -> None:
        super().__init__(spec)
        self._cast = spec.wire != torch.float32
        self._rounds = (Round(Collective.SUM, spec.wire, (spec.count,)),)
        self._gradient = self._reduced = torch.empty(0)

    @property
    def rounds(self) -> tuple[Round, ...]:
        """One sum of the parameter's size."""
        return self._rounds

    def begin(self, gradient: Tensor, residuals: Mapping[str, Residual] = NO_RESIDUAL) -> None:
        """See `Coder`."""
        self._gradient = gradient

    def write(self, index: int, parts: Sequence[Tensor]) -> None:
        """See `Coder`."""
        (out,) = parts
        if self._cast:
            torch.mul(self._gradient, 1 / self.spec.workers, out=out)
        else:
            out.copy_(self._gradient)

    def read(self, index: int, parts: Sequence[Tensor]) -> None:
        """See `Coder`."""
        (self._reduced,) = parts

    def finish(self, out: Tensor) -> None:
        """See `Coder`."""
        if self._cast:
            out.copy_(self._reduced).mul_(self.spec.workers / self.spec.divisor)
        else:
            torch.div(self._reduced, self.spec.divisor, out=out)
