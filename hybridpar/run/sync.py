"""What a run says about the compression of its gradients: lines at the start, a table, columns of the metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hybridpar.observe.files import replace_file
from hybridpar.sync.compression_table import WireFormat, table_csv, table_lines
from hybridpar.sync.figures import SyncFigures

#: In the run directory: the codec of each parameter.
TABLE_FILE = "compress.csv"


def wire_format_lines(wire_format: WireFormat, directory: Path | None) -> list[str]:
    """Lines to show at the start; nothing where gradients are added as they are and no codec was asked for."""
    lines: list[str] = []
    if wire_format.layers:
        if directory is not None:
            replace_file(directory / TABLE_FILE, [table_csv(wire_format.layers)])
        policy = str(wire_format.policy)
        if wire_format.applied.changes_nothing and not wire_format.policy.changes_nothing:
            return [*lines, f"warning: --compress {policy[:60]} changes nothing: it fits no layer of this model"]
        rules = policy if len(policy) <= 60 else f"{len(wire_format.policy.rules)} rules, the first that matches counts"
        lines += ["", f"gradients are sent as {rules}", "", *table_lines(wire_format.layers)]
        lines += [f"bytes that a worker sends in a step; all layers are in {TABLE_FILE}", ""]
    return lines


def sync_fields(sync: SyncFigures, exposed_ms: float) -> dict[str, Any]:
    """What a step's record says of the sync of gradients; nothing where none were sent."""
    if not sync.bytes_before:
        return {}
    names = ("bytes_before", "bytes_after", "encode_ms", "wire_ms", "decode_ms", "sync_ms")
    kept = {"residual_norm": sync.residual_norm, "residual_norms": sync.residual_norms}
    return {name: getattr(sync, name) for name in names} | kept | {"hidden_share": sync.hidden_share(exposed_ms)}
