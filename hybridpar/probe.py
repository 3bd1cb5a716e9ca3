"""Why: the machine is measured by processes of their own, so that the measuring one cannot be harmed by it.

The parent never imports torch for it, keeps no CUDA context, and survives a driver that crashes or a link that hangs:
every probe has a time limit, and all its processes are stopped when one fails. What runs in those processes is
`hybridpar.probe_worker`.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from hybridpar.cluster import Cluster, Device, Link, host_fingerprint, machine_load, read_cluster, write_cluster
from hybridpar.errors import LaunchError
from hybridpar.process import available_cores, worker_environment

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

#: Seconds that one quantity is measured for; a whole probe takes a few times as long.
PROBE_SECONDS = 0.4

#: Seconds after which a probe that has not answered is stopped. Covers a cold import of torch from a slow disk.
PROBE_TIMEOUT = 120.0

_FIX = "Run `hybridpar doctor`: it shows what is broken, and what mends it."


def probe_cluster(*, fresh: bool = False) -> Cluster:
    """What this machine can do, from the cache or measured now, which takes about ten seconds.

    Args:
        fresh: Measure even where the cache has an answer.

    Raises:
        LaunchError: Not even the CPU could be measured.
    """
    host, load = host_fingerprint(), machine_load()
    known = None if fresh else read_cluster(host)
    # Rates that were measured beside other programs are measured again as soon as the machine is calmer.
    if known is not None and not (known.busy and load < known.load / 2):
        return known
    devices, problems = probe_devices()
    gpus = sum(device.kind == "cuda" for device in devices)
    wanted = [("gloo", 2)] if len(available_cores()) > 1 else []
    if gpus > 1:
        wanted.append(("nccl", gpus))
    links = []
    for backend, world_size in wanted:
        try:
            links.append(probe_link(world_size, backend))
        except LaunchError as error:
            problems.append(error.what)
    found = Cluster(
        host=host,
        measured_at=time.time(),
        load=load,
        devices=tuple(devices),
        links=tuple(links),
        problems=tuple(problems),
    )
    # A problem may be gone the next time, so an answer with problems is not kept.
    if not problems:
        write_cluster(found)
    return found


def probe_devices(seconds: float = PROBE_SECONDS) -> tuple[list[Device], list[str]]:
    """Measure the CPU and every GPU that torch can use.

    Args:
        seconds: Time to spend on each rate.

    Returns:
        The devices, and one line for each GPU that could not be measured.

    Raises:
        LaunchError: The measuring process failed, for instance because torch cannot be imported.
    """
    program = _worker_program("devices", seconds=seconds)
    answer = json.loads(run_programs([program], "measuring the devices", workers=1))
    return [Device.model_validate(device) for device in answer["devices"]], list(answer["problems"])


def probe_link(
    world_size: int = 2,
    backend: str = "gloo",
    *,
    group: ProcessGroup | None = None,
    seconds: float = PROBE_SECONDS,
    timeout: float = PROBE_TIMEOUT,
) -> Link:
    """Measure the link between workers.

    In a process that has joined a process group, measures over that group; every rank must then call this, and every
    rank gets the same answer. Elsewhere, starts fresh local workers, which talk over the loopback interface or, with
    NCCL, between the GPUs.

    Args:
        world_size: Local workers to start.
        backend: `gloo` between CPU workers, `nccl` between one worker per GPU.
        group: Group to measure over, where there are several; default: the default group.
        seconds: Time to spend on latency, and again on bandwidth.
        timeout: Seconds after which local workers that have not answered are stopped.

    Raises:
        LaunchError: The local workers could not be started or did not find each other.
        ValueError: There are less than two workers.
    """
    # Torch is looked up, not imported: a process that has joined a group has it.
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        from hybridpar.probe_worker import measure_link

        return measure_link(group, seconds)
    if world_size < 2:
        raise ValueError(f"a link needs two workers, not {world_size}")
    with tempfile.TemporaryDirectory(prefix="hybridpar-") as directory:
        store = str(Path(directory) / "store")
        programs = [
            _worker_program(
                "link", rank=rank, world_size=world_size, backend=backend, store=store, seconds=seconds, timeout=timeout
            )
            for rank in range(world_size)
        ]
        what = f"measuring the link between {world_size} workers over {backend}"
        answer = run_programs(programs, what, workers=world_size, timeout=timeout)
    return Link.model_validate_json(answer)


def probe_torch() -> dict[str, Any]:
    """What the installed torch can do; the keys are those of `hybridpar.probe_worker.torch_facts`.

    Raises:
        LaunchError: Torch cannot be imported.
    """
    program = _worker_program("torch_facts")
    return cast("dict[str, Any]", json.loads(run_programs([program], "importing torch", workers=1)))


def _worker_program(function: str, **arguments: object) -> str:
    """A Python program for `run_programs` that answers with what a function of `hybridpar.probe_worker` returns."""
    # The package is looked for last of all, where this process found it: it need not be installed, and its directory
    # must not hide another package. `-m` would search the current directory first.
    place = str(Path(__file__).resolve().parents[1])
    call = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
    return (
        f"import sys; sys.path.append({place!r}); from hybridpar import probe_worker\n"
        f"answer = probe_worker.{function}({call})\n"
        "open(sys.argv[1], 'w', encoding='utf-8').write(answer)"
    )


def run_programs(programs: Sequence[str], what: str, *, workers: int, timeout: float = PROBE_TIMEOUT) -> str:
    """Run Python programs side by side, each in a fresh interpreter; all end when one fails.

    Args:
        programs: Their source text. Each writes its answer to the file that its first argument names; standard
            output is no place for it, because libraries log there (NCCL_DEBUG).
        what: What they do, for messages: "measuring ...".
        workers: Between how many workers the cores are shared.
        timeout: Seconds after which they are stopped.

    Returns:
        The answer of the first program.

    Raises:
        LaunchError: A program failed, crashed, or did not end in time.
    """
    environment = {**os.environ, **worker_environment(workers, available_cores())}
    # Left alone, gloo takes the interface that the host's name resolves to, which need not reach this host.
    if loopback := _loopback():
        environment.setdefault("GLOO_SOCKET_IFNAME", loopback)
    with tempfile.TemporaryDirectory(prefix="hybridpar-") as directory:
        logs = [Path(directory) / f"{number}.log" for number in range(len(programs))]
        answers = [log.with_suffix(".json") for log in logs]
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for program, log, answer in zip(programs, logs, answers, strict=True):
                with log.open("wb") as output:
                    processes.append(
                        subprocess.Popen(
                            [sys.executable, "-P", "-c", program, str(answer)],
                            env=environment,
                            stdin=subprocess.DEVNULL,
                            stdout=output,
                            stderr=subprocess.STDOUT,
                            start_new_session=True,  # Ctrl-C comes to this process alone, which then stops them
                        )
                    )
            _wait_for_all(processes, logs, what, timeout)
            return answers[0].read_text(encoding="utf-8")
        finally:
            for process in processes:
                process.kill()
                process.wait()


def _wait_for_all(processes: list[subprocess.Popen[bytes]], logs: list[Path], what: str, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while True:
        codes = [process.poll() for process in processes]
        for code, log in zip(codes, logs, strict=True):
            if code:
                raise LaunchError(f"{what} failed: {_last_line(log, code)}", fix=_FIX)
        if all(code == 0 for code in codes):
            return
        if time.monotonic() > deadline:
            late = logs[next(number for number, code in enumerate(codes) if code is None)]
            said = _last_line(late, 0)
            raise LaunchError(
                f"{what} took more than {timeout:g} s{f'; it last said: {said}' if said else ''}", fix=_FIX
            )
        time.sleep(0.02)


def _last_line(log: Path, code: int) -> str:
    """The last line that a process wrote, which for a Python error is the error itself, or how the process ended."""
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    if code < 0:
        return f"the process was killed by signal {-code}" + (f" ({lines[-1].strip()})" if lines else "")
    if lines:
        return lines[-1].strip()
    return f"the process exited with {code}" if code else ""


def _loopback() -> str | None:
    names = {name for _, name in socket.if_nameindex()}
    return next((name for name in ("lo", "lo0") if name in names), None)
