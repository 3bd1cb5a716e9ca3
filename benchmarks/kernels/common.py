"""Allocator settings, the columns that every row ends with, and floors: what neither arithmetic nor memory can beat."""

from __future__ import annotations

import functools
import importlib.metadata
import platform
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.rig.rows import commit, now, processor
from hybridpar.machine.process import describe_allocator
from hybridpar.tvm_kernels.conv_bench import ConvBench, stock_call
from hybridpar.tvm_kernels.measure import Call
from hybridpar.tvm_kernels.shapes import ConvShape, Layout

RESULTS = Path(__file__).parent / "results"
#: Bytes a second of memory, and float32 multiply-adds a second, of SXM modules.
_GPUS = {
    "NVIDIA A100-SXM4-80GB": (2.039e12, 9.75e12),
    "NVIDIA H100 80GB HBM3": (3.35e12, 33.5e12),
    "NVIDIA H200": (4.8e12, 33.5e12),
}


def setting() -> dict[str, object]:
    """Columns that every row ends with."""
    return {
        "date": now(),
        "commit": commit(),
        "device": processor(),
        "threads": torch.get_num_threads(),
        "allocator": describe_allocator(),
        "torch": torch.__version__,
        "tvm": importlib.metadata.version("apache-tvm"),
        "python": platform.python_version(),
    }


def measure_speed() -> tuple[float, float]:
    """Float32 multiply-adds a second, in a product of matrices, and bytes a second in a copy, of this many threads."""
    left, right = torch.randn(2, 768, 768)
    out, source = torch.empty(768, 768), torch.zeros(8 << 20)
    copied = torch.empty_like(source)
    products = 768**3 / _least_seconds(lambda: torch.mm(left, right, out=out))
    return products, 2 * source.nbytes / _least_seconds(lambda: copied.copy_(source))


def _least_seconds(run: Callable[[], object]) -> float:
    seconds = []
    for _ in range(15):
        began = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - began)
    return min(seconds[1:])


def torchs_ways(bench: ConvBench) -> dict[str, Call]:
    """Torch's calls of a convolution in both layouts; on a GPU as it is, and with its own kernels for cuDNN's."""
    ways: dict[str, Call] = {}
    for layout in Layout:
        call = bench.instead
        if layout is not bench.key.layout:
            key, operands = bench.key, bench.operands(layout)
            call = bench.in_turn([stock_call(key.shape, key.direction, *tensors) for tensors in operands])
        ways[f"torch {layout}"] = call
        if bench.device is not None:
            ways[f"native {layout}"] = functools.partial(_without_cudnn, call)
    return ways


def _without_cudnn(call: Call) -> object:
    with torch.backends.cudnn.flags(enabled=False):
        return call()


def multiply_adds(shape: ConvShape) -> int:
    """Multiplications with an element of the image, not with padding; the same in all three directions."""
    count = shape.batch * shape.channels
    for axis, (size, outputs) in enumerate(((shape.height, shape.out_height), (shape.width, shape.out_width))):
        inputs = (
            out * shape.stride[axis] + tap * shape.dilation[axis] - shape.padding[axis]
            for out in range(outputs)
            for tap in range(shape.kernel[axis])
        )
        count *= sum(0 <= position < size for position in inputs)
    return count


def gpu_floor_ms(name: str, shape: ConvShape, item: int) -> float | None:
    """What neither arithmetic nor memory of a GPU can beat, by its data sheet; None where that is not here."""
    if name not in _GPUS:
        return None
    bandwidth, per_second = _GPUS[name]
    return 1e3 * max(multiply_adds(shape) / per_second, shape.least_bytes * item / 4 / bandwidth)
