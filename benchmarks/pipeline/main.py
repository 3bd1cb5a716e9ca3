"""Command for all tables of the pipeline; run it on an idle machine.

python -m benchmarks.pipeline.main                    # all tables, as root for the shaped links
python -m benchmarks.pipeline.main --table ddp        # one of them
python -m benchmarks.pipeline.main --quick            # small, and nothing is written: does it run?
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from benchmarks.pipeline import against_ddp
from benchmarks.pipeline.hidden_sync import AGREE, RATE
from benchmarks.rig.launch import measure_in_ranks, possible_links, run_command
from benchmarks.rig.network import LOOPBACK, Network


@dataclass(frozen=True, kw_only=True)
class Options:
    """Measure the pipeline."""

    table: Literal["torch", "ddp", "hidden_sync", "all"] = "all"
    """Against torch's pipelining, against DDP, and how much of the gradient sync is hidden."""
    quick: bool = False
    """Small settings, busy rounds kept, nothing written."""
    rounds: int = 20
    """Rounds to keep."""
    keep_busy: bool = False
    """Keep rounds in which others used the machine; rows then say `loaded`."""
    output: Path = Path(__file__).parent / "results"
    """Folder of the tables to add rows to."""


def main(options: Options) -> None:
    """Start the ranks of every table that is asked for."""
    quick = options.quick
    common = {"quick": quick, "rounds": options.rounds}
    paired = common | {"keep_busy": options.keep_busy or quick}
    if options.table in ("torch", "all"):
        with Network(2, LOOPBACK) as network:
            arguments = paired | {"output": None if quick else options.output / "torch.csv"}
            measure_in_ranks(network, "benchmarks.pipeline.against_torch", arguments)
    if options.table in ("ddp", "all"):
        for link in possible_links(against_ddp.LINKS[:1] if quick else against_ddp.LINKS):
            with Network(2, link) as network:
                arguments = paired | {"output": None if quick else options.output / "ddp.csv"}
                measure_in_ranks(network, "benchmarks.pipeline.against_ddp", arguments)
    if options.table in ("hidden_sync", "all") and list(possible_links([RATE])):
        _hidden_sync(quick, common | {"output": None if quick else options.output / "hidden_sync.csv"})


def _hidden_sync(quick: bool, common: dict[str, object]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        notes = Path(folder) / "notes"

        def ratio_at(rate: str, micro_batches: int, judge: bool) -> float:
            with Network(4, rate) as network:
                arguments = common | {"micro_batches": micro_batches, "notes": notes, "judge": judge}
                measure_in_ranks(network, "benchmarks.pipeline.hidden_sync", arguments)
            return float(json.loads(notes.read_text())["ratio"])

        for micro_batches in (2,) if quick else (4, 2):
            ratio = ratio_at(RATE, micro_batches, judge=False)
        mbit = 1000.0
        for _ in range(1 if quick else 6):
            mbit = max(1.0, mbit * ratio)
            ratio = ratio_at(f"{mbit:.0f}mbit", 2, judge=True)
            if AGREE[0] <= ratio <= AGREE[1]:
                break
        else:
            print(f"at no rate do the two times agree; the last was {mbit:.0f} Mbit/s, ratio {ratio:.2f}")


if __name__ == "__main__":
    run_command(main, Options)
