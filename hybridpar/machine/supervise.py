"""Starts the workers of a job on this machine, and its servers if it has any, and replaces those that die.

This process hosts the store at which the workers find each other, and watches them:

* a worker that dies where no update waits for it is started again and joins the others, which have not stopped;
* any other process that dies - a server, or a worker that an update waits for - makes the launcher start all of them
  again, and they go on from the last whole checkpoint.

An error that would only come again is not worth a restart: the worker leaves a *verdict*, a file with the message and
the exit code (`hybridpar.machine.launch.record_failure`), all workers end, and this process reports it once.
"""

from __future__ import annotations

import datetime
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from hybridpar.errors import UsageError
from hybridpar.machine.launch import VERDICT_VARIABLE, StopRequest, report_verdict, tell_interrupted
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
#: Seconds that processes have to leave, or to be found to have failed first, once one has failed.
_SETTLE_SECONDS = 2.0


@dataclass
class _Job:
    """All processes of a run.

    Attributes:
        program: What the interpreter runs.
        workers: Number of workers, the first processes.
        servers: Number of servers, the others.
        patient: Whether an update waits for every worker.
        environment: Of all of them.
    """

    program: Sequence[str]
    workers: int
    servers: int
    patient: bool
    restarts: int
    patience: float
    environment: dict[str, str]
    processes: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    attempt: int = 0
    joined: int = 0

    def start(self, rank: int, joins: int = 0) -> None:
        """Start a process, for the `joins`-th time again while the others go on."""
        own = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.workers + self.servers),
            "LOCAL_WORLD_SIZE": str(self.workers),
            "HYBRIDPAR_ATTEMPT": str(self.attempt),
            "TORCHELASTIC_RESTART_COUNT": str(self.attempt + joins),
            "HYBRIDPAR_JOINS": "1" if joins else "0",
        }
        self.processes[rank] = subprocess.Popen(
            [sys.executable, *self.program],
            env={**os.environ, **self.environment, **own},
            start_new_session=True,  # Ctrl-C comes from us, once, and to workers only
        )

    def signal(self, number: int, *, servers: bool) -> None:
        """Send a signal to all that run."""
        for rank, process in self.processes.items():
            if process.poll() is None and (servers or rank < self.workers):
                process.send_signal(number)

    def end(self) -> None:
        """Kill what still runs."""
        if sys.stdout.isatty() and any(process.poll() is None for process in self.processes.values()):
            sys.stdout.write("\x1b[?25h")  # the cursor, which a killed worker's display has hidden
        self.signal(signal.SIGKILL, servers=True)
        for process in self.processes.values():
            process.wait()

    def name(self, rank: int) -> str:
        """What to call a process."""
        return f"worker {rank}" if rank < self.workers else f"server {rank - self.workers}"


class _Signals(StopRequest):
    """Remembers the first signal, and counts."""

    count = 0

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = self.signal or number
        self.count += number == signal.SIGINT or self.count == 0


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
    restarts: int = 3,
    patience: int = STOP_SECONDS,
    program: Sequence[str] = ("-m", "hybridpar"),
) -> int:
    """Run `python -m hybridpar ARGUMENTS` as workers, and as servers, on this machine until they end."""
    check_processes(workers, servers)
    # Each with torch's default, all cores, they would be in each other's way; also where they do not tune themselves.
    os.environ.setdefault("OMP_NUM_THREADS", str(threads_per_worker(workers, available_cores())))
    # A socket of our own, because a store left to itself listens on all interfaces. It becomes the store's.
    door = socket.create_server(("127.0.0.1", 0))
    with tempfile.TemporaryDirectory(prefix="hybridpar-") as directory:
        verdict = Path(directory) / "verdict.json"
        environment = {
            VERDICT_VARIABLE: str(verdict),
            TOKEN_VARIABLE: new_token(),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(door.getsockname()[1]),
            "GROUP_WORLD_SIZE": "1",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RUN_ID": f"hybridpar-{os.getpid()}-{os.urandom(4).hex()}",
        }
        job = _Job((*program, *arguments), workers, servers, patient, restarts, patience, environment)
        signals = _Signals()
        try:
            return _watch(job, door, signals, verdict)
        finally:
            job.end()
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


def _watch(job: _Job, door: socket.socket, signals: _Signals, verdict: Path) -> int:
    """Start everything, and do what the module's header says until it ends."""
    store: object | None = None
    while True:
        for rank in range(job.workers + job.servers):
            job.start(rank)
        # Workers wait at the door while torch is imported here, as they import it at the same time.
        store = store or _open_store(door)
        failed = _until_something_fails(job, signals, verdict)
        if verdict.exists():
            return report_verdict(verdict)
        if signals.signal is not None:
            tell_interrupted(verdict)
            return 128 + signals.signal
        if failed is None:
            return 0
        cause = _cause(job.processes[failed].returncode)
        job.end()
        if job.attempt + job.joined >= job.restarts:
            used_up = ", and {} restarts are used up\nEvery restart went on from the last whole checkpoint."
            used_up = used_up.format(job.restarts) if job.restarts else ""
            print(
                f"error: {job.name(failed)} {cause}{used_up}\n"
                "Look at the messages above; `dmesg` tells whether the system ran out of memory.",
                file=sys.stderr,
            )
            return 1
        print(f"{job.name(failed)} {cause}; all processes start again from the last checkpoint", file=sys.stderr)
        job.attempt += 1


def _until_something_fails(job: _Job, signals: _Signals, verdict: Path) -> int | None:
    """Watch until all is done, or a process has failed that cannot be replaced alone."""
    passed_on, deadline = 0, float("inf")
    while True:
        time.sleep(0.05)
        if signals.signal is not None and signals.count > passed_on:
            passed_on = signals.count
            job.signal(signals.signal if passed_on == 1 else signal.SIGINT, servers=False)
            deadline = time.monotonic() + (job.patience if passed_on == 1 else KILL_SECONDS)
        if time.monotonic() > deadline or passed_on > 2:
            return None
        codes = {rank: process.poll() for rank, process in job.processes.items()}
        of_workers = [codes[rank] for rank in range(job.workers)]
        if verdict.exists():
            deadline = min(deadline, time.monotonic() + _SETTLE_SECONDS)
            if None not in codes.values():
                return None
            continue
        if not any(of_workers) and None not in of_workers:
            return _servers_end(job)
        bad = [rank for rank, code in codes.items() if code not in (None, 0)]
        if not bad:
            continue
        if signals.wanted:
            if None not in of_workers:
                return bad[0]
            continue
        replaceable = [rank for rank in bad if rank < job.workers and (codes[rank] or 0) < 0]
        alone = len(bad) == len(replaceable) and not job.patient and not verdict.exists()
        if alone and job.attempt + job.joined < job.restarts:
            for rank in replaceable:
                job.joined += 1
                print(f"{job.name(rank)} {_cause(codes[rank])}; the others go on, and it joins again", file=sys.stderr)
                job.start(rank, job.joined)
            continue
        return _first_failure(job, bad)


def _servers_end(job: _Job) -> int | None:
    """All workers have ended well: servers end by themselves."""
    limit = time.monotonic() + STOP_SECONDS
    for rank in range(job.workers, job.workers + job.servers):
        try:
            job.processes[rank].wait(max(0.1, limit - time.monotonic()))
        except subprocess.TimeoutExpired:
            job.processes[rank].kill()
    return None


def _first_failure(job: _Job, bad: Sequence[int]) -> int:
    """Who failed first: those that were killed before those that noticed."""
    deadline = time.monotonic() + _SETTLE_SECONDS
    while time.monotonic() < deadline:
        found = [rank for rank, process in job.processes.items() if (process.poll() or 0) < 0]
        if found:
            return found[0]
        time.sleep(0.05)
    return bad[0]


def _cause(code: int | None) -> str:
    code = code or 0
    return f"was killed by signal {-code}" if code < 0 else f"exited with {code}"
