"""Compiled encoding and decoding for some codecs, on a CPU and on CUDA.

Each function here does what its codec otherwise does in torch, and says whether it did: it does nothing where kernels
are switched off or cannot be had, or where tensors are not dense float32 on a CPU or a CUDA device. What is decoded is
the same bit for bit either way, as it is given by the bytes, so workers with and without kernels, and with different
devices, can train together; but not for PowerSGD, whose products each library rounds in its way. What is encoded
differs where sums are made in another order.

Addresses go to the kernels, so the checks that keep them inside of their tensors are made here. On a CPU the GIL is
released; on a GPU nothing waits, as levels, scales and sums stay there.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hybridpar.codegen import LANES
from hybridpar.codegen.build import Function, load_kernels
from hybridpar.codegen.nvrtc import load_cuda_kernels
from hybridpar.compress.codec import CHUNK
from hybridpar.compress.kernels import cuda
from hybridpar.compress.kernels.cuda import CudaKernels
from hybridpar.compress.memory import Memory, Residual, Scratch

if TYPE_CHECKING:
    from hybridpar.compress.packing import Fields, Noise

_SOURCES = [Path(__file__).with_name(f"{name}_source.py") for name in ("quantised", "powersgd")]


class CpuKernels:
    """The kernels of this CPU."""

    #: Values that a tensor may have.
    most_values = (1 << 63) - 1

    def __init__(self, functions: Mapping[str, Function]) -> None:
        self.functions = functions

    def launch(self, kernel: str, blocks: int, *arguments: int | float) -> None:
        """Call a kernel; blocks are a GPU's."""
        self.functions[kernel](*arguments)

    def encode(self, name: str, values: Tensor, memory: Memory, *arguments: int | float) -> None:
        """Call the encoder that leaves what is not sent, or the one that does not."""
        left, pending, factor = memory.addresses(values.numel())
        self.functions[f"{name}_keep" if memory.keeps else name](values.data_ptr(), left, pending, *arguments, factor)


@functools.cache
def table(device: torch.device) -> CpuKernels | CudaKernels | None:
    """All kernels of a device, built if need be; None where there are none.

    The first time on a machine it takes as long as the compiler takes: TVM for a CPU some seconds, and NVRTC for a
    GPU. After that a file is read.
    """
    if device.type == "cpu":
        functions = load_kernels("codec", _SOURCES)
        return CpuKernels(functions) if functions else None
    if device.type != "cuda":
        return None
    launchers = load_cuda_kernels("codec", cuda.SOURCE, cuda.PARAMETERS, device)
    return CudaKernels(launchers) if launchers else None


def onebit_encode(values: Tensor, memory: Memory, lower: Tensor, upper: Tensor, packed: Tensor) -> bool:
    """Encode groups, and leave what is not sent."""
    kernels = _kernels(values)
    if kernels is None:
        return False
    groups, length = values.shape
    assert packed.numel() == -(-groups * length // 8)
    assert lower.numel() == upper.numel() == groups
    made = lower.data_ptr(), upper.data_ptr(), packed.data_ptr(), groups, length
    if isinstance(kernels, CpuKernels):
        kernels.encode("onebit_encode", values, memory, *made)
        return True
    by_warps = length <= cuda.WARP_VALUES
    kernel = "onebit_encode_warp" if by_warps else "onebit_encode_block"
    left, pending, factor = memory.addresses(values.numel())
    blocks = -(-groups // cuda.WARPS) if by_warps else groups
    kernels.launch(kernel, blocks, values.data_ptr(), left, pending, *made, factor)
    return True


def onebit_read(lower: Tensor, upper: Tensor, packed: Tensor, out: Tensor, *, add: bool) -> bool:
    """Set out to the levels that bits choose, or add these to it."""
    kernels = _kernels(out)
    if kernels is None:
        return False
    groups, length = out.shape
    assert packed.numel() == -(-groups * length // 8)
    assert lower.numel() == upper.numel() == groups
    addresses = lower.data_ptr(), upper.data_ptr(), packed.data_ptr(), out.data_ptr()
    name = "onebit_add" if add else "onebit_decode"
    kernels.launch(name, blocks_of(out.numel()), *addresses, out.numel(), length)
    return True


def twobit_encode(
    values: Tensor,
    memory: Memory,
    rule: tuple[float, float, float],
    level: Tensor,
    codes: Tensor,
    scratch: Scratch,
) -> bool:
    """Encode values, and leave what is not sent."""
    kernels = _kernels(values)
    if kernels is None:
        return False
    assert codes.numel() == -(-values.numel() // 16) * 4
    assert level.numel() == 1
    count = values.numel()
    made = level.data_ptr(), codes.data_ptr()
    if isinstance(kernels, CpuKernels):
        kernels.encode("twobit_encode", values, memory, *made, count, *rule)
        return True
    left, pending, factor = memory.addresses(count)
    source = values.data_ptr(), left
    parts = scratch.take("parts", cuda.PARTS_ROOM, torch.float64).data_ptr()
    blocks = max(blocks_of(count, cuda.MOST_PARTS), 1)  # also of no values there is a level
    kernels.launch("twobit_magnitudes", blocks, *source, parts, count, factor)
    numbers = blocks, count, *rule, factor
    kernels.launch("twobit_codes", max(blocks_of(count), 1), *source, pending, *made, parts, *numbers)
    return True


def twobit_read(level: Tensor, codes: Tensor, out: Tensor, *, add: bool) -> bool:
    """Set out to plus, nothing or minus the level, or add that to it."""
    kernels = _kernels(out)
    if kernels is None:
        return False
    assert codes.numel() * 4 >= out.numel()
    addresses = level.data_ptr(), codes.data_ptr(), out.data_ptr()
    name = "twobit_add" if add else "twobit_decode"
    kernels.launch(name, blocks_of(out.numel()), *addresses, out.numel())
    return True


def largest(values: Tensor, out: Tensor) -> bool:
    """Set out to the largest magnitude, infinite where a value is not finite."""
    kernels = _kernels(values, out)
    if kernels is None:
        return False
    assert out.numel() == 1
    out.zero_()
    blocks = blocks_of(values.numel(), cuda.MOST_PARTS)
    kernels.launch("qsgd_scale", blocks, values.data_ptr(), out.data_ptr(), values.numel())
    return True


def qsgd_encode(values: Tensor, scale: Tensor, noise: Noise, steps: int, fields: Fields, words: Tensor) -> bool:
    """Round values to codes of a grid, and pack them as code + steps."""
    kernels = _kernels(values, scale)
    if kernels is None:
        return False
    assert values.numel() == fields.count
    assert words.numel() == fields.words
    # A run without values draws no offset, as in torch, so that both ways round alike.
    starts = [noise.offset(stop - start) if stop > start else 0 for start, stop in fields.runs()]
    addresses = values.data_ptr(), scale.data_ptr(), words.data_ptr(), noise.ring.data_ptr()
    layout = fields.count, fields.words, fields.width, fields.per_word
    bits = 8 * words.itemsize
    if isinstance(kernels, CpuKernels):
        at = torch.tensor(starts)
        kernels.functions[f"qsgd_encode_{bits}"](*addresses, at.data_ptr(), *layout, steps, CHUNK)
        return True
    chunks = cuda.MOST_PLACES // fields.per_word  # a launch takes so many starts
    for first in range(0, fields.words, chunks * CHUNK):
        last = min(first + chunks * CHUNK, fields.words)
        run = first // CHUNK * fields.per_word
        part = starts[run : run + chunks * fields.per_word]
        numbers = *layout, steps, CHUNK, first, last, struct.pack(f"{len(part)}I", *part)
        kernels.launch(f"qsgd_encode_{bits}", word_blocks(last - first), *addresses, *numbers)
    return True


def qsgd_read(words: Tensor, scale: Tensor, fields: Fields, zero: int, unit: int, out: Tensor, *, add: bool) -> bool:
    """Set out = (code - zero) / unit * scale, or add that to it."""
    kernels = _kernels(scale, out)
    if kernels is None:
        return False
    assert out.numel() == fields.count
    assert words.numel() == fields.words
    numbers = fields.count, fields.words, fields.width, fields.per_word, zero, float(unit)
    name = f"qsgd_{'add' if add else 'decode'}_{8 * words.itemsize}"
    addresses = words.data_ptr(), scale.data_ptr(), out.data_ptr()
    kernels.launch(name, word_blocks(fields.words), *addresses, *numbers)
    return True


def powersgd_left(values: Tensor, memory: Memory, right: Tensor, out: Tensor) -> bool:
    """Make v, leave it in the residual, and set out = right v^T; on a CPU alone, as all of PowerSGD's kernels."""
    if not isinstance(memory, Residual):
        return False
    left, owed, factor = memory.unsettled()
    first, second = (torch.zeros_like(out), right) if owed is None else (owed.left, owed.right)
    pending = memory.pending.view(values.shape)
    tensors = values, left.view(values.shape), first, second, pending, right, out
    return _by_factors("left", [(out, right), (first, second)], tensors, factor)


def powersgd_right(matrix: Tensor, left: Tensor, out: Tensor) -> bool:
    """Set out = left matrix."""
    return _by_factors("right", [(left, out)], (matrix, left, out))


def powersgd_product(left: Tensor, right: Tensor, out: Tensor, scale: float) -> bool:
    """Set out = scale * left^T right."""
    return _by_factors("product", [(left, right)], (out, left, right), scale)


def powersgd_subtract(left: Tensor, right: Tensor, out: Tensor) -> bool:
    """Set out -= left^T right, as the kernel `left` does on its way: it reads a number before it writes it."""
    tensors = torch.zeros_like(out), out, left, right, out, right, torch.empty_like(left)
    return _by_factors("left", [(left, right)], tensors, 1.0)


def _by_factors(name: str, pairs: Sequence[tuple[Tensor, Tensor]], tensors: Sequence[Tensor], *numbers: float) -> bool:
    """Call a kernel for a matrix, the first of the tensors, and factors of it; whether there is one for it."""
    matrix, rows = tensors[0], len(pairs[0][0])
    if matrix.device.type != "cpu" or matrix.shape[1] % LANES:  # other kernels of a GPU are not loaded for that
        return False
    kernels = _kernels(*tensors)
    function = kernels.functions.get(f"powersgd_{name}{rows}") if isinstance(kernels, CpuKernels) else None
    if function is None:
        return False
    for left, right in pairs:
        assert len(left) == len(right) == rows
        assert (left.shape[1], right.shape[1]) == matrix.shape
    function(*(tensor.data_ptr() for tensor in tensors), *matrix.shape, *numbers)
    return True


def _kernels(*tensors: Tensor) -> CpuKernels | CudaKernels | None:
    """The kernels of the device that has some tensors, or None where there are none that take them."""
    device = tensors[0].device
    for tensor in tensors:
        if tensor.device != device or tensor.dtype != torch.float32 or not tensor.is_contiguous():
            return None
    kernels = table(device)
    return None if kernels is None or max(map(torch.numel, tensors)) > kernels.most_values else kernels


def blocks_of(count: int, most: int | None = None) -> int:
    """Blocks of threads that take four values at a time."""
    return min(-(-count // (4 * cuda.THREADS)), cuda.MOST_BLOCKS if most is None else most)


def word_blocks(words: int) -> int:
    """Blocks of threads that take a word each."""
    return min(-(-words // cuda.THREADS), cuda.MOST_BLOCKS)
