"""Calls the compiled kernels of a CPU.

Methods do what the functions of the same name in `hybridpar.compress.kernels` do, which check the arguments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hybridpar.codegen.build import Function, load_kernels
from hybridpar.compress.codec import CHUNK, Residual, Scratch
from hybridpar.compress.feedback import KeptResidual

if TYPE_CHECKING:
    from hybridpar.compress.packing import Fields


@dataclass(frozen=True)
class ThresholdRule:
    """How a threshold follows from the values; see `hybridpar.compress.codecs.twobit`.

    Attributes:
        mode: 0 for `fixed`; 1 for the lesser of scale * mean and cap * largest; 2 for scale * mean, with what is sent
            decoded as the mean of what is sent.
        fixed: A threshold.
        scale: Of the mean magnitude.
        cap: Of the largest magnitude.
    """

    mode: int
    fixed: float
    scale: float
    cap: float


_KERNELS = ("onebit", "onebit_columns", "twobit", "qsgd", "powersgd")
_SOURCES = [Path(__file__).with_name(f"{name}_source.py") for name in _KERNELS]

#: From so many values on, what is written is not read again before it would have left the caches.
_STREAM = 1 << 16


class CpuKernels:
    """The kernels of this CPU.

    Args:
        functions: By name.
    """

    #: Values that a tensor may have.
    most_values = (1 << 63) - 1

    def __init__(self, functions: Mapping[str, Function]) -> None:
        self.functions = functions

    @classmethod
    def load(cls) -> CpuKernels | None:
        """Built if need be; None where there are none."""
        functions = load_kernels("codec", _SOURCES)
        return cls(functions) if functions else None

    def onebit_encode(
        self,
        values: Tensor,
        residual: Residual,
        lower: Tensor,
        upper: Tensor,
        packed: Tensor,
    ) -> None:
        """Encode rows as signs and two levels.

        Args:
            values: float32, one group per row.
            residual: Gives v, and is left as v - C(v) where it keeps anything.
            lower: Lower levels, one per group.
            upper: Upper levels, one per group.
            packed: The bits, 1-D uint8.
        """
        places = (lower.data_ptr(), upper.data_ptr(), packed.data_ptr(), *values.shape, _streams(values))
        self._encode("onebit_encode", values, residual, *places)

    def onebit_read(
        self, lower: Tensor, upper: Tensor, packed: Tensor, out: Tensor, divisor: int, *, add: bool
    ) -> None:
        """Decode rows; they are divided by `divisor`, or added to `out`.

        Args:
            lower: Lower levels, one per group.
            upper: Upper levels, one per group.
            packed: The bits, 1-D uint8.
            out: float32, one group per row.
            divisor: At least 1.
            add: Whether to add, instead of replacing what is there.
        """
        places = (lower.data_ptr(), upper.data_ptr(), packed.data_ptr(), out.data_ptr(), *out.shape, _streams(out))
        if add:
            self.functions["onebit_add"](*places)
        else:
            self.functions["onebit_decode"](*places, float(divisor))

    def onebit_encode_columns(
        self,
        values: Tensor,
        residual: Residual,
        lower: Tensor,
        upper: Tensor,
        packed: Tensor,
        scratch: Scratch,
    ) -> None:
        """Encode columns as signs and two levels.

        Args:
            values: float32, one group per column; rows may lie apart.
            residual: Gives v, and is left as v - C(v) where it keeps anything.
            lower: Lower levels, one per group.
            upper: Upper levels, one per group.
            packed: The bits, 1-D uint8.
            scratch: Memory to borrow.
        """
        ones = scratch.take("ones", values.shape[1])
        places = (lower.data_ptr(), upper.data_ptr(), ones.data_ptr(), packed.data_ptr())
        numbers = (*values.shape, values.stride(0), _streams(values))
        self._encode("onebit_columns_encode", values, residual, *places, *numbers)

    def onebit_read_columns(self, lower: Tensor, upper: Tensor, packed: Tensor, out: Tensor, *, add: bool) -> None:
        """Decode columns, or add them to `out`.

        Args:
            lower: Lower levels, one per group.
            upper: Upper levels, one per group.
            packed: The bits, 1-D uint8.
            out: float32, one group per column; rows may lie apart.
            add: Whether to add, instead of replacing what is there.
        """
        places = (lower.data_ptr(), upper.data_ptr(), packed.data_ptr(), out.data_ptr())
        name = "onebit_columns_add" if add else "onebit_columns_decode"
        self.functions[name](*places, *out.shape, out.stride(0), _streams(out))

    def twobit_encode(
        self,
        values: Tensor,
        residual: Residual,
        rule: ThresholdRule,
        level: Tensor,
        codes: Tensor,
        _scratch: Scratch,
    ) -> None:
        """Encode values as minus, nothing or plus.

        Args:
            values: 1-D float32.
            residual: Gives v, and is left as v - C(v) where it keeps anything.
            rule: What is sent.
            level: One element, float32.
            codes: 1-D uint8, whole words of 32 bits.
            _scratch: Not needed here.
        """
        places = (level.data_ptr(), codes.data_ptr(), values.numel(), rule.mode, _streams(values))
        numbers = (rule.fixed, rule.scale, rule.cap)
        self._encode("twobit_encode", values, residual, *places, *numbers)

    def twobit_read(self, level: Tensor, codes: Tensor, out: Tensor, divisor: int, *, add: bool) -> None:
        """Decode values; they are divided by `divisor`, or added to `out`.

        Args:
            level: One element, float32.
            codes: 1-D uint8, whole words of 32 bits.
            out: 1-D float32.
            divisor: At least 1.
            add: Whether to add, instead of replacing what is there.
        """
        places = (level.data_ptr(), codes.data_ptr(), out.data_ptr(), out.numel(), _streams(out))
        if add:
            self.functions["twobit_add"](*places)
        else:
            self.functions["twobit_decode"](*places, float(divisor))

    def largest(self, values: Tensor, out: Tensor) -> None:
        """Write the largest magnitude.

        Args:
            values: float32.
            out: One element.
        """
        self.functions["qsgd_scale"](values.data_ptr(), out.data_ptr(), values.numel())

    def qsgd_encode(
        self,
        values: Tensor,
        scale: Tensor,
        ring: Tensor,
        starts: Sequence[int],
        steps: int,
        fields: Fields,
        words: Tensor,
        scratch: Scratch,
    ) -> None:
        """Round values to codes of a grid; the noise of each run begins at one of `starts` in the ring.

        Args:
            values: 1-D float32.
            scale: One element, float32.
            ring: Noise, 1-D float32.
            starts: For each run of codes where its noise begins in the ring.
            steps: Of the grid, from zero to the scale.
            fields: Where codes lie.
            words: Packed codes, 1-D.
            scratch: Memory to borrow.
        """
        lies, planes = _in_words(fields), words
        if lies is not fields:
            words = scratch.take("plane words", lies.words, lies.word)
        places = torch.tensor(starts)
        addresses = (values.data_ptr(), scale.data_ptr(), words.data_ptr(), ring.data_ptr(), places.data_ptr())
        fixed = (lies.count, lies.words, lies.width, lies.per_word, steps, CHUNK)
        self.functions[f"qsgd_encode{words.itemsize * 8}"](*addresses, *fixed)
        if lies is not fields:
            self.functions["qsgd_spread"](words.data_ptr(), planes.data_ptr(), lies.words, lies.width)

    def qsgd_read(
        self,
        words: Tensor,
        scale: Tensor,
        fields: Fields,
        zero: int,
        unit: int,
        out: Tensor,
        scratch: Scratch,
        *,
        add: bool,
    ) -> None:
        """Decode codes of a grid, or add them to `out`.

        Args:
            words: Packed codes, 1-D.
            scale: One element, float32.
            fields: Where codes lie.
            zero: Code of the value 0.
            unit: Code of the scale, above `zero`.
            out: 1-D float32.
            scratch: Memory to borrow.
            add: Whether to add, instead of replacing what is there.
        """
        lies = _in_words(fields)
        if lies is not fields:
            planes, words = words, scratch.take("plane words", lies.words, lies.word)
            self.functions["qsgd_collect"](planes.data_ptr(), words.data_ptr(), lies.words, lies.width)
        addresses = (words.data_ptr(), scale.data_ptr(), out.data_ptr())
        fixed = (lies.count, lies.words, lies.width, lies.per_word, zero)
        self.functions[f"qsgd_{'add' if add else 'decode'}{words.itemsize * 8}"](*addresses, *fixed, float(unit))

    def powersgd_left(self, values: Tensor, residual: KeptResidual, right: Tensor, out: Tensor) -> None:
        """Make v, and multiply it with each row of a factor.

        Args:
            values: float32, a matrix.
            residual: Gives v, and keeps it.
            right: Rows as long as those of the matrix.
            out: As many rows as `right`, as long as the matrix has rows.
        """
        places = (values.data_ptr(), residual.kept.data_ptr(), residual.pending.data_ptr())
        numbers = (right.data_ptr(), out.data_ptr(), *values.shape, _streams(values))
        self.functions[f"powersgd_left{right.shape[0]}"](*places, *numbers, residual.factor)

    def powersgd_right(self, matrix: Tensor, left: Tensor, out: Tensor) -> None:
        """Multiply rows of a factor with a matrix.

        Args:
            matrix: float32.
            left: Rows as long as the matrix has rows.
            out: As many rows as `left`, as long as those of the matrix.
        """
        places = (matrix.data_ptr(), left.data_ptr(), out.data_ptr())
        self.functions[f"powersgd_right{left.shape[0]}"](*places, *matrix.shape)

    def powersgd_product(self, left: Tensor, right: Tensor, out: Tensor, unsent: Tensor, scale: float) -> None:
        """Set out = scale * left^T right, and subtract the product from what is kept.

        Args:
            left: Rows as long as the matrix has rows.
            right: Rows as long as those of the matrix.
            out: The matrix.
            unsent: As many elements.
            scale: Any number.
        """
        places = (left.data_ptr(), right.data_ptr(), out.data_ptr(), unsent.data_ptr())
        self.functions[f"powersgd_product{left.shape[0]}"](*places, *out.shape, _streams(out), scale)

    def _encode(self, name: str, values: Tensor, residual: Residual, *arguments: int | float) -> None:
        if isinstance(residual, KeptResidual):
            kept, pending = residual.halves()
            way = "keep" if kept.dtype == torch.float32 else "short"
            self.functions[f"{name}_{way}"](
                values.data_ptr(), kept.data_ptr(), pending.data_ptr(), *arguments, residual.factor
            )
        else:
            self.functions[name](values.data_ptr(), 0, 0, *arguments)


def _streams(written: Tensor) -> int:
    """Whether what is written should go past the caches."""
    return int(written.numel() >= _STREAM)


def _in_words(fields: Fields) -> Fields:
    lies = fields.in_words
    assert lies is not None
    return lies
