"""Workers as a grid of pipeline positions by replicas, with the channels between stages.

Along one axis are the replicas of its stages, with which it adds gradients; along the other the stages before and after
its own, with which it exchanges activations and their gradients. Replicas of a stage have neighbouring ranks, because
launchers number the workers of a host one after the other and gradients are heavier than activations.

Replicas may also have different numbers of workers. A position is then a stage, and one worker may be at several
positions of its replica: each position's workers, one of every replica, have sums of their own.

Whatever needs all workers to set up is set up here, in one order that is the same everywhere.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from hybridpar.comm.group import TorchGroup, open_group
from hybridpar.comm.shared_channel import Offer, take_offer
from hybridpar.comm.transport import GroupReceive, GroupSend, MessagePart, ReceiveEnd, SendEnd
from hybridpar.comm.world import World
from hybridpar.errors import SyncError, UsageError

_log = logging.getLogger(__name__)

_T = TypeVar("_T")

#: (rank of the sender, rank of the receiver)
Channel = tuple[int, int]


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
        self._is_rectangle = homes is None
        self.senders: dict[int, SendEnd] = {}
        self.receivers: dict[int, ReceiveEnd] = {}
        self._groups: list[dist.ProcessGroup] = []
        hosts = self._agree(pairs)
        self.columns = [list(column) for column in zip(*self._homes, strict=True)]
        self.worlds: dict[int, World] = {}
        wanted = [(row[source], row[target]) for source, target in pairs for row in self._homes]
        channels = [one for one in dict.fromkeys(wanted) if one[0] != one[1]]
        try:
            self._divide(lanes)
            shared = self._share_memory([one for one in channels if hosts[one[0]] == hosts[one[1]] is not None])
            with world.named_errors("connecting the stages of the pipeline"):
                self._connect([one for one in channels if one not in shared])
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

    def _divide(self, lanes: int) -> None:
        """Open the worlds of this worker's positions, in one order on all workers."""
        rank = self.world.rank
        if self._is_rectangle:
            self.worlds[self.position] = self.world.split(self.columns, lanes)
            return
        for position, column in enumerate(self.columns):
            others = [[one] for one in range(self.world.size) if one not in column]
            party = self.world.split([column, *others], lanes)
            if rank in column:
                self.worlds[position] = party

    def close(self) -> None:
        """Leave all channels and destroy the grid's process groups. Safe to call twice."""
        ends: list[SendEnd | ReceiveEnd] = [*self.senders.values(), *self.receivers.values()]
        for end in ends:
            end.close()
        self.senders, self.receivers = {}, {}
        groups, self._groups = self._groups, []
        if dist.is_initialized():
            for group in groups:
                dist.destroy_process_group(group)
        for world in self.worlds.values():
            world.close()

    # ------------------------------------------------------------------- set-up

    def _agree(self, pairs: list[tuple[int, int]]) -> list[str | None]:
        """Make sure that all workers want the same grid, and learn where they are."""
        mine = (self.positions, pairs, [] if self._is_rectangle else [list(row) for row in self._homes])
        answers = self.world.gather((mine, self.world.memory_host()))
        hosts: list[str | None] = []
        for rank, answer in enumerate(answers):
            assert isinstance(answer, tuple)
            theirs, host = answer
            if theirs != mine:
                raise SyncError(
                    f"worker {rank} wants {theirs[0]} positions and pairs {theirs[1]}, worker {self.world.rank} wants "
                    f"{mine[0]} and {mine[1]}",
                    "All workers must make the same grid.",
                    "Start all workers with the same plan.",
                )
            hosts.append(host)
        return hosts

    def _share_memory(self, wanted: list[Channel]) -> set[Channel]:
        """Open channels in shared memory, and return those that could be opened, at both ends."""
        rank, patience = self.world.rank, (self.world.timeout, self.world.wait_on)
        offers: dict[Channel, Offer] = {}
        try:
            for one in wanted:
                if one[0] == rank and (offer := _attempt(partial(Offer, one[1], *patience), one[1])) is not None:
                    offers[one] = offer
            places = _merged(self.world.gather({one: offer.place for one, offer in offers.items()}))
            taken: dict[Channel, bool] = {}
            for one, place in places.items():
                take = partial(take_offer, place, one[0], *patience)
                if one[1] == rank and (end := _attempt(take, one[0])) is not None:
                    self.receivers[self.ranks.index(one[0])] = end
                    taken[one] = True
            opened = _merged(self.world.gather(taken))
            for one in offers.keys() & opened.keys():
                self.senders[self.ranks.index(one[1])] = offers[one].accept()
        except OSError as error:
            raise self.world.peer_error("connecting the stages of the pipeline", error) from error
        finally:
            for offer in offers.values():
                offer.close()
        return set(opened)

    def _connect(self, channels: list[Channel]) -> None:
        """Open channels over the backend. All workers make all groups, in one order, theirs or not.

        A first message goes over every channel at once, as NCCL connects on first use, when the order in which workers
        come to different channels is nobody's to control. In this one order the first exchange can always go on.
        """
        device = self.world.device
        first = MessagePart((1,))
        for source, target in channels:
            group = self._open_group((source, target))
            if group is None:
                continue
            self._groups.append(group)
            # Ranks in a group follow the ranks in the job.
            if self.world.rank == source:
                sender = GroupSend(TorchGroup(group), int(source < target), device)
                sender.send([torch.zeros(first.shape, device=device)])
                sender.bytes_sent = 0
                self.senders[self.ranks.index(target)] = sender
            else:
                receiver = GroupReceive(TorchGroup(group), int(target < source), device)
                receiver.receive([first])
                self.receivers[self.ranks.index(source)] = receiver

    def _open_group(self, ranks: Sequence[int]) -> dist.ProcessGroup | None:
        """A group of some workers of the grid; where that is a part of the job, the others make none."""
        world = self.world
        part = world.size < world.job_size
        return open_group([world.members[rank] for rank in ranks], world.timeout, members_only=part)


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


def _attempt(make: Callable[[], _T], peer: int) -> _T | None:
    try:
        return make()
    except OSError as error:
        _log.warning("no shared memory between this worker and worker %d (%s); they use the network", peer, error)
        return None


def _merged(answers: list[object]) -> dict[Channel, Any]:
    merged: dict[Channel, Any] = {}
    for answer in answers:
        assert isinstance(answer, dict)
        merged.update(answer)
    return merged
