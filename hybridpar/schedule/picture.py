"""Draws a schedule as a grid of lanes by time."""

from __future__ import annotations

from hybridpar.schedule.actions import Action, Kind, Schedule
from hybridpar.schedule.layout import Layout
from hybridpar.schedule.program import LaneRun, dependencies


def draw_schedule(
    schedule: Schedule, layout: Layout, *, mark: Action | None = None, note: str = "", width: int = 100
) -> str:
    """A schedule as a grid of text: a row per lane, a column per slot of time.

    A forward pass takes one slot, a backward pass two: `B3 --`. A dot is an idle slot. From the place where a lane can
    never go on, its cells have question marks and no time.

    Args:
        schedule: The schedule; it may be wrong.
        layout: Where its stages run.
        mark: An action to point at, under its row.
        note: What to write beside the mark.
        width: Characters per line; a longer grid is cut to a part that has the mark in it, and says so.
    """
    run = LaneRun(schedule, layout, dependencies(layout, schedule))
    several = any(len({action.stage for action in row}) > 1 for row in schedule.rows)
    rows: list[list[str]] = []
    marked: tuple[int, int] | None = None
    for lane, row in enumerate(schedule.rows):
        starts = list(map(int, run.starts[lane]))
        cells: list[str] = []
        for position, action in enumerate(row):
            text = str(action) if several else f"{action.kind.value}{action.index}"
            if position < len(starts):
                cells += ["."] * (starts[position] - len(cells))
            if action == mark:
                marked = marked or (lane, len(cells))
            if position < len(starts):
                cells += [text, "-" * len(text)] if action.kind is Kind.BACKWARD else [text]
            else:
                cells.append(f"{text}?")
        rows.append(cells)
    total = max(len(cells) for cells in rows)
    column = 1 + max([len(str(total)), *(len(cell) for cells in rows for cell in cells)])
    label = len(f"lane {len(rows) - 1}  ")
    shown = max(1, (width - label) // column)
    first = 0
    if marked is not None and marked[1] >= shown:
        first = min(marked[1] - shown // 2, total - shown)
    window = range(first, min(total, first + shown))
    lines = [" " * label + "".join(f"{slot:<{column}}" for slot in window).rstrip()]
    for lane, cells in enumerate(rows):
        cells += ["."] * (int(run.length) - len(cells))
        part = "".join(f"{cell:<{column}}" for cell in cells[window.start : window.stop])
        lines.append((f"lane {lane}".ljust(label) + part).rstrip())
        if marked is not None and marked[0] == lane:
            indent = label + column * (marked[1] - first)
            lines.append(f"{' ' * indent}{'^' * (column - 1)} {note}".rstrip())
    if len(window) < total:
        lines.append(f"(slots {window.start} to {window.stop - 1} of {total})")
    return "\n".join(lines)
