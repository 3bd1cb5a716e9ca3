"""Why: the state of optimizers is as large as the model, and pickled it would be in memory several times over.

`dist.gather_object` holds the pickled bytes of every worker, each padded to the longest, and copies of them. Here only
what is around tensors is pickled, and tensors follow one by one, each into the memory where it stays.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybridpar.pipeline.world import World


def gather_on_main(mine: Any, ranks: Sequence[int], world: World) -> list[Any] | None:
    """Something of some workers on rank 0 of a world; a collective of all of its workers.

    Args:
        mine: What pickles, with tensors anywhere in it; looked at on the workers of `ranks` only.
        ranks: Whose.
        world: The workers.

    Returns:
        On rank 0 what those workers have, in the order of `ranks`: its own as it is, tensors of others on the CPU. None
        elsewhere.

    Raises:
        SyncError: A worker died or did not answer in time.
    """
    around, tensors = _taken_apart(mine) if world.rank in ranks else (b"", [])
    told: list[Any] = world.gather((around, [(tuple(one.shape), one.dtype) for one in tensors]))
    if world.rank:
        with world.named_errors("sending state to worker 0"):
            for one in tensors:
                if one.numel():
                    dist.send(_bytes_of(one.to(world.device)), group_dst=0, group=world.control)
        return None
    found = []
    for rank in ranks:
        if rank == 0:
            found.append(mine)
            continue
        around, facts = told[rank]
        with world.named_errors(f"receiving the state of worker {rank}"):
            found.append(_put_together(around, [_received(shape, dtype, rank, world) for shape, dtype in facts]))
    return found


def _received(shape: tuple[int, ...], dtype: torch.dtype, rank: int, world: World) -> Tensor:
    flat = torch.empty(math.prod(shape), dtype=dtype, device=world.device)
    if flat.numel():
        dist.recv(flat.view(torch.uint8), group_src=rank, group=world.control)
    return flat.view(shape).cpu()


def _bytes_of(tensor: Tensor) -> Tensor:
    """What a tensor holds, row by row; backends carry bytes of every type."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


class _Pickler(pickle.Pickler):
    """Leaves tensors out, and puts them aside."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: list[Tensor] = []

    def persistent_id(self, item: Any) -> int | None:
        if not isinstance(item, Tensor):
            return None
        self.tensors.append(item)
        return len(self.tensors) - 1


class _Unpickler(pickle.Unpickler):
    """Puts tensors in again."""

    def __init__(self, file: io.BytesIO, tensors: Sequence[Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, number: int) -> Tensor:
        return self._tensors[number]


def _taken_apart(item: Any) -> tuple[bytes, list[Tensor]]:
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(item)
    return file.getvalue(), pickler.tensors


def _put_together(around: bytes, tensors: Sequence[Tensor]) -> Any:
    return _Unpickler(io.BytesIO(around), tensors).load()
