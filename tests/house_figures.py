"""Measures how large and how simple the project is, for the table at the end of docs/internals.md.

    python -m tests.house_figures            print the table
    python -m tests.house_figures --write    put it into docs/internals.md

Lines of code are those that are neither blank, comment nor docstring. The walks are those of scripts/walks.py.
"""

from __future__ import annotations

import sys

from scripts.walks import WALKS, count
from tests.structure import PACKAGE, ROOT, code_lines, dotted, layer_of, python_files

DOCUMENT = ROOT / "docs/internals.md"
BEGIN, END = "<!-- figures: python -m tests.house_figures --write -->", "<!-- end of figures -->"

#: Folders and modules of the package by part; `run` has all others.
PARTS = {
    "kernels": ("tvm_kernels", "codegen"),
    "gradients": ("compress", "sync", "comm", "server"),
    "plans": ("planner", "partition", "pipeline", "schedule", "lanes", "machine", "plan"),
    "run": (),
}


def lines_by_part() -> dict[str, int]:
    """Lines of code of each part of the package, and of what is beside it."""
    part_of = {layer: part for part, layers in PARTS.items() for layer in layers}
    lines = dict.fromkeys(PARTS, 0)
    for path in PACKAGE.rglob("*.py"):
        lines[part_of.get(layer_of(dotted(path)), "run")] += code_lines(path)
    lines["library"] = sum(lines.values())
    return lines | {folder: sum(map(code_lines, python_files(folder))) for folder in ("tests", "benchmarks")}


def table() -> str:
    """The figures as two Markdown tables."""
    rows = ["| lines of code | |", "|---|---|"]
    for part, lines in lines_by_part().items():
        told = ", ".join(f"`{layer}`" for layer in PARTS.get(part, ()))
        rows.append(f"| {part}{f': {told}' if told else ''} | {lines:,} |")
    rows += ["", "| walk | files | calls |", "|---|---|---|"]
    for walk in WALKS:
        calls = count(walk)
        rows.append(f"| {walk} | {len(calls)} | {calls.total():,} |")
    return "\n".join(rows)


def main(write: bool) -> None:
    """Print the tables, or put them into docs/internals.md."""
    text = table()
    print(text)
    if write:
        document = DOCUMENT.read_text(encoding="utf-8")
        head, rest = document.split(BEGIN)
        DOCUMENT.write_text(f"{head}{BEGIN}\n{text}\n{END}{rest.split(END)[1]}", encoding="utf-8")


if __name__ == "__main__":
    main("--write" in sys.argv[1:])
