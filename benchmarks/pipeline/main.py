"""Command for all tables of the pipeline; run it on an idle machine.

python -m benchmarks.pipeline.main                    # all tables, as root for the shaped links
python -m benchmarks.pipeline.main --table ddp        # one of them
python -m benchmarks.pipeline.main --quick            # small, and nothing is written: does it run?
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.rig.command import measure_in_ranks, run_command
from benchmarks.rig.network import LOOPBACK, Network

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, kw_only=True)
class Options:
    """Measure the pipeline."""

    table: Literal["torch", "ddp", "prediction", "hidden_sync", "all"] = "all"
    """Against torch's pipelining, against DDP, predictions, and how much of the gradient sync is hidden."""
    quick: bool = False
    """Small settings, busy rounds kept, nothing written."""
    rounds: int = 20
    """Rounds to keep."""
    keep_busy: bool = False
    """Keep rounds in which others used the machine; rows then say `loaded`."""
    models: tuple[str, ...] = ()
    """Only these models, where a table has several."""
    output: Path = RESULTS
    """Folder of the tables to add rows to."""


def main(options: Options) -> int:
    """Start the ranks of every table that is asked for."""
    for name, start in TABLES.items():
        if options.table in (name, "all"):
            start(options)
    return 0


def run(module: str, network: Network, options: Options, file: str, **more: Any) -> None:
    """Start `benchmarks.pipeline.MODULE.measure` in every rank of a network."""
    told = {
        "quick": options.quick,
        "rounds": options.rounds,
        "keep_busy": options.keep_busy or options.quick,
        "output": None if options.quick else str((options.output / file).resolve()),
        **more,
    }
    measure_in_ranks(network, f"benchmarks.pipeline.{module}", told, timeout=1800)


def _against_torch(options: Options) -> None:
    with Network(2, LOOPBACK) as network:
        run("against_torch", network, options, "torch.csv", models=list(options.models))


def _against_ddp(options: Options) -> None:
    from benchmarks.pipeline.against_ddp import LINKS

    for rate in LINKS[:1] if options.quick else LINKS:
        with Network(2, rate) as network:
            run("against_ddp", network, options, "ddp.csv")


def _prediction(options: Options) -> None:
    from benchmarks.pipeline.prediction import LINKS, summarise

    with tempfile.TemporaryDirectory() as folder:
        notes = Path(folder) / "notes"
        for rate in LINKS[-1:] if options.quick else LINKS:
            with Network(2, rate) as network:
                run("prediction", network, options, "prediction.csv", notes=str(notes))
        summarise(notes, None if options.quick else str(options.output / "prediction.csv"))


def _hidden_sync(options: Options) -> None:
    from benchmarks.pipeline.hidden_sync import AGREE, RATE

    with tempfile.TemporaryDirectory() as folder:
        notes = Path(folder) / "notes"

        def ratio_at(rate: str, micro_batches: int, judge: bool) -> float:
            with Network(4, rate) as network:
                more = {"micro_batches": micro_batches, "notes": str(notes), "judge": judge}
                run("hidden_sync", network, options, "hidden_sync.csv", **more)
            return float(json.loads(notes.read_text())["ratio"])

        for micro_batches in (2,) if options.quick else (4, 2):
            ratio = ratio_at(RATE, micro_batches, judge=False)
        mbit = 1000.0
        for _ in range(1 if options.quick else 6):
            mbit = max(1.0, mbit * ratio)
            ratio = ratio_at(f"{mbit:.0f}mbit", 2, judge=True)
            if AGREE[0] <= ratio <= AGREE[1]:
                break
        else:
            print(f"no rate was found at which the two times agree; the last was {mbit:.0f} Mbit/s, ratio {ratio:.2f}")


TABLES: dict[str, Callable[[Options], None]] = {
    "torch": _against_torch,
    "ddp": _against_ddp,
    "prediction": _prediction,
    "hidden_sync": _hidden_sync,
}


if __name__ == "__main__":
    run_command(main, Options)
