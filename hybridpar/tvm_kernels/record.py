"""Records of measured kernels, and the one rule by which a record may be used.

A kernel runs only where its record says that its result is right, that a second measurement confirmed its time, and
that it was faster. Right means: no further from float64 than a limit, or than some times what PyTorch itself is.
"""

from __future__ import annotations

import json
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from hybridpar.machine.steady import MOST_NOISE
from hybridpar.tvm_kernels.measure import is_clear, is_gain
from hybridpar.tvm_kernels.operation import KernelKey, Operation, named_operation, operation_of, operations
from hybridpar.tvm_kernels.shapes import Direction, Layout, ShapeError

RECORD_VERSION: Literal[1] = 1

#: How many times as fast as its rival a kernel must have been to be used: less is within what a measurement errs by.
LEAST_GAIN = 1.02

#: Error of the last rounding.
_ROUNDING = {"float32": 0.0, "bfloat16": 2.0**-8, "float16": 2.0**-11}
#: Where PyTorch is further off itself, as with a variance of two values, a kernel may be off by so many times that.
_TIMES_STOCK = 4.0
#: Never more than this.
_MOST_ERROR = 1e-2


def most_error(direction: str, dtype: str = "float32", stock_error: float | None = None) -> float:
    """The largest error that a kernel may have."""
    limit = next(one.limits[direction] for one in operations().values() if direction in one.limits)
    return min(_MOST_ERROR, max(limit + _ROUNDING[dtype], _TIMES_STOCK * (stock_error or 0.0)))


def is_right(error: float | None, direction: str, dtype: str = "float32", stock_error: float | None = None) -> bool:
    """Whether a kernel's result is precise enough to be used."""
    return error is not None and error <= most_error(direction, dtype, stock_error)


class KernelRecord(BaseModel):
    """A measurement of a kernel against its rival, and where it was taken. Times are milliseconds of one call.

    The rival's is the median of interleaved pairs, the kernel's is that over the median of the pairs' ratios. With one
    thread they are time of the CPU, without what other processes took; with more they are time of the clock.

    Attributes:
        device: Fingerprint of the CPU or GPU.
        threads: Threads that computed it.
        versions: By name, versions that the times depend on; see `Operation.versions`.
        error: Largest difference from float64, relative to the largest value; None where it was not measured.
        stock_error: The same of torch, on the same data.
        noise: Relative distance between measurements of the ratio of both times, the worst of them.
        tuned_at: Seconds since the epoch; records of one search share it.
        version: Of the format of records.
        op: Name of the operation.
        dtype: Of all tensors.
        layout: Of activations.
        ms: Of the kernel.
        stock_ms: Of its rival.
        layout_ms: Of torch in the layout of the record; None where that is its faster one.
        quick: True where one candidate was timed, at the start of a run, beside torch in the layout of the record
            alone; see `hybridpar.tvm_kernels.confirm`.
        direction: What of the operation was computed.
        shape: As the `text` of the operation's shapes has it.
        parameters: Of the schedule.
        align: What the addresses of all tensors must be multiples of.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    device: str
    threads: int = Field(ge=1)
    versions: dict[str, str]
    error: float | None = Field(None, ge=0)
    stock_error: float | None = Field(None, ge=0)
    noise: float | None = Field(None, ge=0)
    tuned_at: float = Field(0.0, ge=0)
    version: Literal[1] = RECORD_VERSION
    op: str = "depthwise_conv2d"
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    layout: Layout
    ms: float = Field(gt=0)
    stock_ms: float = Field(gt=0)
    layout_ms: float | None = Field(None, gt=0)
    quick: bool | None = None
    direction: str
    shape: str
    parameters: dict[str, int | float | str | bool | None]
    align: int = Field(4, ge=1)

    @field_validator("direction")
    @classmethod
    def _is_a_direction(cls, text: str, info: ValidationInfo) -> str:
        operation = named_operation(info.data.get("op", ""))
        if operation is None or text not in operation.limits:
            raise ValueError(f"{text!r} is no direction of {info.data.get('op')}")
        return Direction(text) if text in tuple(Direction) else text

    @field_validator("shape")
    @classmethod
    def _is_a_shape(cls, text: str, info: ValidationInfo) -> str:
        operation = named_operation(info.data.get("op", ""))
        try:
            return text if operation is None else str(operation.shape.parse(text).text)
        except ShapeError as error:
            raise ValueError(error.what) from error

    @property
    def key(self) -> KernelKey:
        """What it is a record of."""
        shape = self.operation.shape.parse(self.shape)
        return KernelKey(self.direction, shape, self.layout, self.threads, self.device, self.dtype, self.op)

    @property
    def operation(self) -> Operation:
        """The operation, for whichever target."""
        found = named_operation(self.op)
        assert found is not None, "records of unknown operations are not read"
        return found

    @property
    def numbers(self) -> dict[str, int]:
        """Those of its parameters that are whole numbers, as all of a kernel's are."""
        return {name: one for name, one in self.parameters.items() if type(one) is int}

    @property
    def rejected(self) -> str | None:
        """Why its parameters make no kernel; None where they make one.

        Raises:
            KernelsUnavailable: There are no kernels of the operation for the device.
        """
        reason = operation_of(self.key).reject(self.key, self.numbers)
        odd = len(self.numbers) < len(self.parameters)
        return reason or ("its parameters are not whole numbers" if odd else None)

    @property
    def current(self) -> bool:
        """Whether it was measured with the versions that are installed."""
        return tuple(sorted(self.versions.items())) == self.operation.versions

    @property
    def times(self) -> tuple[float, float]:
        """Milliseconds of the kernel, and of what would run in its place."""
        return self.ms, self.stock_ms if self.layout_ms is None else self.layout_ms

    @property
    def doubt(self) -> str:
        """Why nothing may run on it, whatever its times; empty where it may."""
        where = self.direction, self.dtype
        if not is_right(self.error, *where, self.stock_error):
            found = "unknown" if self.error is None else f"{self.error:.1e}"
            return f"its error is {found}, and at most {most_error(*where, self.stock_error):.1e} is let through"
        if self.noise is not None and not is_clear(self.gain, self.noise):
            apart = f"its measurements lay {100 * self.noise:.0f} % apart"
            within = f"within which lies its gain of {self.gain:.2f}x"
            return f"{apart}, {within if self.gain > 1 else f'and at most {100 * MOST_NOISE:.0f} % is used'}"
        return ""

    @property
    def gain(self) -> float:
        """Times as fast as its rival that the kernel was."""
        own, rival = self.times
        return rival / own

    @property
    def saved_ms(self) -> float:
        """Milliseconds that the kernel saves for certain, by the lower end of its gain; 0 where it is not used.

        A rival that was timed beside other programs may have taken many times as long as it does alone, which noise
        tells: its median is no promise.
        """
        own, rival = self.times
        return max(0.0, rival / (1 + (self.noise or 0.0)) - own) if self.wins else 0.0

    @property
    def wins(self) -> bool:
        """Whether it may be used, and was measured to be faster than its rival, by `LEAST_GAIN`."""
        return self.gain > LEAST_GAIN and is_gain(self.gain, self.noise or 0.0) and not self.doubt

    def line(self) -> str:
        """The record as a line of a database."""
        return json.dumps(self.model_dump(mode="json", exclude_none=True))


def why_unused(record: KernelRecord) -> str:
    """Why a record of the right key is not used."""
    if record.current:
        return f"{record.doubt}; tune again"
    wanted = ", ".join(f"{name} {version}" for name, version in record.operation.versions)
    return f"its record is not of {wanted}; tune again"
