"""Why: half the bytes for one cheap pass is what every other codec has to beat.

The sum over workers is rounded at every addition. float16 has 11 significant bits and ends at 65504, bfloat16 has 8
and the range of float32. A gradient that leaves the range arrives as infinity on all workers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from hybridpar.compress.codec import CODECS, Codec, TensorSpec
from hybridpar.compress.codecs.none import Full


@CODECS.register("fp16", "float16 on the wire, half the bytes; ends at 65504")
@dataclass(frozen=True)
class Float16(Codec):
    """The gradient in float16. DDP's `fp16_compress_hook` does the same."""

    name = "fp16"
    biased = False

    def bind(self, spec: TensorSpec) -> Full:
        """See `Codec`."""
        return Full(replace(spec, wire=torch.float16))


@CODECS.register("bf16", "bfloat16 on the wire, half the bytes; 8 significant bits")
@dataclass(frozen=True)
class BFloat16(Codec):
    """The gradient in bfloat16. DDP's `bf16_compress_hook` does the same."""

    name = "bf16"
    biased = False

    def bind(self, spec: TensorSpec) -> Full:
        """See `Codec`."""
        return Full(replace(spec, wire=torch.bfloat16))
