"""Confirms kernels on a CPU that has no records of its own: one candidate for each operation, in seconds.

Most of what comes with the package was measured on other CPUs. At the start of a run the operations that have no record
here are each given one kernel: the one that is most like the best that is known of the same convolution or the nearest
one, of the package too. It is timed beside torch as the finalists of a search are, and what was found is recorded, gain
or not, in the database of this machine, so that it is done once. `hybridpar tune` goes on from there.

A process of its own does it: what it needs of memory goes with it, a crash is not the run's, and it is ended when its
time is up. Each record is appended when it is there.
"""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from hybridpar.codegen.cache import KernelsUnavailable, wanted
from hybridpar.codegen.compile_pool import child_environment
from hybridpar.errors import HybridparError, cannot_write, first_line
from hybridpar.formats.cache import locked
from hybridpar.formats.messages import pack, unpack
from hybridpar.tvm_kernels.database import Database, default_database, user_database, versions
from hybridpar.tvm_kernels.machine import is_gpu
from hybridpar.tvm_kernels.shapes import KernelKey
from hybridpar.tvm_kernels.space import why_none
from hybridpar.tvm_kernels.tune import search_all, weigh

_log = logging.getLogger(__name__)

#: Seconds, a twentieth of what `hybridpar tune` takes by itself.
LIMIT = 30.0
#: After so many times the limit the process is ended: it begins nothing when the time is up, but ends what it began.
_ENDED = 3.0


def confirm_kernels(keys: Mapping[KernelKey, int], database: Database, seconds: float = LIMIT) -> str:
    """Time one kernel for each operation that a database has no record of, and record it in the user's database.

    Nothing that goes wrong with it is an error. Where HYBRIDPAR_KERNELS is `off` nothing is done.
    """
    missing = weigh({key: count for key, count in keys.items() if _is_missing(key, database)})
    if not missing or not wanted():
        return ""
    began, path = time.perf_counter(), user_database()
    why = _run(missing, path, seconds)
    database = default_database()
    tried = [record for key in missing if (record := database.best(key, current=False)) is not None and record.current]
    left = sum(_is_missing(key, database) for key in missing)
    if why and not tried:
        return f"no kernel could be confirmed on this CPU: {why}"
    won = sum(record.wins for record in tried)
    line = f"confirmed {won} of {len(tried)} kernels on this CPU in {time.perf_counter() - began:.1f} s; kept in {path}"
    if left:
        line += f"; {left} are left to torch: {why or 'the time was up'}"
    return line


def _is_missing(key: KernelKey, database: Database) -> bool:
    """Whether there may be a kernel for the CPU, and nothing is known of it with the versions that are installed."""
    if is_gpu(key.device) or why_none(key) or versions(key.device)["tvm"] == "none":
        return False
    record = database.best(key, current=False)
    return record is None or not record.current


def _run(weights: Mapping[KernelKey, float], path: Path, seconds: float) -> str:
    """Have another process confirm kernels; why that failed, empty where it did not."""
    # The clock is the same in all processes of a machine, and loading torch counts too.
    try:
        done = subprocess.run(
            [sys.executable, "-m", __name__],
            input=pack((path, time.monotonic() + seconds, weights)),
            capture_output=True,
            timeout=_ENDED * seconds,
            env=child_environment(),
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "it took too long and was ended"
    except OSError as error:
        return str(error)
    message = done.stderr.decode(errors="replace").strip()
    _log.info("confirming kernels: exit %d\n%s", done.returncode, message)
    return (message.splitlines() or [f"exit {done.returncode}"])[-1] if done.returncode else ""


# ---------------------------------------------------------------------------------------------------- the child process


def _serve() -> None:
    """Confirm what standard input names; processes of other runs do so one after the other, as each would disturb."""
    path, end, weights = unpack(sys.stdin.buffer.read())
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(path.with_suffix(".lock")):
            search_all(weights, path, end - time.monotonic(), quick=True)
    except OSError as error:
        sys.exit(cannot_write(path, error))
    except (HybridparError, KernelsUnavailable) as error:
        sys.exit(first_line(error))


if __name__ == "__main__":
    _serve()
