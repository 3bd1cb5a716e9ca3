"""Tables of what tuning found: one row for each kernel, with torch's time, its own, and its error."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from hybridpar.tvm_kernels.database import Database, KernelRecord
from hybridpar.tvm_kernels.shapes import Direction, KernelKey, Layout

if TYPE_CHECKING:
    from rich.table import Table


def best_records(database: Database, only: Collection[KernelKey] | None = None) -> list[KernelRecord]:
    """The best record of each key that was measured, in the order of shapes and directions."""

    def order(key: KernelKey) -> tuple[Any, ...]:
        return key.device, key.threads, key.shape, key.layout, [*Direction].index(key.direction)

    keys = sorted((key for key in database if only is None or key in only), key=order)
    best = [database.best(key) or database.best(key, current=False) for key in keys]
    return [record for record in best if record is not None]


def table_of(records: Sequence[KernelRecord]) -> Table:
    """The records as a table for the terminal: times in milliseconds, and which of `tuned` and `stock` runs."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("shape", "direction", "threads", "stock_ms", "tuned_ms", "ratio", "error", "runs"):
        table.add_column(name, justify="left" if name in ("shape", "direction", "runs") else "right")
    for record in records:
        runs = "tuned" if record.wins else "stock"
        table.add_row(
            record.shape + (" contiguous" if record.layout is Layout.CONTIGUOUS else ""),
            record.direction,
            str(record.threads),
            f"{record.stock_ms:.3f}",
            f"{record.ms:.3f}",
            f"{record.gain:.2f}x",
            "" if record.error is None else f"{record.error:.1e}",
            runs if record.current else f"{runs}, other versions",
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
