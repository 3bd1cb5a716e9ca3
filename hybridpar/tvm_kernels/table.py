"""Tables and pictures of what tuning found: one row for each kernel, with torch's time, its own, and its error."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridpar.formats.output_files import require_matplotlib, save_picture
from hybridpar.tvm_kernels.database import Database
from hybridpar.tvm_kernels.operation import KernelKey, Operation, named_operation, operations

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class Row:
    """The best record of a key.

    Attributes:
        shape: The convolution or the norm.
        direction: What is computed; `batch_norm_act` for a norm, forward and backward together;
            `depthwise_batch_norm_act` for the forward of a convolution and the norm behind it.
        layout: Of activations.
        threads: Threads that compute it.
        device: Where it was measured.
        current: Whether the versions that it was measured with are those that are installed.
        stock_ms: Time of torch; of a convolution and a norm the time of their kernels apart.
        tuned_ms: Time of the kernel.
        floor_ms: What neither arithmetic nor memory can beat.
        ratio: How many times as fast as `stock_ms` the kernel is.
        error: Largest difference from float64, relative to the largest value.
        runs: `tuned` or `stock`: which of the two is used; of a convolution and a norm `together` or `apart`.
    """

    shape: str
    direction: str
    layout: str
    threads: int
    device: str
    current: bool
    stock_ms: float
    tuned_ms: float
    floor_ms: float | None
    ratio: float
    error: float | None
    runs: str


def rows_of(database: Database, only: Collection[KernelKey] | None = None) -> list[Row]:
    """The best record of each key that was measured, operation by operation, in the order of shapes and directions.

    Args:
        database: The records.
        only: Leave out what is not among these.

    Returns:
        A row for each.
    """
    directions = [str(direction) for one in _ordered() for direction in one.limits]

    def order(key: KernelKey) -> tuple[Any, ...]:
        place = directions.index(key.direction)
        own = next(iter(named_operation(key.op).limits))  # type: ignore[union-attr]
        return directions.index(own), key.device, key.threads, key.shape, key.layout, place

    rows = []
    for key in sorted((key for key in database if only is None or key in only), key=order):
        best = database.best(key) or database.best(key, current=False)
        if best is not None and best.ms is not None and best.stock_ms is not None:
            tuned, stock, _ = best.operation.words
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
                    best.floor_ms,
                    round(best.stock_ms / best.ms, 3),
                    best.error,
                    tuned if best.wins else stock,
                )
            )
    return rows


def _ordered() -> list[Operation]:
    """The operations in the order of tables and pictures."""
    return sorted({name: one for (name, _), one in operations().items()}.values(), key=lambda one: -len(one.limits))


def table_of(rows: Sequence[Row]) -> Table:
    """The rows as a table for the terminal.

    Args:
        rows: Of any operations.

    Returns:
        A table of rich.
    """
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("shape")
    table.add_column("direction")
    for name in ("threads", "stock_ms", "tuned_ms", "floor_ms", "ratio", "error"):
        table.add_column(name, justify="right")
    table.add_column("runs")
    for row in rows:
        table.add_row(
            row.shape + (" contiguous" if row.layout == "contiguous" else ""),
            row.direction,
            str(row.threads),
            f"{row.stock_ms:.3f}",
            f"{row.tuned_ms:.3f}",
            "" if row.floor_ms is None else f"{row.floor_ms:.3f}",
            f"{row.ratio:.2f}x",
            "" if row.error is None else f"{row.error:.1e}",
            row.runs if row.current else f"{row.runs}, other versions",
        )
    return table


def summary_lines(rows: Sequence[Row]) -> list[str]:
    """Geometric means of the ratios per direction; where the kernel is not used the ratio is 1.

    Args:
        rows: Of any operations.

    Returns:
        A line for each direction that occurs.
    """
    lines = []
    for operation in _ordered():
        name, _, other = operation.words
        for direction in operation.limits:
            own = [row for row in rows if row.direction == direction]
            if own:
                tuned = [row.ratio for row in own if row.runs == name]
                mean = math.exp(sum(map(math.log, tuned)) / len(own))
                said = f"{len(tuned)} of {len(own)} {name}, {mean:.2f}x {other} as chosen (geometric mean)"
                lines.append(f"{direction}: {said}")
    return lines


def draw_rows(rows: Sequence[Row], path: Path) -> None:
    """Draw a bar for each row: how many times as fast as torch.

    Args:
        rows: Of any operations.
        path: File to write, .svg, .png or .pdf.

    Raises:
        UsageError: matplotlib is missing, or the file cannot be written.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    shapes = list(dict.fromkeys((row.shape, row.layout, row.threads) for row in rows))
    figure = Figure(figsize=(9, 1.5 + 0.45 * len(shapes)), layout="constrained")
    axes = figure.subplots()
    for operation, index, direction in [
        (one, index, str(direction)) for one in _ordered() for index, direction in enumerate(one.limits)
    ]:
        own = {(row.shape, row.layout, row.threads): row.ratio for row in rows if row.direction == direction}
        if not own:
            continue
        middle = (len(operation.limits) - 1) / 2
        places = [place + 0.27 * (index - middle) for place, shape in enumerate(shapes) if shape in own]
        axes.barh(places, [own[shape] for shape in shapes if shape in own], height=0.25, label=direction)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_yticks(range(len(shapes)), [shape for shape, _, _ in shapes], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("times as fast as torch")
    axes.set_xscale("log")
    if rows:
        axes.legend(loc="best", fontsize=8)
    save_picture(figure, path)
