"""Workers as a grid of pipeline positions by replicas, with the channels between stages.

Along one axis are the replicas of its stages, with which it adds gradients; along the other the stages before and after
its own, with which it exchanges activations and their gradients. Replicas of a stage have neighbouring ranks, because
launchers number the workers of a host one after the other and gradients are heavier than activations.

Replicas may also have different numbers of workers. A position is then a stage, and one worker may be at several
positions of its replica: each position's workers, one of every replica, have sums of their own.

Whatever needs all workers to set up is set up here, in one order that is the same everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from hybridpar.comm.transport import Channel, MessagePart
from hybridpar.comm.world import World
from hybridpar.errors import SyncError, UsageError


class Grid:
    """This worker's place among P pipeline positions times R replicas; rank = position * R + replica.

    Making one is a collective over all workers of the job.
    """

    def __init__(
        self,
        world: World,
        positions: int,
        pairs: Iterable[tuple[int, int]],
        *,
        lanes: int = 2,
        homes: Sequence[Sequence[int]] | None = None,
    ) -> None:
        pairs = sorted(set(pairs))
        _check(world, positions if homes is None else 1, pairs, positions)
        self.world = world
        self.positions = positions
        count = world.size // positions
        self._homes = homes or [range(replica, world.size, count) for replica in range(count)]
        self.replicas = len(self._homes)
        self.replica = next(replica for replica, row in enumerate(self._homes) if world.rank in row)
        self.ranks = list(dict.fromkeys(self._homes[self.replica]))
        self.position = self.ranks.index(world.rank)
        self.senders: dict[int, Channel] = {}
        self.receivers: dict[int, Channel] = {}
        self._agree(pairs)
        self.columns = [list(column) for column in zip(*self._homes, strict=True)]
        self.worlds: dict[int, World] = {}
        wanted = [(row[source], row[target]) for source, target in pairs for row in self._homes]
        try:
            worlds = world.worlds_of(self.columns, lanes)
            self.worlds = {position: world for position, world in enumerate(worlds) if world is not None}
            with world.named_errors("connecting the stages of the pipeline"):
                self._connect([ends for ends in dict.fromkeys(wanted) if ends[0] != ends[1]])
        except BaseException:
            self.close()
            raise

    def rank_of(self, position: int, replica: int) -> int:
        """The rank in the job of a place in the grid."""
        return self._homes[replica][position]

    @property
    def replica_world(self) -> World:
        """The workers of this worker's position, or of its first."""
        return next(iter(self.worlds.values()))

    def close(self) -> None:
        """Leave all channels and worlds. Safe to call twice."""
        for channel in (*self.senders.values(), *self.receivers.values()):
            channel.group.close()
        self.senders, self.receivers = {}, {}
        for world in self.worlds.values():
            world.close()

    # ------------------------------------------------------------------- set-up

    def _agree(self, pairs: list[tuple[int, int]]) -> None:
        """Make sure that all workers want the same grid."""
        mine = (self.positions, pairs, [list(row) for row in self._homes])
        answers: list[Any] = self.world.gather(mine)
        for rank, theirs in enumerate(answers):
            if theirs != mine:
                raise SyncError(
                    f"worker {rank} wants {theirs[0]} positions and pairs {theirs[1]}, worker {self.world.rank} wants "
                    f"{mine[0]} and {mine[1]}",
                    "All workers must make the same grid.",
                    "Start all workers with the same plan.",
                )

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


def _check(world: World, positions: int, pairs: list[tuple[int, int]], columns: int) -> None:
    if positions < 1 or world.size % positions:
        fits = [str(number) for number in range(1, world.size + 1) if world.size % number == 0]
        raise UsageError(
            f"{world.size} worker(s) cannot be {positions} pipeline position(s) times a number of replicas",
            "Every replica of a pipeline has a worker at every position.",
            f"Start a multiple of {max(positions, 1)} workers, or use {' or '.join(fits)} position(s).",
        )
    wrong = next((pair for pair in pairs if pair[0] == pair[1] or not set(pair) <= set(range(columns))), None)
    if wrong is not None:
        raise UsageError(
            f"a channel from position {wrong[0]} to position {wrong[1]} of {columns} was asked for",
            "A channel is from one position to another.",
            f"Name two different positions from 0 to {columns - 1}.",
        )
