"""Tests tuning for CUDA: candidates compiled without a GPU never run unmeasured, and records are found again."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hybridpar.codegen import cuda_driver
from hybridpar.codegen.cache import KernelsUnavailable
from hybridpar.codegen.compile_pool import Builder, Built
from hybridpar.codegen.nvrtc import compiler
from hybridpar.commands.tune.tuning import run_tune
from hybridpar.errors import KernelError, UsageError
from hybridpar.tvm_kernels import choice, cuda_kernel, measure
from hybridpar.tvm_kernels.choice import Choices, kernel_for
from hybridpar.tvm_kernels.conv_bench import ConvBench
from hybridpar.tvm_kernels.cuda_cost import bank_conflicts, estimate, resident_blocks, wavefronts
from hybridpar.tvm_kernels.cuda_kernel import CudaKernel, CudaVariant
from hybridpar.tvm_kernels.cuda_space import candidates, reject
from hybridpar.tvm_kernels.database import Database, read_database
from hybridpar.tvm_kernels.kernel import make_kernels
from hybridpar.tvm_kernels.machine import KNOWN, cpu_fingerprint, gpu_at, is_gpu
from hybridpar.tvm_kernels.operation import KernelKey
from hybridpar.tvm_kernels.operations import depthwise_cuda
from hybridpar.tvm_kernels.record import KernelRecord
from hybridpar.tvm_kernels.request import TuneConfig
from hybridpar.tvm_kernels.schedules.cuda_tile import Tile
from hybridpar.tvm_kernels.search import compile_all
from hybridpar.tvm_kernels.shapes import ConvShape, Direction, Layout
from hybridpar.tvm_kernels.tuner import tune
from tests.emulated.convolutions import emulated_kernels
from tests.tvm_kernels.standin import StandIn, record_of

SHAPE = ConvShape.parse("2x8x9x7 k3x3 s1x1 p1x1 d1x1")
LAST = Layout.CHANNELS_LAST
HOPPER = KNOWN["h100"]
GPU = torch.device("cuda", 0)
REST = ((2, 8, 9, 7), (3, 3), (1, 1), (1, 1), (1, 1), LAST)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with an H100, as far as is asked."""
    monkeypatch.setattr(choice, "gpu_at", lambda index: HOPPER)
    monkeypatch.setattr(depthwise_cuda, "_current", lambda: 0)


def gpu_record(direction: Direction = Direction.FORWARD, **fields: Any) -> KernelRecord:
    return record_of(SHAPE, direction, LAST, **{"device": HOPPER.fingerprint, "dtype": "bfloat16", **fields})


# --------------------------------------------------------------------------------------------------- without a GPU


@pytest.fixture
def _compiler() -> None:
    try:
        compiler()
    except KernelsUnavailable as reason:
        pytest.skip(str(reason))


@pytest.mark.usefixtures("_compiler")
@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_without_a_gpu_candidates_are_compiled_and_marked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, builder: Builder
) -> None:
    shapes, path = tmp_path / "shapes.txt", tmp_path / "k.jsonl"
    shapes.write_text(SHAPE.text)
    config = TuneConfig(shapes=shapes, target="cuda", dtype="bfloat16", gpu="h200", trials=1, output=path)
    search = partial(compile_all, builder=builder)
    assert run_tune(config, search) == 0
    database = read_database(path)
    assert [record.direction for record in database.records] == list(Direction)
    for record in database.records:
        assert (record.ms, record.stock_ms, record.wins) == (None, None, False)
        assert (record.device, record.dtype, record.threads) == ("NVIDIA H200 sm_90", "bfloat16", 1)
        assert record.predicted_ms is not None
        assert record.cubin is not None
        assert (tmp_path / record.cubin).read_bytes()[:4] == b"\x7fELF"
        assert reject(SHAPE, record.direction, LAST, record.dtype, record.parameters) is None  # type: ignore[arg-type]
    assert "nothing was measured" in capsys.readouterr().err
    # They are no reason to run anything, and none to compile them again.
    monkeypatch.setattr(choice, "gpu_at", lambda index: KNOWN["h200"])
    choices = Choices(database, lambda records: pytest.fail("an unmeasured candidate was made"))
    for decision in choices.prepare(database):
        assert decision.kernel is None
        assert decision.why == "its candidates were compiled and not measured; tune on this device"
    assert run_tune(TuneConfig(show=path)) == 0
    assert "3 more were compiled for a GPU and not measured" in capsys.readouterr().out
    size = path.stat().st_size
    assert run_tune(config) == 0  # this time as it is chosen for the target
    assert path.stat().st_size == size
    assert "3 were done before" in capsys.readouterr().err


def test_without_a_compiler_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, builder: Builder
) -> None:
    def none(*_: object) -> None:
        raise KernelsUnavailable("there is neither NVRTC nor nvcc")

    monkeypatch.setattr(cuda_kernel, "compile_unspilled", none)
    shapes, path = tmp_path / "shapes.txt", tmp_path / "k.jsonl"
    shapes.write_text(SHAPE.text)
    config = TuneConfig(shapes=shapes, target="cuda", gpu="a100", trials=1, output=path)
    with pytest.raises(KernelError, match="neither NVRTC nor nvcc") as found:
        run_tune(config, partial(compile_all, builder=builder))
    assert "nvcc" in str(found.value.fix)
    assert not path.exists()


def test_what_contradicts_itself_is_refused(tmp_path: Path) -> None:
    for fields in ({"dtype": "float16"}, {"gpu": "a100"}, {"target": "cuda", "threads": 2}):
        with pytest.raises(UsageError, match="cuda"):
            TuneConfig(model="mobilenet_v2", **fields).check()  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------------ with a GPU


@pytest.mark.usefixtures("hopper")
def test_a_search_compiles_checks_measures_and_drops_what_is_wrong(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, builder: Builder
) -> None:
    """All of it but the GPU: kernels run on the CPU, and clocks are drawn."""
    draw = random.Random(0)
    monkeypatch.setattr(cuda_driver, "current_stream", lambda index: 0)
    monkeypatch.setattr(measure, "milliseconds", lambda call, times, device: call() is None or draw.random())
    monkeypatch.setattr(cuda_kernel, "compile_unspilled", lambda source, _: source)
    loaded: list[CudaVariant] = []

    def nothing(*_: torch.Tensor | None) -> None:
        """Leave the result as it is."""

    def load(variant: CudaVariant, code: bytes, index: int) -> Any:
        loaded.append(variant)
        folder = tmp_path / str(len(loaded))
        folder.mkdir()
        return nothing if len(loaded) == 1 else emulated_kernels([variant], [code.decode()], folder)[0]

    monkeypatch.setattr(cuda_kernel, "load_cubin", load)
    monkeypatch.setattr(ConvBench, "run", _filled(ConvBench.run))
    bench = ConvBench(SHAPE, Direction.WEIGHT_GRADIENT, LAST, 1, 0, "float32", torch.device("cpu"))
    monkeypatch.setattr(depthwise_cuda.DepthwiseCuda, "bench", lambda *_: bench)
    key = KernelKey(Direction.WEIGHT_GRADIENT, SHAPE, LAST, 1, HOPPER.fingerprint)
    found = tune(key, 600, trials=2, builder=builder)
    assert len(loaded) == 2
    (one,) = found
    assert one.parameters == loaded[1].parameters
    assert one.error < 1e-5
    assert one.final
    assert one.floor_ms > 0


def _filled(run: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """What is left as it is must not be right by chance, as freed memory may hold the result before."""

    def filled(self: ConvBench, kernel: CudaKernel) -> torch.Tensor:
        if getattr(kernel, "variant", None) is None:
            return torch.zeros_like(self.arguments()[2])
        return run(self, kernel)

    return filled


@pytest.mark.usefixtures("hopper")
def test_the_op_finds_what_was_measured_on_such_a_gpu_with_the_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    made = StandIn()
    records = [gpu_record(), gpu_record(Direction.WEIGHT_GRADIENT, device=KNOWN["h200"].fingerprint)]
    monkeypatch.setattr(choice, "_active", Choices(Database("a test's", records), made))
    assert kernel_for(GPU, torch.bfloat16, Direction.FORWARD, *REST) is not None
    assert kernel_for(GPU, torch.float32, Direction.FORWARD, *REST) is None
    assert kernel_for(GPU, torch.float64, Direction.FORWARD, *REST) is None
    assert kernel_for(GPU, torch.bfloat16, Direction.WEIGHT_GRADIENT, *REST) is None, "another GPU's"
    assert kernel_for(torch.device("cpu"), torch.float32, Direction.FORWARD, *REST) is None, "the CPU has none"


@pytest.mark.usefixtures("hopper")
def test_strict_is_about_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYBRIDPAR_KERNELS", "strict")
    monkeypatch.setattr(choice, "_active", Choices(Database("a test's", []), StandIn()))
    assert kernel_for(GPU, torch.bfloat16, Direction.FORWARD, *REST) is None


def test_records_become_kernels_only_within_the_space(monkeypatch: pytest.MonkeyPatch) -> None:
    right = next(candidates(SHAPE, Direction.FORWARD, LAST, "bfloat16", HOPPER))
    contents = "hybridpar.tvm_kernels.kernel.contents_of"
    monkeypatch.setattr(contents, lambda paths, requests, workers: [Built((), b"source")] * len(paths))
    monkeypatch.setattr(CudaKernel, "prepare", lambda self, index: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    changes = ({}, {"vector": 3}, {"threads_c": 1 << 20}, {"rows": "2; system()"}, {"columns": 10**9})
    made = make_kernels([gpu_record(parameters=right | one) for one in changes])
    assert [isinstance(one, KernelsUnavailable) for one in made] == [False, True, True, True, True]


def test_a_kernel_needs_what_its_vectors_need() -> None:
    wide = ConvShape.parse("2x96x14x14 k3x3 s1x1 p1x1 d1x1")
    own = next(one for one in candidates(wide, Direction.FORWARD, LAST, "bfloat16", HOPPER) if one["vector"] == 4)
    variant = CudaVariant(wide, Direction.FORWARD, LAST, "bfloat16", own)
    made = CudaKernel(variant, lambda index: pytest.fail("it was loaded"))
    padded = torch.empty(64, dtype=torch.bfloat16)
    assert made.takes(padded, padded[4:])
    assert not made.takes(padded, padded[2:])


# --------------------------------------------------------------------------------------------------- the cost model


def test_devices_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(is_gpu(gpu.fingerprint) for gpu in KNOWN.values())
    assert not is_gpu(cpu_fingerprint())
    told = {"name": "A new one", "major": 10, "minor": 0, "multi_processor_count": 10}
    told |= {"max_threads_per_multi_processor": 1536, "memory_clock_rate": 1_000_000, "memory_bus_width": 512}
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda index: SimpleNamespace(**told, clock_rate=2_000_000)
    )
    gpu = gpu_at.__wrapped__(0)
    assert (gpu.fingerprint, gpu.processors, gpu.threads) == ("A new one sm_100", 10, 1536)
    assert gpu.bandwidth == 128e9
    assert gpu.multiply_adds == 128 * 10 * 2e9


def test_wavefronts_of_patterns_that_everybody_knows() -> None:
    assert wavefronts([4 * lane for lane in range(32)], 4) == 1
    assert wavefronts([0] * 32, 4) == 1, "a broadcast"
    assert [wavefronts([4 * step * lane for lane in range(32)], 4) for step in (2, 3, 8, 32)] == [2, 1, 8, 32]
    assert wavefronts([2 * lane for lane in range(32)], 2) == 1, "two lanes share a word"
    assert wavefronts([16 * lane for lane in range(32)], 16) == 4


def test_the_model_knows_what_costs() -> None:
    shape = ConvShape.parse("32x96x56x56 k3x3 s1x1 p1x1 d1x1")
    own = {"vector": 1, "threads_c": 1, "threads_x": 32, "threads_y": 4, "virtual": 1, "columns": 1, "rows": 4}
    own |= {"skew": 0, "hold": 1}

    def cost(**changes: int) -> float:
        return estimate(shape, Direction.FORWARD, Layout.CONTIGUOUS, "float32", own | changes, HOPPER)

    def tile_of(**changes: int) -> Tile:
        return Tile(shape, Direction.FORWARD, Layout.CONTIGUOUS, "float32", own | changes)

    assert bank_conflicts(tile_of(columns=2)) == 2 > bank_conflicts(tile_of(virtual=2)) == 1
    assert cost(columns=2) > cost(virtual=2)
    assert cost(rows=1) > cost(rows=4), "the halo"
    assert cost(rows=4, hold=0) > cost(rows=4), "more accesses of shared memory"
    # Sixteen bytes a cell and 2048 threads are what an SM has padded tile for.
    tile = tile_of()
    held = resident_blocks(tile, HOPPER)
    assert held * tile.threads <= HOPPER.threads
    assert held * tile.shared_bytes <= HOPPER.shared_bytes


def test_the_space_holds_its_rules() -> None:
    for direction in Direction:
        for layout in Layout:
            space = list(candidates(SHAPE, direction, layout, "float16", HOPPER))
            assert space
            assert len({tuple(sorted(one.items())) for one in space}) == len(space)
            few = ConvShape.parse("1x1x9x31 k3x3 s2x2 p1x1 d1x1")
            assert list(candidates(few, direction, layout, "float16", HOPPER))
            for one in space[:50]:
                tile = Tile(SHAPE, direction, layout, "float16", one)
                assert tile.shared_bytes <= 48 << 10
                assert tile.threads % 32 == 0
                if direction is Direction.WEIGHT_GRADIENT:
                    assert one["parts"] <= SHAPE.batch * tile.vertical.tiles * tile.horizontal.tiles
