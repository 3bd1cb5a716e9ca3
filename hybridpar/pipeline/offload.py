"""Moves what a stage saves for its backward pass to the host's memory, and back before that pass.

Autograd hands all that a forward pass saves to a hook (`torch.autograd.graph.saved_tensors_hooks`). `Parked` notes the
storages behind it, each once however many views of it are saved. What moves when is part of the program (`PARK`,
`FETCH`): after the forward pass a copy lane copies the storages to pinned memory, and the stage's lane lets go of them
before a later pass; ahead of the backward pass the stage's lane makes room again, and the copy lane fills it. So memory
of the device is allocated and freed on the stage's own lane only, as the allocator of a GPU wants it, and no lane waits
for more than a copy.

What moves comes back bit for bit. Parameters, buffers, what enters and leaves the stage, and small tensors stay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hybridpar.models.state import storage_of

#: Smaller storages stay: starting a copy takes about as long as copying so many bytes.
LEAST_BYTES = 64 << 10


class Parked:
    """What one micro-batch's forward pass of a stage saved."""

    def __init__(self, stays: Iterable[Tensor]) -> None:
        self._stays = {storage_of(tensor) for tensor in stays}
        self._blocks: dict[int, _Block] = {}

    def hooks(self) -> AbstractContextManager[Any]:
        """Context in which the forward pass runs."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)

    def park(self, stays: Iterable[Tensor]) -> None:
        """Start to copy the storages to the host; on the copy lane, after the forward pass."""
        for key in {storage_of(tensor) for tensor in stays}:
            self._blocks.pop(key, None)
        for block in self._blocks.values():
            block.park()

    def release(self) -> None:
        """Let go of the device's memory; on the stage's lane, behind `park`."""
        for block in self._blocks.values():
            block.device = None

    def make_room(self, device: torch.device) -> None:
        """Allocate memory to come back to; on the stage's lane."""
        for block in self._blocks.values():
            block.device = torch.empty(block.size, dtype=torch.uint8, device=device)

    def fetch(self) -> None:
        """Start to copy the storages back, and leave them to autograd; on the copy lane, behind `make_room`."""
        for block in self._blocks.values():
            assert block.device is not None
            assert block.host is not None
            block.device.copy_(block.host, non_blocking=True)
            block.host = None
        self._blocks = {}

    def _pack(self, tensor: Tensor) -> Any:
        plain = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout is torch.strided and not tensor.is_meta
        if not plain or tensor.is_conj() or tensor.is_neg():
            return tensor
        key = storage_of(tensor)
        if key in self._stays or tensor.untyped_storage().nbytes() < LEAST_BYTES:
            return tensor
        block = self._blocks.get(key)
        if block is None:
            block = self._blocks[key] = _Block(tensor)
        block.saved.append((tensor.detach(), tensor._version))
        return partial(block.view, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))


class _Block:
    """A storage as bytes: on the device, on the host, or in between on both."""

    def __init__(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self.size = storage.nbytes()
        self.device: Tensor | None = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
        self.host: Tensor | None = None
        self.saved: list[tuple[Tensor, int]] = []  # each with the version that it was saved at, until it moves

    def park(self) -> None:
        if any(alias._version != version for alias, version in self.saved):
            raise RuntimeError(  # as autograd says in the backward pass, which would not see it now
                f"a tensor of shape {tuple(self.saved[0][0].shape)} needed for gradient computation has been modified "
                "by an inplace operation"
            )
        self.saved.clear()
        assert self.device is not None
        self.host = torch.empty(self.size, dtype=torch.uint8, pin_memory=self.device.is_cuda)
        self.host.copy_(self.device, non_blocking=True)

    def view(self, dtype: torch.dtype, size: torch.Size, stride: tuple[int, ...], offset: int) -> Tensor:
        """A tensor that was saved, once the block is on the device again."""
        assert self.device is not None
        empty = torch.empty(0, dtype=dtype, device=self.device.device)
        return empty.set_(self.device.untyped_storage(), offset, size, stride)


def _unpack(saved: Tensor | Callable[[], Tensor]) -> Tensor:
    return saved if isinstance(saved, Tensor) else saved()
