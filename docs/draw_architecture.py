"""Draws docs/images/architecture.svg from the imports of the package.

    python docs/draw_architecture.py

Every box is a folder or top-level module; its height grows with its lines of code. A line leads down to what a
box imports; lines that follow from others are left out (the transitive reduction), and so are those to `errors`.
"""

from __future__ import annotations

import sys
from html import escape
from pathlib import Path

import networkx as nx

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.structure import PACKAGE, code_lines, floors, layers  # noqa: E402

#: What each folder or module is for, and the group whose colour it has.
CAPTIONS = {
    "errors": ("imported by all", "base"),
    "registry": ("names with descriptions", "base"),
    "spec": ("name:key=value as a dataclass", "base"),
    "config": ("options of a run", "base"),
    "models": ("models by name, fingerprint", "base"),
    "plan": ("plan.json", "base"),
    "formats": ("files and messages, read safely", "base"),
    "lanes": ("in-order queues on a device", "base"),
    "machine": ("devices, links, processes", "base"),
    "schedule": ("actions, checker, simulator", "parts"),
    "codegen": ("TVM and CUDA builds", "parts"),
    "compress": ("codecs, DDP hook", "parts"),
    "tvm_kernels": ("depthwise and norm kernels", "parts"),
    "partition": ("trace, measure, cut", "parts"),
    "comm": ("groups, collectives", "engine"),
    "sync": ("gradients between replicas", "engine"),
    "pipeline": ("runs stages on lanes", "engine"),
    "optim": ("optimizers, recipes", "engine"),
    "server": ("parameter servers", "engine"),
    "integrations": ("in other people's trainers", "engine"),
    "data": ("data sets, loaders", "base"),
    "observe": ("metrics, page, timeline", "base"),
    "planner": ("search for the fastest plan", "engine"),
    "train": ("Trainer, one step, checkpoints", "engine"),
    "run": ("what `train` adds: run directory", "command"),
    "commands": ("train, plan, tune, show, doctor", "command"),
    "cli": ("command line", "command"),
    "__main__": ("python -m hybridpar", "command"),
    "__init__": ("public names", "command"),
}
COLOURS = {"base": "#e8edf3", "parts": "#dcefe3", "engine": "#fdeed3", "command": "#f6dede"}
LEGEND = {
    "base": "used everywhere",
    "parts": "useful alone in your own loop",
    "engine": "trains",
    "command": "command line",
}
WIDTH, GAP_X, GAP_Y, MARGIN = 186, 30, 46, 30


def _size(layer: str) -> int:
    place = PACKAGE / layer
    files = list(place.rglob("*.py")) if place.is_dir() else [place.with_suffix(".py")]
    return sum(map(code_lines, files))


def _rows(graph: dict[str, set[str]], reduced: nx.DiGraph) -> list[list[str]]:
    """Layers by floor, the top one first; in a row each stands near the middle of what imports it."""
    level = floors(graph)
    # What only little imports stands just below the lowest of its users, not on the ground.
    for layer in sorted(level, key=lambda one: -level[one]):
        users = [level[user] for user in reduced.predecessors(layer)]
        if users:
            level[layer] = min(users) - 1
    rows = [sorted(one for one in level if level[one] == floor) for floor in range(max(level.values()), 0, -1)]
    place: dict[str, float] = {}
    for _ in range(8):
        for row in rows:
            wanted = {}
            for layer in row:
                near = [place[one] for one in nx.all_neighbors(reduced, layer) if one in place]
                wanted[layer] = sum(near) / len(near) if near else place.get(layer, 0.0)
            row.sort(key=lambda one: (wanted[one], one))
            for index, layer in enumerate(row):
                place[layer] = index - (len(row) - 1) / 2
    return [row for row in rows if row]


def draw() -> str:
    """The picture as SVG."""
    graph = layers()
    missing = set(graph) - set(CAPTIONS)
    if missing:
        raise SystemExit(f"no caption for {', '.join(sorted(missing))}: add it to CAPTIONS in {Path(__file__).name}")
    whole = nx.DiGraph([(layer, other) for layer, others in graph.items() for other in others])
    reduced = nx.transitive_reduction(whole)
    reduced.remove_edges_from([edge for edge in reduced.edges if edge[1] == "errors"])  # which all import
    rows = _rows(graph, reduced)
    most = max(map(len, rows))
    width = most * (WIDTH + GAP_X) - GAP_X + 2 * MARGIN
    boxes: dict[str, tuple[float, float, float]] = {}
    top = float(MARGIN + 30)
    for row in rows:
        heights = {layer: 42 + min(30.0, _size(layer) / 250) for layer in row}
        left = (width - len(row) * (WIDTH + GAP_X) + GAP_X) / 2
        for index, layer in enumerate(row):
            boxes[layer] = (left + index * (WIDTH + GAP_X), top, heights[layer])
        top += max(heights.values()) + GAP_Y
    parts = []
    for upper, lower in sorted(reduced.edges):
        (x1, y1, h1), (x2, y2, _) = boxes[upper], boxes[lower]
        outs = sorted(reduced.successors(upper), key=lambda one: boxes[one][0])
        ins = sorted(reduced.predecessors(lower), key=lambda one: boxes[one][0])
        x1 += WIDTH * (outs.index(lower) + 1) / (len(outs) + 1)
        x2 += WIDTH * (ins.index(upper) + 1) / (len(ins) + 1)
        y1 += h1
        bend = max(24.0, (y2 - y1) / 2)
        parts.append(
            f'<path d="M{x1:.0f},{y1:.0f} C{x1:.0f},{y1 + bend:.0f} {x2:.0f},{y2 - bend:.0f} {x2:.0f},{y2:.0f}" '
            'fill="none" stroke="#8a94a3" stroke-width="1.3"/>'
        )
    for layer, (x, y, height) in boxes.items():
        caption, group = CAPTIONS[layer]
        middle = x + WIDTH / 2
        parts += [
            f'<rect x="{x:.0f}" y="{y:.0f}" width="{WIDTH}" height="{height:.0f}" rx="7" fill="{COLOURS[group]}" '
            'stroke="#5b6573"/>',
            f'<text x="{middle:.0f}" y="{y + height / 2 - 4:.0f}" class="name">{escape(layer)}</text>',
            f'<text x="{middle:.0f}" y="{y + height / 2 + 12:.0f}" class="caption">{escape(caption)}</text>',
        ]
    for index, (group, text) in enumerate(LEGEND.items()):
        x = MARGIN + index * 230
        parts.append(f'<rect x="{x}" y="14" width="16" height="16" rx="3" fill="{COLOURS[group]}" stroke="#5b6573"/>')
        parts.append(f'<text x="{x + 24}" y="27" class="legend">{escape(text)}</text>')
    style = (
        "text{font-family:Helvetica,Arial,sans-serif;fill:#1d2530;text-anchor:middle}"
        ".name{font-size:15px;font-weight:600}.caption{font-size:11px;fill:#46505d}"
        ".legend{font-size:13px;text-anchor:start}"
    )
    size = f'viewBox="0 0 {width:.0f} {top:.0f}" width="{width:.0f}" height="{top:.0f}"'
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n<style>{style}</style>\n'
        f'<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n'
    )


if __name__ == "__main__":
    (ROOT / "docs/images/architecture.svg").write_text(draw(), encoding="utf-8")
