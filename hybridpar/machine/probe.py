"""Looks at an installation from separate processes, which this module starts and supervises.

The process that asks imports no torch for it, has no CUDA context, and survives a driver that crashes or a link that
hangs: every probe has a time limit, and all its processes are stopped when one fails.
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
from typing import Any

from hybridpar.errors import LaunchError, first_line
from hybridpar.machine.process import available_cores, worker_environment

#: Seconds after which a probe that has not answered is stopped. Covers a cold import of torch from a slow disk.
PROBE_TIMEOUT = 120.0

_FIX = "Run `hybridpar doctor`: it shows what is broken, and what mends it."


def program_of(module: str, function: str, **arguments: object) -> str:
    """A Python program for `Programs` that answers with what a function of a module of the package returns."""
    # The package is looked for last of all, where this process has it: it need not be installed, and its directory
    # must not hide another package. `-m` would search the current directory first.
    directory = str(Path(__file__).resolve().parents[2])
    call = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
    return (
        f"import sys; sys.path.append({directory!r}); from {module} import {function}\n"
        f"answer = {function}({call})\n"
        "open(sys.argv[1], 'w', encoding='utf-8').write(answer)"
    )


def torch_facts() -> str:
    """What the installed torch can do, as JSON.

    Keys: `torch` and `torchvision` (versions; None where torchvision cannot be imported), `cuda_build` (version of the
    CUDA toolkit torch was built with, or None), `cuda_error` (why CUDA cannot be used, or None), `gpus` (name of each,
    and why it cannot be used, or None), `backends` (name to whether torch.distributed has it).
    """
    import torch
    import torch.distributed as dist

    available = dist.is_available()
    facts: dict[str, Any] = {
        "torch": torch.__version__,
        "torchvision": _torchvision_version(),
        "cuda_build": torch.version.cuda,
        "cuda_error": None if torch.version.cuda is None else _cuda_error("cuda"),
        "gpus": [
            (torch.cuda.get_device_name(index), _cuda_error(f"cuda:{index}"))
            for index in range(torch.cuda.device_count())
        ],
        "backends": {
            "gloo": available and dist.is_gloo_available(),
            "nccl": available and dist.is_nccl_available(),
            "mpi": available and dist.is_mpi_available(),
        },
    }
    return json.dumps(facts)


def _cuda_error(device: str) -> str | None:
    """Why nothing can be computed on a device: no memory left, no kernels for it, no driver."""
    import torch

    try:
        torch.ones(1, device=device).add(1).item()
    except RuntimeError as error:
        return first_line(error)
    return None


def _torchvision_version() -> str | None:
    try:
        import torchvision
    except Exception:  # a build for another torch fails with RuntimeError, a missing one with ImportError
        return None
    return str(torchvision.__version__)


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
                last_line = _last_line(self._logs[codes.index(None)], 0)
                last = f"; it last said: {last_line}" if last_line else ""
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
