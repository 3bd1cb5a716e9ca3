"""Codec `none`: gradients in full precision, which is also used where another codec does not fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridpar.compress.codec import CODECS, Codec, Coder, Collective, Round, TensorSpec


@CODECS.register("none", "full precision; every codec falls back to it where it does not fit")
@dataclass(frozen=True)
class NoCompression(Codec):
    """The gradient as it is: one all-reduce of float32, bit for bit what it is without codecs."""

    name = "none"
    biased = False
    castable = True

    def bind(self, spec: TensorSpec) -> Full:
        return Full(spec)


class Full(Coder):
    """All elements, in the type in which the spec says messages are sent.

    In a type shorter than float32 each worker sends g / K, as the sum of g might leave the range of float16.
    """

    def __init__(self, spec: TensorSpec) -> None:
        super().__init__(spec, [Round(Collective.SUM, spec.wire, (spec.count,))])
        self._cast = spec.wire != torch.float32

    def write(self, index: int, parts: Sequence[Tensor]) -> None:
        (out,) = parts
        if self._cast:
            torch.mul(self._gradient, 1 / self.spec.workers, out=out)
        else:
            out.copy_(self._gradient)

    def finish(self, out: Tensor) -> None:
        (reduced,) = self._received
        if self._cast:
            out.copy_(reduced).mul_(self.spec.workers / self.spec.divisor)
        else:
            torch.div(reduced, self.spec.divisor, out=out)
