"""Command for the tables of 1-bit SGD: double buffering, the paper's ablations, and the best number of workers.

python -m benchmarks.asynchronous.recipe                    # all three, as root for the shaped links
python -m benchmarks.asynchronous.recipe --table buffering  # one of them
python -m benchmarks.asynchronous.recipe --quick            # small, and nothing is written: does it run?
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.rig.command import measure_in_ranks, run_command
from benchmarks.rig.network import LOOPBACK, Network, missing

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, kw_only=True)
class Options:
    """Measure what the recipe of 1-bit SGD gains, and what its parts are worth."""

    table: Literal["buffering", "ablation", "workers", "all"] = "all"
    """Steps with late gradients, accuracies without parts of the recipe, numbers of workers."""
    rounds: int = 20
    """Rounds to keep; each is several steps of every method."""
    seeds: int = 3
    """Seeds of the accuracies."""
    quick: bool = False
    """Small settings, busy rounds kept, nothing written."""
    keep_busy: bool = False
    """Keep rounds in which others used the machine; rows then say `loaded`."""
    output: Path = RESULTS
    """Folder of the tables to add rows to."""


def main(options: Options) -> int:
    """Take every table that is asked for."""
    for name, start in (("ablation", _ablation), ("buffering", _buffering), ("workers", _workers)):
        if options.table in (name, "all"):
            start(options)
    return 0


def _ablation(options: Options) -> None:
    from benchmarks.asynchronous.ablation import measure

    measure(options.quick, 1 if options.quick else options.seeds, _file(options, "ablation.csv"))


def _buffering(options: Options) -> None:
    """First on the loopback, to learn which link carries an exchange in half the time of a batch; then on that link."""
    if lack := missing():
        print(f"buffering: skipped, {lack}")
        return
    with tempfile.TemporaryDirectory() as folder:
        notes = Path(folder) / "probe.json"
        with Network(2, LOOPBACK) as network:
            _start("buffering", network, options, {"notes": str(notes), "probe": True})
        rate = json.loads(notes.read_text())["rate"]
        with Network(2, rate) as network:
            told = {"notes": str(notes), "probe": False, "output": _file(options, "buffering.csv")}
            _start("buffering", network, options, told)


def _workers(options: Options) -> None:
    if lack := missing():
        print(f"workers: skipped, {lack}")
        return
    from benchmarks.asynchronous.workers import LINK, MOST, conclude

    with tempfile.TemporaryDirectory() as folder:
        for ranks in range(2, (3 if options.quick else MOST) + 1):
            with Network(ranks, LINK) as network:
                _start("workers", network, options, {"notes": str(Path(folder) / f"{ranks}.json")})
        conclude(Path(folder), options.quick, _file(options, "workers.csv"))


def _file(options: Options, name: str) -> str | None:
    return None if options.quick else str((options.output / name).resolve())


def _start(module: str, network: Network, options: Options, told: dict[str, Any]) -> None:
    """Start `benchmarks.asynchronous.MODULE.measure` in every rank of a network."""
    busy = options.keep_busy or options.quick
    told = {"quick": options.quick, "rounds": options.rounds, "keep_busy": busy, **told}
    measure_in_ranks(network, f"benchmarks.asynchronous.{module}", told)


if __name__ == "__main__":
    run_command(main, Options)
