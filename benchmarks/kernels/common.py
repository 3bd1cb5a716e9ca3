"""Allocator settings, machine description and printing of tables, shared by all benchmarks of kernels."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.rig.rows import commit, device, now
from hybridpar.machine.process import describe_allocator, tune_this_process
from hybridpar.tvm_kernels.operation import versions as kernel_versions

RESULTS = Path(__file__).parent / "results"


def same_allocator() -> None:
    """Give this process the allocator settings of a training run, which hold for all that it measures."""
    tune_this_process(1)


def setting() -> dict[str, object]:
    """Columns that every row ends with."""
    versions = kernel_versions()
    return {
        "date": now(),
        "commit": commit(),
        "device": device(),
        "threads": torch.get_num_threads(),
        "allocator": describe_allocator(),
        "torch": versions["torch"],
        "tvm": versions["tvm"],
        "python": platform.python_version(),
    }


def print_aligned(rows: Sequence[Sequence[str]]) -> None:
    """Print rows in columns, the first one to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        print("  ".join([row[0].ljust(widths[0]), *cells]).rstrip())
