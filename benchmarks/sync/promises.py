"""Judges step times against targets that were set before measuring, for codecs with an acceptable loss.

The best codec is the fastest of ours whose loss after a hundred steps is no worse than that of torch's PowerSGD of rank
4, by the table of `benchmarks.sync.losses`. Where that has not been measured, all take part, and the rows say so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.rig.paired import Paired
from benchmarks.rig.records import read_dicts
from benchmarks.rig.rows import Row, row
from benchmarks.rig.stats import PARITY_AT_MOST
from benchmarks.rig.table import wide_console
from benchmarks.sync.methods import codec_of
from hybridpar.compress.auto import FIDELITIES, PROVEN

#: Whose loss must be reached.
REFERENCE = "ddp-psgd4"


@dataclass(frozen=True)
class Promise:
    """Our best step against another project's.

    Attributes:
        over: Names of the others; the fastest of them counts.
        times: How many times as fast ours is at least; below 1 it may be slower.
        only: The one method of ours that it is about; empty for the best.
    """

    over: tuple[str, ...]
    times: float
    only: str = ""


#: What `--compress auto --fidelity lossy` chooses from, and how much slower than the fastest of it its choice may be.
AUTO, AMONG, NEARLY = "own:auto:lossy", tuple(f"own:{text}" for text in ("none", *FIDELITIES["lossy"])), 0.95
_POWERSGD = ("ddp-psgd1", "epfml-psgd4")
#: By link and number of ranks.
PROMISES: Mapping[tuple[str, int], tuple[Promise, ...]] = {
    ("1gbit", 2): (
        Promise(("ddp",), 4.0),
        Promise(("ddp-fp16",), 2.4),
        Promise(_POWERSGD, 1.3),
        Promise(("none",), 1 / 1.4),
        Promise(AMONG, NEARLY, only=AUTO),
    ),
    ("1gbit", 4): (Promise(("ddp",), 3.0), Promise(("ddp-fp16",), 2.0)),
    ("100mbit", 2): (
        Promise(("ddp",), 25.0),
        Promise(("ddp-fp16",), 13.0),
        Promise(_POWERSGD, 1.3),
        Promise(AMONG, NEARLY, only=AUTO),
    ),
    # In full precision a step takes half a minute there.
    ("10mbit+50ms", 2): (Promise(tuple(name for name in AMONG if name[4:] in PROVEN), NEARLY, only=AUTO),),
    ("loopback", 2): (Promise(("ddp",), 1 / PARITY_AT_MOST, only="own:auto"),),
}


def read_losses(path: Path) -> dict[str, float]:
    """The latest loss of each method, the mean over the seeds; empty where there is no table."""
    return {entry["what"].removeprefix("loss, "): float(entry["value"]) for entry in read_dicts(path)}


def eligible(ours: Sequence[str], losses: str | None) -> tuple[list[str], bool]:
    """Which of our methods may be the best, and whether their losses are known.

    Args:
        ours: Names of our methods.
        losses: The table of losses.
    """
    known = read_losses(Path(losses)) if losses else {}
    if REFERENCE not in known:
        return list(ours), False
    by_codec = {codec_of(name): loss for name, loss in known.items() if codec_of(name) is not None}
    return [name for name in ours if by_codec.get(codec_of(name), float("inf")) <= known[REFERENCE]], True


def promised_rows(result: Paired, ours: Sequence[str], common: Mapping[str, Any], known: bool) -> list[Row]:
    """A row for each promise that this run can judge.

    Args:
        result: The run.
        ours: Our methods that may be the best.
        common: Claim, setting, link and ranks.
        known: Whether they were chosen by their losses.
    """
    rows = []
    for promise in PROMISES.get((common["link"], common["ranks"]), ()):
        others = [name for name in promise.over if name in result.milliseconds]
        mine = [name for name in ours if name in result.milliseconds]
        if promise.only:
            mine = [name for name in result.milliseconds if name == promise.only]
        if len(others) < len(promise.over) or not mine:
            where, who = f"{common['link']}, {common['ranks']} ranks", ", ".join(promise.over)
            print(f"{where}: no promise of {promise.times:.2f} times {who} can be judged: not all was measured")
            continue
        extra = {
            "promise": f"{promise.times:.4g} times as fast as the faster of {', '.join(promise.over)}",
            "loss": "none needed" if promise.only else f"at most that of {REFERENCE}" if known else "not known",
        }
        best, other = min(mine, key=result.median_ms), min(others, key=result.median_ms)
        rows.append(row(result, best, other, target=1 / promise.times, extra=extra, **common))
    return rows


def print_promises(rows: Sequence[Row]) -> None:
    """What was promised, what was measured, and the verdict; as speed-ups."""
    if not rows:
        return
    table = Table(title=f"promises, {rows[0].link}, {rows[0].ranks} ranks", title_justify="left")
    for column in ("best of ours", "over", "target", "measured [95 %]", "verdict", "loss"):
        table.add_column(column)
    for entry in rows:
        assert entry.target is not None
        table.add_row(
            entry.method,
            entry.baseline,
            f">= {1 / entry.target:.2f} x",
            f"{1 / entry.ratio:.2f} x [{1 / entry.ratio_high:.2f}, {1 / entry.ratio_low:.2f}]",
            entry.verdict,
            entry.extra["loss"],
        )
    wide_console().print(table)
