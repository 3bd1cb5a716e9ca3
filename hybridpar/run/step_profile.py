"""`--profile`: a trace of torch.profiler of some steps after the first, of every worker, for ui.perfetto.dev.

It has all threads of the process, by the names of the lanes, and beside torch's operators what the flight record notes
(passes, transfers, sums of gradients and other exchanges) and the encoding and decoding of codecs. It goes to
`profile/rank-N.json.gz` in the run directory, on each host's own disk where that is not shared.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import threading
from typing import Any

import torch

from hybridpar.comm.flight import FLIGHT
from hybridpar.errors import RunDirectoryError
from hybridpar.observe.files import replace_file
from hybridpar.observe.running import WARM_UP_STEPS
from hybridpar.run.part import Part, Run

#: Steps in a trace, where the run has so many after the first ones.
PROFILED_STEPS = 3


class StepProfile(Part):
    """Profiles some steps of this worker."""

    def __init__(self) -> None:
        self._after = self._until = 0
        self._profiler: Any = None
        self._over = False

    def start(self, run: Run) -> None:
        """Decide which steps to profile."""
        self._after = min(run.trainer.steps_done + WARM_UP_STEPS, run.total - 1)
        self._until = min(self._after + PROFILED_STEPS, run.total)

    def begin_step(self, run: Run) -> None:
        """Begin or end where that is due."""
        issued = run.trainer.steps_done
        if self._profiler is None and self._after <= issued < self._until and not self._over:
            with run.clock.away(), run.progress.pause():
                self._begin(run)
        elif self._profiler is not None and issued >= self._until:
            with run.clock.away(), run.progress.pause():
                self.finish(run)

    def finish(self, run: Run) -> None:
        """End a profile that is under way, at the end of a run that ended early."""
        profiler, self._profiler, self._over = self._profiler, None, True
        if profiler is None:
            return
        run.progress.message("writing the profile ...")
        run.trainer.wait()
        FLIGHT.names_ranges = False
        profiler.stop()
        path = run.folder.directory / "profile" / f"rank-{run.world.job_rank}.json.gz"
        aside = path.with_name(f".{path.stem}.tmp")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(aside))
            trace = json.loads(aside.read_bytes())
            name_threads(trace, {thread.native_id or 0: thread.name for thread in threading.enumerate()})
            replace_file(path, [gzip.compress(json.dumps(trace).encode(), 5)])
        except (OSError, RuntimeError, RunDirectoryError) as error:
            run.warnings.append(f"there is no profile: {error}")
            return
        finally:
            with contextlib.suppress(OSError):
                aside.unlink()
        run.progress.message(f"profile written to {path.parent}, a file per worker; open one in ui.perfetto.dev")

    def close(self, run: Run) -> None:
        """Drop a profile that an error left under way."""
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            FLIGHT.names_ranges = False
            profiler.stop()

    def _begin(self, run: Run) -> None:
        from torch._C._profiler import _ExperimentalConfig
        from torch.profiler import ProfilerActivity, profile

        run.trainer.wait()
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else it writes of itself to standard error
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
        self._profiler = profile(
            activities=activities, experimental_config=_ExperimentalConfig(profile_all_threads=True)
        )
        self._profiler.start()
        FLIGHT.names_ranges = True


def name_threads(trace: dict[str, Any], names: dict[int, str]) -> None:
    """Give the threads of a trace the names that Python knows them by."""
    for event in trace["traceEvents"]:
        name = names.get(event.get("tid")) if event.get("ph") == "M" and event.get("name") == "thread_name" else None
        if name is not None:
            event["args"]["name"] = "main thread" if name == "MainThread" else name
