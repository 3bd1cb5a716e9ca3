"""Depthwise convolution and BatchNorm kernels that are tuned on this very device, for any training loop.

A use of it::

    model = hybridpar.tvm_kernels.optimize(model, database="kernels.jsonl", report=True)

The names below are the public ones; they load torch when first used, so that the command line can describe its options
without it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hybridpar.tvm_kernels.database import Database as Database
    from hybridpar.tvm_kernels.database import append_records as append_records
    from hybridpar.tvm_kernels.database import default_database as default_database
    from hybridpar.tvm_kernels.database import merge_databases as merge_databases
    from hybridpar.tvm_kernels.database import read_database as read_database
    from hybridpar.tvm_kernels.layers import depthwise_layers as depthwise_layers
    from hybridpar.tvm_kernels.op import depthwise_conv2d as depthwise_conv2d
    from hybridpar.tvm_kernels.record import KernelRecord as KernelRecord
    from hybridpar.tvm_kernels.shapes import ConvShape as ConvShape
    from hybridpar.tvm_kernels.shapes import Direction as Direction
    from hybridpar.tvm_kernels.shapes import Layout as Layout
    from hybridpar.tvm_kernels.swap import DepthwiseConv2d as DepthwiseConv2d
    from hybridpar.tvm_kernels.swap import optimize as optimize
    from hybridpar.tvm_kernels.swap import restore as restore

_HOME = {
    "ConvShape": "shapes", "Database": "database", "DepthwiseConv2d": "swap", "Direction": "shapes",
    "KernelRecord": "record", "Layout": "shapes", "append_records": "database", "default_database": "database",
    "depthwise_conv2d": "op", "depthwise_layers": "layers", "merge_databases": "database", "optimize": "swap",
    "read_database": "database", "restore": "swap",
}  # fmt: skip

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
