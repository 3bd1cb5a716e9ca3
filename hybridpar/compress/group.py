"""Groups of workers that exchange tensors: the collectives that codecs need."""

from __future__ import annotations

import datetime
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybridpar.compress.codec import Collective


class Group(ABC):
    """Some workers that exchange tensors. Calls come in the same order on all of them.

    On a CPU a call returns when the result is there, on a GPU when it is enqueued on the current stream. Tensors are
    1-D and contiguous.
    """

    @property
    @abstractmethod
    def size(self) -> int:
        """How many workers there are."""

    @property
    @abstractmethod
    def rank(self) -> int:
        """This worker."""

    @abstractmethod
    def all_reduce(self, tensor: Tensor, collective: Collective = Collective.SUM) -> None:
        """Replace a tensor by its sum, maximum or bitwise and over the workers, equal bit for bit on all of them.

        Args:
            tensor: 1-D.
            collective: SUM, MAX or AND.
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
    def close(self) -> None:
        """Leave the group. Safe to call twice."""


# The newer name of torch 2.14, which warns of the older one.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

_OPERATIONS = {Collective.SUM: dist.ReduceOp.SUM, Collective.MAX: dist.ReduceOp.MAX, Collective.AND: dist.ReduceOp.BAND}


class TorchGroup(Group):
    """A process group of torch.distributed, which stays its owner's to destroy.

    Args:
        group: The group; None for the default one.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        #: The process group.
        self.group = group
        # NCCL has no bitwise operations.
        self._bitwise = dist.get_backend(group) != "nccl"

    @property
    def size(self) -> int:
        return dist.get_world_size(self.group)

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    def all_reduce(self, tensor: Tensor, collective: Collective = Collective.SUM) -> None:
        if not tensor.numel():
            return
        if collective is Collective.AND and not self._bitwise:
            self._and_by_gathering(tensor)
            return
        dist.all_reduce(tensor, _OPERATIONS[collective], group=self.group)

    def all_to_all(self, out: Tensor, inp: Tensor, out_sizes: Sequence[int], in_sizes: Sequence[int]) -> None:
        dist.all_to_all_single(out, inp, list(out_sizes), list(in_sizes), group=self.group)

    def all_gather(self, out: Tensor, inp: Tensor) -> None:
        _all_gather(out, inp, group=self.group)

    def close(self) -> None:
        """Do nothing: the group belongs to its maker."""

    def _and_by_gathering(self, tensor: Tensor) -> None:
        words = torch.empty(self.size * tensor.numel(), dtype=tensor.dtype, device=tensor.device)
        self.all_gather(words, tensor)
        for row in words.view(self.size, -1):
            tensor.bitwise_and_(row)


def timeout_of(group: dist.ProcessGroup | None) -> float:
    """Seconds after which a silent worker is an error in a process group; None for the default one."""
    made: Any = group or dist.group.WORLD
    return float(made._get_backend(made._device_types[0]).options._timeout.total_seconds())


def open_group(ranks: Sequence[int], timeout: float, *, members_only: bool = False) -> dist.ProcessGroup | None:
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
    return group
