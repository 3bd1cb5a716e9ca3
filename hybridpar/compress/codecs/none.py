"""Codecs `none`, `fp16` and `bf16`: gradients as they are, or in 16 bits.

The option `cast` does the same to the messages of another codec. `none` is also used where another codec does not fit.
The sum over workers is rounded at every addition. float16 has 11 significant bits and ends at 65504, bfloat16 has 8 and
the range of float32. A gradient that leaves the range arrives as infinity on all workers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hybridpar.compress.codec import CODECS, Codec, Full, TensorSpec


@CODECS.register("none", "full precision; every codec falls back to it where it does not fit")
@dataclass(frozen=True, kw_only=True)
class NoCompression(Codec):
    """The gradient as it is: one all-reduce of float32, bit for bit what it is without codecs."""

    biased = False
    at_once = True
    castable = True

    def coder(self, spec: TensorSpec) -> Full:
        return Full(spec)


@CODECS.register("fp16", "float16 on the wire, half the bytes; ends at 65504")
@dataclass(frozen=True, kw_only=True)
class Float16(NoCompression):
    """The gradient in float16. DDP's `fp16_compress_hook` does the same."""

    castable = False
    cast: Literal["fp32", "fp16", "bf16"] = "fp16"


@CODECS.register("bf16", "bfloat16 on the wire, half the bytes; 8 significant bits")
@dataclass(frozen=True, kw_only=True)
class BFloat16(NoCompression):
    """The gradient in bfloat16. DDP's `bf16_compress_hook` does the same."""

    castable = False
    cast: Literal["fp32", "fp16", "bf16"] = "bf16"
