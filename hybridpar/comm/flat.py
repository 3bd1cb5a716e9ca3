"""Dense tensors as flat views of their memory, as collectives take them."""

from __future__ import annotations

from torch import Tensor


def flat_view(dense: Tensor) -> Tensor:
    """A dense tensor in any memory format as a 1-D view in memory order."""
    return dense.as_strided((dense.numel(),), (1,), dense.storage_offset())


def is_dense(tensor: Tensor) -> bool:
    """Whether the tensor fills its memory without gaps or overlaps, whatever the order of its dimensions."""
    expected = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda pair: (pair[1], pair[0])):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True
