"""Tests the generated CUDA kernels of convolutions on a CPU, against float64.

The generated source runs on the CPU (`tests/emulated`), with threads as fibers that meet at barriers only.
"""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hybridpar.codegen import cuda_driver
from hybridpar.codegen.cache import KernelsUnavailable
from hybridpar.codegen.compile_pool import Builder
from hybridpar.codegen.nvrtc import CONTRACTED, compiler
from hybridpar.tvm_kernels import Database, choice
from hybridpar.tvm_kernels.choice import Choices, Decision
from hybridpar.tvm_kernels.conv_bench import DTYPES, ConvBench
from hybridpar.tvm_kernels.cuda_kernel import CudaKernel, CudaVariant, compile_unspilled
from hybridpar.tvm_kernels.cuda_space import bank_conflicts
from hybridpar.tvm_kernels.database import most_error
from hybridpar.tvm_kernels.machine import KNOWN
from hybridpar.tvm_kernels.op import depthwise_conv2d
from hybridpar.tvm_kernels.shapes import ConvShape, Direction, KernelKey, Layout
from hybridpar.tvm_kernels.space import candidates, reject
from hybridpar.tvm_kernels.tune import first_candidates
from tests.emulated.convolutions import emulated_kernels, write_sources
from tests.tvm_kernels.standin import key_of

CPU, HOPPER = torch.device("cpu"), KNOWN["h100"]
LAST, CONTIGUOUS = Layout.CHANNELS_LAST, Layout.CONTIGUOUS
FORWARD, INPUT, WEIGHT = Direction


def variant(shape: str, direction: Direction, layout: Layout, dtype: str, **changes: int) -> CudaVariant:
    """A kernel with several blocks, threads and results along every axis, and borders that nothing divides."""
    of = ConvShape.parse(shape)
    step = of.stride[0] if direction is INPUT else 1
    threads = (4, 4, 2) if layout is LAST else (2, 8, 2)
    own = dict(zip(("threads_c", "threads_x", "threads_y"), threads, strict=True))
    own |= {"vector": 2 if layout is LAST and of.channels % 2 == 0 else 1, "virtual": 2, "columns": step, "rows": 2}
    own |= {"pad": 0} | ({"tap_rows": 2, "split_k": 3} if direction is WEIGHT else {"hold_taps": 1}) | changes
    key = key_of(of, direction, layout, 1, HOPPER.fingerprint, dtype)
    assert reject(key, own) is None
    return CudaVariant(key, own)


ONE, TWO = "2x10x9x7 k3x3 s1x1 p1x1 d1x1", "2x10x9x8 k3x3 s2x2 p1x1 d1x1"
#: Every direction, layout, dtype and stride is there, each way to hold taps and to add sums, and odd sizes.
VARIANTS = [
    variant(ONE, FORWARD, LAST, "float32", hold_taps=0),
    variant(TWO, FORWARD, LAST, "bfloat16"),
    variant(TWO, FORWARD, CONTIGUOUS, "float16", pad=1),
    variant(ONE, INPUT, CONTIGUOUS, "bfloat16", hold_taps=0),
    variant(TWO, INPUT, LAST, "float16"),
    variant(TWO, INPUT, CONTIGUOUS, "float32", hold_taps=0),
    variant(ONE, WEIGHT, LAST, "float32"),
    variant(TWO, WEIGHT, CONTIGUOUS, "bfloat16"),
    variant(ONE, WEIGHT, CONTIGUOUS, "float32", threads_c=1, threads_x=16, threads_y=8, tap_rows=3),
    variant(TWO, WEIGHT, LAST, "float16", threads_c=32, threads_x=2, threads_y=1, vector=1, tap_rows=3),
    variant("1x5x7x6 k5x3 s1x2 p2x0 d1x2", FORWARD, LAST, "float32"),
    variant("1x5x7x6 k3x5 s1x1 p1x2 d2x1", INPUT, CONTIGUOUS, "float32"),
    variant("1x6x9x7 k3x2 s2x1 p2x1 d2x1", WEIGHT, LAST, "float32"),
]

SWEEP = [
    variant(shape, direction, layout, dtype)
    for shape, direction, layout, dtype in itertools.product(
        (ONE, TWO, "1x6x9x11 k3x3 s1x1 p2x2 d2x2", "1x6x11x9 k5x5 s2x2 p2x2 d1x1"), Direction, Layout, DTYPES
    )
]


@pytest.fixture(scope="module")
def sources(builder: Builder) -> list[str]:
    return write_sources(VARIANTS, builder)


@pytest.fixture(scope="module")
def kernels(sources: list[str], tmp_path_factory: pytest.TempPathFactory) -> list[CudaKernel]:
    return emulated_kernels(VARIANTS, sources, tmp_path_factory.mktemp("convolutions"))


@pytest.fixture(autouse=True)
def _no_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_driver, "current_stream", lambda index: 0)


def bench_of(kernel: CudaKernel) -> ConvBench:
    return ConvBench(kernel.variant.key, 0, CPU)


def name(one: CudaVariant) -> str:
    return f"{one.key.text} {one.key.dtype}"


# ------------------------------------------------------------------------------------------------- what is computed


@pytest.mark.parametrize("index", range(len(VARIANTS)), ids=[name(one) for one in VARIANTS])
def test_source_computes_what_float64_does(index: int, kernels: list[CudaKernel]) -> None:
    kernel = kernels[index]
    bench = bench_of(kernel)
    assert bench.error(kernel) <= most_error(kernel.variant.key.direction, kernel.variant.key.dtype)
    # Fibers take turns the other way round in every other launch, so a missing barrier would show.
    assert torch.equal(bench.run(kernel), bench.run(kernel))


def test_nothing_is_written_beside_the_result(kernels: list[CudaKernel], monkeypatch: pytest.MonkeyPatch) -> None:
    for kernel in kernels:
        bench = bench_of(kernel)
        count = bench.arguments[0][2].numel()
        padded = torch.full((count + 256,), 7.0, dtype=bench.arguments[0][2].dtype)
        scratch = torch.full((kernel.scratch_bytes // 4 + 64,), math.nan)
        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty", lambda size, memory=scratch, **_: memory.view(torch.uint8)[:size])
            kernel(*bench.arguments[0][:2], None, padded[128 : 128 + count])
        assert (padded[:128] == 7).all()
        assert (padded[128 + count :] == 7).all()
        assert scratch[kernel.scratch_bytes // 4 :].isnan().all()


def test_results_that_are_not_there_do_not_spoil_sums(kernels: list[CudaKernel]) -> None:
    index = next(i for i, one in enumerate(VARIANTS) if one.key.direction is WEIGHT and one.key.dtype == "bfloat16")
    kernel, bench = kernels[index], bench_of(kernels[index])
    clean = bench.run(kernel)
    # At stride 2 the last of eight columns meets the last of three taps only: the first one would meet it in a fifth
    # column of the gradient, for which a thread is there.
    assert kernel.variant.tiling.block[1] > kernel.variant.key.shape.out_width == 4
    for images, *_ in bench.arguments:  # sets take turns
        images[..., 7] = math.nan
    spoilt = bench.run(kernel)
    assert torch.equal(spoilt[..., :2], clean[..., :2])
    assert spoilt[..., 2].isnan().all()


@pytest.mark.parametrize("changed", [False, True], ids=["kernels", "torch, as the views are strided"])
def test_the_op_runs_them_through_the_launcher(
    changed: bool, kernels: list[CudaKernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward and weight gradient are of one shape; as tensors of the CPU stand for those of a GPU."""
    found_for: dict[Direction, None] = {}

    def decide(key: KernelKey) -> Decision:
        found = [one for one in kernels if replace(one.variant.key, device=key.device) == key]
        found_for.update(dict.fromkeys([one.variant.key.direction for one in found]))
        return Decision(key, found[0] if found else None, None)

    choices = Choices(Database())
    monkeypatch.setattr(choices, "decide", decide)
    monkeypatch.setattr(choice, "_active", choices)
    shape = ConvShape.parse(ONE)
    draw = torch.Generator().manual_seed(3)
    x = torch.randn(2, 10, 9, 8 if changed else 7, generator=draw)[..., :7]
    x = x if changed else x.contiguous(memory_format=torch.channels_last)
    x.requires_grad_()
    weight, bias = torch.randn(10, 1, 3, 3, generator=draw).requires_grad_(), torch.randn(10, generator=draw)
    y = depthwise_conv2d(x, weight, bias, 1, 1)
    y.square().sum().backward()
    assert list(found_for) == ([] if changed else [FORWARD, INPUT, WEIGHT][::2])
    own = weight.grad
    weight.grad = None
    expected = torch.nn.functional.conv2d(x, weight, bias, 1, 1, 1, shape.channels)
    expected.square().sum().backward()
    assert torch.allclose(y, expected, atol=1e-5)
    assert torch.allclose(own, weight.grad, rtol=1e-4, atol=1e-3)


# ------------------------------------------------------------------------------------------------------- the source


def rows_kernel(source: str) -> str:
    """The body of the kernel that reads images."""
    begin = re.search(r" conv_kernel\([^;{]*\) \{", source)
    assert begin is not None
    return source[begin.start() :].split('extern "C"')[0]


def shared_bytes(source: str) -> int:
    """What it declares as shared memory."""
    sizes = {"float": 4, "ushort": 2}
    found = re.findall(r"__shared__ __align__\(16\) (float|ushort)(\d?) \w+\[(\d+)\];", rows_kernel(source))
    return sum(sizes[kind] * int(lanes or 1) * int(count) for kind, lanes, count in found)


def test_shared_memory_is_what_the_formula_says(sources: list[str]) -> None:
    for one, source in zip(VARIANTS, sources, strict=True):
        found, formula = shared_bytes(source), one.tiling.shared_bytes
        assert 0 < found <= formula, name(one)


def brute_force(variant: CudaVariant, source: str) -> float:
    """Accesses of shared memory of the first warp's first read of the tile, from the index that the source has."""
    body = rows_kernel(source)
    declared = re.search(r"__shared__ __align__\(16\) (float|ushort)(\d?) tile_shared_ptr", body)
    read = re.search(r"tile_shared_local_ptr.*= tile_shared_ptr\[(.+)\];", body)
    assert declared is not None
    assert read is not None
    item = {"float": 4, "ushort": 2}[declared[1]] * int(declared[2] or 1)
    text = re.sub(r"\(\(int\)(threadIdx|blockIdx)\.([xyz])\)", r"\1_\2", read[1]).replace("/", "//")
    names = dict.fromkeys(re.findall(r"[A-Za-z_]\w*", text), 0)
    wide = variant.tiling.launches[0][3][0]
    banks: dict[tuple[int, int], set[int]] = {}
    for lane in range(32):
        place = item * eval(text, {**names, "threadIdx_x": lane % wide, "threadIdx_y": lane // wide})
        for word in {byte // 4 for byte in range(place, place + item)}:
            banks.setdefault((lane * item // 128 if item > 4 else 0, word % 32), set()).add(word)
    turns = {turn for turn, _ in banks}
    count = sum(max(len(words) for (at, _), words in banks.items() if at == turn) for turn in turns)
    return count / max(1, 32 * item // 128)


#: A row of 32 threads with four results each, at a stride: accesses of shared memory for each one that is needed. The
#: table in docs/kernels.md has the same.
CONFLICTS: list[tuple[int, dict[str, int], float]] = [
    (1, {"virtual": 1, "columns": 4}, 4),
    (1, {"virtual": 2, "columns": 2}, 2),
    (1, {"virtual": 4, "columns": 1}, 1),
    (2, {"virtual": 4, "columns": 1, "phases": 0}, 2),
    (2, {"virtual": 4, "columns": 1, "phases": 1}, 1),
]


def test_virtual_threads_and_phases_avoid_the_conflicts_that_the_model_predicts(builder: Builder) -> None:
    wide = "1x4x64x140 k3x3 s{0}x{0} p1x1 d1x1"
    row = {"threads_x": 32, "threads_y": 1}
    chosen = [
        variant(wide.format(stride), FORWARD, CONTIGUOUS, "float32", **row, **tile) for stride, tile, _ in CONFLICTS
    ]
    square = {"threads_x": 8, "threads_y": 4, "virtual": 1, "columns": 4}
    chosen.append(variant(wide.format(1), FORWARD, CONTIGUOUS, "float32", **square))
    chosen.append(variant(wide.format(2), FORWARD, LAST, "float32"))
    chosen.append(variant(wide.format(1), FORWARD, LAST, "bfloat16", threads_c=2, threads_x=16, threads_y=1))
    written = write_sources(chosen, builder)
    for one, source in zip(chosen, written, strict=True):
        assert bank_conflicts(one.tiling) == brute_force(one, source), one.parameters
    assert [bank_conflicts(one.tiling) for one in chosen[: len(CONFLICTS)]] == [times for *_, times in CONFLICTS]


# -------------------------------------------------------------------------------------------------------- compiling


def needs_compiler() -> None:
    try:
        compiler(CONTRACTED)
    except KernelsUnavailable as reason:
        pytest.skip(str(reason))


def test_what_would_be_measured_first_compiles_and_spills_nothing(builder: Builder) -> None:
    needs_compiler()
    chosen = []
    for direction, layout, dtype, gpu in (
        (FORWARD, LAST, "bfloat16", KNOWN["h100"]),
        (WEIGHT, LAST, "float32", KNOWN["a100"]),
    ):
        shape = ConvShape.parse("32x96x56x56 k3x3 s2x2 p1x1 d1x1")
        key = KernelKey(direction, shape, layout, 1, gpu.fingerprint, dtype)
        (own,) = first_candidates(key, candidates(key))
        chosen.append((CudaVariant(key, own), gpu.architecture))
    for (one, architecture), source in zip(chosen, write_sources([one for one, _ in chosen], builder), strict=True):
        assert compile_unspilled(source.encode(), architecture)[:4] == b"\x7fELF", name(one)


# ------------------------------------------------------------------------------------------------------------- sweeps


@pytest.mark.sweep
@pytest.mark.timeout(3600)
def test_every_direction_layout_dtype_and_stride_is_right(tmp_path: Path, builder: Builder) -> None:
    written = write_sources(SWEEP, builder)
    for one, source in zip(SWEEP, written, strict=True):
        assert shared_bytes(source) <= one.tiling.shared_bytes, name(one)
    for kernel in emulated_kernels(SWEEP, written, tmp_path):
        error = bench_of(kernel).error(kernel)
        assert error <= most_error(kernel.variant.key.direction, kernel.variant.key.dtype), name(kernel.variant)
