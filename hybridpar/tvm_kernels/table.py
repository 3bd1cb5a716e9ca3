"""Tables of what tuning found: one row for each kernel, with torch's time, its own, and its error."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from hybridpar.tvm_kernels.database import Database, KernelRecord
from hybridpar.tvm_kernels.shapes import Direction, KernelKey

if TYPE_CHECKING:
    from rich.table import Table


def best_records(database: Database, only: Collection[KernelKey] | None = None) -> list[KernelRecord]:
    """The best record of each key that was measured, in the order of shapes and directions."""

    def order(key: KernelKey) -> tuple[Any, ...]:
        return key.device, key.threads, key.shape, key.layout, [*Direction].index(key.direction)

    keys = sorted((key for key in database if only is None or key in only), key=order)
    best = [database.best(key) or database.best(key, current=False) for key in keys]
    return [record for record in best if record is not None]


def row_of(record: KernelRecord) -> dict[str, Any]:
    """A record as a row: times in milliseconds, `ratio` to torch, and which of `tuned` and `stock` runs.

    Where it is not of the versions that are installed it is not `current`.
    """
    row = {name: getattr(record, name) for name in ("shape", "direction", "layout", "threads", "stock_ms", "error")}
    row |= {"tuned_ms": record.ms, "ratio": round(record.gain, 3), "current": record.current}
    return row | {"runs": "tuned" if record.wins else "stock"}


def table_of(records: Sequence[KernelRecord]) -> Table:
    """The records as a table for the terminal."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("shape", "direction", "threads", "stock_ms", "tuned_ms", "ratio", "error", "runs"):
        table.add_column(name, justify="left" if name in ("shape", "direction", "runs") else "right")
    for row in map(row_of, records):
        table.add_row(
            row["shape"] + (" contiguous" if row["layout"] == "contiguous" else ""),
            row["direction"],
            str(row["threads"]),
            f"{row['stock_ms']:.3f}",
            f"{row['tuned_ms']:.3f}",
            f"{row['ratio']:.2f}x",
            "" if row["error"] is None else f"{row['error']:.1e}",
            row["runs"] if row["current"] else f"{row['runs']}, other versions",
        )
    return table


def summary_lines(records: Sequence[KernelRecord]) -> list[str]:
    """Geometric means of the ratios per direction; where the kernel is not used the ratio is 1."""
    lines = []
    for direction in Direction:
        some = [record for record in records if record.direction == direction]
        if some:
            ratios = [record.gain for record in some if record.wins]
            mean = math.exp(sum(map(math.log, ratios)) / len(some))
            text = f"{len(ratios)} of {len(some)} tuned, {mean:.2f}x torch as chosen (geometric mean)"
            lines.append(f"{direction}: {text}")
    return lines
