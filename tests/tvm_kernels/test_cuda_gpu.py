"""Tests tuned CUDA kernels on a GPU: the op runs them on torch's stream and with its memory."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from torch import nn

from hybridpar.tvm_kernels import choice
from hybridpar.tvm_kernels.choice import Choices
from hybridpar.tvm_kernels.conv_bench import DTYPES, ConvBench
from hybridpar.tvm_kernels.database import Database, most_error, read_database
from hybridpar.tvm_kernels.machine import gpu_at
from hybridpar.tvm_kernels.op import depthwise_conv2d
from hybridpar.tvm_kernels.shapes import ConvShape, Direction, KernelKey, Layout
from hybridpar.tvm_kernels.tune import search_all

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("tvm") is None, reason="needs TVM, to write kernels"),
]

SHAPE = ConvShape.parse("4x24x13x11 k3x3 s2x2 p1x1 d1x1")


@pytest.fixture(scope="module", params=sorted(DTYPES))
def tuned(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Database:
    """Records of all directions, made to win: what is tested is whether they are right, not whether they are fast."""
    path: Path = tmp_path_factory.mktemp("tuned") / "k.jsonl"
    keys = [
        KernelKey(direction, SHAPE, layout, 1, gpu_at(0).fingerprint, request.param)
        for layout in Layout
        for direction in Direction
    ]
    report = search_all(dict.fromkeys(keys, 1.0), path, 600, trials=2)
    assert report.tuned == len(keys)
    found = read_database(path).records
    return Database("tuned", [record.model_copy(update={"stock_ms": 10 * record.ms}) for record in found])


@pytest.mark.parametrize("layout", Layout)
def test_a_layer_runs_on_what_was_tuned(tuned: Database, layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    choices = Choices(tuned)
    monkeypatch.setattr(choice, "_active", choices)
    dtype = tuned.records[0].dtype
    decisions = choices.prepare(key for key in tuned if key.layout is layout)
    assert all(decision.kernel for decision in decisions)
    form = torch.channels_last if layout is Layout.CHANNELS_LAST else torch.contiguous_format
    draw = torch.Generator().manual_seed(0)
    conv = nn.Conv2d(24, 24, 3, 2, 1, groups=24).to("cuda", DTYPES[dtype])
    x = torch.randn(4, 24, 13, 11, generator=draw).to("cuda", DTYPES[dtype]).contiguous(memory_format=form)
    x.requires_grad_()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        y = depthwise_conv2d(x, conv.weight, conv.bias, 2, 1)
        gradient = torch.randn(y.shape, generator=draw).to(y)
        y.backward(gradient)
    torch.cuda.synchronize()
    double = nn.Conv2d(24, 24, 3, 2, 1, groups=24).double()
    double.load_state_dict({name: value.double().cpu() for name, value in conv.state_dict().items()})
    wide = x.detach().double().cpu().requires_grad_()
    expected = double(wide)
    expected.backward(gradient.double().cpu())
    assert conv.weight.grad is not None
    for got, right, direction in zip(
        (y, x.grad, conv.weight.grad), (expected, wide.grad, double.weight.grad), Direction, strict=True
    ):
        assert got is not None
        assert right is not None
        worst = float((got.double().cpu() - right).abs().max() / right.abs().max())
        assert worst <= most_error(direction, dtype), direction


def test_nothing_waits_for_the_device_and_nothing_leaks(tuned: Database) -> None:
    choices = Choices(tuned)
    key = next(key for key in tuned if key.direction is Direction.WEIGHT_GRADIENT)
    kernel = choices.decide(key).kernel
    assert kernel is not None
    bench = ConvBench(key, 0, torch.device("cuda", 0))
    out = torch.empty_like(bench.arguments[0][2])
    kernel(*bench.arguments[0][:2], None, out)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):  # which refuses whatever waits
        kernel(*bench.arguments[0][:2], None, out)
    for _ in range(1000):
        kernel(*bench.arguments[0][:2], None, out)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before
