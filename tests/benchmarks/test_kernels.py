"""The tables of the kernels: what they are taken of, and what is said of their rows."""

from __future__ import annotations

import pytest
import torch

from benchmarks.kernels.depthwise import operations
from hybridpar.tvm_kernels.machine import cpu_fingerprint
from hybridpar.tvm_kernels.shapes import ConvShape, Direction, KernelKey, Layout
from tests.tvm_kernels.standin import all_records, tuned


@pytest.mark.parametrize("on_kernels", [True, False])
@pytest.mark.parametrize("direction", list(Direction))
def test_all_sides_of_a_row_compute_the_same(
    direction: Direction, on_kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HYBRIDPAR_KERNELS", "on")
    shape = ConvShape.parse("2x8x9x9 k5x5 s2x2 p2x2 d1x1")
    with tuned(all_records(shape) if on_kernels else []) as kernels, torch.no_grad():
        operation, stock, error = operations(KernelKey(direction, shape, Layout.CHANNELS_LAST, 1, cpu_fingerprint()))
        position = {Direction.FORWARD: None, Direction.INPUT_GRADIENT: 0, Direction.WEIGHT_GRADIENT: 1}[direction]
        results = [side() for side in (operation, *stock.values())]
    results = [result if isinstance(result, torch.Tensor) else result[position] for result in results]  # type: ignore[index]
    assert error < 1e-5
    assert (kernels.calls[direction] > 0) is on_kernels
    for result in results[1:]:
        assert torch.allclose(results[0], result, rtol=1e-4, atol=1e-4)
