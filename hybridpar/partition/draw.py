"""Draws a partition: where the model is cut, what crosses, and the load of each stage.

Each stage is a row, its blocks drawn as wide as they take, so the row is the stage's bar of load; arcs above it are
residual and dense branches. Lines between rows are the tensors that are sent, with their bytes. A block is a run of
units that only feed each other, so that what is left is the shape of the model: blocks, branches, joins.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridpar.formats.output_files import require_matplotlib, save_picture
from hybridpar.partition.graph import UnitGraph
from hybridpar.partition.table import readable_bytes, where
from hybridpar.plan import Plan

_ROW = 3.0  # height of a row, in units of the height of a block
_MOST_LABELS = 5
_UPRIGHT = 12  # characters that fit into the height of a block


@dataclass
class Block:
    """A run of units drawn as a box; `left` and `width` are milliseconds."""

    stage: int
    units: list[int]
    left: float
    width: float = 0.0
    label: str = ""

    @property
    def center(self) -> float:
        """Middle on the time axis."""
        return self.left + self.width / 2


@dataclass(frozen=True)
class Wire:
    """A value drawn from a block to another, by their indices; `source` is None for an input of the model."""

    source: int | None
    target: int
    bytes: int


def lay_out(graph: UnitGraph, stage_of: list[int]) -> tuple[list[Block], list[Wire], list[Wire]]:
    """Blocks by stage and from left to right, wires inside of stages, and wires between them.

    Wires between neighbours in a row are left out: the boxes touch.
    """
    feeds, needs = defaultdict[int, set[int]](set), defaultdict[int, set[int]](set)
    for before, after in graph.edges():
        feeds[before].add(after)
        needs[after].add(before)
    blocks: list[Block] = []
    block_of: dict[int, int] = {}
    for unit in sorted(range(len(graph)), key=stage_of.__getitem__):  # in each stage in their order
        last = blocks[-1] if blocks and blocks[-1].stage == stage_of[unit] else None
        if last is None or needs[unit] != {last.units[-1]} or feeds[last.units[-1]] != {unit}:
            blocks.append(Block(stage_of[unit], [], 0.0 if last is None else last.left + last.width))
        blocks[-1].units.append(unit)
        blocks[-1].width += graph.units[unit].ms
        block_of[unit] = len(blocks) - 1
    for block in blocks:
        block.label = _label(graph, block)
    inner, cut = [], []
    for value in graph.values:
        source, home = block_of.get(value.producer), stage_of[value.producer] if value.producer >= 0 else 0
        crossed = {home}
        for consumer in value.consumers:
            wire = Wire(source, block_of[consumer], value.bytes)
            # A tensor is sent once per stage, to the block that first needs it.
            if stage_of[consumer] not in crossed:
                crossed.add(stage_of[consumer])
                cut.append(wire)
            elif stage_of[consumer] == home and source is not None and wire.target > source + 1:
                inner.append(wire)
    return blocks, inner, cut


def _label(graph: UnitGraph, block: Block) -> str:
    units = [graph.units[index] for index in block.units]
    first = units[0].module or units[0].operation
    if len(units) == 1:
        return first
    levels = zip(*(unit.module.split(".") for unit in units), strict=False)
    shared = [level[0] for level in itertools.takewhile(lambda level: len(set(level)) == 1, levels)]
    return ".".join(shared) if len(shared) > 1 else ".".join(first.split(".")[: len(shared) + 1]) + " ..."


def draw_partition(graph: UnitGraph, plan: Plan, path: str | Path) -> None:
    """Draw a partition into an SVG or PNG file.

    Args:
        graph: Units with times.
        plan: A plan made from them.
        path: File to write; the ending chooses the format.

    Raises:
        UsageError: matplotlib is missing, or the file cannot be written in the format its name asks for.
    """
    require_matplotlib()
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.hashsalt"] = "hybridpar"
    stages = plan.partition.stages
    # A plan of one stage names no units: it has them all.
    position = {unit: index for index, stage in enumerate(stages) for unit in stage.units}
    figure = Figure(figsize=(16, 1.6 + 1.7 * len(stages)), layout="constrained")
    axes = figure.subplots()
    figure.suptitle(_title(plan), fontsize=12, x=0.01, ha="left")
    _draw_rows(axes, plan, *lay_out(graph, [position.get(unit.name, 0) for unit in graph.units]))
    save_picture(figure, Path(path))


def _title(plan: Plan) -> str:
    part, measured = plan.partition, plan.measured
    noise = f", noise {measured.noise * 100:.0f} %" if measured is not None and measured.noise else ""
    source = measured.profile if measured is not None else None
    return (
        f"{plan.model.name} in {len(part.stages)} stages    micro-batch {part.micro_batch}    "
        f"largest/mean {part.balance:.3f}    {readable_bytes(part.cut_bytes)} cross    times {source}{noise}"
    )


def _color(stage: int) -> Any:
    import matplotlib

    return matplotlib.colormaps["tab10"](stage % 10)


def _base(stage: int) -> float:
    return -_ROW * stage


def _draw_rows(axes: Any, plan: Plan, blocks: list[Block], inner: list[Wire], cut: list[Wire]) -> None:
    stages = plan.partition.stages
    longest = max(block.left + block.width for block in blocks) or 1.0
    for index, block in enumerate(blocks):
        color = (*_color(block.stage)[:3], 0.85 if index % 2 else 0.6)
        middle = _base(block.stage) + 0.5
        axes.barh(middle, block.width, 1, left=block.left, color=[color], edgecolor="white", linewidth=0.6)
        _write_label(axes, block, longest)
    strength = min(0.55, 20 / max(len(inner), 1) + 0.12)  # many arcs must not turn black
    for wire in inner:
        assert wire.source is not None
        start, end = blocks[wire.source], blocks[wire.target]
        left, base = start.left + start.width, _base(start.stage) + 1
        height = 0.15 + 0.75 * min(1.0, abs(end.left - left) / (0.35 * longest))
        style = {"mutation_scale": 5, "color": "0.3", "alpha": strength, "linewidth": 0.8, "zorder": 1}
        _draw_arrow(axes, (left, base), (end.left, base), (height, height), style)
    _draw_cuts(axes, blocks, cut, longest)
    mean = sum(stage.ms or 0 for stage in stages) / len(stages)
    top, bottom = 2.2, _base(len(stages) - 1) - 0.9
    label = f"mean {mean:,.1f} ms"
    axes.plot([mean, mean], [bottom, top], ":", color="0.35", linewidth=0.9, zorder=0, label=label)
    axes.legend(loc="lower right", fontsize=8, framealpha=1, edgecolor="none", ncols=2)
    axes.set_xlim(-0.01 * longest, 1.02 * longest)
    axes.set_ylim(bottom, top)
    rows = range(len(stages))
    axes.set_yticks([_base(row) + 0.5 for row in rows], [_row_label(plan, row) for row in rows], fontsize=8)
    axes.set_xlabel("milliseconds per micro-batch, forward and backward; a box is a block of the model")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)


def _row_label(plan: Plan, row: int) -> str:
    """A stage with its worker, times and memory: what is even in time is not even in memory."""
    stage = plan.partition.stages[row]
    lines = [f"stage {row}"] + ([f"worker {where(plan, row)}"] if plan.placement else [])
    lines.append(f"forward {stage.forward_ms or 0:,.1f} ms, backward {stage.backward_ms or 0:,.1f} ms")
    sizes = readable_bytes(stage.parameter_bytes), readable_bytes(stage.saved_bytes or 0)
    return "\n".join([*lines, "parameters {}, saved {}".format(*sizes)])


def _write_label(axes: Any, block: Block, longest: float) -> None:
    share = block.width / longest
    if share < 0.009 or not block.label:
        return
    text, flat = block.label, share > 0.0075 * len(block.label)
    if not flat:
        text = (text if len(text) <= _UPRIGHT else text.removesuffix(" ...").rpartition(".")[2])[:_UPRIGHT]
    look = {"rotation": 0 if flat else 90, "fontsize": 8 if flat else 6.5, "color": "black", "clip_on": True}
    axes.text(block.center, _base(block.stage) + 0.5, text, ha="center", va="center", **look)


def _draw_arrow(
    axes: Any, start: tuple[float, float], end: tuple[float, float], up: tuple[float, float], style: dict[str, Any]
) -> None:
    """A curve that leaves and arrives upright; `up` is how far above its ends it bends."""
    from matplotlib.patches import FancyArrowPatch
    from matplotlib.path import Path as Curve

    points = [start, (start[0], start[1] + up[0]), (end[0], end[1] + up[1]), end]
    curve = Curve(points, [Curve.MOVETO, Curve.CURVE4, Curve.CURVE4, Curve.CURVE4])
    axes.add_patch(FancyArrowPatch(path=curve, arrowstyle="-|>", **style))


def _draw_cuts(axes: Any, blocks: list[Block], cut: list[Wire], longest: float) -> None:
    """Lines for what is sent, and a label per pair of stages, in the gap above the later; skips are dashed."""
    groups: dict[tuple[int, int], list[Wire]] = defaultdict(list)
    for wire in cut:
        groups[blocks[wire.source].stage if wire.source is not None else 0, blocks[wire.target].stage].append(wire)
    for (home, away), wires in sorted(groups.items()):
        color, skips, few = _color(home), away - home - 1, len(wires) <= _MOST_LABELS
        style = {"mutation_scale": 7, "color": color, "alpha": 0.75 if few else 0.4, "linewidth": 1.3, "zorder": 2}
        style["linestyle"] = (0, (4, 2)) if skips else "-"
        for wire in wires:
            start = blocks[wire.source].center if wire.source is not None else 0.0
            end = blocks[wire.target].center
            _draw_arrow(axes, (start, _base(home)), (end, _base(away) + 1), (-0.9, 0.9), style)
        total = readable_bytes(sum(wire.bytes for wire in wires))
        parts = " + ".join(readable_bytes(wire.bytes) for wire in wires)
        text = total if len(wires) == 1 else f"{parts} = {total}" if few else f"{len(wires)} tensors, {total}"
        left, height = (0.42 + 0.17 * skips) * longest, _base(away) + 1.62 - 0.26 * (skips % 2)
        frame = {"boxstyle": "round,pad=0.2", "facecolor": "white", "edgecolor": color, "linewidth": 0.6}
        look = {"fontsize": 8, "ha": "center", "va": "center", "color": color, "bbox": frame, "zorder": 3}
        axes.text(left, height, f"{home} → {away}: {text}", **look)
