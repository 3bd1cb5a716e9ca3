"""Starts the workers of a job on this machine, and its servers if it has any, and replaces those that die.

This process hosts the store at which the workers find each other, and watches them:

* a worker that dies where no update waits for it is started again and joins the others, which have not stopped;
* any other process that dies - a server, or a worker that an update waits for - makes the launcher start all of them
  again, and they go on from the last whole checkpoint.

An error that would only come again is not worth a restart: the worker leaves a *verdict*, a file with the message and
the exit code (`hybridpar.machine.launch.record_failure`), all workers end, and this process reports it once.

A job on several machines has two levels of the same. The processes that its launcher watches are agents, one on each
machine (`hybridpar.machine.nodes`): `python -m hybridpar.machine.supervise` starts the workers there and watches them
until one dies, which ends the agent. The first line of its standard input is JSON and says what to start, so that no
secret is on a command line. Each further line is the name of a signal; the end of the input, which is the end of the
connection, ends everything.
"""

from __future__ import annotations

import datetime
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Protocol

from hybridpar.errors import UsageError
from hybridpar.machine.addresses import is_loopback
from hybridpar.machine.launch import (
    VERDICT_VARIABLE,
    StopRequest,
    record_failure,
    report_verdict,
    tell_interrupted,
)
from hybridpar.machine.process import available_cores, threads_per_worker, usable_memory

#: Holds what processes of a job must know to be let in by its servers.
TOKEN_VARIABLE = "HYBRIDPAR_TOKEN"

#: Processes of a job that a core may have; so many already take minutes to start.
MOST_PER_CORE = 8
#: Main memory that a process needs for itself at least, before it has a model.
LEAST_BYTES = 150 << 20

#: Seconds that workers have after Ctrl-C or SIGTERM to end their step and save; those that have nothing to save.
STOP_SECONDS, LEAVE_SECONDS = 60, 5
#: Seconds that workers have after a second Ctrl-C.
KILL_SECONDS = 1
#: Signals that end everything at once.
_AT_ONCE = 3
#: Seconds that processes have to leave, or to be found to have failed first, once one has failed.
_SETTLE_SECONDS = 2.0


#: How often the processes of a job are started again.
RESTARTS = 3
#: What an agent ends with that has lost a worker: all are worth a restart.
LOST_WORKER = 75
#: Begins the line on standard error by which an agent hands its verdict on.
VERDICT_MARK = "hybridpar verdict "


class Process(Protocol):
    """What the launcher asks of a process, here or on another machine."""

    @property
    def returncode(self) -> int | None: ...

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def send_signal(self, number: int, /) -> None: ...


@dataclass
class Job(ABC):
    """The processes that a launcher starts and watches.

    Attributes:
        workers: Number of workers, the first processes.
        servers: Number of servers, the others.
        patient: Whether an update waits for every worker.
        restarts: How often processes are started again.
        patience: Seconds that workers have after a signal.
        attempt: How often all were started again.
        joined: How often a worker was started again alone.
    """

    workers: int
    servers: int = 0
    patient: bool = True
    restarts: int = RESTARTS
    patience: float = STOP_SECONDS
    processes: dict[int, Process] = field(default_factory=dict)
    attempt: int = 0
    joined: int = 0

    @abstractmethod
    def begin(self, index: int, joins: int = 0) -> Process:
        """Start a process, for the `joins`-th time again while the others go on."""

    @abstractmethod
    def name(self, index: int) -> str:
        """What to call a process."""

    def cause(self, index: int) -> str:
        """How a process ended."""
        code = self.processes[index].returncode or 0
        return f"was killed by signal {-code}" if code < 0 else f"exited with {code}"

    def failure(self, index: int) -> tuple[str, int] | None:
        """What to say of a failure that a restart would not mend, and the exit code; None where it may."""
        return None

    def when_started(self) -> None:  # noqa: B027
        """Do what the processes wait for."""

    def tell_stopped(self, verdict: Path) -> None:
        """Say that a signal has ended the job."""
        tell_interrupted(verdict)

    def signal(self, number: int, *, servers: bool) -> None:
        """Send a signal to all that run."""
        for index, process in self.processes.items():
            if process.poll() is None and (servers or index < self.workers):
                process.send_signal(number)

    def end(self) -> None:
        """Kill what still runs."""
        if sys.stdout.isatty() and any(process.poll() is None for process in self.processes.values()):
            sys.stdout.write("\x1b[?25h")  # the cursor, which a killed worker's display has hidden
        self.signal(signal.SIGKILL, servers=True)
        for process in self.processes.values():
            process.wait()


@dataclass(kw_only=True)
class _LocalJob(Job):
    """The processes of a job that run on this machine: all of them, or those from a rank on.

    Attributes:
        program: What the interpreter runs.
        environment: Of all of them.
        door: The socket at which the store of the job listens; None where it is on another machine.
        first: Rank of the first process.
        size: Processes on all machines; None for those of this one.
    """

    program: Sequence[str]
    environment: dict[str, str]
    door: socket.socket | None
    first: int = 0
    size: int | None = None
    _store: object | None = None

    def begin(self, index: int, joins: int = 0) -> Process:
        own = {
            "RANK": str(self.first + index),
            "LOCAL_RANK": str(index),
            "WORLD_SIZE": str(self.size or self.workers + self.servers),
            "LOCAL_WORLD_SIZE": str(self.workers),
            "HYBRIDPAR_ATTEMPT": str(self.attempt),
            "TORCHELASTIC_RESTART_COUNT": str(self.attempt + joins),
            "HYBRIDPAR_JOINS": "1" if joins else "0",
        }
        # Each with torch's default, all cores, they would be in each other's way; also where they do not tune
        # themselves.
        threads = {"OMP_NUM_THREADS": str(threads_per_worker(self.workers, available_cores()))}
        return subprocess.Popen(
            [sys.executable, *self.program],
            env={**threads, **os.environ, **self.environment, **own},
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C comes from us, once, and to workers only
        )

    def name(self, index: int) -> str:
        return f"worker {self.first + index}" if index < self.workers else f"server {index - self.workers}"

    def when_started(self) -> None:
        # Workers wait at the door while torch is imported here, as they import it at the same time.
        if self._store is None and self.door is not None:
            self._store = _open_store(self.door)


class _Signals(StopRequest):
    """Remembers the first signal, and counts."""

    count = 0

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = self.signal or number
        self.count += number == signal.SIGINT or self.count == 0

    def listen(self) -> None:
        """Take the lines of standard input for signals, and its end for one that ends everything at once."""
        for line in sys.stdin:
            self._note(signal.Signals[f"SIG{line.strip()}"], None)
        self.signal, self.count = self.signal or signal.SIGTERM, _AT_ONCE


def new_token() -> str:
    """A random token."""
    return secrets.token_hex(16)


def check_processes(workers: int, servers: int = 0) -> None:
    """Refuse to start more processes than the machine has cores and memory for."""
    cores = len(available_cores())
    most = max(2, min(MOST_PER_CORE * cores, usable_memory() // LEAST_BYTES))
    if workers + servers > most:
        given = f"--workers {workers}" + (f" and servers={servers}" if servers else "")
        raise UsageError(
            f"{given} on one machine",
            f"Each is a process of {LEAST_BYTES >> 20} MiB at least, and there are at most {MOST_PER_CORE} per core: "
            f"with {cores} core(s) and {usable_memory() >> 30} GiB no more than {most}.",
            "Start fewer.",
        )
    if workers > cores:
        print(f"warning: {workers} workers on {cores} core(s): they take turns, and fewer are faster", file=sys.stderr)


def launch_workers(
    arguments: Sequence[str],
    workers: int,
    servers: int = 0,
    *,
    patient: bool = True,
    restarts: int = RESTARTS,
    patience: int = STOP_SECONDS,
    program: Sequence[str] = ("-m", "hybridpar"),
) -> int:
    """Run `python -m hybridpar ARGUMENTS` as workers, and as servers, on this machine until they end."""
    check_processes(workers, servers)
    # A socket of our own, because a store left to itself listens on all interfaces. It becomes the store's.
    door = socket.create_server(("127.0.0.1", 0))
    environment = {
        TOKEN_VARIABLE: new_token(),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(door.getsockname()[1]),
        "GROUP_WORLD_SIZE": "1",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": new_job(),
    }
    job = _LocalJob(
        workers=workers,
        servers=servers,
        patient=patient,
        restarts=restarts,
        patience=patience,
        program=(*program, *arguments),
        environment=environment,
        door=door,
    )
    with tempfile.TemporaryDirectory(prefix="hybridpar-") as directory:
        verdict = Path(directory) / "verdict.json"
        environment[VERDICT_VARIABLE] = str(verdict)
        return supervise(job, verdict)


def new_job() -> str:
    """A name that no other job has."""
    return f"hybridpar-{secrets.token_hex(8)}"


def _open_store(door: socket.socket) -> object:
    """The store of the job, on a socket that listens already."""
    import torch.distributed as dist

    address, port = door.getsockname()[:2]
    return dist.TCPStore(  # type: ignore[attr-defined]
        *("127.0.0.1" if address == "0.0.0.0" else address, int(port)),
        is_master=True,
        wait_for_workers=False,
        timeout=datetime.timedelta(seconds=60),
        master_listen_fd=door.detach(),
    )


def supervise(job: Job, verdict: Path) -> int:
    """Start everything, and do what the module's header says until it ends."""
    signals = _Signals()
    try:
        while True:
            failed = _run_once(job, signals, verdict)
            if verdict.exists():
                return report_verdict(verdict)
            if signals.signal is not None:
                job.tell_stopped(verdict)
                return 128 + signals.signal
            if failed is None:
                return 0
            cause, failure = f"{job.name(failed)} {job.cause(failed)}", job.failure(failed)
            job.end()
            if failure is None and job.attempt + job.joined >= job.restarts:
                used_up = ", and {} restarts are used up\nEvery restart went on from the last whole checkpoint."
                used_up = used_up.format(job.restarts) if job.restarts else ""
                hint = "Look at the messages above; `dmesg` tells whether the system ran out of memory."
                failure = f"error: {cause}{used_up}\n{hint}", 1
            if failure is not None:
                print(failure[0], file=sys.stderr)
                return failure[1]
            print(f"{cause}; all processes start again from the last checkpoint", file=sys.stderr)
            job.attempt += 1
    finally:
        job.end()
        signals.release()


def _run_once(job: Job, signals: _Signals, verdict: Path) -> int | None:
    """Start everything, and watch until all is done, or a process has failed that cannot be replaced alone."""
    for index in range(job.workers + job.servers):
        job.processes[index] = job.begin(index)
    job.when_started()
    passed_on, deadline = 0, float("inf")
    while True:
        time.sleep(0.05)
        if signals.signal is not None and signals.count > passed_on:
            passed_on = signals.count
            job.signal(signals.signal if passed_on == 1 else signal.SIGINT, servers=False)
            deadline = time.monotonic() + (job.patience if passed_on == 1 else KILL_SECONDS)
        if time.monotonic() > deadline or passed_on >= _AT_ONCE:
            return None
        codes = {index: process.poll() for index, process in job.processes.items()}
        of_workers = [codes[index] for index in range(job.workers)]
        if verdict.exists():
            deadline = min(deadline, time.monotonic() + _SETTLE_SECONDS)
            if None not in codes.values():
                return None
            continue
        if not any(of_workers) and None not in of_workers:
            return _servers_end(job)
        bad = [index for index, code in codes.items() if code not in (None, 0)]
        if not bad:
            continue
        if signals.wanted:
            if None not in of_workers:
                return bad[0]
            continue
        replaceable = [index for index in bad if index < job.workers and (codes[index] or 0) < 0]
        alone = len(bad) == len(replaceable) and not job.patient and not verdict.exists()
        if alone and job.attempt + job.joined < job.restarts:
            for index in replaceable:
                job.joined += 1
                told = f"{job.name(index)} {job.cause(index)}"
                print(f"{told}; the others go on, and it joins again", file=sys.stderr)
                job.processes[index] = job.begin(index, job.joined)
            continue
        return _first_failure(job, bad)


def _servers_end(job: Job) -> int | None:
    """All workers have ended well: servers end by themselves."""
    limit = time.monotonic() + STOP_SECONDS
    for index in range(job.workers, job.workers + job.servers):
        try:
            job.processes[index].wait(max(0.1, limit - time.monotonic()))
        except subprocess.TimeoutExpired:
            job.processes[index].send_signal(signal.SIGKILL)
    return None


def _first_failure(job: Job, bad: Sequence[int]) -> int:
    """Who failed first: those that were killed before those that noticed."""
    deadline = time.monotonic() + _SETTLE_SECONDS
    while time.monotonic() < deadline:
        killed = [index for index, process in job.processes.items() if (process.poll() or 0) < 0]
        if killed:
            return killed[0]
        time.sleep(0.05)
    return bad[0]


# --------------------------------------------------------------------------------------------------------------- agent


def agent() -> int:
    """Start what standard input says on this machine, and watch it until it ends, or loses a worker."""
    order, signals = json.loads(sys.stdin.readline()), _Signals()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # words come by the input
    threading.Thread(target=signals.listen, daemon=True).start()
    os.environ.update(order["environment"])
    with tempfile.TemporaryDirectory(prefix="hybridpar-") as directory:
        verdict = Path(directory) / "verdict.json"
        os.environ[VERDICT_VARIABLE] = str(verdict)
        job = _LocalJob(
            order["workers"],
            program=order["program"],
            environment={},
            door=None,
            first=order["first"],
            size=order["size"],
            attempt=order["attempt"],
        )
        failed = None
        try:
            check_processes(job.workers)
            place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            if job.first == 0:
                job.door = _open_door(*place)
            else:
                _wait_for_door(place, signals)
            failed = _run_once(job, signals, verdict)
        except UsageError as error:
            record_failure(error, debug=False)
        finally:
            job.end()
        if verdict.exists():
            text = verdict.read_text(encoding="utf-8")
            print(VERDICT_MARK + text, file=sys.stderr, flush=True)
            return int(json.loads(text)["code"])
        if signals.signal is not None:
            return 128 + signals.signal
        if failed is not None:
            print(f"{job.name(failed)} {job.cause(failed)}", file=sys.stderr, flush=True)
        return 0 if failed is None else LOST_WORKER


def _open_door(host: str, port: int) -> socket.socket:
    """The socket of the store, on the address that others reach where it is one of this machine, else on all."""
    with suppress(OSError):
        address = socket.gethostbyname(host)
        if not is_loopback(address):
            return socket.create_server((address, port))
    try:
        return socket.create_server(("", port))
    except OSError as error:
        raise UsageError(
            f"the job cannot meet at {host}:{port}: {error.strerror}",
            "The first machine of a job listens there.",
            "Name a free port in the hosts file: port=P behind the host.",
        ) from error


def _wait_for_door(place: tuple[str, int], signals: _Signals) -> None:
    """Wait until the first machine listens; workers that come too early would fail."""
    limit = time.monotonic() + STOP_SECONDS
    while not signals.wanted and time.monotonic() < limit:
        with suppress(OSError):
            socket.create_connection(place, 1.0).close()
            return
        time.sleep(0.1)


if __name__ == "__main__":
    sys.exit(agent())
