"""Checks the depthwise kernels and times them against torch: a part of the pack `kernels` of `scripts/gpu_check.py`.

Every direction, layout and dtype is compared with float64 on some shapes, then timed against torch, as it is and with
its own kernels in place of cuDNN's, in both layouts. Candidates are those that were the best of a shape before, by the
rows of `convolutions.csv`, then those that are like them. With machine code that was compiled elsewhere (`--prebuild
DIR`, then `--prebuilt DIR`) a machine needs neither TVM nor a compiler.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch

from benchmarks.kernels.common import gpu_floor_ms, torchs_ways
from benchmarks.rig.records import append_dicts, read_dicts
from hybridpar.codegen.cache import KernelsUnavailable
from hybridpar.codegen.compile_pool import Builder
from hybridpar.tvm_kernels import cuda_kernel
from hybridpar.tvm_kernels.conv_bench import ConvBench
from hybridpar.tvm_kernels.cuda_kernel import CudaKernel, CudaVariant, load_cubin
from hybridpar.tvm_kernels.database import most_error
from hybridpar.tvm_kernels.machine import Gpu
from hybridpar.tvm_kernels.measure import time_pairs
from hybridpar.tvm_kernels.shapes import ConvShape, Direction, KernelKey, Layout
from hybridpar.tvm_kernels.space import candidates, default, nearest
from scripts.gpu_common import RESULTS, Outcome, Pack, Result, SkippedCheck, run_each

#: The table of times.
TABLE = "convolutions.csv"
#: What `prebuild` writes beside machine code: a line of JSON for each candidate.
LIST = "candidates.jsonl"

#: Sizes that nothing divides, one channel, borders wider than the image, dilation.
CHECKED = (
    "2x24x13x11 k3x3 s1x1 p1x1 d1x1",
    "3x40x15x17 k5x5 s2x2 p2x2 d1x1",
    "2x36x7x7 k7x7 s1x1 p3x3 d1x1",
    "1x1x9x31 k3x3 s2x2 p1x1 d1x1",
    "2x10x12x9 k3x3 s1x1 p2x2 d2x2",
)

#: Layers of MobileNetV2, EfficientNet-B0 and ConvNeXt-T.
TIMED = (
    "64x32x112x112 k3x3 s1x1 p1x1 d1x1",
    "64x96x112x112 k3x3 s2x2 p1x1 d1x1",
    "64x144x56x56 k3x3 s1x1 p1x1 d1x1",
    "64x384x14x14 k3x3 s1x1 p1x1 d1x1",
    "64x960x7x7 k3x3 s1x1 p1x1 d1x1",
    "64x240x28x28 k5x5 s1x1 p2x2 d1x1",
    "64x672x14x14 k5x5 s2x2 p2x2 d1x1",
    "64x96x56x56 k7x7 s1x1 p3x3 d1x1",
    "64x768x7x7 k7x7 s1x1 p3x3 d1x1",
)
DTYPES_CHECKED, DTYPES_TIMED = ("float32", "bfloat16", "float16"), ("float32", "bfloat16")

#: Candidates of each case that are timed.
KEPT = 6
#: Seconds to time a candidate for, and its rival.
SECONDS = 0.05


def cases(gpu: Gpu, shapes: Iterable[str], dtypes: Iterable[str]) -> list[KernelKey]:
    """Every direction and layout of some shapes and dtypes."""
    return [
        KernelKey(direction, ConvShape.parse(shape), layout, 1, gpu.fingerprint, dtype)
        for shape, dtype, layout, direction in itertools.product(shapes, dtypes, Layout, Direction)
    ]


def prebuild(folder: Path, gpu: Gpu, checked: int = 1, timed: int = KEPT) -> None:
    """Compile what a GPU is to run.

    Args:
        folder: Where to put it.
        gpu: That it is for.
        checked: Candidates of each case that is only checked.
        timed: Candidates of each case that is timed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    wanted = [(key, checked) for key in cases(gpu, CHECKED, DTYPES_CHECKED)]
    wanted += [(key, timed) for key in cases(gpu, TIMED, DTYPES_TIMED)]
    compiled = 0
    with Builder(1) as builder, (folder / LIST).open("w") as file:
        for number, (key, count) in enumerate(wanted):
            print(f"{number}/{len(wanted)} {key.direction} {key.shape.text}")
            for parameters, code in compiled_candidates(key, builder, count):
                name = f"{hashlib.sha256(code).hexdigest()[:24]}.cubin"
                (folder / name).write_bytes(code)
                line = {"case": _name(key), "architecture": gpu.architecture, "parameters": parameters, "file": name}
                file.write(json.dumps(line) + "\n")
                compiled += 1
    print(f"{compiled} candidates of {len(wanted)} cases compiled for {gpu.architecture}")


def compiled_candidates(key: KernelKey, builder: Builder, count: int) -> Iterator[tuple[dict[str, int], bytes]]:
    """The first candidates that compile without keeping values in memory for want of registers, with machine code."""
    space = candidates(key)
    wanted = [*best_before(key), default(key)]
    compiled = failed = 0
    while space and compiled < count and failed <= 2 * count + 4:
        parameters = nearest(wanted[min(compiled + failed, len(wanted) - 1)], space)
        space.remove(parameters)
        try:
            source = builder.build(CudaVariant(key, parameters).request).image
            yield parameters, cuda_kernel.compile_unspilled(source, key.device.rpartition(" ")[2])
            compiled += 1
        except KernelsUnavailable as error:
            failed += 1
            print(f"{_name(key)} {parameters}: {error}", file=sys.stderr)


def best_before(key: KernelKey) -> list[dict[str, int]]:
    """What was the fastest of a case, by the rows of the table, the newest first."""
    rows = [row for row in read_dicts(RESULTS / TABLE) if row["method"] == "kernel" and _row_case(row) == _name(key)]
    texts = dict.fromkeys(row["parameters"] for row in reversed(rows))
    return [{name: int(value) for name, _, value in (word.partition("=") for word in text.split())} for text in texts]


def _row_case(row: dict[str, str]) -> str:
    return " ".join(row[name] for name in ("direction", "shape", "layout", "dtype"))


class Kernels:
    """Candidates for a GPU, from a directory or built here.

    Args:
        gpu: The GPU.
        index: Its number.
        folder: What `prebuild` wrote; None to build.
    """

    def __init__(self, gpu: Gpu, index: int, folder: Path | None) -> None:
        self.gpu, self.index, self.folder = gpu, index, folder
        lines = (folder / LIST).read_text().splitlines() if folder is not None else []
        self._compiled = [json.loads(line) for line in lines]

    def of(self, key: KernelKey, count: int) -> list[CudaKernel]:
        """The first candidates of a case.

        Raises:
            SkippedCheck: None was prebuilt for this architecture.
            KernelsUnavailable: None can be built.
        """
        candidates = self._prebuilt(key) if self.folder is not None else self._built(key)
        kernels = [load_cubin(variant, code, self.index) for variant, code in itertools.islice(candidates, count)]
        if not kernels:
            raise SkippedCheck(f"there is no machine code for {self.gpu.architecture}")
        return kernels

    def _prebuilt(self, key: KernelKey) -> Iterator[tuple[CudaVariant, bytes]]:
        assert self.folder is not None
        for line in self._compiled:
            if (line["case"], line["architecture"]) == (_name(key), self.gpu.architecture):
                yield CudaVariant(key, line["parameters"]), (self.folder / line["file"]).read_bytes()

    def _built(self, key: KernelKey) -> Iterator[tuple[CudaVariant, bytes]]:
        with Builder(1) as builder:
            for parameters, code in compiled_candidates(key, builder, KEPT):
                yield CudaVariant(key, parameters), code


def _name(key: KernelKey) -> str:
    return f"{key.direction} {key.shape.text} {key.layout} {key.dtype}"


def compare(kernels: Kernels, key: KernelKey, device: torch.device) -> Outcome:
    """The error of the first candidate, and that a second call gives the same bits."""
    (kernel,) = kernels.of(key, 1)
    bench = ConvBench(key, 0, device)
    error, limit = bench.error(kernel), most_error(key.direction, key.dtype)
    return error, limit, error <= limit and torch.equal(bench.run(kernel), bench.run(kernel))


def run_checks(device: torch.device, kernels: Kernels) -> Iterator[Result]:
    """Compare every case with float64, printing each."""
    checks: dict[str, Callable[[], Outcome]] = {
        _name(key): lambda key=key: compare(kernels, key, device)  # type: ignore[misc]
        for key in cases(kernels.gpu, CHECKED, DTYPES_CHECKED)
    }
    yield from run_each(checks)


@dataclasses.dataclass(frozen=True)
class Timed:
    """Times of one case: of the fastest candidate, and of each of torch's ways."""

    key: KernelKey
    ms: float
    ways: dict[str, float]
    error: float
    parameters: dict[str, int]


def time_case(kernels: Kernels, key: KernelKey, device: torch.device) -> Timed | None:
    """Time the first candidates against torch's ways, each in pairs with the fastest; None where none is right."""
    bench = ConvBench(key, 0, device)
    best: tuple[float, float, CudaKernel] | None = None
    for kernel in kernels.of(key, KEPT):
        error = bench.error(kernel)
        if error > most_error(key.direction, key.dtype):
            print(f"{_name(key)}: {dict(kernel.variant.parameters)} is wrong by {error:.1e}", file=sys.stderr)
            continue
        ms = bench.compare(kernel, SECONDS).ms
        if best is None or ms < best[0]:
            best = ms, error, kernel
    if best is None:
        return None
    _, error, kernel = best
    pairs = {
        name: time_pairs(lambda: bench.run(kernel), way, SECONDS, 5, device=device)
        for name, way in torchs_ways(bench).items()
    }
    ms = min(pair.ms for pair in pairs.values())
    ways = {name: pair.stock_ms for name, pair in pairs.items()}
    return Timed(key, ms, ways, error, dict(kernel.variant.parameters))


def time_convolutions(pack: Pack, kernels: Kernels) -> None:
    """Time all cases, and add rows to a table as they come."""
    for key in cases(kernels.gpu, TIMED, DTYPES_TIMED):
        if not pack.has_time_for(_name(key)):
            continue
        try:
            timed = time_case(kernels, key, pack.device)
        except (SkippedCheck, KernelsUnavailable, RuntimeError) as error:
            print(f"{_name(key)}: {error}", file=sys.stderr)
            continue
        if timed is not None:
            append_dicts(pack.out / TABLE, rows_of(timed, kernels.gpu, pack))
            fastest, ms = min(timed.ways.items(), key=lambda way: way[1])
            print(f"{_name(key)}: {timed.ms:.4f} ms, {fastest} {ms:.4f} ms, {ms / timed.ms:.2f}x", flush=True)


def rows_of(timed: Timed, gpu: Gpu, pack: Pack) -> list[dict[str, str]]:
    """A row for the kernel and one for each of torch's ways."""
    key = timed.key
    floor_ms = gpu_floor_ms(gpu.name, key.shape, 4 if key.dtype == "float32" else 2)
    common = pack.facts() | {"device": gpu.name, "shape": key.shape.text}
    common |= {"direction": str(key.direction), "layout": str(key.layout), "dtype": key.dtype}
    parameters = " ".join(f"{name}={value}" for name, value in timed.parameters.items())
    rows = []
    for name, ms in {"kernel": timed.ms, **timed.ways}.items():
        row = common | {"method": name, "ms": f"{ms:.5f}", "ratio_to_kernel": f"{ms / timed.ms:.3f}"}
        row["floor_ms"] = "" if floor_ms is None else f"{floor_ms:.5f}"
        is_kernel = name == "kernel"
        rows.append(
            row | {"error": f"{timed.error:.2e}" if is_kernel else "", "parameters": parameters if is_kernel else ""}
        )
    return rows
