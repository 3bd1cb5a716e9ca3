"""Tests tuning for CUDA, with kernels that run on the CPU, and how records of a GPU are found again."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridpar.codegen import cuda_driver
from hybridpar.codegen.cache import KernelsUnavailable
from hybridpar.codegen.compile_pool import Builder, Built
from hybridpar.commands.tune import TuneRequest, run_tune
from hybridpar.errors import UsageError
from hybridpar.tvm_kernels import cuda_kernel, measure
from hybridpar.tvm_kernels import tune as tuning
from hybridpar.tvm_kernels.choice import Choices
from hybridpar.tvm_kernels.conv_bench import ConvBench
from hybridpar.tvm_kernels.cuda_kernel import CudaKernel, CudaVariant
from hybridpar.tvm_kernels.cuda_space import bank_conflicts, resident_blocks, wavefronts
from hybridpar.tvm_kernels.database import Database, KernelRecord
from hybridpar.tvm_kernels.kernel import make_kernels
from hybridpar.tvm_kernels.machine import KNOWN
from hybridpar.tvm_kernels.shapes import ConvShape, Direction, KernelKey, Layout
from hybridpar.tvm_kernels.space import candidates, default, nearest, neighbours, reject
from hybridpar.tvm_kernels.tune import tune
from tests.emulated.convolutions import emulated_kernels
from tests.tvm_kernels.standin import StandIn, key_of, record_of

SHAPE = ConvShape.parse("2x8x9x7 k3x3 s1x1 p1x1 d1x1")
LAST = Layout.CHANNELS_LAST
HOPPER = KNOWN["h100"]


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with an H100, as far as is asked."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)


def on_hopper(shape: ConvShape, direction: Direction, layout: Layout = LAST, dtype: str = "float32") -> KernelKey:
    return key_of(shape, direction, layout, 1, HOPPER.fingerprint, dtype)


def gpu_record(direction: Direction = Direction.FORWARD, **fields: Any) -> KernelRecord:
    return record_of(SHAPE, direction, LAST, **{"device": HOPPER.fingerprint, "dtype": "bfloat16", **fields})


# --------------------------------------------------------------------------------------------------- without a GPU


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_without_a_gpu_nothing_is_tuned_for_one(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--target cuda without a GPU"):
        run_tune(TuneRequest(shape=(SHAPE.text,), target="cuda", output=tmp_path / "k.jsonl", tune_process=False))
    assert not (tmp_path / "k.jsonl").exists()


def test_what_contradicts_itself_is_refused(tmp_path: Path) -> None:
    for fields in ({"amp": "fp16"}, {"target": "cuda", "threads": 2}):
        with pytest.raises(UsageError, match="with --target"):
            TuneRequest(model="mobilenet_v2", **fields).check()  # type: ignore[arg-type]


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
    key = on_hopper(SHAPE, Direction.WEIGHT_GRADIENT)
    bench = ConvBench(key, 0, torch.device("cpu"))
    monkeypatch.setattr(tuning, "bench_of", lambda *_: bench)
    found = tune(key, 600, trials=2, builder=builder)
    assert len(loaded) == 2
    (one,) = found
    assert one.parameters == loaded[1].parameters
    assert one.error < 1e-5


@pytest.mark.parametrize("direction", [Direction.FORWARD, Direction.WEIGHT_GRADIENT])
def test_a_search_can_climb_and_its_records_meet_the_rule_of_those_of_cpus(direction: Direction) -> None:
    wide = ConvShape.parse("8x576x14x14 k3x3 s1x1 p1x1 d1x1")
    among = candidates(on_hopper(wide, direction, Layout.CONTIGUOUS))
    aim = among[2 * len(among) // 3]

    def cost(one: Mapping[str, int]) -> float:
        return sum(abs(math.log2((value + 1) / (aim[name] + 1))) for name, value in one.items() if name != "split_k")

    best = among[0]
    while better := [one for one in neighbours(best, among) if cost(one) < cost(best)]:
        best = min(better, key=cost)
    assert cost(best) < 0.2 * cost(among[0])
    key = on_hopper(SHAPE, direction)
    sets = [ConvBench(key, device=device).operands(LAST) for device in (torch.device("cpu"), None)]
    assert len(sets[0]) == len(sets[1]) > 1, "tensors come from memory"


def _filled(run: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """What is left as it is must not be right by chance, as freed memory may hold the result before."""

    def filled(self: ConvBench, kernel: CudaKernel) -> torch.Tensor:
        if getattr(kernel, "variant", None) is None:
            return torch.zeros_like(self.arguments[0][2])
        return run(self, kernel)

    return filled


def test_what_was_measured_on_such_a_gpu_with_the_dtype_is_chosen() -> None:
    records = [gpu_record(), gpu_record(Direction.WEIGHT_GRADIENT, device=KNOWN["h200"].fingerprint)]
    choices = Choices(Database("a test's", records), StandIn())
    assert choices.decide(on_hopper(SHAPE, Direction.FORWARD, dtype="bfloat16")).kernel is not None
    others = [
        on_hopper(SHAPE, Direction.FORWARD),
        on_hopper(SHAPE, Direction.WEIGHT_GRADIENT, dtype="bfloat16"),  # another GPU's
        key_of(SHAPE, Direction.FORWARD),
    ]
    assert [choices.decide(key).kernel for key in others] == [None] * 3


def test_records_become_kernels_only_within_the_space(monkeypatch: pytest.MonkeyPatch) -> None:
    right = candidates(on_hopper(SHAPE, Direction.FORWARD, dtype="bfloat16"))[0]
    contents = "hybridpar.tvm_kernels.kernel.contents_of"
    monkeypatch.setattr(contents, lambda files, _: [Built((), b"source")] * len(files))
    monkeypatch.setattr(cuda_kernel, "cubin", lambda *_: b"code")
    monkeypatch.setattr(CudaKernel, "prepare", lambda self, index: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    with pytest.raises(ValueError, match="rows"):
        gpu_record(parameters=right | {"rows": "2; system()"})
    changes = ({}, {"vector": 3}, {"threads_c": 1 << 20}, {"columns": 10**9})
    made = make_kernels([gpu_record(parameters=right | one) for one in changes])
    assert [isinstance(one, KernelsUnavailable) for one in made] == [False, True, True, True]


def test_a_kernel_needs_what_its_vectors_need() -> None:
    wide = ConvShape.parse("2x96x14x14 k3x3 s1x1 p1x1 d1x1")
    key = on_hopper(wide, Direction.FORWARD, dtype="bfloat16")
    variant = CudaVariant(key, next(one for one in candidates(key) if one["vector"] == 4))
    made = CudaKernel(variant, lambda index: pytest.fail("it was loaded"))
    padded = torch.empty(64, dtype=torch.bfloat16)
    assert made.takes(padded, padded[4:])
    assert not made.takes(padded, padded[2:])


# ---------------------------------------------------------------------------------------------------- the space


def test_wavefronts_of_patterns_that_everybody_knows() -> None:
    assert wavefronts(tuple(range(0, 128, 4)), 4) == 1
    assert wavefronts((0,) * 32, 4) == 1, "a broadcast"
    assert [wavefronts(tuple(4 * step * lane for lane in range(32)), 4) for step in (2, 3, 8, 32)] == [2, 1, 8, 32]
    assert wavefronts(tuple(range(0, 64, 2)), 2) == 1, "two lanes share a word"
    assert wavefronts(tuple(range(0, 512, 16)), 16) == 4


def test_the_space_holds_its_rules() -> None:
    for direction in Direction:
        for layout in Layout:
            key = on_hopper(SHAPE, direction, layout, "float16")
            space = candidates(key)
            assert space
            assert nearest(default(key), space) in space
            assert len({tuple(sorted(one.items())) for one in space}) == len(space)
            few = ConvShape.parse("1x1x9x31 k3x3 s2x2 p1x1 d1x1")
            assert candidates(on_hopper(few, direction, layout, "float16"))
            for one in space[:50]:
                assert reject(key, one) is None
                tiling = CudaVariant(key, one).tiling
                assert tiling.shared_bytes <= 48 << 10
                assert tiling.tile.threads % 32 == 0
                assert bank_conflicts(tiling) <= 2
                assert resident_blocks(tiling, HOPPER) * tiling.tile.threads >= 256
                if direction is Direction.WEIGHT_GRADIENT:
                    assert one["split_k"] <= SHAPE.batch * tiling.blocks[0] * tiling.blocks[1]
