"""Launches the compiled kernels of a CUDA device.

Levels, scales and sums stay on the device, so no call here waits. How many blocks there are follows from the number of
values alone, so that sums come out the same on every GPU. Methods do what the functions of the same name in
`hybridpar.compress.kernels` do, which check the arguments.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from hybridpar.codegen.nvrtc import load_cuda_kernels
from hybridpar.compress.codec import CHUNK, Residual, Scratch
from hybridpar.compress.feedback import KeptResidual
from hybridpar.compress.kernels.cpu import ThresholdRule

if TYPE_CHECKING:
    from hybridpar.compress.packing import Fields

#: The kernels' source.
SOURCE = Path(__file__).with_name("codec.cu")

# As in the source.
THREADS = 256
_LANES = 32
_MOST_PARTS = 512
_MOST_PLACES = 896

#: Groups of up to so many values are encoded by a warp, longer ones by a block.
_WARP_VALUES = 768

#: Blocks of a kernel that loops over what there is: enough to fill a GPU several times.
_MOST_BLOCKS = 2048

#: Parts of sums, in float64: of magnitudes and of what is chosen, each a sum with a number behind it.
_PARTS_ROOM = 2 * 2 * _MOST_PARTS

_LAYOUT = "IIII"
_ENCODE = f"PPPP{_LAYOUT}IIII{4 * _MOST_PLACES}s"
_READ = f"PPP{_LAYOUT}If"

#: What each kernel takes, in the format of `struct`.
PARAMETERS = {
    **dict.fromkeys(("onebit_encode_warp", "onebit_encode_block"), "PPPPPPIIf"),
    **dict.fromkeys(("onebit_decode", "onebit_add"), "PPPPIIf"),
    "twobit_magnitudes": "PPPIf",
    "twobit_chosen": "PPPIIff",
    "twobit_codes": "PPPPPPIIIffff",
    **dict.fromkeys(("twobit_decode", "twobit_add"), "PPPIf"),
    "qsgd_scale": "PPI",
    **{f"qsgd_encode_{kind}": _ENCODE for kind in ("8", "32", "64", "planes")},
    **{f"qsgd_{name}_{kind}": _READ for name in ("decode", "add") for kind in ("8", "32", "64", "planes")},
}


class Launch(Protocol):
    """Launches a kernel."""

    def __call__(
        self, grid: tuple[int, int, int], block: tuple[int, int, int], *arguments: int | float | bytes
    ) -> None:
        """Launch it with so many blocks of so many threads."""


class CudaKernels:
    """The kernels of one CUDA device.

    Args:
        functions: By name, those of `PARAMETERS`.
    """

    #: Values that a tensor may have.
    most_values = (1 << 31) - 1

    def __init__(self, functions: Mapping[str, Launch]) -> None:
        self.functions = functions

    @classmethod
    def load(cls, device: torch.device) -> CudaKernels | None:
        """Built if need be; None where there are none.

        Args:
            device: A CUDA device.
        """
        functions = load_cuda_kernels("codec", SOURCE, PARAMETERS, device)
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
        groups, length = values.shape
        by_warps = length <= _WARP_VALUES
        kernel = "onebit_encode_warp" if by_warps else "onebit_encode_block"
        blocks = _parts(groups, THREADS // _LANES) if by_warps else groups
        kept, pending, factor = _halves(residual)
        places = (_address(values), kept, pending, _address(lower), _address(upper), _address(packed))
        self._launch(kernel, blocks, *places, groups, length, factor)

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
        places = (_address(lower), _address(upper), _address(packed), _address(out))
        kernel = "onebit_add" if add else "onebit_decode"
        self._launch(kernel, _blocks(out.numel()), *places, out.numel(), out.shape[1], float(divisor))

    def twobit_encode(
        self,
        values: Tensor,
        residual: Residual,
        rule: ThresholdRule,
        level: Tensor,
        codes: Tensor,
        scratch: Scratch,
    ) -> None:
        """Encode values as minus, nothing or plus.

        Args:
            values: 1-D float32.
            residual: Gives v, and is left as v - C(v) where it keeps anything.
            rule: What is sent.
            level: One element, float32.
            codes: 1-D uint8, whole words of 32 bits.
            scratch: Memory to borrow.
        """
        count = values.numel()
        kept, pending, factor = _halves(residual)
        source = (_address(values), kept)
        parts = _address(scratch.take("parts", _PARTS_ROOM, torch.float64))
        blocks = max(_blocks(count, _MOST_PARTS), 1)  # also of no values there is a level
        self._launch("twobit_magnitudes", blocks, *source, parts, count, factor)
        if rule.mode == 2:
            self._launch("twobit_chosen", blocks, *source, parts, blocks, count, rule.scale, factor)
        places = (pending, _address(level), _address(codes), parts)
        numbers = (rule.mode, rule.fixed, rule.scale, rule.cap, factor)
        self._launch("twobit_codes", max(_blocks(count), 1), *source, *places, blocks, count, *numbers)

    def twobit_read(self, level: Tensor, codes: Tensor, out: Tensor, divisor: int, *, add: bool) -> None:
        """Decode values; they are divided by `divisor`, or added to `out`.

        Args:
            level: One element, float32.
            codes: 1-D uint8, whole words of 32 bits.
            out: 1-D float32.
            divisor: At least 1.
            add: Whether to add, instead of replacing what is there.
        """
        places = (_address(level), _address(codes), _address(out))
        kernel = "twobit_add" if add else "twobit_decode"
        self._launch(kernel, _blocks(out.numel()), *places, out.numel(), float(divisor))

    def largest(self, values: Tensor, out: Tensor) -> None:
        """Write the largest magnitude.

        Args:
            values: float32.
            out: One element.
        """
        out.zero_()
        count = values.numel()
        self._launch("qsgd_scale", _blocks(count, _MOST_PARTS), _address(values), _address(out), count)

    def qsgd_encode(
        self,
        values: Tensor,
        scale: Tensor,
        ring: Tensor,
        starts: Sequence[int],
        steps: int,
        fields: Fields,
        words: Tensor,
        _scratch: Scratch,
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
            _scratch: Not needed here.
        """
        kernel = f"qsgd_encode_{_memory(fields)}"
        places = (_address(values), _address(scale), _address(words), _address(ring))
        # A launch takes so many chunks of words as there is room for where their noise begins.
        chunks = _MOST_PLACES // fields.per_word
        for first in range(0, fields.words, chunks * CHUNK):
            last = min(first + chunks * CHUNK, fields.words)
            run = first // CHUNK * fields.per_word
            own = starts[run : run + chunks * fields.per_word]
            at = struct.pack(f"{len(own)}I", *own)
            blocks = min(_parts(last - first, THREADS), _MOST_BLOCKS)
            self._launch(kernel, blocks, *places, *_layout(fields), steps, CHUNK, first, last, at)

    def qsgd_read(
        self,
        words: Tensor,
        scale: Tensor,
        fields: Fields,
        zero: int,
        unit: int,
        out: Tensor,
        _scratch: Scratch,
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
            _scratch: Not needed here.
            add: Whether to add, instead of replacing what is there.
        """
        blocks = min(_parts(fields.words, THREADS), _MOST_BLOCKS)
        places = (_address(words), _address(scale), _address(out))
        kernel = f"qsgd_{'add' if add else 'decode'}_{_memory(fields)}"
        self._launch(kernel, blocks, *places, *_layout(fields), zero, float(unit))

    def _launch(self, kernel: str, blocks: int, *arguments: int | float | bytes) -> None:
        if blocks:
            self.functions[kernel]((blocks, 1, 1), (THREADS, 1, 1), *arguments)


def _address(tensor: Tensor) -> int:
    return tensor.data_ptr()


def _halves(residual: Residual) -> tuple[int, int, float]:
    """Addresses of what is kept and of what will be, and the factor of the former."""
    if isinstance(residual, KeptResidual):
        return residual.kept.data_ptr(), residual.pending.data_ptr(), residual.factor
    return 0, 0, 1.0


def _parts(count: int, size: int) -> int:
    return -(-count // size)


def _blocks(count: int, most: int = _MOST_BLOCKS) -> int:
    """Blocks of threads that take four values at a time."""
    return min(_parts(count, 4 * THREADS), most)


def _memory(fields: Fields) -> str:
    return str(8 * fields.word.itemsize) if fields.in_words is fields else "planes"


def _layout(fields: Fields) -> tuple[int, int, int, int]:
    return fields.count, fields.words, fields.width, fields.per_word
