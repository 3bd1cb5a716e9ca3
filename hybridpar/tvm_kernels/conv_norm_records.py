"""Why: whether a convolution should sum up its results for the norm behind it is measured, as everything else is.

Records of `depthwise_batch_norm_act` are lines of the same database. A record is of a convolution's forward with the
norm and the activation behind it: together, with a kernel that leaves the moments of its result and a norm that takes
them, against the two kernels that were found for each alone. It says nothing about PyTorch, and counts only where both
parts run on their kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal

from pydantic import Field, field_validator

from hybridpar.tvm_kernels.device import installed_versions
from hybridpar.tvm_kernels.norm_records import NormKey, NormShape, norm_versions
from hybridpar.tvm_kernels.record import Record
from hybridpar.tvm_kernels.shapes import ConvShape, Layout, ShapeError

#: The operation's name: in records, and where a table has directions of convolutions.
CONV_NORM_OP: Literal["depthwise_batch_norm_act"] = "depthwise_batch_norm_act"

CONV_NORM_RECORD_VERSION: Literal[1] = 1

#: Raised where the kernels change so that old times say nothing any more.
_KERNELS = 1


@dataclass(frozen=True, order=True)
class ConvNormShape:
    """A convolution and the activation behind the norm behind it.

    Attributes:
        convolution: The convolution.
        act: The activation.
    """

    convolution: ConvShape
    act: str

    @property
    def text(self) -> str:
        """As "32x96x112x112 k3x3 s2x2 p1x1 d1x1 relu6"."""
        return f"{self.convolution.text} {self.act}"

    @property
    def norm(self) -> NormShape:
        """The norm's part of it."""
        one = self.convolution
        return NormShape(one.batch * one.out_height * one.out_width, one.channels, self.act)


@dataclass(frozen=True, order=True)
class ConvNormKey:
    """What a pair computes, and where: what a record must agree in to be of use. It is float32 in channels_last.

    Attributes:
        shape: Convolution and activation.
        threads: Threads that compute it.
        device: Fingerprint of the device.
    """

    shape: ConvNormShape
    threads: int
    device: str

    @property
    def layout(self) -> Layout:
        """Of activations."""
        return Layout.CHANNELS_LAST

    @property
    def direction(self) -> str:
        """What stands where a convolution has its direction: the forward of both together."""
        return CONV_NORM_OP

    @property
    def dtype(self) -> str:
        """Of all tensors."""
        return "float32"

    @property
    def norm(self) -> NormKey:
        """The norm's part of it."""
        return NormKey(self.shape.norm, self.threads, self.device)


class ConvNormRecord(Record):
    """One measurement. Times are milliseconds of the forward of both, medians of interleaved pairs.

    The error is that of the moments, in standard deviations and variances.
    """

    version: Literal[1] = CONV_NORM_RECORD_VERSION
    op: Literal["depthwise_batch_norm_act"] = CONV_NORM_OP
    shape: str = Field(description="of the convolution, as `ConvShape.text` has it")
    activation: Literal["none", "relu", "relu6", "silu"]
    dtype: Literal["float32"] = "float32"
    layout: Literal["channels_last"] = "channels_last"
    parameters: dict[str, int | float | str | bool | None] = Field(description="of the convolution's schedule")
    ms: float = Field(gt=0, description="of both together: that apart over the median of the paired ratios")
    apart_ms: float = Field(gt=0, description="of the kernels of convolution and norm, one after the other; the median")

    @field_validator("shape")
    @classmethod
    def _is_a_shape(cls, text: str) -> str:
        try:
            return ConvShape.parse(text).text
        except ShapeError as error:
            raise ValueError(error.what) from error

    @property
    def key(self) -> ConvNormKey:
        """What it is a record of."""
        return ConvNormKey(ConvNormShape(ConvShape.parse(self.shape), self.activation), self.threads, self.device)

    @property
    def current(self) -> bool:
        """Whether it was measured with the versions that are installed."""
        return tuple(sorted(self.versions.items())) == conv_norm_versions()

    @property
    def times(self) -> tuple[float, float]:
        """Milliseconds of both together and of both apart."""
        return self.ms, self.apart_ms


@cache
def conv_norm_versions() -> tuple[tuple[str, str], ...]:
    """Versions that a pair's time depends on, by name: those of convolutions and of norms."""
    return tuple(sorted({**dict(installed_versions()), **dict(norm_versions()), "moments": str(_KERNELS)}.items()))
