"""Starts the workers of a job on this machine, and its servers if it has any, and replaces those that die.

This process listens where the workers find each other, for a store that one of them opens there, or this process where
there are servers. It watches them:

* a worker that dies where no update waits for it is started again and joins the others, which have not stopped;
* any other process that dies - a server, worker 0, which tests and writes, or a worker that an update waits for - makes
  the launcher start all of them again, and they go on from the last whole checkpoint.

An error that would only come again is not worth a restart: the worker leaves a *verdict*, a file with the message and
the exit code (`hybridpar.machine.launch.record_failure`), all workers end, and this process reports it once.

A job on several machines has two levels of the same. The processes that its launcher watches are agents, one on each
machine (`hybridpar.machine.nodes`): `python -m hybridpar.machine.supervise` starts the workers there and watches them
until one dies, which ends the agent. The first line of its standard input is JSON and says what to start, so that no
secret is on a command line. Each further line is the name of a signal; the end of the input, which is the end of the
connection, ends everything.
"""

from __future__ import annotations

import contextlib
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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from hybridpar.errors import UsageError
from hybridpar.machine.launch import (
    DOOR_VARIABLE,
    TOLD,
    VERDICT_VARIABLE,
    StopRequest,
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
#: What to do after a failure that has no other explanation.
_LOOK = "Look at the messages above; `dmesg` tells whether the system ran out of memory."
#: Begins a line on standard error by which an agent hands a file of its workers on: the file's name, then its text.
FILE_MARK = "hybridpar file "


@dataclass(kw_only=True)
class Job:
    """The processes that a launcher starts and watches: all of a run, or those of a machine from a rank on.

    Attributes:
        program: What the interpreter runs.
        environment: Of all processes.
        workers: Number of workers, the first processes.
        servers: Number of servers, the others.
        patient: Whether an update waits for every worker.
        restarts: How often processes are started again.
        patience: Seconds that workers have after a signal.
        door: The socket of the job's store, which process 0 opens there, or this process where there are servers: a
            worker may then start again alone, and outlive the others. Without it process 0 makes its own.
        first: Rank of the first process.
        size: Processes on all machines; None for those of this one.
        attempt: How often all were started again.
        joined: How often a worker was started again alone.
    """

    program: Sequence[str]
    environment: dict[str, str]
    workers: int
    servers: int = 0
    patient: bool = True
    restarts: int = RESTARTS
    patience: float = STOP_SECONDS
    door: socket.socket | None = None
    first: int = 0
    size: int | None = None
    attempt: int = 0
    joined: int = 0
    processes: dict[int, subprocess.Popen[Any]] = field(default_factory=dict)

    @property
    def verdict(self) -> Path:
        """The file in which a worker leaves an error that would only come again."""
        return Path(self.environment[VERDICT_VARIABLE])

    def begin(self, index: int, joins: int = 0) -> subprocess.Popen[Any]:
        """Start a process, for the `joins`-th time again while the others go on."""
        # Each with torch's default, all cores, they would be in each other's way; also where they do not tune
        # themselves.
        threads = {"OMP_NUM_THREADS": str(threads_per_worker(self.workers, available_cores()))}
        named = {
            "RANK": str(self.first + index),
            "LOCAL_RANK": str(index),
            "WORLD_SIZE": str(self.size or self.workers + self.servers),
            "LOCAL_WORLD_SIZE": str(self.workers),
            "HYBRIDPAR_ATTEMPT": str(self.attempt),
            "TORCHELASTIC_RESTART_COUNT": str(self.attempt + joins),
            "HYBRIDPAR_JOINS": "1" if joins else "0",
        }
        doors = []
        if self.door is not None and index == 0 and not self.servers:
            doors = [self.door.fileno()]
            named[DOOR_VARIABLE] = str(doors[0])
        return subprocess.Popen(
            [sys.executable, *self.program],
            env={**threads, **os.environ, **self.environment, **named},
            pass_fds=doors,
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C comes from us, once, and to workers only
        )

    def failure(self, index: int) -> tuple[str, str]:
        """Which process failed and how, and what to do where that would only come again."""
        name = f"worker {self.first + index}" if index < self.workers else f"server {index - self.workers}"
        code = self.processes[index].returncode or 0
        return f"{name} was killed by signal {-code}" if code < 0 else f"{name} exited with {code}", ""

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
        given = f"--nproc {workers}" + (f" and servers={servers}" if servers else "")
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
    # A socket of our own, because a store left to itself listens on all interfaces. It stays open for the next attempt;
    # the store is opened by a process that imports torch anyway, which takes seconds and some 300 MB.
    door = socket.create_server(("127.0.0.1", 0))
    environment = {
        TOKEN_VARIABLE: new_token(),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(door.getsockname()[1]),
        "GROUP_WORLD_SIZE": "1",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": new_job(),
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # else each worker that has lost the store shows a stack of C++
    }
    job = Job(
        workers=workers,
        servers=servers,
        patient=patient,
        restarts=restarts,
        patience=patience,
        program=(*program, *arguments),
        environment=environment,
        door=door,
    )
    return supervise(job)


def new_job() -> str:
    """A name that no other job has."""
    return f"hybridpar-{secrets.token_hex(8)}"


@contextlib.contextmanager
def _watched(job: Job) -> Iterator[_Signals]:
    """The signals that a job gets, and a directory for its verdict, until its processes have ended."""
    signals = _Signals()
    try:
        with tempfile.TemporaryDirectory(prefix="hybridpar-") as directory:
            job.environment[VERDICT_VARIABLE] = str(Path(directory) / "verdict.json")
            try:
                yield signals
            finally:
                job.end()
    finally:
        signals.release()


def _open_store(door: socket.socket) -> object:
    """The store of the job, on a socket that listens already."""
    import torch.distributed as dist

    return dist.TCPStore(  # type: ignore[attr-defined]
        *("127.0.0.1", int(door.getsockname()[1])),
        is_master=True,
        wait_for_workers=False,
        timeout=datetime.timedelta(seconds=60),
        master_listen_fd=door.detach(),
    )


def supervise(job: Job) -> int:
    """Start everything, and do what the module's header says until it ends."""
    store: object = None
    with _watched(job) as signals:
        while True:
            _start(job)
            if job.door is not None and job.servers and store is None:
                # Workers wait at the door while torch is imported here, as they import it at the same time.
                store = _open_store(job.door)
            failed = _until_something_fails(job, signals)
            if job.verdict.exists():
                return report_verdict(job.verdict)
            if signals.signal is not None:
                tell_interrupted(job.verdict)
                return 128 + signals.signal
            if failed is None:
                return 0
            cause, fix = job.failure(failed)
            job.end()
            if fix or job.attempt + job.joined >= job.restarts:
                if not fix and job.restarts:
                    cause += f", and {job.restarts} restarts are used up"
                    fix = "Every restart went on from the last whole checkpoint.\n"
                print(f"error: {cause}\n{fix}{_LOOK}", file=sys.stderr)
                return 1
            print(f"{cause}; all processes start again from the last checkpoint", file=sys.stderr)
            job.attempt += 1


def _start(job: Job) -> None:
    for index in range(job.workers + job.servers):
        job.processes[index] = job.begin(index)


def _until_something_fails(job: Job, signals: _Signals) -> int | None:
    """Watch until all is done, or a process has failed that cannot be replaced alone."""
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
        if job.verdict.exists():
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
        replaceable = [index for index in bad if 0 < index < job.workers and (codes[index] or 0) < 0]
        alone = len(bad) == len(replaceable) and not job.patient and not job.verdict.exists()
        if alone and job.attempt + job.joined < job.restarts:
            for index in replaceable:
                job.joined += 1
                print(f"{job.failure(index)[0]}; the others go on, and it joins again", file=sys.stderr)
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
    job = Job(**json.loads(sys.stdin.readline()))
    with _watched(job) as signals:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # words come by the input
        threading.Thread(target=signals.listen, daemon=True).start()
        _start(job)
        failed = _until_something_fails(job, signals)
        job.end()
        for left in (job.verdict, job.verdict.with_name(TOLD)):
            if left.exists():
                print(f"{FILE_MARK}{left.name} {left.read_text(encoding='utf-8')}", file=sys.stderr, flush=True)
        if job.verdict.exists():
            return 1
        if signals.signal is not None:
            return 128 + signals.signal
        if failed is None:
            return 0
        print(job.failure(failed)[0], file=sys.stderr, flush=True)
        return LOST_WORKER


if __name__ == "__main__":
    sys.exit(agent())
