"""Codec `none`: gradients in full precision, which is also used where another codec does not fit."""

from __future__ import annotations

from dataclasses import dataclass

from hybridpar.compress.codec import CODECS, Codec, Full, TensorSpec


@CODECS.register("none", "full precision; every codec falls back to it where it does not fit")
@dataclass(frozen=True)
class NoCompression(Codec):
    """The gradient as it is: one all-reduce of float32, bit for bit what it is without codecs."""

    biased = False
    at_once = True
    castable = True

    def bind(self, spec: TensorSpec) -> Full:
        return Full(spec)
