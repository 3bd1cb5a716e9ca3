"""Tables of what tuning found: one row for each kernel, with torch's time, its own, and its error."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hybridpar.tvm_kernels.database import Database
from hybridpar.tvm_kernels.operation import KernelKey
from hybridpar.tvm_kernels.shapes import Direction

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class Row:
    """The best record of a key.

    Attributes:
        shape: The convolution.
        direction: What is computed.
        layout: Of activations.
        threads: Threads that compute it.
        device: Where it was measured.
        current: Whether the versions that it was measured with are those that are installed.
        stock_ms: Time of torch.
        tuned_ms: Time of the kernel.
        ratio: How many times as fast as `stock_ms` the kernel is.
        error: Largest difference from float64, relative to the largest value.
        runs: `tuned` or `stock`: which of the two is used.
    """

    shape: str
    direction: str
    layout: str
    threads: int
    device: str
    current: bool
    stock_ms: float
    tuned_ms: float
    ratio: float
    error: float | None
    runs: str


def rows_of(database: Database, only: Collection[KernelKey] | None = None) -> list[Row]:
    """The best record of each key that was measured, in the order of shapes and directions."""

    def order(key: KernelKey) -> tuple[Any, ...]:
        return key.device, key.threads, key.shape, key.layout, [*Direction].index(key.direction)

    rows = []
    for key in sorted((key for key in database if only is None or key in only), key=order):
        best = database.best(key) or database.best(key, current=False)
        if best is not None:
            rows.append(
                Row(
                    key.shape.text,
                    str(key.direction),
                    key.layout.value,
                    key.threads,
                    key.device,
                    best.current,
                    best.stock_ms,
                    best.ms,
                    round(best.stock_ms / best.ms, 3),
                    best.error,
                    "tuned" if best.wins else "stock",
                )
            )
    return rows


def table_of(rows: Sequence[Row]) -> Table:
    """The rows as a table for the terminal."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("shape")
    table.add_column("direction")
    for name in ("threads", "stock_ms", "tuned_ms", "ratio", "error"):
        table.add_column(name, justify="right")
    table.add_column("runs")
    for row in rows:
        table.add_row(
            row.shape + (" contiguous" if row.layout == "contiguous" else ""),
            row.direction,
            str(row.threads),
            f"{row.stock_ms:.3f}",
            f"{row.tuned_ms:.3f}",
            f"{row.ratio:.2f}x",
            "" if row.error is None else f"{row.error:.1e}",
            row.runs if row.current else f"{row.runs}, other versions",
        )
    return table


def summary_lines(rows: Sequence[Row]) -> list[str]:
    """Geometric means of the ratios per direction; where the kernel is not used the ratio is 1."""
    lines = []
    for direction in Direction:
        own = [row for row in rows if row.direction == direction]
        if own:
            tuned = [row.ratio for row in own if row.runs == "tuned"]
            mean = math.exp(sum(map(math.log, tuned)) / len(own))
            said = f"{len(tuned)} of {len(own)} tuned, {mean:.2f}x torch as chosen (geometric mean)"
            lines.append(f"{direction}: {said}")
    return lines
