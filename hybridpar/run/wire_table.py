"""What a run says about the compression of its gradients: lines at the start, and a table."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import astuple, fields, replace
from pathlib import Path

from hybridpar.formats.output_files import replace_file
from hybridpar.observe.text import format_bytes
from hybridpar.sync.compression_table import LayerBytes, WireFormat

#: In the run directory: the codec of each parameter.
TABLE_FILE = "compress.csv"

#: Layers that the table at the start shows, the largest ones.
SHOWN = 10


def wire_format_lines(wire_format: WireFormat, directory: Path | None) -> list[str]:
    """Lines to show at the start; nothing where gradients are added as they are and no codec was asked for."""
    if not wire_format.layers:
        return []
    if directory is not None:
        replace_file(directory / TABLE_FILE, [table_csv(wire_format.layers)])
    policy = str(wire_format.policy)
    if wire_format.applied.changes_nothing and not wire_format.policy.changes_nothing:
        return [f"warning: --compress {policy[:60]} changes nothing: it fits no layer of this model"]
    rules = policy if len(policy) <= 60 else f"{len(wire_format.policy.rules)} rules, the first that matches counts"
    last = f"bytes that a worker sends in a step; all layers are in {TABLE_FILE}"
    return ["", f"gradients are sent as {rules}", "", *table_lines(wire_format.layers), last, ""]


def table_csv(rows: Sequence[LayerBytes]) -> bytes:
    """All rows as CSV."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(field.name for field in fields(LayerBytes))
    writer.writerows(map(astuple, rows))
    return text.getvalue().encode()


def table_lines(rows: Sequence[LayerBytes]) -> list[str]:
    """The table as lines of at most 79 characters, ASCII: the largest layers, the rest in one line, and the total."""
    largest = sorted(rows, key=lambda row: row.bytes_before, reverse=True)
    rest = largest[SHOWN:] if len(rows) > SHOWN + 1 else []  # a line for a single layer would save nothing
    shown = [row for row in rows if row not in rest]
    if rest:
        shown.append(_sum(f"{len(rest)} smaller ones", rest))
    total = _sum(f"all {len(rows)}", rows)
    ratio = f"{total.bytes_before / total.bytes_after:.1f}x less" if total.bytes_after else ""
    head = f"{'layer':26} {'kind':9} {'size':>11}  {'codec':12} {'before':>7} {'after':>7}"
    return [head, *map(_line, shown), _line(replace(total, kind="", codec=ratio))]


def _sum(name: str, rows: Sequence[LayerBytes]) -> LayerBytes:
    kinds, codecs = {row.kind for row in rows}, {row.codec for row in rows}
    return LayerBytes(
        name,
        "".join(kinds) if len(kinds) == 1 else "",
        sum(row.size for row in rows),
        "".join(codecs) if len(codecs) == 1 else f"{len(codecs)} codecs",
        sum(row.bytes_before for row in rows),
        sum(row.bytes_after for row in rows),
    )


def _line(row: LayerBytes) -> str:
    # The end of a name tells layers apart; of a codec its options are left out.
    layer = row.layer if len(row.layer) <= 26 else f"..{row.layer[-24:]}"
    codec = row.codec if len(row.codec) <= 12 else f"{row.codec.partition(':')[0]}:.."[:12]
    before, after = format_bytes(row.bytes_before), format_bytes(row.bytes_after)
    return f"{layer:26} {row.kind:9} {row.size:>11,}  {codec:12} {before:>7} {after:>7}"
