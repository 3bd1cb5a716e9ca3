"""Command for all tables of the planner.

python -m benchmarks.planner.main   # all tables, as root for shaped links
python -m benchmarks.planner.main --table predicted --links 1gbit --models resnet18 --plans 8
python -m benchmarks.planner.main --table batches   # not in `all`: hours
python -m benchmarks.planner.main --quick   # small, and nothing is written: does it run?
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.planner import batches, closing, ways
from benchmarks.planner.common import ON_DIGITS, SETTINGS
from benchmarks.rig.launch import measure_in_ranks, possible_links, run_command
from benchmarks.rig.network import LOOPBACK, Network
from hybridpar.errors import UsageError, nearest

#: Tables that `all` takes.
ALL = ("closing", "ways", "predicted", "target")


@dataclass(frozen=True, kw_only=True)
class Options:
    """Hold the planner's promises against clocks."""

    table: Literal["predicted", "closing", "target", "ways", "batches", "all"] = "all"
    """Predicted against measured steps, and from the same steps the chosen plan against the others; what closing
    tables of the command say; time to 97 % on digits against DDP; the chosen way to compute a step over the best;
    random jobs whose batch is chosen under a cap on their memory."""
    links: tuple[str, ...] = (LOOPBACK, "1gbit", "100mbit")
    """Links between the workers."""
    models: tuple[str, ...] = tuple(SETTINGS)
    """Models."""
    plans: int = 12
    """Plans of each setting, at least."""
    rounds: int = 7
    """Steps of each plan in each of its turns."""
    seconds: float = 60.0
    """After which no plan of a setting gets another turn; each gets two in any case."""
    runs: int = 3
    """Of the command on each link, for `closing`."""
    seeds: int = 3
    """Trainings of each method, for `target`."""
    jobs: int = 100
    """Random jobs, for `batches`; of the first tenth other batches are timed too."""
    notes: Path | None = None
    """Folder where `target` keeps what it knows, to go on from there after it was cut short."""
    quick: bool = False
    """Small settings, nothing written."""
    output: Path = Path(__file__).parent / "results"
    """Folder of the tables to add rows to."""


def main(options: Options) -> None:
    """Take every table that is asked for."""
    known = SETTINGS | ON_DIGITS
    for name in options.models:
        if name not in known:
            raise UsageError(f"no model {name!r}", fix=nearest(name, known))
    names = () if options.quick else (*ALL, "regret", "batches")
    files = {name: str(options.output.resolve() / f"{name}.csv") for name in names}
    tables = ALL if options.table == "all" else (options.table,)
    if "closing" in tables:
        for link in possible_links(options.links):
            closing.measure(link, options.runs, options.quick, files.get("closing"))
    if "ways" in tables:
        ways.measure_all(options.quick, files.get("ways"))
    if "batches" in tables:
        batches.measure(options.jobs, options.jobs // 10, files.get("batches"))
    if "predicted" in tables:
        small = {"plans": 6, "rounds": 3} if options.quick else {"plans": options.plans, "rounds": options.rounds}
        common = {"models": options.models, "seconds": options.seconds, "quick": options.quick, "tables": files}
        _on_links(options.links, "predicted", small | common)
    if "target" in tables:
        shaped = tuple(link for link in options.links if link != LOOPBACK)  # nothing is promised without a limit
        with tempfile.TemporaryDirectory() as passing:
            notes = options.notes or Path(passing)
            notes.mkdir(parents=True, exist_ok=True)
            arguments = {"quick": options.quick, "seeds": 1 if options.quick else options.seeds, "notes": notes}
            arguments["output"] = files.get("target")
            for phase, links in (("plan", shaped), ("train", (LOOPBACK,)), ("time", shaped)):
                _on_links(links, "target", arguments | {"phase": phase})


def _on_links(links: Sequence[str], module: str, arguments: dict[str, Any]) -> None:
    """Start `benchmarks.planner.MODULE.measure` in two ranks, on every link."""
    for link in possible_links(links):
        with Network(2, link) as network:
            measure_in_ranks(network, f"benchmarks.planner.{module}", arguments, timeout=3 * 3600)


if __name__ == "__main__":
    run_command(main, Options)
