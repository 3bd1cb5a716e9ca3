"""How workers find each other: time-outs, restarts, and several trainers in one program.

Torch's default time-out is half an hour. Its store keeps the addresses of process groups that are gone, of a dead
attempt or of an earlier trainer, and it lets gloo listen on the loopback where other machines cannot reach it. So the
default process group is made here and nowhere else.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from hybridpar.comm.flight import FLIGHT
from hybridpar.errors import LaunchError, UsageError, first_line
from hybridpar.machine.addresses import address_towards, gloo_address, interface_of, is_loopback
from hybridpar.machine.launch import DOOR_VARIABLE
from hybridpar.machine.process import host_identity

_log = logging.getLogger(__name__)

_T = TypeVar("_T")

#: Stores of this process by the address they were reached at. Each is kept to the end: on rank 0 it may be the server,
#: which the peers may still need for a process group that this worker has left already.
_stores: dict[str, Any] = {}
#: How often this process has made a default process group, and the one it made last.
_made = 0
_group: dist.ProcessGroup | None = None
#: How many worlds use that group.
_users = 0


def enter_group(device: torch.device, timeout: float) -> Callable[[], None] | None:
    """Use the default process group, which is made where there is none.

    Gives what leaves it: when the last of those that entered it leaves, it is destroyed. None where it is not ours.
    """
    global _users
    if not dist.is_initialized():
        _users = 0
        initialise(device, timeout)
    elif dist.group.WORLD is not _group:
        return None
    _users += 1
    return partial(_leave_group, _group)


def _leave_group(group: object) -> None:
    global _users
    if not dist.is_initialized() or dist.group.WORLD is not group:
        return
    _users -= 1
    if _users <= 0:
        _destroy()


@atexit.register
def _destroy() -> None:
    """Destroy the default group if it was made here: a process that ends with it may abort in the backend's threads."""
    global _group
    if _group is not None and dist.is_initialized() and dist.group.WORLD is _group:
        dist.destroy_process_group()
    _group = None


def initialise(device: torch.device, timeout: float) -> None:
    """Make torch's default process group: NCCL for CUDA tensors, gloo for CPU tensors."""
    global _made, _group
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    limit = datetime.timedelta(seconds=timeout)
    _made += 1
    try:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        store = dist.PrefixStore(f"group-{_made}", job_store(limit))  # type: ignore[attr-defined]
        _use_reachable_interface(_exchange_addresses(store, rank, size), rank)
        dist.init_process_group(
            backend,
            timeout=limit,
            device_id=device if device.type == "cuda" else None,
            store=store,
            rank=rank,
            world_size=size,
        )
    except (RuntimeError, ValueError, KeyError, OSError) as error:
        raise LaunchError(
            f"worker {os.environ.get('RANK', '?')} of {os.environ.get('WORLD_SIZE', '?')} cannot join the job at "
            f"{_store_address()}: {first_line(error)}",
            "RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT must describe a job whose workers reach each other.",
            "Start workers with `hybridpar train --nproc N`, or with torchrun; on several hosts give that --local-addr "
            "with the address of each host on the network, as MASTER_ADDR may stand for the loopback there.",
        ) from error
    _group = dist.group.WORLD


def _store_address() -> str:
    return f"{os.environ.get('MASTER_ADDR', '?')}:{os.environ.get('MASTER_PORT', '?')}"


def job_store(limit: datetime.timedelta) -> Any:
    """The store of this job, apart from what other jobs at the same address and other attempts of it write there.

    Torch's elastic launcher keeps a store for all attempts of a program, which would find the addresses of those
    before. With several launchers, on a host each, their restarts are counted apart and the number names no attempt,
    unless it is ours, which counts for all hosts.
    """
    address = _store_address()
    if address not in _stores:
        _require_agent_store(limit)
        try:
            _stores[address] = _open_store(limit)
        except RuntimeError as error:
            if "EADDRINUSE" not in str(error):
                raise
            # Wrong usage: it would be in use again after a restart.
            raise UsageError(
                f"the job cannot meet at {address}: the port is in use",
                "MASTER_PORT must be free on the host of worker 0; another job may be using it.",
                "Set another MASTER_PORT (with --hosts ssh:FILE, port= in the line of the first host), or start with "
                "`torchrun --standalone`, which chooses a free port.",
            ) from error
    alone = os.environ.get("GROUP_WORLD_SIZE", "1") == "1"
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if alone else "0"
    attempt = os.environ.get("HYBRIDPAR_ATTEMPT", restarts)
    job = os.environ.get("TORCHELASTIC_RUN_ID", "")
    store = dist.PrefixStore(f"job-{job}/attempt-{attempt}", _stores[address])  # type: ignore[attr-defined]
    store.set_timeout(limit)
    return store


def _open_store(limit: datetime.timedelta) -> Any:
    """The store at MASTER_ADDR; this process opens it where its launcher listens there already."""
    # Documented parts of torch.distributed, which declares no exports.
    if (door := os.environ.get(DOOR_VARIABLE)) is None:
        return next(dist.rendezvous("env://", timeout=limit))[0]  # type: ignore[attr-defined]
    return dist.TCPStore(  # type: ignore[attr-defined]
        *(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])),
        is_master=True,
        wait_for_workers=False,
        timeout=limit,
        master_listen_fd=int(door),
    )


def _require_agent_store(limit: datetime.timedelta) -> None:
    """Fail at once where torchrun's store, which stands before there are workers, is not where MASTER_ADDR leads."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        socket.create_connection(address, timeout=min(10.0, limit.total_seconds())).close()


# ------------------------------------------------------------------------------------------------- network interfaces


class HostAddresses(NamedTuple):
    """Where a worker is.

    Attributes:
        host: Equal in workers between which there is no network.
        listens: The address that gloo takes unless told otherwise: that of the host's own name.
        towards_store: The address of this host on the way to the job's store.
    """

    host: str
    listens: str
    towards_store: str


def _exchange_addresses(store: Any, rank: int, size: int) -> list[HostAddresses]:
    """Every worker's place, by rank. Waits for all workers, at most as long as the store's time-out."""
    mine = HostAddresses(host_identity(), gloo_address(), address_towards(os.environ.get("MASTER_ADDR", "127.0.0.1")))
    store.set(f"place-{rank}", json.dumps(mine))
    keys = [f"place-{other}" for other in range(size)]
    try:
        store.wait(keys)
    except RuntimeError as error:
        late = [str(other) for other, key in enumerate(keys) if not store.check([key])]
        raise RuntimeError(f"no sign of worker{'s' if len(late) > 1 else ''} {', '.join(late[:20])}") from error
    return [HostAddresses(*json.loads(store.get(key))) for key in keys]


def _use_reachable_interface(hosts: Sequence[HostAddresses], rank: int) -> None:
    """Name gloo an interface that other hosts reach, where it would listen on the loopback of this one.

    That happens where the host's own name stands for 127.0.1.1 in /etc/hosts, as Debian sets it up.
    """
    if "GLOO_SOCKET_IFNAME" in os.environ or len({where.host for where in hosts}) == 1:
        return
    addresses = [reachable_address(hosts, each) for each in range(len(hosts))]
    if None in addresses:
        hidden = addresses.index(None)
        raise LaunchError(
            f"worker {hidden} would listen on {hosts[hidden].listens}, which other hosts cannot reach",
            "The name of its host stands for the loopback, and so does its way to MASTER_ADDR.",
            "Set GLOO_SOCKET_IFNAME to its network interface (`ip address` lists them) on every host, or give "
            "torchrun --local-addr with the host's address on the network.",
        )
    if is_loopback(hosts[rank].listens):
        name = interface_of(address_towards(str(addresses[rank])))
        if name is not None:
            os.environ["GLOO_SOCKET_IFNAME"] = name


def reachable_address(hosts: Sequence[HostAddresses], rank: int) -> str | None:
    """An address that leads to the interface through which this worker and other hosts reach each other, if any."""
    mine = hosts[rank]
    others = [where for where in hosts if where.host != mine.host]
    known = [mine.listens, mine.towards_store, *(address for where in others for address in where[1:])]
    return next((address for address in known if not is_loopback(address)), None)


# --------------------------------------------------------------------------------------------------------- lost peers

#: The default process group for which roll calls were opened last, and how many.
_called: tuple[object, int] = (None, 0)


def open_roll_call(timeout: float) -> RollCall | None:
    """A roll call of all workers of the job; workers that use it open theirs in the same order."""
    global _called
    get_store = getattr(dist.distributed_c10d, "_get_default_store", None)
    if get_store is None:  # it is no public part of torch
        return None
    group = dist.group.WORLD
    _called = (group, _called[1] + 1 if _called[0] is group else 0)
    store = dist.PrefixStore(f"roll-call-{_called[1]}", get_store())  # type: ignore[attr-defined]
    return RollCall(store, dist.get_rank(), dist.get_world_size(), beat=min(5.0, timeout / 8))


class RollCall:
    """Finds out which workers of a job have stopped, when one of them notices that something is wrong.

    The store is asked only then. All workers that wait for a stopped one notice at about the same time: their
    time-outs began within one step, and the first that gives up closes its connections.

    Each worker writes a sign of life every `beat` seconds, with what it does where that is no part of a step. So a
    worker that tests, or writes to a slow disk, for longer than the time-out is not taken for dead (`is_busy`).
    """

    def __init__(self, store: Any, rank: int, size: int, beat: float = 5.0) -> None:
        self._store = store
        self._rank = rank
        self._others = [other for other in range(size) if other != rank]
        self._beat = beat
        self._lock = threading.Lock()
        self._missing: list[int] | None = None
        self._named: dict[int, str] = {}  # what a worker was last said to be busy with

    def show_life(self) -> Callable[[], None]:
        """Write signs of life on a thread, until what this returns is called."""
        closed = threading.Event()

        def write() -> None:
            number = 0
            with contextlib.suppress(RuntimeError):  # the store is gone
                while not closed.wait(self._beat):
                    number += 1
                    self._store.set(f"sign-{self._rank}", json.dumps([number, FLIGHT.busy_with()]))

        threading.Thread(target=write, name="signs of life", daemon=True).start()
        return closed.set

    def is_busy(self) -> bool:
        """Whether some other worker is alive outside of a step. One worker then logs once which, and what it does."""
        busy: dict[int, str] = _within(5 * self._beat, self._watch, {})
        with self._lock:
            for rank, doing in busy.items():
                if self._rank == min({self._rank, *self._others} - busy.keys()) and self._named.get(rank) != doing:
                    _log.warning("worker %d waits for worker %d, which is alive: %s", self._rank, rank, doing)
                    self._named[rank] = doing
        return bool(busy)

    def leave(self, reason: str) -> None:
        """Say how this worker came to take part no more, before the others notice."""
        _within(1.0, lambda: self._store.set(f"left-{self._rank}", reason), None)

    def left(self) -> dict[int, str]:
        """What workers that take part no more have said."""
        return _within(1.0, lambda: self._said("left"), {})

    def missing(self, patience: float) -> list[int]:
        """Workers that have not called this within `patience` seconds; asked once, then the answer stays.

        Worker 0 counts as missing where the store does not answer, which it may serve.
        """
        with self._lock:
            if self._missing is None:
                self._missing = _within(patience + 1.0, lambda: self._call(patience), [0][: self._rank])
            return self._missing

    def _watch(self) -> dict[int, str]:
        """What workers are busy with that give a new sign within four beats."""
        before, busy = self._said("sign"), dict[int, str]()
        deadline = time.monotonic() + 4 * self._beat
        while not busy and time.monotonic() < deadline:
            time.sleep(self._beat / 10)
            new = {rank: json.loads(sign) for rank, sign in self._said("sign").items() if sign != before.get(rank)}
            busy = {rank: doing for rank, (_, doing) in new.items() if doing is not None}
        return busy

    def _call(self, patience: float) -> list[int]:
        self._store.set(f"here-{self._rank}", "")
        missing, deadline = self._others, time.monotonic() + patience
        while missing and time.monotonic() < deadline:
            time.sleep(0.02)
            here = self._said("here")
            missing = [rank for rank in missing if rank not in here]
        return missing

    def _said(self, what: str) -> dict[int, str]:
        """What others have written to the store."""
        keys = {rank: f"{what}-{rank}" for rank in self._others}
        return {rank: self._store.get(key).decode() for rank, key in keys.items() if self._store.check([key])}


def _within(seconds: float, ask: Callable[[], _T], otherwise: _T) -> _T:
    """What the store answers. One whose server is stopped does not answer at all, so a thread asks it."""
    answers: list[_T] = []

    def run() -> None:
        with contextlib.suppress(RuntimeError):
            answers.append(ask())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return answers[0] if answers else otherwise
