"""Runs `hybridpar train --fidelity lossy` as a user does: whether it chooses the outer loop, and what comes of it.

On a shaped link the command runs once in each host, as it does under a launcher; on the loopback it starts its workers
itself. Each run has an empty cache. Its row holds what was predicted beside what was measured, of a step and of the
whole training: predicted steps to 97 % are those of the planner's table times those of synchronous training.

    python -m benchmarks.outer.closing --link 10mbit+50ms --epochs 10
    python -m benchmarks.outer.closing --link loopback
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.outer.accuracy import RESULTS, TARGET
from benchmarks.rig.command import run_command
from benchmarks.rig.launch import launch
from benchmarks.rig.network import LOOPBACK, Network
from benchmarks.rig.records import append_dicts
from benchmarks.rig.rows import commit, device

TIMEOUT = 1500.0


@dataclass(frozen=True, kw_only=True)
class Options:
    """Train on a link as the planner chooses, or as is asked for."""

    link: str = "10mbit+50ms"
    """Between the workers: loopback, or a rate and perhaps more, as `benchmarks/README.md` says."""
    workers: int = 2
    """How many, each on a host of its own on a shaped link."""
    model: str = "resnet18"
    """What is trained on digits."""
    epochs: int = 10
    """Of the run."""
    given: tuple[str, ...] = ("--fidelity", "lossy")
    """Further options of `hybridpar train`."""
    seed: int = 1
    """Of the run."""
    output: Path = RESULTS / "closing.csv"
    """The rows."""


@dataclass(frozen=True, kw_only=True)
class Closed:
    """A run and what came of it.

    Attributes:
        given: Its options.
        chosen: How workers were kept in step, and what was sent.
        predicted_ms: A step.
        measured_ms: A step, without waiting for data.
        bytes_per_step: That worker 0 sent.
        accuracy: At the end, in per cent.
        steps_to_target: Until 97 %, on the line through the ends of epochs; empty where it was not reached.
        seconds: From start to end, planning included.
        told: What was said of the plan.
    """

    link: str
    workers: int
    model: str
    epochs: int
    seed: int
    given: str
    chosen: str
    predicted_ms: float | None
    measured_ms: float | None
    bytes_per_step: int
    accuracy: float
    steps_to_target: float | None
    seconds: float
    told: str
    commit: str
    device: str


def main(options: Options) -> int:
    """Run the command and add its row."""
    with tempfile.TemporaryDirectory() as passing:
        place = Path(passing) / "run"
        arguments = ["-m", "hybridpar", "train", options.model, "--data", "digits", "--run-dir", str(place)]
        arguments += ["--epochs", str(options.epochs), "--seed", str(options.seed), *options.given]
        environment = {"HYBRIDPAR_CACHE": str(Path(passing) / "cache"), "PYTHONWARNINGS": "ignore::FutureWarning"}
        began = time.perf_counter()
        with tempfile.TemporaryFile("w+", encoding="utf-8") as said:
            if options.link == LOOPBACK:
                command = [sys.executable, *arguments, "--nproc", str(options.workers)]
                subprocess.run(command, env={**os.environ, **environment}, stdout=said, timeout=TIMEOUT, check=True)
            else:
                with Network(options.workers, options.link) as network:
                    launch(arguments, network, timeout=TIMEOUT, environment=environment, stdout=said)
            seconds = time.perf_counter() - began
            said.seek(0)
            lines = said.read().splitlines()
        print(*lines, sep="\n")
        row = _row(options, place, lines, seconds)
    append_dicts(options.output, [asdict(row)])
    return 0


def _row(options: Options, place: Path, lines: list[str], seconds: float) -> Closed:
    summary: dict[str, Any] = json.loads((place / "summary.json").read_text())
    rows = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
    tested = [(row["step"], 100 * row["test_accuracy"]) for row in rows if row.get("test_accuracy") is not None]
    begin = next((at for at, line in enumerate(lines) if line.startswith("plan ")), None)
    told = [] if begin is None else [line.strip() for line in lines[begin : begin + 5]]
    plan = json.loads((place / "plan.json").read_text())
    ran = (plan.get("ran") or {}).get("step_ms")
    return Closed(
        link=options.link,
        workers=options.workers,
        model=options.model,
        epochs=options.epochs,
        seed=options.seed,
        given=" ".join(options.given),
        chosen=f"{summary['sync']} {summary['codec']}",
        predicted_ms=summary.get("predicted_step_ms"),
        measured_ms=ran,
        bytes_per_step=summary["bytes_sent_per_step"],
        accuracy=round(100 * summary["test_accuracy"], 3),
        steps_to_target=_steps_to(tested),
        seconds=round(seconds, 1),
        told=" | ".join(told),
        commit=commit(),
        device=device(),
    )


def _steps_to(tested: list[tuple[int, float]]) -> float | None:
    """Training steps until the target, on the line through what was tested."""
    before, last = 0.0, 0
    for step, reached in tested:
        if reached >= TARGET:
            return round(last + (step - last) * (TARGET - before) / max(reached - before, 1e-9), 1)
        before, last = reached, step
    return None


if __name__ == "__main__":
    run_command(main, Options, __doc__)
