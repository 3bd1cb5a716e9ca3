"""Depthwise convolution and BatchNorm kernels that are tuned on this very device, for any training loop.

A use of it::

    model = hybridpar.tvm_kernels.optimize(model, database="kernels.jsonl", report=True)

The names below are the public ones; they load torch when first used, so that the command line can describe its options
without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybridpar.registry import lazy_names

if TYPE_CHECKING:
    from hybridpar.tvm_kernels.database import Database as Database
    from hybridpar.tvm_kernels.database import KernelRecord as KernelRecord
    from hybridpar.tvm_kernels.database import append_records as append_records
    from hybridpar.tvm_kernels.database import default_database as default_database
    from hybridpar.tvm_kernels.database import read_database as read_database
    from hybridpar.tvm_kernels.op import depthwise_conv2d as depthwise_conv2d
    from hybridpar.tvm_kernels.shapes import ConvShape as ConvShape
    from hybridpar.tvm_kernels.shapes import Direction as Direction
    from hybridpar.tvm_kernels.shapes import Layout as Layout
    from hybridpar.tvm_kernels.swap import DepthwiseConv2d as DepthwiseConv2d
    from hybridpar.tvm_kernels.swap import optimize as optimize
    from hybridpar.tvm_kernels.swap import restore as restore

_MODULES = {
    "database": "KernelRecord Database append_records default_database read_database",
    "op": "depthwise_conv2d",
    "shapes": "ConvShape Direction Layout",
    "swap": "DepthwiseConv2d optimize restore",
}

__getattr__, __dir__, __all__ = lazy_names(__name__, _MODULES)
