"""Brings plain values and tensors of all workers of a group together, by `hybridpar.formats.messages`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hybridpar.comm.group import Group
from hybridpar.errors import SyncError
from hybridpar.formats.messages import DTYPES, bytes_of, pack, put_together, take_apart, tensor_facts, unpack


def gather_items(item: Any, group: Group) -> list[Any]:
    """The items of all workers of a group, by rank; a collective."""

    def gather(tensor: Tensor) -> Tensor:
        rows = torch.empty(group.size * tensor.numel(), dtype=tensor.dtype, device=group.device)
        group.all_gather(rows, tensor.to(group.device))
        return rows.cpu().view(group.size, -1)

    mine = torch.frombuffer(bytearray(pack(item)), dtype=torch.uint8)
    sizes = gather(torch.tensor([mine.numel()])).view(-1).tolist()
    padded = torch.zeros(max(sizes), dtype=torch.uint8)
    padded[: mine.numel()] = mine
    return [_read(row[:size], rank) for rank, (row, size) in enumerate(zip(gather(padded), sizes, strict=True))]


def gather_on_first(mine: Any, ranks: Sequence[int], group: Group) -> list[Any] | None:
    """Something large of some workers on rank 0 of a group; a collective of all of its workers.

    Tensors follow each into the memory where it stays.
    """
    text, tensors = take_apart(mine) if group.rank in ranks and group.rank else ("null", [])
    facts = gather_items((text, tensor_facts(tensors)), group)
    if group.rank:
        for tensor in tensors:
            group.send(bytes_of(tensor.to(group.device)), 0)
        return None
    items = []
    for source in ranks:
        if source == 0:
            items.append(mine)
            continue
        text, forms = facts[source]
        tensors = []
        for shape, dtype in forms:
            tensor = torch.empty(shape, dtype=DTYPES[dtype], device=group.device)
            group.recv(bytes_of(tensor), source)
            tensors.append(tensor.cpu())
        items.append(put_together(text, tensors))
    return items


def _read(data: Tensor, rank: int) -> Any:
    try:
        return unpack(data.numpy().data)
    except ValueError as error:
        raise SyncError(f"worker {rank} sent {error}", "All workers run the same version of hybridpar.") from error
