"""Groups of workers that exchange tensors: the collectives and transfers that everything else is made of."""

from __future__ import annotations

import datetime
import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from hybridpar.errors import SyncError
from hybridpar.formats.messages import DTYPES, bytes_of, pack, put_together, take_apart, tensor_facts, unpack


class Reduction(enum.Enum):
    """What an all-reduce makes of the workers' tensors, element by element."""

    #: Their sum.
    SUM = "sum"
    #: The largest. What happens to NaN is left open, so no message may hold any.
    MAX = "max"
    #: Bitwise and of integer words.
    AND = "and"


#: Every worker's item, on every worker, by rank.
Gather = Callable[[object], list[object]]

#: Asked after a time-out: whether to wait as long again, because a worker is alive and busy.
WaitOn = Callable[[], bool]


def never() -> bool:
    """Do not wait on after a time-out."""
    return False


def buffer_of(tensor: Tensor) -> memoryview:
    """A contiguous tensor's memory; the tensor must outlive it."""
    memory: Any = tensor.detach().view(-1).view(torch.uint8).numpy()
    return memoryview(memory)


class Group(ABC):
    """Some workers that exchange tensors. Calls come in the same order on all of them.

    On a CPU a call returns when the result is there, on a GPU when it is enqueued on the current stream. Tensors are
    1-D and contiguous.

    Attributes:
        size: How many workers there are.
        rank: This worker.
        device: Where tensors are.
        transport: What carries them.
    """

    size: int
    rank: int
    transport: str
    device: torch.device = torch.device("cpu")

    @abstractmethod
    def all_reduce(self, tensor: Tensor, reduction: Reduction = Reduction.SUM) -> None:
        """Replace a tensor by its reduction over the workers, equal bit for bit on all of them.

        Args:
            tensor: 1-D.
            reduction: SUM, MAX or AND.
        """

    @abstractmethod
    def all_to_all(self, out: Tensor, inp: Tensor, out_sizes: Sequence[int], in_sizes: Sequence[int]) -> None:
        """Send `in_sizes[k]` elements of `inp` to worker k, and receive `out_sizes[k]` from it into `out`.

        Args:
            out: Where what arrives goes, by rank of the sender.
            inp: What is sent, by rank of the receiver.
            out_sizes: Elements from each worker.
            in_sizes: Elements for each worker.
        """

    @abstractmethod
    def all_gather(self, out: Tensor, inp: Tensor) -> None:
        """Receive every worker's `inp` into `out`, by rank.

        Args:
            out: As large as all workers' `inp` together.
            inp: Of one size on all workers.
        """

    @abstractmethod
    def send(self, tensor: Tensor, rank: int) -> None:
        """Send a tensor to a worker that calls `recv`; the others take no part. No two may send to each other at once.

        Args:
            tensor: 1-D. It may be changed when this returns (on a GPU: in stream order).
            rank: The worker that receives it.
        """

    @abstractmethod
    def recv(self, tensor: Tensor, rank: int) -> None:
        """Receive a tensor from a worker that calls `send`.

        Args:
            tensor: Where it goes; of the size that is sent.
            rank: The worker that sends it.
        """

    @abstractmethod
    def close(self) -> None:
        """Leave the group, and end a call that waits on another thread. Safe to call twice."""

    def gather(self, item: Any) -> list[Any]:
        """The items of all workers, by rank; a collective.

        Args:
            item: Something that `hybridpar.formats.messages` packs.
        """
        mine = torch.frombuffer(bytearray(pack(item)), dtype=torch.uint8)
        sizes = self._rows(torch.tensor([mine.numel()])).view(-1).tolist()
        rows = self._rows(functional.pad(mine, (0, max(sizes) - mine.numel())))
        return [_read(row[:size], rank) for rank, (row, size) in enumerate(zip(rows, sizes, strict=True))]

    def _rows(self, tensor: Tensor) -> Tensor:
        """Every worker's tensor, by rank, on the host."""
        rows = torch.empty(self.size * tensor.numel(), dtype=tensor.dtype, device=self.device)
        self.all_gather(rows, tensor.to(self.device))
        return rows.cpu().view(self.size, -1)

    def gather_on_first(self, mine: Any, ranks: Sequence[int]) -> list[Any] | None:
        """Something large of some workers on rank 0; a collective of all. Tensors go into the memory where they stay.

        Args:
            mine: What this worker has, if it is one of them.
            ranks: Their ranks.
        """
        text, tensors = take_apart(mine) if self.rank in ranks and self.rank else ("null", [])
        facts = self.gather((text, tensor_facts(tensors)))
        if self.rank:
            for tensor in tensors:
                self.send(bytes_of(tensor.to(self.device)), 0)
            return None
        items = []
        for source in ranks:
            if source == 0:
                items.append(mine)
                continue
            text, forms = facts[source]
            tensors = []
            for shape, dtype in forms:
                tensor = torch.empty(shape, dtype=DTYPES[dtype], device=self.device)
                self.recv(bytes_of(tensor), source)
                tensors.append(tensor.cpu())
            items.append(put_together(text, tensors))
        return items


_REDUCE: dict[Reduction, Callable[..., Tensor]] = {
    Reduction.SUM: torch.add,
    Reduction.MAX: torch.maximum,
    Reduction.AND: torch.bitwise_and,
}


def reduce_rows(rows: Sequence[Tensor] | Tensor, out: Tensor, reduction: Reduction) -> None:
    """Reduce at least two rows in their order."""
    reduce = _REDUCE[reduction]
    reduce(rows[0], rows[1], out=out)
    for row in rows[2:]:
        reduce(out, row, out=out)


def split(tensor: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Pieces of these sizes from the start on; what is left over belongs to none."""
    return [tensor[end - size : end] for end, size in zip(accumulate(sizes), sizes, strict=True)]


# The newer name of torch 2.14, which warns of the older one.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

_OPERATIONS = {Reduction.SUM: dist.ReduceOp.SUM, Reduction.MAX: dist.ReduceOp.MAX, Reduction.AND: dist.ReduceOp.BAND}


class TorchGroup(Group):
    """A process group of torch.distributed.

    Args:
        group: The group; None for the default one.
        is_ours: Whether `close` destroys it; else its maker does.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, *, is_ours: bool = False) -> None:
        #: The process group.
        self.group = group
        self._is_ours = is_ours
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        backend = dist.get_backend(group)
        self.transport = "nccl" if "nccl" in dist.get_backend_config(group) else backend
        self._bitwise = backend != "nccl"  # which has no bitwise operations
        if not self._bitwise:
            self.device = torch.device("cuda", torch.cuda.current_device())

    def all_reduce(self, tensor: Tensor, reduction: Reduction = Reduction.SUM) -> None:
        if not tensor.numel():
            return
        if reduction is Reduction.AND and not self._bitwise:
            self._and_by_gathering(tensor)
            return
        dist.all_reduce(tensor, _OPERATIONS[reduction], group=self.group)

    def all_to_all(self, out: Tensor, inp: Tensor, out_sizes: Sequence[int], in_sizes: Sequence[int]) -> None:
        dist.all_to_all_single(out, inp, list(out_sizes), list(in_sizes), group=self.group)

    def all_gather(self, out: Tensor, inp: Tensor) -> None:
        _all_gather(out, inp, group=self.group)

    def send(self, tensor: Tensor, rank: int) -> None:
        self._transfer(dist.isend, tensor, rank)

    def recv(self, tensor: Tensor, rank: int) -> None:
        self._transfer(dist.irecv, tensor, rank)

    def close(self) -> None:
        if self._is_ours and dist.is_initialized():
            self._is_ours = False
            dist.destroy_process_group(self.group)

    def _transfer(self, kind: Callable[..., Any], tensor: Tensor, rank: int) -> None:
        if tensor.numel():
            # As a batch: outside of one, NCCL makes another communicator for every pair.
            for work in dist.batch_isend_irecv([dist.P2POp(kind, tensor, group=self.group, group_peer=rank)]):
                work.wait()

    def _and_by_gathering(self, tensor: Tensor) -> None:
        words = torch.empty(self.size * tensor.numel(), dtype=tensor.dtype, device=tensor.device)
        self.all_gather(words, tensor)
        for row in words.view(self.size, -1):
            tensor.bitwise_and_(row)


def timeout_of(group: dist.ProcessGroup | None) -> float:
    """Seconds after which a silent worker is an error in a process group; None for the default one."""
    made: Any = group or dist.group.WORLD
    return float(made._get_backend(made._device_types[0]).options._timeout.total_seconds())


def open_group(ranks: Sequence[int], timeout: float, *, members_only: bool = False) -> TorchGroup | None:
    """Make a process group with threads of its own, on which all members can be reached when this returns.

    Gloo lets a worker go on as soon as its own connections stand. One that fails right after that, for a reason of its
    own, closes them on workers that are still connecting, and these would report a network that does not work instead
    of the reason. So members exchange a message once.
    """
    group = dist.new_group(
        list(ranks), timeout=datetime.timedelta(seconds=timeout), use_local_synchronization=members_only
    )
    if not isinstance(group, dist.ProcessGroup):
        return None
    if "gloo" in dist.get_backend_config(group):  # NCCL connects on first use
        dist.all_reduce(torch.zeros(1), group=group)
    return TorchGroup(group, is_ours=True)


def _read(data: Tensor, rank: int) -> Any:
    try:
        return unpack(data.numpy().data)
    except ValueError as error:
        raise SyncError(f"worker {rank} sent {error}", "All workers run the same version of hybridpar.") from error
