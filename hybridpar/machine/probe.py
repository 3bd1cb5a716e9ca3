"""Measures devices and links in separate processes, which this module starts and supervises.

The parent never imports torch for it, keeps no CUDA context, and survives a driver that crashes or a link that hangs:
every probe has a time limit, and all its processes are stopped when one fails. What runs in those processes is
`hybridpar.machine.probe_worker`.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from hybridpar.errors import LaunchError
from hybridpar.machine.cluster import Cluster, Device, Link, host_fingerprint, machine_load, read_cluster, write_cluster
from hybridpar.machine.process import available_cores, worker_environment
from hybridpar.machine.steady import MOST_NOISE

_log = logging.getLogger(__name__)

#: Seconds that one quantity is measured for; a whole probe takes a few times as long.
PROBE_SECONDS = 0.4

#: Seconds after which a probe that has not answered is stopped. Covers a cold import of torch from a slow disk.
PROBE_TIMEOUT = 120.0

_FIX = "Run `hybridpar doctor`: it shows what is broken, and what mends it."


def probe_cluster(*, fresh: bool = False) -> Cluster:
    """What this machine can do, from the cache or measured now, which takes about ten seconds."""
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
    if found.noise > MOST_NOISE:
        _log.warning(
            "measurements of this machine lie %.0f %% apart, however often they are repeated: they are used now and "
            "not kept; run `hybridpar doctor` when nothing else runs",
            100 * found.noise,
        )
    # A problem may be gone the next time, so an answer with problems is not kept.
    elif not problems:
        write_cluster(found)
    return found


def probe_devices(seconds: float = PROBE_SECONDS) -> tuple[list[Device], list[str]]:
    """Measure the CPU and every GPU that torch can use."""
    program = _worker_program("devices", seconds=seconds)
    with Programs([program], "measuring the devices", workers=1) as probe:
        answer = json.loads(probe.answer())
    return [Device.model_validate(device) for device in answer["devices"]], list(answer["problems"])


def probe_link(world_size: int = 2, backend: str = "gloo", seconds: float = PROBE_SECONDS) -> Link:
    """Measure the link between fresh local workers, over the loopback interface or, with NCCL, between the GPUs."""
    if world_size < 2:
        raise ValueError(f"a link needs two workers, not {world_size}")
    with tempfile.TemporaryDirectory(prefix="hybridpar-") as directory:
        store = str(Path(directory) / "store")
        told = {"backend": backend, "store": store, "seconds": seconds, "timeout": PROBE_TIMEOUT}
        programs = [_worker_program("link", rank=rank, world_size=world_size, **told) for rank in range(world_size)]
        what = f"measuring the link between {world_size} workers over {backend}"
        with Programs(programs, what, workers=world_size) as probe:
            return Link.model_validate_json(probe.answer())


def start_torch_probe() -> Programs:
    """Begin to ask the installed torch what it can do; answers with `hybridpar.machine.probe_worker.torch_facts`."""
    return Programs([_worker_program("torch_facts")], "importing torch", workers=1)


def _worker_program(function: str, **arguments: object) -> str:
    """A Python program for `Programs` that answers with what a function of `hybridpar.machine.probe_worker` returns."""
    # The package is looked for last of all, where this process found it: it need not be installed, and its directory
    # must not hide another package. `-m` would search the current directory first.
    place = str(Path(__file__).resolve().parents[2])
    call = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
    return (
        f"import sys; sys.path.append({place!r}); from hybridpar.machine import probe_worker\n"
        f"answer = probe_worker.{function}({call})\n"
        "open(sys.argv[1], 'w', encoding='utf-8').write(answer)"
    )


class Programs:
    """Python programs that run side by side, each in a fresh interpreter, until the context is left."""

    def __init__(self, programs: Sequence[str], what: str, *, workers: int, timeout: float = PROBE_TIMEOUT) -> None:
        self._what = what
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout
        self._directory = tempfile.TemporaryDirectory(prefix="hybridpar-")
        self._logs = [Path(self._directory.name) / f"{number}.log" for number in range(len(programs))]
        self._processes: list[subprocess.Popen[bytes]] = []
        environment = {**os.environ, **worker_environment(workers, available_cores())}
        # Left alone, gloo takes the interface that the host's name resolves to, which need not reach this host.
        if loopback := _loopback():
            environment.setdefault("GLOO_SOCKET_IFNAME", loopback)
        try:
            for program, log in zip(programs, self._logs, strict=True):
                self._start(program, log, environment)
        except OSError as error:  # no processes or no memory left
            self.close()
            raise LaunchError(f"{what} failed: cannot start a process: {error.strerror}") from error
        except BaseException:
            self.close()
            raise

    def _start(self, program: str, log: Path, environment: dict[str, str]) -> None:
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", program, str(log.with_suffix(".answer"))],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C comes to this process alone, which then stops them
            )
        self._processes.append(process)

    def answer(self) -> str:
        """Wait until all programs have ended, and give the answer of the first."""
        while True:
            codes = [process.poll() for process in self._processes]
            for code, log in zip(codes, self._logs, strict=True):
                if code:
                    raise LaunchError(f"{self._what} failed: {_last_line(log, code)}", fix=_FIX)
            if all(code == 0 for code in codes):
                return self._logs[0].with_suffix(".answer").read_text(encoding="utf-8")
            if time.monotonic() > self._deadline:
                said = _last_line(self._logs[codes.index(None)], 0)
                last = f"; it last said: {said}" if said else ""
                raise LaunchError(f"{self._what} took more than {self._timeout:g} s{last}", fix=_FIX)
            time.sleep(0.02)

    def close(self) -> None:
        """Stop what still runs. Safe to call twice."""
        for process in self._processes:
            process.kill()
            process.wait()
        self._directory.cleanup()

    def __enter__(self) -> Programs:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


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
