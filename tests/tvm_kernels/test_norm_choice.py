"""Why: what decides between kernels and torch must be a measurement of this very shape, and nothing else."""

from __future__ import annotations

import pytest
import torch
from torchvision import models

from hybridpar.errors import UsageError
from hybridpar.tvm_kernels import norm_choice, norm_kernels
from hybridpar.tvm_kernels.norm_choice import NormShape, NormTime, NormTimes, measure_norm, norm_shapes


def test_a_shape_is_a_text() -> None:
    shape = NormShape(100352, 96, "relu6")
    assert NormShape.parse(shape.text) == shape
    for text in ("", "100x96", "100x96 gelu", "0x4 relu", "-1x4 relu", "4x4 relu x"):
        with pytest.raises(UsageError, match="is no shape of a norm"):
            NormShape.parse(text)


@pytest.mark.usefixtures("kernels")
def test_a_measurement() -> None:
    threads = torch.get_num_threads()
    ms, stock_ms, error = measure_norm(6 * 35, 24, "silu", 2, seconds=0.0)
    assert ms > 0
    assert stock_ms > 0
    assert 0 < error < 2e-6
    assert torch.get_num_threads() == threads


def test_what_cannot_be_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norm_kernels, "table", dict)
    with pytest.raises(UsageError, match="no kernel can norm 16 rows of 8 channels here"):
        measure_norm(16, 8, "relu", 1)


def test_only_what_was_measured_and_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[tuple[object, ...]] = []

    def measure(*given: object) -> tuple[float, float, float]:
        measured.append(given)
        return (1.0, 2.0, 0.0) if given[1] == 8 else (2.0, 1.0, 0.0)

    monkeypatch.setattr(norm_choice, "measure_norm", measure)
    times = NormTimes({(NormShape(4, 4, "relu"), 1): NormTime(1.0, 1.0, 0.0)})
    shapes = {"a": NormShape(16, 8, "relu"), "b": NormShape(16, 8, "relu"), "c": NormShape(16, 16, "relu")}
    times.measure({**shapes, "d": NormShape(4, 4, "relu")}, 1, 0.5)
    assert measured == [(16, 8, "relu", 1, 0.5), (16, 16, "relu", 1, 0.5)]
    assert times(16, 8, "relu", 1)
    for other in ((16, 8, "relu", 2), (16, 8, "silu", 1), (16, 16, "relu", 1), (4, 4, "relu", 1)):
        assert not times(*other)


def test_the_shapes_of_a_model() -> None:
    model = models.mobilenet_v2(weights=None, width_mult=0.25)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    shapes = norm_shapes(model, torch.randn(2, 3, 64, 64))
    assert len(shapes) == 52
    assert shapes["features.0.1"] == NormShape(2 * 32 * 32, 8, "relu6")
    assert shapes["features.18.1"] == NormShape(2 * 2 * 2, 1280, "relu6")
    assert model.training
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert not any(module._forward_pre_hooks for module in model.modules())
