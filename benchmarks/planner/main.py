"""Command for all tables of the planner.

python -m benchmarks.planner.main   # all tables, as root for shaped links
python -m benchmarks.planner.main --table predicted --links 1gbit --models resnet18 --plans 8
python -m benchmarks.planner.main --quick   # small, and nothing is written: does it run?
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from benchmarks.rig.command import measure_in_ranks, run_command
from benchmarks.rig.network import LOOPBACK, Network, missing
from hybridpar.errors import UsageError, nearest

RESULTS = Path(__file__).parent / "results"
_TABLES = ("closing", "predicted", "target", "ways")
_MODELS = ("resnet18", "mobilenet_v2", "vgg11_cifar")
#: As benchmarks/outer trains them.
_ON_DIGITS = ("resnet18-digits", "resnet34-digits", "timm/resnet10t-digits")


@dataclass(frozen=True, kw_only=True)
class Options:
    """Hold the planner's promises against clocks."""

    table: Literal["predicted", "closing", "target", "ways", "all"] = "all"
    """Predicted against measured steps, and from the same steps the chosen plan against the others; what closing
    tables of the command say; time to 97 % on digits against DDP; the chosen way to compute a step over the best."""
    links: tuple[str, ...] = (LOOPBACK, "1gbit", "100mbit")
    """Links between the workers."""
    models: tuple[str, ...] = _MODELS
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
    notes: Path | None = None
    """Folder where `target` keeps what it has found, to go on from there after it was cut short."""
    quick: bool = False
    """Small settings, nothing written."""
    output: Path = RESULTS
    """Folder of the tables to add rows to."""


def main(options: Options) -> int:
    """Take every table that is asked for."""
    for name in options.models:
        if name not in (*_MODELS, *_ON_DIGITS):
            raise UsageError(f"no model {name!r}", fix=nearest(name, (*_MODELS, *_ON_DIGITS)))
    wanted = [name for name in _TABLES if options.table in (name, "all")]
    if "closing" in wanted:
        from benchmarks.planner import closing

        for link in _possible(options.links, 2):
            closing.measure(link, options.runs, options.quick, _file(options, "closing"))
    if "ways" in wanted:
        from benchmarks.planner import ways

        ways.measure_all(options.quick, _file(options, "ways"))
    if "predicted" in wanted:
        tables = {name: _file(options, name) for name in ("predicted", "regret")}
        _on_links(options, "predicted", 2, **_plans(options), tables=tables)
    if "target" in wanted:
        shaped = tuple(link for link in options.links if link != LOOPBACK)  # nothing is promised without a limit
        with tempfile.TemporaryDirectory() as passing:
            notes = options.notes or Path(passing)
            notes.mkdir(parents=True, exist_ok=True)
            told: dict[str, Any] = {"seeds": 1 if options.quick else options.seeds, "notes": str(notes.resolve())}
            told["output"] = _file(options, "target")
            for phase, links in (("plan", shaped), ("train", (LOOPBACK,)), ("time", shaped)):
                _on_links(replace(options, links=links), "target", 2, phase=phase, **told)
    return 0


def _file(options: Options, table: str) -> str | None:
    return None if options.quick else str(options.output.resolve() / f"{table}.csv")


def _plans(options: Options) -> dict[str, Any]:
    return {
        "models": list(options.models),
        "plans": 6 if options.quick else options.plans,
        "rounds": 3 if options.quick else options.rounds,
        "seconds": options.seconds,
    }


def _possible(links: Sequence[str], ranks: int) -> Iterator[str]:
    """The links that can be made here; the others are told of."""
    for link in links:
        if link != LOOPBACK and (lack := missing()):
            print(f"{link}, {ranks} ranks: skipped, {lack}")
        else:
            yield link


def _on_links(options: Options, module: str, ranks: int, **told: Any) -> None:
    """Start `benchmarks.planner.MODULE.measure` in every rank, on every link."""
    for link in _possible(options.links, ranks):
        with Network(ranks, link) as network:
            asked = {"quick": options.quick, **told}
            measure_in_ranks(network, f"benchmarks.planner.{module}", asked, timeout=3 * 3600)


if __name__ == "__main__":
    run_command(main, Options)
