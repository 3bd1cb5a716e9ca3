"""`--profile`: a trace of torch.profiler of some steps after the first, of every worker, for ui.perfetto.dev.

It has all threads of the process, by the names of the lanes, and beside torch's operators what the flight record notes
(passes, transfers, sums of gradients and other exchanges) and the encoding and decoding of codecs. It goes to
`profile/rank-N.json.gz` in the run directory, on each host's own disk where that is not shared.
"""

from __future__ import annotations

import gzip
import json
import os
import tempfile
import threading
from pathlib import Path
from typing import Any

import torch

from hybridpar.comm.flight import FLIGHT
from hybridpar.errors import RunDirectoryError
from hybridpar.formats.output_files import replace_file
from hybridpar.run.part import Part, Run
from hybridpar.run.timings import steps_to_show


class StepProfile(Part):
    """Profiles some steps of this worker."""

    def __init__(self) -> None:
        self._shown = range(0)
        self._profiler: Any = None

    def start(self, run: Run) -> None:
        """Decide which steps to profile."""
        self._shown = steps_to_show(run.trainer.steps_done, run.total)

    def begin_step(self, run: Run) -> None:
        """Begin or end where that is due."""
        if (run.trainer.steps_done + 1 in self._shown) != (self._profiler is not None):
            with run.clock.away(), run.progress.pause():
                if self._profiler is None:
                    self._begin(run)
                else:
                    self.finish(run)

    def finish(self, run: Run) -> None:
        """End a profile that is under way, at the end of a run that ended early."""
        profiler, self._shown = self._profiler, range(0)
        if profiler is None:
            return
        run.progress.message("writing the profile ...")
        run.trainer.wait()
        self.close(run)
        path = run.folder.directory / "profile" / f"rank-{run.world.job_rank}.json.gz"
        try:
            with tempfile.TemporaryDirectory() as folder:
                profiler.export_chrome_trace(f"{folder}/trace.json")
                trace = json.loads(Path(folder, "trace.json").read_bytes())
            _name_threads(trace["traceEvents"])
            replace_file(path, [gzip.compress(json.dumps(trace).encode(), 5)])
        except (OSError, RuntimeError, RunDirectoryError) as error:
            run.warnings.append(f"there is no profile: {error}")
            return
        run.progress.message(f"profile written to {path.parent}, a file per worker; open one in ui.perfetto.dev")

    def close(self, run: Run) -> None:
        """End a profile that is under way, perhaps after an error."""
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
        options = _ExperimentalConfig(profile_all_threads=True)
        self._profiler = profile(activities=activities, experimental_config=options)
        self._profiler.start()
        FLIGHT.names_ranges = True


def _name_threads(events: list[dict[str, Any]]) -> None:
    """Give the threads of a trace the names that Python knows them by."""
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    for event in events:
        if event.get("name") == "thread_name" and (name := names.get(event.get("tid"))) is not None:
            event["args"]["name"] = "main thread" if name == "MainThread" else name
