"""Why: a fused norm is worth it on one machine and not on another, so what was measured is kept beside the kernels.

Records of `batch_norm_act` are lines of the same database as those of convolutions, told apart by `op`. One kernel
does all shapes, so there are no parameters to search: a record is a measurement. What it depends on is the number of
rows (pixels of all images), of channels, the activation and the threads.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Literal

from pydantic import Field

from hybridpar.errors import UsageError, shortened
from hybridpar.tvm_kernels.device import installed_versions
from hybridpar.tvm_kernels.record import Record
from hybridpar.tvm_kernels.schedules.norm_rows import ACTIVATIONS
from hybridpar.tvm_kernels.shapes import Layout

#: The operation's name: in records, and where a table has directions of convolutions.
NORM_OP: Literal["batch_norm_act"] = "batch_norm_act"

NORM_RECORD_VERSION: Literal[1] = 1

#: Raised where the kernels change so that old times say nothing any more.
_KERNELS = 1

_TEXT = re.compile(r"(\d{1,12})x(\d{1,6}) (\w+)")


@dataclass(frozen=True, order=True)
class NormShape:
    """What a norm's time depends on.

    Attributes:
        rows: Pixels of all images, N * H * W.
        channels: C.
        act: The activation.
    """

    rows: int
    channels: int
    act: str

    @property
    def text(self) -> str:
        """As "100352x96 relu6"."""
        return f"{self.rows}x{self.channels} {self.act}"

    @property
    def bytes(self) -> int:
        """Of the input in float32."""
        return 4 * self.rows * self.channels

    @classmethod
    def parse(cls, text: str) -> NormShape:
        """From its text.

        Raises:
            UsageError: It is none.
        """
        match = _TEXT.fullmatch(text.strip())
        if match is None or match[3] not in ACTIVATIONS or not int(match[1]) * int(match[2]):
            raise UsageError(
                f"{shortened(repr(text))} is no shape of a norm",
                f"It is rows x channels and one of {', '.join(ACTIVATIONS)}.",
                'Write it as "100352x96 relu6".',
            )
        return cls(int(match[1]), int(match[2]), match[3])


@dataclass(frozen=True, order=True)
class NormKey:
    """What a norm computes, and where: what a record must agree in to be of use.

    Attributes:
        shape: Rows, channels, activation.
        threads: Threads that compute it.
        device: Fingerprint of the device.
        layout: Of activations.
        dtype: Of all tensors.
    """

    shape: NormShape
    threads: int
    device: str
    layout: Layout = Layout.CHANNELS_LAST
    dtype: str = "float32"

    @property
    def op(self) -> str:
        """Name of the operation."""
        return NORM_OP

    @property
    def direction(self) -> str:
        """What stands where a convolution has its direction: forward and backward are measured together."""
        return NORM_OP


class NormRecord(Record):
    """One measurement. Times are milliseconds of forward and backward together, in interleaved pairs."""

    version: Literal[1] = NORM_RECORD_VERSION
    op: Literal["batch_norm_act"] = NORM_OP
    rows: int = Field(ge=2)
    channels: int = Field(ge=1)
    activation: Literal["none", "relu", "relu6", "silu"]
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    layout: Layout = Layout.CHANNELS_LAST
    ms: float = Field(gt=0, description="of the kernels: torch's median over the median of the paired ratios")
    stock_ms: float = Field(gt=0, description="of torch's two operations, the activation in place; the median")
    floor_ms: float | None = Field(None, gt=0, description="of the least passes over memory, at the speed of copies")

    @property
    def key(self) -> NormKey:
        """What it is a record of."""
        shape = NormShape(self.rows, self.channels, self.activation)
        return NormKey(shape, self.threads, self.device, self.layout, self.dtype)

    @property
    def current(self) -> bool:
        """Whether it was measured with the versions that are installed."""
        return tuple(sorted(self.versions.items())) == norm_versions()

    @property
    def times(self) -> tuple[float, float]:
        """Milliseconds of the kernels and of torch."""
        return self.ms, self.stock_ms


@cache
def norm_versions() -> tuple[tuple[str, str], ...]:
    """Versions that a norm's time and that of its rival depend on, by name; not those of convolutions' schedules."""
    shared = {name: version for name, version in installed_versions() if name != "schedules"}
    return tuple(sorted((shared | {"norms": str(_KERNELS)}).items()))
