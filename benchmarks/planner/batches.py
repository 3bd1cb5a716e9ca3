"""Runs `hybridpar train --batch-size auto` on random jobs, each in a cgroup with a cap on its memory.

A job that the system kills has run out of memory, which prediction is there to prevent; one that says that no batch
fits has not. Of some jobs the steps of other batches are timed as well, under the same cap.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.rig.records import append_dicts

_CGROUPS = Path("/sys/fs/cgroup/memory")
_MODELS = ("resnet18", "resnet34", "mobilenet_v2", "squeezenet1_1", "shufflenet_v2_x0_5", "mnasnet0_5", "vgg11_bn")
_STEPS = 3
_TIMEOUT = 1200.0


@dataclass(frozen=True)
class Job:
    """A training, and the bytes that all of its processes may have together."""

    model: str
    side: int
    workers: int
    optimizer: str
    cap: int

    def run(self, batch: str) -> tuple[int, dict[str, object]]:
        """Exit code of the command, and the run's summary."""
        with tempfile.TemporaryDirectory() as folder, _capped(self.cap) as procs:
            options = {"data": "synthetic:samples=1024", "image-size": self.side, "batch-size": batch, "lr": 0.001}
            options |= {"nproc": self.workers, "optimizer": self.optimizer, "steps": _STEPS}
            options |= {"run-dir": f"{folder}/run", "checkpoints": "never"}
            words = [f"--{name}={value}" for name, value in options.items()]
            done = subprocess.run(
                [sys.executable, "-m", "hybridpar", "train", self.model, *words],
                env={**os.environ, "HYBRIDPAR_CACHE": f"{folder}/cache"},
                preexec_fn=lambda: procs.write_text(str(os.getpid())),
                capture_output=True,
                text=True,
                timeout=_TIMEOUT,
            )
            summary = Path(folder, "run", "summary.json")
            if done.returncode not in (0, 2):
                print(done.stderr[-2000:], file=sys.stderr)
            return done.returncode, json.loads(summary.read_text()) if summary.exists() else {"said": done.stderr}


@contextmanager
def _capped(cap: int) -> Iterator[Path]:
    """A cgroup with a cap on its memory; yields the file that a process is written into."""
    group = _CGROUPS / f"hybridpar-{os.getpid()}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(cap))
        yield group / "cgroup.procs"
    finally:
        while left := (group / "cgroup.procs").read_text().split():  # processes that are about to end
            for process in left:
                with suppress(ProcessLookupError):
                    os.kill(int(process), signal.SIGKILL)
            time.sleep(0.1)
        group.rmdir()


def measure(jobs: int, compared: int, output: str | None) -> None:
    """Run random jobs; as root. Of the first `compared` other batches are timed too."""
    draw = random.Random(0)
    for number in range(jobs):
        side, workers = draw.choice((32, 48, 64, 96, 128)), draw.choice((1, 2))
        cap = int(workers * draw.uniform(0.6, 2.5) * 1e9)
        job = Job(draw.choice(_MODELS), side, workers, draw.choice(("sgd", "adamw")), cap)
        code, summary = job.run("auto")
        ended = {0: "trained", 2: "no batch fits"}.get(code, f"exit {code}")
        row: dict[str, object] = {"job": number, **vars(job), "ended": ended, "batch": summary.get("batch_size", "")}
        row |= {"of_the_best": _of_the_best(job, int(str(row["batch"]))) if code == 0 and number < compared else ""}
        print(row, flush=True)
        if output is not None:
            append_dicts(Path(output), [row])


def _of_the_best(job: Job, batch: int) -> float:
    """Samples per second of the batch over those of the best batch, all by the median of a run's steps."""
    rates = {}
    for size in (batch // 4, batch // 2, batch, 2 * batch, 4 * batch):
        code, summary = job.run(str(size)) if 2 * job.workers <= size <= 128 else (2, {})
        if code == 0:
            rates[size] = size / float(str(summary["step_ms_median"]))
    return round(rates[batch] / max(rates.values()), 3)
