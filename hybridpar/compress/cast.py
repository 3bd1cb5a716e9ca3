"""Why: any message of floating-point numbers can travel in 16 bits, whatever the codec that wrote it.

`none` in float16 is the codec `fp16`; PowerSGD's factors in bfloat16 are `powersgd:cast=bf16`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from hybridpar.compress.codec import Codec, Coder, TensorSpec
from hybridpar.errors import UsageError, nearest

#: What floating-point messages can be cast to, by name.
WIRE_TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Cast(Codec):
    """Another codec, whose floating-point messages travel in a shorter type.

    Attributes:
        inner: The codec.
        cast: `fp16` or `bf16`.
    """

    inner: Codec
    cast: str
    name = "cast"

    def __post_init__(self) -> None:
        if self.cast not in WIRE_TYPES:
            raise UsageError(f"cast={self.cast}", "It names a 16-bit type.", nearest(self.cast, WIRE_TYPES))
        if not self.inner.castable:
            raise UsageError(
                f"codec {self.inner.name!r} with cast={self.cast}",
                "Its messages are not floating-point numbers, so there is nothing to cast.",
                "Leave out the cast.",
            )

    @property
    def biased(self) -> bool:  # type: ignore[override]
        """As the codec inside, but for the rounding."""
        return self.inner.biased

    @property
    def stateful(self) -> bool:  # type: ignore[override]
        """As the codec inside."""
        return self.inner.stateful

    @property
    def feedback(self) -> bool:  # type: ignore[override]
        """As the codec inside."""
        return self.inner.feedback

    @property
    def refuses_momentum(self) -> bool:  # type: ignore[override]
        """As the codec inside."""
        return self.inner.refuses_momentum

    def fits(self, shape: Sequence[int]) -> bool:
        """As the codec inside."""
        return self.inner.fits(shape)

    def bind(self, spec: TensorSpec) -> Coder:
        """See `Codec`."""
        return self.inner.bind(replace(spec, wire=WIRE_TYPES[self.cast]))
