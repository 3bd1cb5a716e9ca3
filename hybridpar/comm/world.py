"""`World`: the process groups of this worker and its place among the others.

Each sync lane needs a process group of its own: collectives of one group must be issued in the same order on every
worker, and two threads (or streams) cannot promise that for a group they share. Groups are made eagerly and in a
fixed order, because making them lazily is a collective whose order nobody controls.

Not all workers hold the same parameters: in a pipeline only the replicas of a stage do. `World.split` makes a world of
each such party, with its groups, so that whatever synchronises a world synchronises a part of the job unchanged.

A process that ends without destroying its groups can abort inside the backend's threads; `World.close` is therefore
part of every exit path.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from hybridpar.comm.flight import FLIGHT, noted, outside
from hybridpar.errors import HybridparError, LaunchError, SyncError, first_line, shortened
from hybridpar.machine.process import host_identity

if TYPE_CHECKING:  # loaded where there are several workers
    from hybridpar.comm.group import Group, TorchGroup
    from hybridpar.comm.rendezvous import RollCall

_log = logging.getLogger(__name__)

_T = TypeVar("_T")

#: What a worker that leaves without an error says.
GOOD_ORDER = "left in good order"


def all_reduce_bytes(payload: int, workers: int) -> int:
    """Bytes that one worker sends in an all-reduce: 2 (K - 1) / K of the payload."""
    return round(2 * (workers - 1) / workers * payload)


@dataclass
class World:
    """This worker's place among its peers: all workers of the job, or one party of them (`split`).

    A world of one worker has no process groups, and no collective is ever called in it.

    Attributes:
        rank: This worker's number in this world, from 0.
        size: Number of workers of this world.
        device: The device this worker computes on.
        timeout: Seconds after which a silent peer is an error.
        lane_groups: What exchanges gradients, one group for each sync lane.
        control_group: What adds control messages.
        control: A process group of torch, for broadcasts at the start, and for what has no connections of its own.
        transport: What sends gradients: `sockets`, `gloo`, `nccl`, `shared memory`, or `none`.
        share_memory: Whether CPU workers of one host may exchange data through shared memory.
        members: The workers' ranks in the whole job, by rank here.
        job_size: Number of workers of the whole job.
    """

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    timeout: float = 120.0
    lane_groups: list[Group] = field(default_factory=list)
    control_group: Group | None = None
    control: TorchGroup | None = None
    transport: str = "none"
    share_memory: bool = True
    members: tuple[int, ...] = ()
    job_size: int = 0
    _leave: Callable[[], None] | None = None
    _meeting: Group | None = None
    _roll_call: RollCall | None = None
    _end_life: Callable[[], None] | None = None
    #: Kinds of groups that could not be opened, which all workers know.
    _failed: set[type[Group]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.members = self.members or tuple(range(self.size))
        self.job_size = self.job_size or self.size
        self._meeting = self.control
        self._channel = FLIGHT.channel(self.members)

    @classmethod
    def join(
        cls,
        *,
        lanes: int = 2,
        timeout: float = 120.0,
        device: torch.device | None = None,
        shared_memory: bool = True,
    ) -> World:
        """Take this process's place in the job that its environment describes.

        Under torchrun, or any launcher that sets `RANK`, `WORLD_SIZE` and `MASTER_ADDR`, the default process group is
        initialised (NCCL for CUDA tensors, gloo for CPU tensors) unless the caller already did. Without these
        variables, or with `WORLD_SIZE=1`, the world is this process alone.
        """
        device = device or default_device()
        if device.type == "cuda":
            torch.cuda.set_device(device)
        if not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return cls(device=device, timeout=timeout, share_memory=shared_memory)
        from hybridpar.comm.group import open_group
        from hybridpar.comm.rendezvous import enter_group, open_roll_call

        leave = enter_group(device, timeout)
        size = dist.get_world_size()
        world = cls(dist.get_rank(), size, device, timeout, share_memory=shared_memory, _leave=leave)
        if size == 1:
            return world
        try:
            world._roll_call = open_roll_call(timeout)
            world._end_life = world._roll_call.show_life() if world._roll_call is not None else None
            world.control = world._meeting = open_group(world.members, timeout)
            # Where hosts do not share the directory of a run that is resumed, worker 0 alone knows its options.
            lanes, world.share_memory = world.gather((lanes, shared_memory))[0]  # type: ignore[misc]
            world._open_lanes([world], [world.members], lanes)
        except BaseException as error:
            world.close()
            if not isinstance(error, RuntimeError):
                raise
            raise LaunchError(
                f"worker {world.rank} of {size} cannot connect to its peers: {first_line(error)}",
                "Every worker must reach every other one.",
                "On several network interfaces, name the right one in GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME.",
            ) from error
        return world

    def split(self, parties: Sequence[Sequence[int]], lanes: int = 2) -> World:
        """Divide the workers into parties and return this worker's, as a world of its own; a collective.

        The new world has its groups, and is closed apart from this one, which stays as it is.
        """
        assert sorted(rank for party in parties for rank in party) == list(range(self.size)), "each is in one party"
        (world,) = [world for world in self.worlds_of(parties, lanes) if world is not None]
        return world

    def worlds_of(self, parties: Sequence[Sequence[int]], lanes: int = 2) -> list[World | None]:
        """A world for each party that this worker is in, of which there may be several; a collective, as `split`."""
        from hybridpar.comm.group import open_group

        parties = [sorted(party) for party in parties]
        facts: dict[str, Any] = {"job_size": self.job_size, "share_memory": self.share_memory}
        worlds: list[World | None] = [None] * len(parties)
        for index, party in enumerate(parties):
            if self.rank in party:
                members, rank = tuple(self.members[each] for each in party), party.index(self.rank)
                given = rank, len(party), self.device, self.timeout
                worlds[index] = World(*given, members=members, _roll_call=self._roll_call, **facts)
        with self.named_errors("dividing the workers into parties"):
            for party, world in zip(parties, worlds, strict=True):
                ranks, part = [self.members[rank] for rank in party], self.size < self.job_size
                group = open_group(ranks, self.timeout, members_only=part) if len(party) > 1 else None
                if world is not None:
                    world.control = world._meeting = group
            self._open_lanes(worlds, parties, lanes)
        return worlds

    def _open_lanes(self, worlds: Sequence[World | None], parties: Sequence[Sequence[int]], lanes: int) -> None:
        """Give the worlds of parties groups of plain values, of control messages, and of lanes.

        Plain values are gathered over connections where that is possible, as these wait for workers that are busy.
        """
        meetings = self.open_groups(parties, on_host=True, by_torch=False)
        controls = self.open_groups(parties, by_torch=False)
        groups = iter(self.open_groups([party for party in parties for _ in range(lanes)]))
        for world, meeting, control in zip(worlds, meetings, controls, strict=True):
            of_lanes = [group for group in islice(groups, lanes) if group is not None]
            if world is not None and of_lanes:
                world._meeting, world.control_group = meeting or world.control, control or world.control
                world.lane_groups, world.transport = of_lanes, of_lanes[0].transport

    def open_groups(
        self, parties: Sequence[Sequence[int]], *, on_host: bool = False, by_torch: bool = True
    ) -> list[Group | None]:
        """Open a group for each party: in shared memory, over sockets, or by torch; a collective of this world.

        Parties are ranks in this world, ascending; a worker may be in none, or in several. The group is None where this
        worker is no member or the only member. With `on_host` tensors are on the host also where workers compute on
        GPUs. Without `by_torch` there may be no group.
        """
        from hybridpar.comm.connections import connect
        from hybridpar.comm.group import open_group
        from hybridpar.comm.sockets import SharedMemoryGroup, SocketGroup

        computes_on_host = self.device.type == "cpu"
        host = host_identity() if self.share_memory and computes_on_host else None  # where it may share memory
        answers: list[Any] = self.gather((host, on_host or computes_on_host))
        hosts, are_on_host = zip(*answers, strict=True)
        left = {index: party for index, party in enumerate(parties) if len(party) > 1}
        groups: dict[int, Group | None] = {}
        kinds: tuple[type[SocketGroup], ...] = (SharedMemoryGroup, SocketGroup)
        for kind in kinds if all(are_on_host) else ():
            if kind in self._failed:  # trying takes as long as a worker waits for another
                continue
            fitting = {index: party for index, party in left.items() if kind.fits([hosts[rank] for rank in party])}
            if not fitting:
                continue
            try:
                made = connect(kind, self.rank, [*fitting.values()], self.gather, self.timeout, self.wait_on)
            except OSError as error:
                if self.rank == 0:
                    _log.warning("no %s between workers (%s): messages go another way", kind.transport, error)
                self._failed.add(kind)
                continue
            groups |= dict(zip(fitting, made, strict=True))
            left = {index: party for index, party in left.items() if index not in fitting}
        for index, party in left.items() if by_torch else ():
            ranks = [self.members[rank] for rank in party]
            groups[index] = open_group(ranks, self.timeout, members_only=self.size < self.job_size)
        return [groups.get(index) for index in range(len(parties))]

    @property
    def is_main(self) -> bool:
        """Whether this is the worker of the job that writes files and talks to the terminal."""
        return self.job_rank == 0

    @property
    def job_rank(self) -> int:
        """This worker's rank in the whole job."""
        return self.members[self.rank]

    def barrier(self) -> None:
        """Wait on the host until every worker is here."""
        self.gather(None)

    @contextlib.contextmanager
    def patient(self) -> Iterator[None]:
        """Inside, workers may be downloading, and wait for each other; those of a process group know who is busy."""
        yield

    def gather(self, item: object) -> list[object]:
        """Every worker's item, on every worker, by rank. For start-up and checkpoints, never within a step."""
        if self._meeting is None:
            return [item]
        with self.named_errors("exchanging start-up or checkpoint facts"):
            return self._meeting.gather(item)

    def gather_on_main(self, mine: object, ranks: Sequence[int]) -> list[Any] | None:
        """Something large of some workers on rank 0, such as the state of optimizers; a collective of all workers."""
        if self._meeting is None:
            return [mine for _ in ranks]
        with self.named_errors("bringing state to worker 0"):
            return self._meeting.gather_on_first(mine, ranks)

    def from_main(self, decide: Callable[[], _T], *, long: bool = False) -> _T:
        """What rank 0 of this world decides, on every worker; a problem there is everybody's. As `gather`.

        What may take long, such as measuring, is done as `on_all_patiently` does it.
        """
        meet = self.on_all_patiently if long else self.on_all
        mine = meet(lambda: decide() if self.rank == 0 else None)
        decided: _T = self.gather(mine)[0]  # type: ignore[assignment]
        return decided

    def on_all_patiently(self, act: Callable[[], _T]) -> _T:
        """As `on_all`, for what may take longer than the time-out: who waits sees that the others are at work."""
        with outside("what takes long, and is no step"):
            return self.on_all(act)

    def on_all(self, act: Callable[[], _T]) -> _T:
        """What `act` returns on this worker; the first problem of a worker is everybody's. As `gather`."""
        problem: HybridparError | None = None
        try:
            done = act()
        except HybridparError as error:
            problem = error
        for rank, answer in enumerate(self.gather(problem)):
            if isinstance(answer, HybridparError):
                raised = answer if problem is None or rank != self.rank else problem
                raised.is_repeated = rank != self.rank
                raise raised
        if problem is not None:  # of who replaces a worker that died, and had no problem
            raise problem
        return done

    @contextlib.contextmanager
    def named_errors(self, doing: str, *, transfer: tuple[int, int] | None = None) -> Iterator[None]:
        """Context that turns a backend's error into a `SyncError` that says who waited for what.

        It is also noted in the flight record (`hybridpar.comm.flight`), so all workers of this world enter it in the
        same order.
        """
        channel = self._channel if transfer is None else FLIGHT.channel(transfer, is_transfer=True)
        try:
            with noted(doing, channel):
                yield
        except NotImplementedError:
            raise
        except RuntimeError as error:
            raise self.peer_error(doing, error) from error

    def peer_error(self, doing: str, error: BaseException) -> SyncError:
        """The backend's error as one that says which worker is at fault, and which one waited for what."""
        text = first_line(error)
        lost = any(sign in text for sign in ("onnection", "reset by peer", "remote process", "Broken pipe"))
        left = {} if self._roll_call is None else self._roll_call.left()
        missing = sorted(left, key=lambda rank: GOOD_ORDER in left[rank])[:1] or self._missing(lost)
        what = f"worker {self.job_rank} of {self.job_size} stopped while {doing}{self._peers_text()}"
        if len(missing) == 1:
            fate = "died or left" if lost else f"did not answer within {self.timeout:g} s"
            what = f"worker {missing[0]} {left.get(missing[0], fate)}, so {what}"
        else:
            what += f": {'a peer has died' if lost else f'a peer did not answer within {self.timeout:g} s, or failed'}"
            if missing:  # some may be busy with a step that the others have done
                what += f"; no sign of workers {', '.join(map(str, missing[:20]))}"
        return SyncError(
            what,
            f"The backend says: {text[:200]}",
            "Give all workers as many batches; an empty one, (inputs[:0], targets[:0]), takes part without samples."
            if left and GOOD_ORDER in left[missing[0]]
            else "Look at the first worker that failed; a launched job restarts from its last checkpoint."
            if left or lost or not missing
            else "It hangs, or is busy for longer than --timeout allows, or its machine is not to be reached.",
        )

    def leave(self, reason: str) -> None:
        """Say how this worker came to take part no more, for the messages of others; such as "left step 7"."""
        if self._roll_call is not None:
            self._roll_call.leave(shortened(reason))

    def wait_on(self) -> bool:
        """Whether to wait on for silent workers after a time-out: another one is alive, outside of a step."""
        return self._roll_call is not None and self._roll_call.is_busy()

    def _missing(self, lost: bool) -> list[int]:
        """Workers that have stopped or left, as far as that can be found out."""
        if self._roll_call is None:
            return []
        if lost and self.job_size == 2:
            return [1 - self.job_rank]
        # Those that noticed too are not long in coming: the first one to give up closes its connections.
        return self._roll_call.missing(0.5 if lost else min(5.0, self.timeout / 4))

    def _peers_text(self) -> str:
        """Who the peers are, where they are not simply everybody else."""
        peers = [str(member) for member in self.members if member != self.job_rank]
        if self.size == self.job_size or not peers:
            return ""
        return f" with worker{'s' if len(peers) > 1 else ''} {', '.join(peers)}"

    def close(self) -> None:
        """Destroy all process groups of this world. Safe to call twice."""
        if self._end_life is not None:
            self._end_life()
        for group in [*self.lane_groups, self.control_group, self._meeting, self.control]:
            if group is not None:
                group.close()
        self.lane_groups, self.control_group, self.control, self._meeting = [], None, None, None
        leave, self._leave = self._leave, None
        if leave is not None:
            leave()


def default_device() -> torch.device:
    """The GPU numbered `LOCAL_RANK` where there are GPUs, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    return torch.device("cpu")
