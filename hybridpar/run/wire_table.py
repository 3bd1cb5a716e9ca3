"""What a run says about the compression of its gradients: a line at the start, and a table in a file."""

from __future__ import annotations

import csv
import io
from dataclasses import astuple, fields
from pathlib import Path

from hybridpar.formats.output_files import replace_file
from hybridpar.observe.records import format_bytes
from hybridpar.sync.compression_table import LayerBytes, WireFormat

#: In the run directory: the codec of each parameter.
TABLE_FILE = "compress.csv"


def wire_format_lines(wire_format: WireFormat, directory: Path | None) -> list[str]:
    """A line to show at the start, and the table; nothing where gradients are added as they are and none was wanted."""
    if not wire_format.layers:
        return []
    if directory is not None:
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(field.name for field in fields(LayerBytes))
        writer.writerows(map(astuple, wire_format.layers))
        replace_file(directory / TABLE_FILE, [text.getvalue().encode()])
    policy = str(wire_format.policy)
    if wire_format.applied.changes_nothing and not wire_format.policy.changes_nothing:
        return [f"warning: --compress {policy[:60]} changes nothing: it fits no layer of this model"]
    rules = policy if len(policy) <= 60 else f"{len(wire_format.policy.rules)} rules, the first that matches counts"
    before, after = (sum(getattr(row, name) for row in wire_format.layers) for name in ("bytes_before", "bytes_after"))
    size = f"{format_bytes(before)} of a worker and step become {format_bytes(after)}"
    return [f"codec    {rules}: {size}; each layer is in {TABLE_FILE}"]
