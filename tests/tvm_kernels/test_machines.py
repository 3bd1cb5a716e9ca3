"""Tests what is decided for made-up machines: nothing depends on what a machine says of its last cache."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hybridpar.codegen import build
from hybridpar.machine.process import available_cores, threads_per_worker
from hybridpar.tvm_kernels import machine, norm_kernels, norm_swap
from hybridpar.tvm_kernels.conv_bench import ConvBench, turns
from hybridpar.tvm_kernels.machine import Machine
from hybridpar.tvm_kernels.shapes import ConvShape, Direction, Layout
from hybridpar.tvm_kernels.space import candidates, why_none
from hybridpar.tvm_kernels.tune import first_candidates
from tests.tvm_kernels.standin import key_of

LARGE = ConvShape.parse("8x96x112x112 k3x3 s1x1 p1x1 d1x1")
SMALL = ConvShape.parse("2x96x14x14 k3x3 s1x1 p1x1 d1x1")
AVX2, AVX512 = "sse2 avx avx2 fma", "sse2 avx avx2 fma avx512f avx512bw avx512vl"


@dataclass(frozen=True)
class Host:
    """What a machine says of itself."""

    cores: int
    level3_mib: int
    flags: str = AVX512
    architecture: str = "x86_64"
    level2_kib: int = 1024

    def read(self, path: Path) -> str | None:
        """What the file of the system has; None for other files."""
        if str(path) == "/proc/cpuinfo":
            return f"processor : 0\nmodel name : made up\nflags : {self.flags}\n"
        if "/cpu/cpu0/cache/" not in str(path):
            return None
        size = f"{self.level3_mib << 10}K" if "index3" in str(path) else f"{self.level2_kib}K"
        return {"type": "Unified", "size": size, "level": "3" if "index3" in str(path) else "2"}[path.name] + "\n"


MACHINES = {
    "desktop": Host(8, 32),
    "xeon-vm": Host(2, 300, level2_kib=2048),
    "no-last-cache": Host(4, 0, AVX2, level2_kib=256),
    "old": Host(1, 6, "sse2"),
    "arm": Host(64, 64, "", "aarch64"),
    "with-bfloat16": Host(2, 480, f"{AVX512} avx512_bf16"),
}


@contextmanager
def believed(host: Host) -> Iterator[None]:
    """Context in which this process believes to be on a machine."""
    read, caches = Path.read_text, (build.cpu_info, machine.this_machine)
    for cache in caches:
        cache.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "read_text", lambda path, *a, **k: host.read(path) or read(path, *a, **k))
        patch.setattr("platform.machine", lambda: host.architecture)
        patch.setattr("os.sched_getaffinity", lambda _: set(range(host.cores)))
        try:
            yield
        finally:
            for cache in caches:
                cache.cache_clear()


@pytest.fixture
def host(request: Any) -> Iterator[Host]:
    with believed(MACHINES[request.param]):
        yield MACHINES[request.param]


def bench_bytes(shape: ConvShape, direction: Direction) -> int:
    """What a bench keeps: operands in both formats, and results of all turns."""
    with FakeTensorMode():
        bench = ConvBench(key_of(shape, direction, device="made up"))
        turns = [operands for layout in Layout for operands in bench.operands(layout)]
        memory = {id(tensor): tensor.nbytes for operands in turns for tensor in operands}
        return sum(memory.values()) + len(turns) * bench.arguments[0][2].nbytes


def decisions(shape: ConvShape) -> dict[str, Any]:
    """What is decided for a convolution on this machine, but for the width of vectors and the number of threads."""
    here = machine.this_machine()
    found: dict[str, Any] = {}
    for direction in Direction:
        space = candidates(key_of(shape, direction, device="made up"), here)
        found[f"streamed {direction}"] = {one.get("stream") for one in space if one["lanes"] % 16 == 0}
        found[f"swept {direction}"] = {one.get("sweep", 0) for one in space}
        found[f"bench of {direction}"] = bench_bytes(shape, direction)
    size = 4 * shape.batch * shape.channels * (shape.height * shape.width + shape.out_height * shape.out_width)
    found["turns"] = turns(size)
    result = torch.empty(shape.batch, shape.channels, shape.height, shape.width, device="meta")
    found["norm streamed"] = result.numel() * 4 > norm_kernels.FAR
    return found


@pytest.mark.parametrize("host", MACHINES, indirect=True)
def test_what_a_machine_says_of_its_caches_decides_nothing(host: Host) -> None:
    large, small = decisions(LARGE), decisions(SMALL)
    for direction in (Direction.FORWARD, Direction.INPUT_GRADIENT):
        assert (large[f"streamed {direction}"], small[f"streamed {direction}"]) == ({1}, {0})
    for direction in Direction:
        assert large[f"swept {direction}"] == {0, 1}
        assert small[f"swept {direction}"] == {0}
    assert (large["norm streamed"], small["norm streamed"]) == (True, False)
    assert (large["turns"], small["turns"]) == (2, 64)
    lanes = 16 if "avx512f" in host.flags else 8 if host.flags == AVX2 else 4
    registers = 16 if lanes < 16 and host.flags else 32
    half = "avx512_bf16" in host.flags
    assert machine.this_machine() == Machine(lanes, registers, half)
    key = key_of(SMALL, Direction.FORWARD, dtype="bfloat16")
    assert why_none(key) == ("" if half else "there are kernels for bfloat16 on CPUs with AVX512_BF16 alone")
    assert bool(candidates(key)) is half
    assert build._features().get("mattr", ["+avx512bf16"])[-1] == "+avx512bf16" or not half
    assert threads_per_worker(1, available_cores()) <= host.cores


def choices(shape: ConvShape) -> list[Any]:
    """What a search on this machine may try, in order, and what it begins with."""
    keys = [key_of(shape, direction, threads=2, device="made up") for direction in Direction]
    spaces = [candidates(key, machine.this_machine()) for key in keys]
    return [spaces, [first_candidates(key, space) for key, space in zip(keys, spaces, strict=True)]]


@pytest.mark.parametrize("shape", [LARGE, SMALL], ids=["large", "small"])
def test_a_last_cache_of_300_mib_chooses_as_one_of_32_does(shape: ConvShape) -> None:
    chosen = []
    for name in ("desktop", "xeon-vm"):
        with believed(MACHINES[name]):
            chosen.append(choices(shape))
    assert chosen[0] == chosen[1]


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("text", ["2x8x16x16", "8x32x56x56", "8x96x112x112", "32x96x112x112"])
def test_a_benchs_memory_is_bounded(text: str, direction: Direction) -> None:
    shape = ConvShape.parse(f"{text} k3x3 s1x1 p1x1 d1x1")
    # A search has two benches; tensors of one layer that are larger than all of that cannot be helped.
    assert 2 * bench_bytes(shape, direction) <= max(1 << 30, 8 * shape.least_bytes)


def test_threads_share_larger_norms_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert norm_swap.least_values() == 65_536
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    assert norm_swap.least_values() == 524_288
