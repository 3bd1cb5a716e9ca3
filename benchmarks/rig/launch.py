"""Runs the command of a benchmark, and starts one process per rank, all under the same settings.

If a rank fails, all of them are ended.

The settings here are those that move a CPU training step most: the number of threads, and what the C allocator does
with large tensors. By default glibc gives large blocks back to the kernel and pays for the page faults again in the
next step, which can make a CPU step half as long again. The settings here make it keep them, for every method alike.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, Any, NoReturn, TypeVar

import tyro

from benchmarks.rig.network import LOOPBACK, Network, missing
from hybridpar.errors import HybridparError, LaunchError
from hybridpar.machine.process import available_cores, worker_environment

Options = TypeVar("Options")

_ROOT = Path(__file__).parents[2]
_STDERR_LINES = 40


def run_command(main: Callable[[Options], int | None], options: type[Options]) -> NoReturn:
    """Run the command of a benchmark with the options of the command line, a dataclass, and end this process."""
    exit_with(lambda: main(tyro.cli(options)))


def exit_with(run: Callable[[], int | None]) -> NoReturn:
    """End this process with what a call returns as its status; errors of hybridpar have one of their own."""
    try:
        sys.exit(run())
    except HybridparError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)


def possible_links(links: Sequence[str]) -> Iterator[str]:
    """The links that can be made here; a line says of each other one what this machine lacks."""
    for link in links:
        if link != LOOPBACK and (lack := missing()):
            print(f"{link}: skipped, {lack}")
        else:
            yield link


def measure_in_ranks(
    network: Network,
    module: str,
    arguments: Mapping[str, Any],
    timeout: float = 3600.0,
    threads: int = 1,
    environment: Mapping[str, str] | None = None,
) -> None:
    """Call `measure(**arguments)` of a module in every rank.

    Args:
        network: An entered network.
        module: Full name of the module.
        arguments: What JSON can hold, and paths.
        timeout: Seconds until the whole run must be over.
        threads: Threads per rank within an operation.
        environment: More variables for every rank.
    """
    # Torch's warnings about names of its own that will change say nothing of this run.
    variables = {"PYTHONWARNINGS": "ignore::FutureWarning"} | dict(environment or {})
    command = ["-m", "benchmarks.rig.rank", module, json.dumps(arguments, default=_absolute)]
    launch(command, network, threads=threads, timeout=timeout, environment=variables)


def _absolute(path: Path) -> str:
    return str(path.resolve())


def rank_environment(rank: int, network: Network, port: int, threads: int = 1) -> dict[str, str]:
    """What a rank's environment has beyond its parent's."""
    path = os.environ.get("PYTHONPATH")
    # The product's own settings, so that a table shows what a user gets; whatever the user's shell says.
    allocator = worker_environment(network.ranks, available_cores(), {})
    return (
        allocator
        | {
            "RANK": str(rank),
            "WORLD_SIZE": str(network.ranks),
            "LOCAL_RANK": str(rank),
            "MASTER_ADDR": network.address,
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": network.interface,
            "OMP_NUM_THREADS": str(threads),
            "MKL_NUM_THREADS": str(threads),
            "CUDA_VISIBLE_DEVICES": "",
            # Namespaces have no name service, which gloo and the store would warn about at every connection.
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            "PYTHONPATH": f"{_ROOT}{os.pathsep}{path}" if path else str(_ROOT),
            "RIG_LINK": network.link,
        }
        | ({"RIG_RELAY": str(network.relay)} if network.relay else {})
    )


def launch(
    arguments: Sequence[str],
    network: Network,
    *,
    threads: int = 1,
    timeout: float = 600.0,
    environment: Mapping[str, str] | None = None,
    stdout: IO[str] | None = None,
) -> None:
    """Run `python ARGUMENTS` once per rank and wait for all of them.

    Rank 0's output and messages pass through. The other ranks' output is dropped; their messages are kept and shown if
    they fail.

    Args:
        arguments: What Python is given: a script or `-m MODULE`, and its arguments.
        network: An entered network; its number of ranks is the number of processes.
        threads: Threads per rank within an operation.
        timeout: Seconds until the whole run must be over.
        environment: Variables on top of those of `rank_environment`, the same for every rank.
        stdout: A file for rank 0's output; default: this process's own.

    Raises:
        LaunchError: A rank failed, time ran out, or the network's relay ended. No rank, and no child of one, is left
            running.
    """
    port = network.port()
    # A rank must not outlive a launcher that was killed outright, and go on using the cores of the next measurement.
    leash = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
    processes: list[subprocess.Popen[bytes]] = []
    with ExitStack() as files:
        errors = [files.enter_context(tempfile.TemporaryFile()) for _ in range(network.ranks)]
        try:
            for rank in range(network.ranks):
                first = rank == 0
                processes.append(
                    subprocess.Popen(
                        network.command(rank, [*leash, sys.executable, *arguments]),
                        env=os.environ | rank_environment(rank, network, port, threads) | dict(environment or {}),
                        stdin=subprocess.DEVNULL,
                        stdout=stdout if first else subprocess.DEVNULL,
                        stderr=None if first else errors[rank],
                        start_new_session=True,
                    )
                )
            failed, left = _wait(processes, network, timeout)
        finally:
            _end(processes)
        if failed or left:
            raise LaunchError(*_report(processes, failed, left, errors, timeout))


def _wait(
    processes: Sequence[subprocess.Popen[bytes]], network: Network, timeout: float
) -> tuple[list[int], list[int]]:
    """Wait until all ranks succeeded, one failed, or time ran out; ranks that failed, and those still running then."""
    deadline = time.monotonic() + timeout
    while True:
        statuses = [_status(process) for process in processes]
        failed = [rank for rank, status in enumerate(statuses) if status]
        left = [rank for rank, status in enumerate(statuses) if status is None]
        if failed or not left or time.monotonic() > deadline:
            return failed, left
        network.check()
        time.sleep(0.05)


def _status(process: subprocess.Popen[bytes]) -> int | None:
    """Exit status so far, negative for a signal; the process stays unreaped, so that its group keeps its number."""
    if process.returncode is not None:
        return process.returncode
    info = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if info is None:
        return None
    return info.si_status if info.si_code == os.CLD_EXITED else -info.si_status


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        with suppress(ProcessLookupError, PermissionError):  # macOS: EPERM for a group of zombies
            os.killpg(process.pid, signal.SIGKILL)
    for process in processes:
        process.wait()


def _report(
    processes: Sequence[subprocess.Popen[bytes]],
    failed: Sequence[int],
    left: Sequence[int],
    errors: Sequence[IO[bytes]],
    timeout: float,
) -> tuple[str, str, str]:
    if failed:
        ended = ", ".join(f"rank {rank} ({_describe(processes[rank].returncode)})" for rank in failed)
        what = f"failed: {ended}"
        fix = ""
    else:
        what = f"rank {', '.join(map(str, left))} still running after {timeout:g} s"
        fix = "Give a larger time-out, or look for a rank that waits for a collective that another one never starts."
    parts = []
    for rank in failed or left:
        if rank == 0:
            parts.append("Rank 0's messages are above.")
            continue
        errors[rank].seek(0)
        lines = errors[rank].read().decode(errors="replace").splitlines()[-_STDERR_LINES:]
        parts.append("\n".join([f"Rank {rank} said:", *(lines or ["(nothing)"])]))
    return what, "\n".join(parts), fix


def _describe(status: int) -> str:
    return f"exit status {status}" if status >= 0 else f"killed by {signal.Signals(-status).name}"
