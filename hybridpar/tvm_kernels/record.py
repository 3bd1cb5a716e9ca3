"""Why: what records of all operations have in common, and the one rule by which a record may be used.

A kernel runs only where its record says that its result is right, that a second measurement confirmed its time, and
that it was faster. Right means: no further from float64 than a limit, or than some times what PyTorch itself is.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from hybridpar.errors import HybridparError
from hybridpar.machine.steady import MOST_NOISE

#: How many times as fast as its rival a kernel must have been to be used: less is within what a measurement errs by.
LEAST_GAIN = 1.02

#: Largest difference from float64, relative to the largest value: sums over taps, and over whole images. For a
#: convolution with the norm behind it, of a mean in standard deviations and of a variance in variances.
_SUMS = {
    "forward": 1e-5,
    "input_gradient": 1e-5,
    "weight_gradient": 1e-4,
    "batch_norm_act": 1e-5,
    "depthwise_batch_norm_act": 1e-4,
}
#: That of the last rounding.
_ROUNDING = {"float32": 0.0, "bfloat16": 2.0**-8, "float16": 2.0**-11}
#: Where PyTorch is further off itself, as with a variance of two values, a kernel may be off by so many times that.
_TIMES_STOCK = 4.0
#: Never more than this.
_MOST_ERROR = 1e-2


class WrongKernelError(HybridparError):
    """A kernel computed something else than it should."""


def most_error(direction: str, dtype: str = "float32", stock_error: float | None = None) -> float:
    """Largest difference from float64, relative to the largest value, that a kernel may have.

    Args:
        direction: Of a convolution, or the name of another operation.
        dtype: Of all tensors.
        stock_error: PyTorch's difference on the same data; None where it is not known.
    """
    own = _SUMS[direction] + _ROUNDING[dtype]
    return min(_MOST_ERROR, max(own, _TIMES_STOCK * (stock_error or 0.0)))


def is_right(error: float | None, direction: str, dtype: str = "float32", stock_error: float | None = None) -> bool:
    """Whether a kernel with this error may be used; not one whose error is NaN, or was never measured.

    Args:
        error: See `most_error`, as the rest.
        direction: Likewise.
        dtype: Likewise.
        stock_error: Likewise.
    """
    return error is not None and error <= most_error(direction, dtype, stock_error)


def require_right(what: str, error: float, direction: str, stock_error: float) -> None:
    """Refuse a kernel in float32 that `is_right` does not let through.

    Args:
        what: The operation in words.
        error: See `most_error`, as the rest.
        direction: Likewise.
        stock_error: Likewise.

    Raises:
        WrongKernelError: Its error is too large.
    """
    if not is_right(error, direction, "float32", stock_error):
        raise WrongKernelError(
            f"a kernel of {what} is wrong by {error:.1e}",
            f"At most {most_error(direction, 'float32', stock_error):.1e} is let through; PyTorch is off by "
            f"{stock_error:.1e}.",
            "Please report it; training works without this kernel.",
        )


class Record(BaseModel):
    """A measurement of some kernel against its rival, and where it was taken."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    device: str
    threads: int = Field(ge=1)
    versions: dict[str, str]
    error: float | None = Field(
        None, ge=0, description="largest difference from float64, relative to the largest value"
    )
    stock_error: float | None = Field(None, ge=0, description="the same of PyTorch, on the same data")
    noise: float | None = Field(
        None, ge=0, description="how far measurements of the ratio of both times lay apart, relative; the worse is told"
    )
    tuned_at: float = Field(0.0, ge=0, description="seconds since the epoch; records of one search share it")

    @property
    @abstractmethod
    def key(self) -> Any:
        """What it is a record of."""

    @property
    @abstractmethod
    def current(self) -> bool:
        """Whether it was measured with the versions that are installed."""

    @property
    @abstractmethod
    def times(self) -> tuple[float | None, float | None]:
        """Milliseconds of the kernel and of its rival; None where it was not measured."""

    @property
    def doubt(self) -> str:
        """Why nothing may run on it, whatever its times; empty where it may."""
        where = self.key.direction, self.key.dtype
        if not is_right(self.error, *where, self.stock_error):
            found = "unknown" if self.error is None else f"{self.error:.1e}"
            return f"its error is {found}, and at most {most_error(*where, self.stock_error):.1e} is let through"
        if self.noise is not None and not self.noise <= MOST_NOISE:
            return f"its measurements lay {100 * self.noise:.0f} % apart, and at most {100 * MOST_NOISE:.0f} % is used"
        return ""

    @property
    def wins(self) -> bool:
        """Whether it may be used, and was measured to be faster than its rival, by `LEAST_GAIN`."""
        own, rival = self.times
        return own is not None and rival is not None and LEAST_GAIN * own < rival and not self.doubt

    def line(self) -> str:
        """The record as a line of a database."""
        return json.dumps(self.model_dump(mode="json", exclude_none=True))
