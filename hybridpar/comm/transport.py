"""Sends lists of tensors, whose shapes both ends know, from one worker to another, and between the stages of a layout.

A *message* is a list of tensors whose shapes, dtypes and memory formats are fixed before training, so nothing but data
is ever sent: no header, no handshake, no pickle. Every ordered pair of workers has a channel. Both ends block (on a
GPU: the current stream does), so a lane per end is all the concurrency there is, and messages arrive in the order in
which they were sent.

In a `Grid`, with the workers that run its stages in other replicas a worker adds gradients; with those that run the
stages before and after its own it exchanges activations and their gradients. Stages of a worker that lie on several
workers in another replica have sums apart from each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hybridpar.errors import SyncError

if TYPE_CHECKING:
    from hybridpar.comm.group import Group
    from hybridpar.comm.world import World
    from hybridpar.schedule.layout import Layout

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def flat_view(dense: Tensor) -> Tensor:
    """A dense tensor in any memory format as a 1-D view in memory order."""
    return dense.as_strided((dense.numel(),), (1,), dense.storage_offset())


def is_dense(tensor: Tensor) -> bool:
    """Whether the tensor fills its memory without gaps or overlaps, whatever the order of its dimensions."""
    return bool(torch.ops.aten.is_non_overlapping_and_dense(tensor))


@dataclass(frozen=True)
class MessagePart:
    """What both ends know about one tensor of a message.

    Attributes:
        shape: Its shape.
        dtype: Its dtype.
        channels_last: Whether it is sent and received in `channels_last` memory format (4-D; 5-D in
            `channels_last_3d`), else contiguous.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    channels_last: bool = False

    @classmethod
    def of(cls, tensor: Tensor) -> MessagePart:
        """The part that a tensor makes: in channels_last only if it is that and not contiguous."""
        order = _CHANNELS_LAST.get(tensor.dim())
        last = order is not None and not tensor.is_contiguous() and tensor.is_contiguous(memory_format=order)
        return cls(tuple(tensor.shape), tensor.dtype, last)

    @property
    def memory_format(self) -> torch.memory_format:
        """The memory format of torch that the part has."""
        return _CHANNELS_LAST[len(self.shape)] if self.channels_last else torch.contiguous_format

    def empty(self, device: torch.device) -> Tensor:
        """A new tensor that holds the part."""
        return torch.empty(self.shape, dtype=self.dtype, device=device, memory_format=self.memory_format)


def payload(tensors: Sequence[Tensor], parts: Sequence[MessagePart] | None = None) -> list[Tensor]:
    """The memory of tensors as 1-D uint8 views, in the order in which the message lays it out."""
    parts = [MessagePart.of(tensor) for tensor in tensors] if parts is None else parts
    if [(tensor.shape, tensor.dtype) for tensor in tensors] != [(part.shape, part.dtype) for part in parts]:
        raise SyncError(
            f"a message of {_text(MessagePart.of(tensor) for tensor in tensors)} was to be sent as {_text(parts)}",
            "Both ends of a channel know shapes and dtypes beforehand, and nothing else is sent.",
            "Make the stage return the same tensors as in the example batch it was cut with.",
        )
    return [
        memory_of(tensor.detach().contiguous(memory_format=part.memory_format))
        for tensor, part in zip(tensors, parts, strict=True)
    ]


def memory_of(dense: Tensor) -> Tensor:
    """The memory of a dense tensor as a 1-D uint8 view."""
    return flat_view(dense).view(torch.uint8)


def _text(parts: Iterable[MessagePart]) -> str:
    named = [f"{'x'.join(map(str, part.shape)) or 'scalar'} {str(part.dtype)[6:]}" for part in parts]
    return ", ".join(named) or "nothing"


class Channel:
    """A direction between two workers of a group: one of them sends messages, the other receives them."""

    def __init__(self, group: Group, peer: int, device: torch.device) -> None:
        self.group = group
        self._peer = peer
        self._device = device

    def send(self, tensors: Sequence[Tensor], parts: Sequence[MessagePart] | None = None) -> None:
        """Send a message. When it returns (on a GPU: in stream order) the tensors may be changed."""
        for memory in payload(tensors, parts):
            self.group.send(memory, self._peer)

    def receive(self, parts: Sequence[MessagePart]) -> list[Tensor]:
        """Receive the next message into new tensors, each contiguous in its memory format."""
        tensors = [part.empty(self._device) for part in parts]
        for tensor in tensors:
            self.group.recv(memory_of(tensor), self._peer)
        return tensors


class Grid:
    """What a worker needs to meet the others of a layout, which all have alike. Making it is a collective of them.

    For each of the pairs of stages there is a channel from the first to the second; where gradients of a stage are
    added there are so many groups as there are lanes.
    """

    def __init__(self, world: World, layout: Layout, pairs: Iterable[tuple[int, int]], *, lanes: int = 2) -> None:
        pairs = sorted(set(pairs))
        self.world = world
        self.layout = layout
        self.replica = layout.replica_of(world.rank)
        #: Of this worker's replica, by position.
        self.ranks = layout.ranks[self.replica]
        self.position = layout.position_of(world.rank)
        #: By position.
        self.senders: dict[int, Channel] = {}
        self.receivers: dict[int, Channel] = {}
        self._worlds: dict[tuple[int, ...], World] = {}
        ends = [(source[pair[0]][0], source[pair[1]][0]) for pair in pairs for source in layout.rows]
        try:
            worlds = world.worlds_of(layout.columns, lanes)
            self._worlds = {
                column: mine for column, mine in zip(layout.columns, worlds, strict=True) if mine is not None
            }
            with world.named_errors("connecting the stages of the pipeline"):
                self._connect([(source, target) for source, target in dict.fromkeys(ends) if source != target])
        except BaseException:
            self.close()
            raise

    def world_of(self, stage: int) -> World:
        """The workers that run one of this worker's stages in any replica."""
        return self._worlds[self.layout.column(stage)]

    @property
    def replica_world(self) -> World:
        """Those of this worker's first stage."""
        return next(iter(self._worlds.values()))

    def close(self) -> None:
        """Leave all channels and worlds. Safe to call twice."""
        for channel in (*self.senders.values(), *self.receivers.values()):
            channel.group.close()
        self.senders, self.receivers = {}, {}
        for world in self._worlds.values():
            world.close()

    # ------------------------------------------------------------------- set-up

    def _connect(self, channels: Sequence[tuple[int, int]]) -> None:
        """Open a channel from each first rank to the second.

        A first message goes over every channel at once, as NCCL connects on first use, when the order in which workers
        come to different channels is nobody's to control. In this one order the first exchange can always go on.
        """
        device, first = self.world.device, MessagePart((1,))
        groups = self.world.open_groups([sorted(ends) for ends in channels])
        for (source, target), group in zip(channels, groups, strict=True):
            if group is None:
                continue
            channel = Channel(group, 1 - group.rank, device)
            if self.world.rank == source:
                self.senders[self.ranks.index(target)] = channel
                channel.send([torch.zeros(first.shape, device=device)])
            else:
                self.receivers[self.ranks.index(source)] = channel
                channel.receive([first])
