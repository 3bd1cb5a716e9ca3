"""Divides the optimizer's work and state among the replicas of a model, without a change in the result.

Each replica steps the parameters that it owns, and keeps optimizer state for those alone; then all hand round the new
values (stage 1 of ZeRO: Rajbhandari et al. 2020, "ZeRO: Memory optimizations toward training trillion parameter
models", section 5.1). A parameter has a single owner, so any optimizer that treats each parameter by itself makes
the step that it would make on all of them, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from hybridpar.comm.group import Group
from hybridpar.comm.transport import flat_view, is_dense
from hybridpar.comm.world import World

#: Bytes that each replica hands round at a time.
CHUNK_BYTES = 8 << 20


def owners(sizes: Sequence[int], replicas: int) -> list[int]:
    """Which replica owns which parameter: the largest first, each to the replica that owns least so far."""
    loads, owner = [0] * replicas, [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        owner[index] = loads.index(min(loads))
        loads[owner[index]] += sizes[index]
    return owner


def largest_share(sizes: Sequence[int], replicas: int) -> int:
    """The most that a replica owns."""
    owner = owners(sizes, replicas)
    return max(sum(size for size, its in zip(sizes, owner, strict=True) if its == each) for each in range(replicas))


def owned(module: nn.Module, replica: int, replicas: int) -> set[int]:
    """The ids of the parameters that a replica owns."""
    parameters = list(module.parameters())
    owner = owners([parameter.numel() for parameter in parameters], replicas)
    return {id(parameter) for parameter, its in zip(parameters, owner, strict=True) if its == replica}


class ParameterShards:
    """Hands round the parameters of a module that each replica has stepped."""

    def __init__(self, module: nn.Module, replicas: World, group: Group) -> None:
        self._parameters = list(module.parameters())
        self._owners = owners([parameter.numel() for parameter in self._parameters], replicas.size)
        self._replicas = replicas
        self._group = group

    @torch.no_grad()
    def exchange(self) -> int:
        """Give every replica the new values of all parameters that are trained."""
        rank, size = self._replicas.rank, self._replicas.size
        rows: list[list[Tensor]] = [[] for _ in range(size)]
        laid: list[tuple[nn.Parameter, Tensor]] = []  # those with gaps in their memory are sent as copies
        for parameter, owner in zip(self._parameters, self._owners, strict=True):
            if not parameter.requires_grad or not parameter.numel():
                continue
            dense = parameter.data if is_dense(parameter) else parameter.data.contiguous()
            if dense is not parameter.data and owner != rank:
                laid.append((parameter, dense))
            rows[owner].append(flat_view(dense).view(torch.uint8))
        longest = max(sum(flat.numel() for flat in row) for row in rows)
        with self._replicas.named_errors("handing round updated parameters"):
            for start in range(0, longest, CHUNK_BYTES):
                count = min(CHUNK_BYTES, longest - start)
                mine = torch.empty(count, dtype=torch.uint8, device=self._replicas.device)
                every = torch.empty(count * size, dtype=torch.uint8, device=self._replicas.device)
                for piece, view in _pieces(rows[rank], start, mine):
                    view.copy_(piece)
                self._group.all_gather(every, mine)
                for other, received in enumerate(every.view(size, count)):
                    for piece, view in _pieces(rows[other], start, received) if other != rank else ():
                        piece.copy_(view)
        for parameter, dense in laid:
            parameter.data.copy_(dense)
        return longest * (size - 1)


def _pieces(row: Sequence[Tensor], start: int, memory: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Pieces of tensors laid end to end, from `start` on, each with the part of a memory that it goes with."""
    offset = -start
    for flat in row:
        low, high = max(0, offset), min(memory.numel(), offset + flat.numel())
        if low < high:
            yield flat[low - offset : high - offset], memory[low:high]
        offset += flat.numel()
