"""Trains a network with every way to exchange gradients and compares the results, with `hybridpar train`.

    python -m benchmarks.asynchronous.trainings                    # all ways, half an hour
    python -m benchmarks.asynchronous.trainings --only softsync onebit-sgd --seeds 3

Trains ResNet-18 on digits with the defaults of `hybridpar train` but for the way, and reads the summaries. Adds rows to
results/trainings.csv.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.rig.command import run_command
from benchmarks.rig.records import append_dicts
from benchmarks.rig.rows import commit, device
from hybridpar.errors import HybridparError, UsageError

#: What a run adds to the command, by what the way is called; all of them with so many workers.
WAYS: Mapping[str, tuple[int, tuple[str, ...]]] = {
    "plain, 3 workers": (3, ("--plan", "none")),
    "ps": (3, ("--sync", "ps")),
    "softsync:2": (3, ("--sync", "softsync:2")),
    "ps-async": (3, ("--sync", "ps-async")),
    "plain, 2 workers": (2, ("--plan", "none")),
    "onebit-sgd": (2, ("--sync", "onebit-sgd")),
    "onebit-sgd, a step late": (2, ("--sync", "onebit-sgd:late=delay")),
    "local:4": (2, ("--sync", "local:4")),
}
#: What a way may lose against the plain run with as many workers, in parts of one.
MOST_LOST = 0.01

RESULTS = Path(__file__).parent / "results"
_COPIED = (
    "workers",
    "epochs",
    "steps",
    "test_accuracy",
    "best_test_accuracy",
    "images_per_second",
    "bytes_sent_per_step",
)


@dataclass(frozen=True, kw_only=True)
class Options:
    """Train with every way to exchange gradients."""

    only: tuple[str, ...] = ()
    """Ways whose names begin so; the plain runs that they are compared with are taken too."""
    seeds: int = 1
    """Trainings of each."""
    arguments: tuple[str, ...] = ("resnet18", "--data", "digits")
    """What all runs have in common."""
    output: Path = RESULTS / "trainings.csv"
    """Table to add rows to."""


def chosen(only: Sequence[str]) -> list[str]:
    """Names of the ways to train with.

    Raises:
        UsageError: There is none of some name.
    """
    for name in only:
        if not any(way.startswith(name) for way in WAYS):
            raise UsageError(f"no way is called {name!r}", f"There are: {', '.join(WAYS)}.")
    asked = [way for way in WAYS if not only or any(way.startswith(name) for name in only)]
    workers = {WAYS[way][0] for way in asked}
    return [way for way in WAYS if way in asked or (way.startswith("plain") and WAYS[way][0] in workers)]


def train(way: str, seed: int, arguments: Sequence[str]) -> dict[str, Any]:
    """The row of one training.

    Raises:
        HybridparError: It failed.
    """
    workers, own = WAYS[way]
    with tempfile.TemporaryDirectory() as folder:
        command = ["hybridpar", "train", *arguments, "--nproc", str(workers), *own, "--seed", str(seed)]
        options = ["--run-dir", folder, "--overwrite", "--checkpoints", "never"]
        done = subprocess.run([sys.executable, "-m", *command, *options], capture_output=True, text=True, check=False)
        if done.returncode:
            raise HybridparError(f"{' '.join(command)} ended with {done.returncode}", done.stderr.strip()[-2000:])
        summary = json.loads((Path(folder) / "summary.json").read_text(encoding="utf-8"))
    row = {"way": way, "seed": seed, "command": " ".join(command)} | {name: summary[name] for name in _COPIED}
    row["mean_staleness"] = (summary.get("staleness") or {}).get("mean", "")
    return row | {"commit": commit(), "device": device(), "torch": summary["versions"]["torch"]}


def verdicts(rows: Sequence[Mapping[str, Any]]) -> dict[str, tuple[float, float, bool]]:
    """By way: mean accuracy, by how much it is below the plain run of as many workers, and whether that is allowed."""
    accuracy = {
        way: statistics.mean(float(row["test_accuracy"]) for row in rows if row["way"] == way)
        for way in dict.fromkeys(row["way"] for row in rows)
    }
    plain = {WAYS[way][0]: mean for way, mean in accuracy.items() if way.startswith("plain")}
    lost = {way: plain[WAYS[way][0]] - mean for way, mean in accuracy.items()}
    return {way: (mean, lost[way], lost[way] <= MOST_LOST) for way, mean in accuracy.items()}


def main(options: Options) -> None:
    """Train, write, and say what was lost."""
    rows = []
    for seed in range(options.seeds):
        for way in chosen(options.only):
            rows.append(train(way, seed, options.arguments))
            print(f"{way}, seed {seed}: {100 * rows[-1]['test_accuracy']:.2f} %", flush=True)
            append_dicts(options.output, rows[-1:])
    for way, (mean, lost, little) in verdicts(rows).items():
        print(f"{way}: {100 * mean:.2f} %, {100 * lost:+.2f} points lost, {'met' if little else 'missed'}")


if __name__ == "__main__":
    run_command(main, Options, __doc__)
