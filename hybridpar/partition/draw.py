"""Draws a partition: where the model is cut, what crosses, and the load of each stage.

Each stage is a row, its blocks drawn as wide as they take, so the row is the stage's bar of load; arcs above it are
residual and dense branches. Lines between rows are the tensors that are sent, with their bytes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hybridpar.formats.output_files import require_matplotlib, save_picture
from hybridpar.partition.graph import UnitGraph
from hybridpar.partition.layout import Block, Layout, Wire, lay_out, readable_bytes
from hybridpar.plan import Plan

_ROW = 3.0  # height of a row, in units of the height of a block
_MOST_LABELS = 5
_UPRIGHT = 12  # characters that fit into the height of a block


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
    position = {unit: index for index, stage in enumerate(stages) for unit in stage.units}
    layout = lay_out(graph, [position[unit.name] for unit in graph.units])
    figure = Figure(figsize=(16, 1.6 + 1.7 * len(stages)), layout="constrained")
    axes, bars = figure.subplots(1, 2, width_ratios=(4.6, 1), sharey=True)
    figure.suptitle(_title(plan), fontsize=12, x=0.01, ha="left")
    _draw_rows(axes, layout, plan)
    _draw_bars(bars, plan)
    save_picture(figure, Path(path))


def _title(plan: Plan) -> str:
    part = plan.partition
    noise = plan.measured.noise if plan.measured is not None else None
    source = plan.measured.profile if plan.measured is not None else None
    return (
        f"{plan.model.name} in {len(part.stages)} stages    micro-batch {part.micro_batch}    "
        f"largest/mean {part.balance:.3f}    {readable_bytes(part.cut_bytes or 0)} cross    times {source}"
        + (f", noise {noise * 100:.0f} %" if noise else "")
    )


def _color(stage: int) -> Any:
    import matplotlib

    return matplotlib.colormaps["tab10"](stage % 10)


def _base(stage: int) -> float:
    return -_ROW * stage


def _draw_rows(axes: Any, layout: Layout, plan: Plan) -> None:
    from matplotlib.patches import Rectangle

    stages = plan.partition.stages
    longest = max(sum(block.width for block in layout.blocks if block.stage == row) for row in range(len(stages)))
    longest = longest or 1.0
    for index, block in enumerate(layout.blocks):
        color = (*_color(block.stage)[:3], 0.85 if index % 2 else 0.6)
        axes.add_patch(
            Rectangle(
                (block.left, _base(block.stage)), block.width, 1, facecolor=color, edgecolor="white", linewidth=0.6
            )
        )
        _write_label(axes, block, longest)
    strength = min(0.55, 20 / max(len(layout.inner), 1) + 0.12)  # many arcs must not turn black
    for wire in layout.inner:
        _draw_arc(axes, layout, wire, longest, strength)
    _draw_cuts(axes, layout, longest)
    mean = sum(stage.ms or 0 for stage in stages) / len(stages)
    top, bottom = 2.2, _base(len(stages) - 1) - 0.9
    label = f"mean {mean:,.1f} ms"
    axes.plot([mean, mean], [bottom, top], ":", color="0.35", linewidth=0.9, zorder=0, label=label)
    axes.legend(loc="lower right", fontsize=8, framealpha=1, edgecolor="none", ncols=2)
    axes.set_xlim(-0.01 * longest, 1.02 * longest)
    axes.set_ylim(bottom, top)
    axes.set_yticks(
        [_base(row) + 0.5 for row in range(len(stages))], [_row_name(plan, row) for row in range(len(stages))]
    )
    axes.set_xlabel("milliseconds per micro-batch, forward and backward; a box is one block of the model")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)


def _row_name(plan: Plan, row: int) -> str:
    name = f"stage {row}"
    if plan.placement is not None:
        worker, lane = plan.layout.replica().rows[0][row]
        name += f"\nworker {worker}\n{plan.placement.device}" + (f" lane {lane}" if lane else "")
    return name


def _write_label(axes: Any, block: Block, longest: float) -> None:
    share = block.width / longest
    if share < 0.009 or not block.label:
        return
    flat = share > 0.0075 * len(block.label)
    upright = block.label if len(block.label) <= _UPRIGHT else block.label.removesuffix(" ...").rpartition(".")[2]
    axes.text(
        block.center,
        _base(block.stage) + 0.5,
        block.label if flat else upright[:_UPRIGHT],
        rotation=0 if flat else 90,
        fontsize=8 if flat else 6.5,
        ha="center",
        va="center",
        color="black",
        clip_on=True,
    )


def _draw_arc(axes: Any, layout: Layout, wire: Wire, longest: float, strength: float) -> None:
    from matplotlib.patches import FancyArrowPatch

    assert wire.source is not None
    start, end = layout.blocks[wire.source], layout.blocks[wire.target]
    base = _base(start.stage) + 1
    left, right = start.left + start.width, end.left
    height = 0.15 + 0.75 * min(1.0, abs(right - left) / (0.35 * longest))
    axes.add_patch(
        FancyArrowPatch(
            path=_curve([(left, base), (left, base + height), (right, base + height), (right, base)]),
            arrowstyle="-|>",
            mutation_scale=5,
            color="0.3",
            alpha=strength,
            linewidth=0.8,
            zorder=1,
        )
    )


def _draw_cuts(axes: Any, layout: Layout, longest: float) -> None:
    from matplotlib.patches import FancyArrowPatch

    groups: dict[tuple[int, int], list[Wire]] = {}
    for wire in layout.cut:
        home = layout.blocks[wire.source].stage if wire.source is not None else 0
        groups.setdefault((home, layout.blocks[wire.target].stage), []).append(wire)
    for (home, away), wires in sorted(groups.items()):
        for wire in wires:
            start = layout.blocks[wire.source].center if wire.source is not None else 0.0
            end = layout.blocks[wire.target]
            top, low = _base(home), _base(away) + 1
            axes.add_patch(
                FancyArrowPatch(
                    path=_curve([(start, top), (start, top - 0.9), (end.center, low + 0.9), (end.center, low)]),
                    arrowstyle="-|>",
                    mutation_scale=7,
                    color=_color(home),
                    alpha=0.75 if len(wires) <= _MOST_LABELS else 0.4,
                    linewidth=1.3,
                    linestyle="-" if away == home + 1 else (0, (4, 2)),
                    zorder=2,
                )
            )
        _label_cut(axes, home, away, wires, longest)


def _label_cut(axes: Any, home: int, away: int, wires: list[Wire], longest: float) -> None:
    """One label per pair of stages, in the gap above the later one; skips are listed below one another."""
    total = readable_bytes(sum(wire.bytes for wire in wires))
    if len(wires) == 1:
        text = total
    elif len(wires) <= _MOST_LABELS:
        text = " + ".join(readable_bytes(wire.bytes) for wire in wires) + f" = {total}"
    else:
        text = f"{len(wires)} tensors, {total}"
    skips = away - home - 1
    axes.text(
        (0.42 + 0.17 * skips) * longest,
        _base(away) + 1.62 - 0.26 * (skips % 2),
        f"{home} → {away}: {text}",
        fontsize=8,
        ha="center",
        va="center",
        color=_color(home),
        bbox={"boxstyle": "round,pad=0.2", "facecolor": "white", "edgecolor": _color(home), "linewidth": 0.6},
        zorder=3,
    )


def _curve(points: list[tuple[float, float]]) -> Any:
    from matplotlib.path import Path as Curve

    return Curve(points, [Curve.MOVETO, Curve.CURVE4, Curve.CURVE4, Curve.CURVE4])


def _draw_bars(axes: Any, plan: Plan) -> None:
    """Memory beside time: what is even in one is not even in the other."""
    stages = plan.partition.stages
    most = max((stage.parameter_bytes + (stage.saved_bytes or 0) for stage in stages), default=1) or 1
    for row, stage in enumerate(stages):
        saved = stage.saved_bytes or 0
        middle = _base(row) + 0.5
        axes.barh(middle, stage.parameter_bytes / most, 0.5, color=_color(row), alpha=0.95)
        axes.barh(middle, saved / most, 0.5, left=stage.parameter_bytes / most, color=_color(row), alpha=0.4)
        axes.text(
            0,
            middle + 0.38,
            f"forward {stage.forward_ms or 0:,.1f} ms, backward {stage.backward_ms or 0:,.1f} ms",
            fontsize=8,
            va="bottom",
        )
        axes.text(
            0,
            middle - 0.38,
            f"parameters {readable_bytes(stage.parameter_bytes)}, saved {readable_bytes(saved)}",
            fontsize=8,
            va="top",
        )
    axes.set_xlim(0, 1.15)
    axes.set_xlabel("parameters (dark), saved for\nbackward per micro-batch (light)")
    axes.set_xticks([])
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
