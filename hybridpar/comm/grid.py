"""The workers of a layout, with the channels between its stages.

With the workers that run its stages in other replicas a worker adds gradients; with those that run the stages before
and after its own it exchanges activations and their gradients. Stages of a worker that lie on several workers in
another replica have sums apart from each other.

Whatever needs all workers to set up is set up here, in one order that is the same everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from hybridpar.comm.transport import Channel, MessagePart
from hybridpar.comm.world import World
from hybridpar.schedule.layout import Layout


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
