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

from benchmarks.rig.checks import Check, check_of, write_checks
from benchmarks.rig.launch import launch
from benchmarks.rig.network import LOOPBACK, Network
from hybridpar.observe.summary import step_without_data_ms
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
    within = f"{sum(error <= APART for error in errors)} of {len(errors)} runs within {100 * APART:.0f} %"
    what = "error of the closing table, median over runs"
    checks.append(check_of(SETTING, link, what, errors, at_most=APART, extra=within))
    write_checks(checks, output, "closing tables")


def _run(link: str, number: int) -> Check:
    """One run of the command; its error, and what else there is to say of it."""
    with tempfile.TemporaryDirectory() as passing:
        directory = Path(passing) / "run"
        environment = {"HYBRIDPAR_CACHE": str(Path(passing) / "cache"), "PYTHONWARNINGS": "ignore::FutureWarning"}
        with tempfile.TemporaryFile("w+", encoding="utf-8") as output:
            _start([*_COMMAND, "--run-dir", str(directory)], link, environment, output)
            output.seek(0)
            pattern = r"^plan +(.*?), about .*?planning took\s+([\d.]+) s"
            planned = re.search(pattern, output.read(), re.DOTALL | re.MULTILINE)
        summary = json.loads((directory / "summary.json").read_text(encoding="utf-8"))
        lines = (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert planned is not None, "the run was not planned"
    predicted, measured = summary["predicted_step_ms"], step_without_data_ms(summary)
    assert predicted is not None, "no time of a step was predicted"
    assert measured is not None, "no time of a step was measured"
    error = predicted / measured - 1  # as in the other tables of predictions
    times = [float(row["step_ms"]) for row in map(json.loads, lines) if "step_ms" in row]
    stretches = [statistics.median(times[at : at + STRETCH]) for at in range(0, len(times) - STRETCH + 1, STRETCH)]
    seconds = float(planned[2])
    within = "at most" if seconds <= MOST_SECONDS else "more than"
    extra = (
        f"{planned[1]}; predicted {predicted:.1f} ms, measured {measured:.1f} ({100 * error:+.1f} %); stretches of "
        f"{STRETCH} steps from {min(stretches):.0f} to {max(stretches):.0f} ms; planned in {seconds:.1f} s "
        f"({within} {MOST_SECONDS:.0f})"
    )
    what = f"error of the closing table, run {number}"
    return check_of(SETTING, link, what, [abs(error)], at_most=APART, extra=extra)


def _start(arguments: list[str], link: str, environment: dict[str, str], output: IO[str]) -> None:
    """Run the command on two workers: once on the loopback, in each host on a shaped link."""
    if link != LOOPBACK:
        with Network(2, link) as network:
            launch(arguments, network, timeout=TIMEOUT, environment=environment, stdout=output)
        return
    command = [sys.executable, *arguments, "--nproc", "2"]
    subprocess.run(command, env={**os.environ, **environment}, stdout=output, timeout=TIMEOUT, check=True)
