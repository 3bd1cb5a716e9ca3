"""Tests what a machine decides: the width of vectors, the memory of a bench, and which norms threads share."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hybridpar.tvm_kernels import machine, norm_swap
from hybridpar.tvm_kernels.conv_bench import ConvBench
from hybridpar.tvm_kernels.shapes import ConvShape, Direction, Layout


@pytest.mark.parametrize(
    ("architecture", "flags", "expected"),
    [
        ("x86_64", "sse2 avx avx2 fma avx512f", machine.Machine(16, 32)),
        ("x86_64", "sse2 avx avx2 fma", machine.Machine(8, 16)),
        ("x86_64", "sse2", machine.Machine(4, 16)),
        ("aarch64", "", machine.Machine(4, 32)),
    ],
)
def test_vectors_are_those_of_the_instruction_sets(
    architecture: str, flags: str, expected: machine.Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "cpu_features", lambda: frozenset(flags.split()))
    monkeypatch.setattr("platform.machine", lambda: architecture)
    assert machine.this_machine.__wrapped__() == expected


def bench_bytes(shape: ConvShape, direction: Direction) -> int:
    """What a bench keeps: operands in both formats, and results of all turns."""
    with FakeTensorMode():
        bench = ConvBench(shape, direction, Layout.CHANNELS_LAST)
        turns = [operands for layout in Layout for operands in bench.operands(layout)]
        memory = {id(tensor): tensor.nbytes for operands in turns for tensor in operands}
        return sum(memory.values()) + len(turns) * bench.arguments()[2].nbytes


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
