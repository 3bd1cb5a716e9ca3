"""Allocator settings, machine description and output of tables, shared by all benchmarks of kernels."""

from __future__ import annotations

import csv
import datetime
import platform
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch

from benchmarks.rig.rows import commit, device
from hybridpar.machine.process import describe_allocator, tune_this_process
from hybridpar.tvm_kernels.operation import operations

RESULTS = Path(__file__).parent / "results"


def same_allocator() -> None:
    """Give this process the allocator settings of a training run, which hold for all that it measures."""
    tune_this_process(1)


def setting() -> dict[str, object]:
    """Columns that every row ends with."""
    versions = dict(operations()["depthwise_conv2d", "cpu"].versions)
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "commit": commit(),
        "device": device(),
        "threads": torch.get_num_threads(),
        "allocator": describe_allocator(),
        "torch": versions["torch"],
        "tvm": versions["tvm"],
        "python": platform.python_version(),
    }


def write_rows(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    """Write a table; all rows have the columns of the first one."""
    rows = list(rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, list(rows[0]))
        table.writeheader()
        table.writerows(rows)


def print_aligned(rows: Sequence[Sequence[str]]) -> None:
    """Print rows in columns, the first one to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        print("  ".join([row[0].ljust(widths[0]), *cells]).rstrip())
