"""Runs `hybridpar train` as a user does and compares the predicted step time with the measured one.

`hybridpar train resnet18 --data digits --nproc 2`, again and again, each time with an empty cache: it measures,
plans, trains, and compares what it predicted with what it measured. On a shaped link the same command runs once in
every host, as it does under a launcher. Errors are those of the prediction: over what was measured, less one.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO

from benchmarks.pipeline.checks import Check, write_checks
from benchmarks.rig.launch import launch
from benchmarks.rig.network import LOOPBACK, Network
from hybridpar.plan import read_plan
from hybridpar.planner.compare import APART

SETTING = "resnet18, digits, `hybridpar train`, empty cache"
#: Seconds that measuring and searching may take.
MOST_SECONDS = 20.0
#: Seconds after which a run is given up.
TIMEOUT = 900.0
#: Steps over which the fastest and the slowest stretch of a run are found.
STRETCH = 10

_COMMAND = ["-m", "hybridpar", "train", "resnet18", "--data", "digits"]


def measure(link: str, runs: int, quick: bool, output: str | None) -> None:
    """Run the command, and write a row for each run and for all of them.

    Args:
        link: Between the workers.
        runs: How many.
        quick: Only one.
        output: Table to add rows to.
    """
    checks = [_run(link, number) for number in range(1, 2 if quick else 1 + runs)]
    errors = [check.value for check in checks]
    checks.append(
        Check(
            setting=SETTING,
            link=link,
            what="error of the closing table, median over runs",
            value=statistics.median(errors),
            low=min(errors),
            high=max(errors),
            at_most=APART,
            extra=f"{sum(error <= APART for error in errors)} of {len(errors)} runs within {100 * APART:.0f} %",
        )
    )
    write_checks(checks, output, "closing tables")


def _run(link: str, number: int) -> Check:
    """One run of the command; its error, and what else there is to say of it."""
    with tempfile.TemporaryDirectory() as passing:
        place = Path(passing) / "run"
        arguments = [*_COMMAND, "--run-dir", str(place)]
        environment = {"HYBRIDPAR_CACHE": str(Path(passing) / "cache"), "PYTHONWARNINGS": "ignore::FutureWarning"}
        with tempfile.TemporaryFile("w+", encoding="utf-8") as said:
            _start(arguments, link, environment, said)
            said.seek(0)
            planned = re.search(r"plan +(.*?), about .*?planning took\s+([\d.]+) s", said.read(), re.DOTALL)
        assert planned is not None, "the run was not planned"
        plan = read_plan(place / "plan.json")
        lines = (place / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert plan.predicted is not None, "the plan has no prediction"
    assert plan.ran is not None, "the run has not told its plan how fast it was"
    predicted, ran = plan.predicted.step_ms, plan.ran.step_ms
    assert predicted is not None, "no time of a step was predicted"
    assert ran is not None, "no time of a step was measured"
    error = predicted / ran - 1  # as in the other tables of predictions
    times = [float(row["step_ms"]) for row in map(json.loads, lines) if "step_ms" in row]
    stretches = [statistics.median(times[at : at + STRETCH]) for at in range(0, len(times) - STRETCH + 1, STRETCH)]
    seconds = float(planned[2])
    within = "at most" if seconds <= MOST_SECONDS else "more than"
    return Check(
        setting=SETTING,
        link=link,
        what=f"error of the closing table, run {number}",
        value=abs(error),
        low=abs(error),
        high=abs(error),
        at_most=APART,
        extra=(
            f"{planned[1]}; predicted {predicted:.1f} ms, measured {ran:.1f} ({100 * error:+.1f} %); stretches of "
            f"{STRETCH} steps from {min(stretches):.0f} to {max(stretches):.0f} ms; planned in {seconds:.1f} s "
            f"({within} {MOST_SECONDS:.0f})"
        ),
    )


def _start(arguments: list[str], link: str, environment: dict[str, str], said: IO[str]) -> None:
    """Run the command on two workers: its own on the loopback, one in each host on a shaped link."""
    if link != LOOPBACK:
        with Network(2, link) as network:
            launch(arguments, network, timeout=TIMEOUT, environment=environment, stdout=said)
        return
    command = [sys.executable, *arguments, "--nproc", "2"]
    subprocess.run(command, env={**os.environ, **environment}, stdout=said, timeout=TIMEOUT, check=True)
