"""Starts the workers and servers of a run on this machine, and replaces those that die.

torch's elastic launcher restarts all processes when one dies; without a barrier that is not needed. This launcher hosts
the store at which the processes find each other, and watches them:

* a worker that dies where no update waits for it is started again and joins the others, which have not stopped;
* any other process that dies - a server, or a worker that an update waits for - makes the launcher start all of them
  again, and they go on from the last whole checkpoint.

Verdicts, signals and exit codes are as in `hybridpar.machine.launch`.
"""

from __future__ import annotations

import datetime
import os
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

from hybridpar.machine.launch import STOP_SECONDS, VERDICT_VARIABLE, check_processes, report_verdict, tell_interrupted
from hybridpar.machine.process import TUNED_VARIABLE, available_cores, threads_per_worker, worker_environment
from hybridpar.server.handshake import TOKEN_VARIABLE, new_token

#: How long processes that have failed are waited for, so that the one which failed first is found.
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
    environment: dict[str, str]
    processes: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, rank: int, attempt: int, joins: int = 0) -> None:
        """Start a process, for the `joins`-th time again while the others go on."""
        own = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.workers + self.servers),
            "LOCAL_WORLD_SIZE": str(self.workers),
            "HYBRIDPAR_ATTEMPT": str(attempt),
            "TORCHELASTIC_RESTART_COUNT": str(attempt + joins),
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
        self.signal(signal.SIGKILL, servers=True)
        for process in self.processes.values():
            process.wait()

    def name(self, rank: int) -> str:
        """What to call a process."""
        return f"worker {rank}" if rank < self.workers else f"server {rank - self.workers}"


class _Signals:
    """Remembers the first signal, and counts."""

    def __init__(self) -> None:
        self.number: int | None = None
        self.count = 0
        self._before = {kind: signal.signal(kind, self._note) for kind in (signal.SIGINT, signal.SIGTERM)}

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.number = self.number or number
        self.count += number == signal.SIGINT or self.count == 0

    def release(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def launch_with_servers(
    program: Sequence[str], workers: int, servers: int, *, patient: bool, tune: bool, restarts: int = 3
) -> int:
    """Run workers and servers on this machine until they end.

    Args:
        program: What the interpreter runs in every process: `-m hybridpar train ...`.
        workers: Number of workers.
        servers: Number of server processes; 0 where every worker serves a stripe.
        patient: Whether an update waits for every worker.
        tune: Give CPU workers the environment of `hybridpar.machine.process.worker_environment`.
        restarts: How often processes that died are replaced.

    Returns:
        The exit code, as of `hybridpar.machine.launch.launch_workers`.

    Raises:
        UsageError: More processes than this machine has room for.
    """
    check_processes(workers, servers)
    import torch.distributed as dist

    environment = {"OMP_NUM_THREADS": str(threads_per_worker(workers, available_cores()))}
    if "OMP_NUM_THREADS" in os.environ:
        environment = {}
    if tune:
        environment |= worker_environment(workers, available_cores()) | {TUNED_VARIABLE: "1"}
    # A socket of our own, because a store left to itself listens on all interfaces. It becomes the store's.
    door = socket.create_server(("127.0.0.1", 0))
    port = int(door.getsockname()[1])
    store = dist.TCPStore(  # type: ignore[attr-defined]
        *("127.0.0.1", port),
        is_master=True,
        wait_for_workers=False,
        timeout=datetime.timedelta(seconds=60),
        master_listen_fd=door.detach(),
    )
    with tempfile.TemporaryDirectory(prefix="hybridpar-") as directory:
        verdict = Path(directory) / "verdict.json"
        environment |= {
            VERDICT_VARIABLE: str(verdict),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            TOKEN_VARIABLE: new_token(),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RUN_ID": f"hybridpar-{os.getpid()}-{os.urandom(4).hex()}",
        }
        job = _Job(program, workers, servers, patient or servers == 0, environment)
        signals = _Signals()
        try:
            return _watch(job, signals, verdict, restarts)
        finally:
            job.end()
            signals.release()


def _watch(job: _Job, signals: _Signals, verdict: Path, restarts: int) -> int:
    """Start everything, and do what the module's header says until it ends."""
    attempt, joined = 0, 0
    while True:
        for rank in range(job.workers + job.servers):
            job.start(rank, attempt)
        failed, joined = _until_something_fails(job, signals, verdict, attempt, restarts, joined)
        if signals.number is not None:
            if verdict.exists():
                return report_verdict(verdict)
            tell_interrupted(verdict)
            return 128 + signals.number
        if verdict.exists():
            return report_verdict(verdict)
        if failed is None:
            return 0
        cause = _cause(job.processes[failed].returncode)
        job.end()
        if attempt + joined >= restarts:
            print(
                f"error: {job.name(failed)} {cause}, and {restarts} restarts are used up\n"
                "Every restart went on from the last whole checkpoint.\n"
                "Look at the messages above; `dmesg` tells whether the system ran out of memory.",
                file=sys.stderr,
            )
            return 1
        print(f"{job.name(failed)} {cause}; all processes start again from the last checkpoint", file=sys.stderr)
        attempt += 1


def _until_something_fails(
    job: _Job, signals: _Signals, verdict: Path, attempt: int, restarts: int, joined: int
) -> tuple[int | None, int]:
    """Watch until all is done, or a process has failed that cannot be replaced alone.

    Returns:
        The process that failed first; and how often a worker was replaced.
    """
    passed_on, deadline = 0, float("inf")
    while True:
        time.sleep(0.05)
        if signals.count > passed_on:
            passed_on = signals.count
            if passed_on > 1 or signals.number is None:
                return None, joined
            job.signal(signals.number, servers=False)
            deadline = time.monotonic() + STOP_SECONDS
        if time.monotonic() > deadline:
            return None, joined
        codes = {rank: process.poll() for rank, process in job.processes.items()}
        if verdict.exists():
            return None, joined
        if all(codes[rank] is not None for rank in range(job.workers)) and not any(
            codes[r] for r in range(job.workers)
        ):
            return _servers_end(job), joined
        bad = [rank for rank, code in codes.items() if code not in (None, 0)]
        if not bad:
            continue
        if signals.number is not None:
            if all(code is not None for rank, code in codes.items() if rank < job.workers):
                return bad[0], joined
            continue
        replaceable = [rank for rank in bad if rank < job.workers and (codes[rank] or 0) < 0]
        alone = len(bad) == len(replaceable) and not job.patient and not verdict.exists()
        if alone and attempt + joined < restarts:
            for rank in replaceable:
                joined += 1
                print(f"{job.name(rank)} {_cause(codes[rank])}; the others go on, and it joins again", file=sys.stderr)
                job.start(rank, attempt, joined)
            continue
        return _first_failure(job, bad), joined


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
