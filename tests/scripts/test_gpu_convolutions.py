"""Tests the script that checks and times depthwise convolutions on a GPU, on a machine without one."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridpar.codegen import cuda_driver
from hybridpar.tvm_kernels import cuda_kernel, measure
from hybridpar.tvm_kernels.cuda_kernel import CudaVariant
from hybridpar.tvm_kernels.machine import KNOWN
from hybridpar.tvm_kernels.shapes import ConvShape, Direction, KernelKey, Layout
from scripts import gpu_convolutions
from tests.emulated.convolutions import emulated_kernels

CPU = torch.device("cpu")
HOPPER = KNOWN["h100"]
SHAPE = "1x4x6x5 k3x3 s1x1 p1x1 d1x1"
KEYS = [
    KernelKey(direction, ConvShape.parse(SHAPE), Layout.CHANNELS_LAST, 1, HOPPER.fingerprint, "float32")
    for direction in (Direction.FORWARD, Direction.WEIGHT_GRADIENT)
]


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> gpu_convolutions.Kernels:
    """What was compiled elsewhere: sources in place of machine code, which run on the CPU."""
    monkeypatch.setattr(cuda_driver, "current_stream", lambda index: 0)
    monkeypatch.setattr(measure, "milliseconds", lambda call, times, device: call() is None or 2.0)
    monkeypatch.setattr(cuda_kernel, "compile_unspilled", lambda source, _: source)
    monkeypatch.setattr(gpu_convolutions, "cases", lambda gpu, shapes, dtypes: KEYS)
    loaded: dict[bytes, Any] = {}

    def load(variant: CudaVariant, code: bytes, index: int) -> Any:
        if code not in loaded:
            folder = tmp_path / str(len(loaded))
            folder.mkdir()
            loaded[code] = emulated_kernels([variant], [code.decode()], folder)[0]
        return loaded[code]

    monkeypatch.setattr(gpu_convolutions, "load_cubin", load)
    folder = tmp_path / "prebuilt"
    gpu_convolutions.prebuild(folder, HOPPER, checked=1, timed=1)
    return gpu_convolutions.Kernels(KNOWN["h200"], 0, folder)


def test_what_was_compiled_elsewhere_is_checked_and_timed(
    kernels: gpu_convolutions.Kernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = list(gpu_convolutions.run_checks(CPU, kernels))
    assert [result.verdict for result in results] == ["ok", "ok"]
    table = tmp_path / "rows.csv"
    gpu_convolutions.time_convolutions(CPU, kernels, table)
    with table.open() as file:
        rows = list(csv.DictReader(file))
    assert [row["method"] for row in rows[:5]] == [
        "kernel",
        "torch channels_last",
        "native channels_last",
        "torch contiguous",
        "native contiguous",
    ]
    assert {row["direction"] for row in rows} == {"forward", "weight_gradient"}
    assert {row["device"] for row in rows} == {"NVIDIA H200"}
    assert {row["ms"] for row in rows if row["method"] != "kernel"} == {"2.00000"}

    monkeypatch.setattr(gpu_convolutions, "load_cubin", lambda *_: _Wrong())
    assert {result.verdict for result in gpu_convolutions.run_checks(CPU, kernels)} == {"FAILED"}


class _Wrong:
    """A kernel that writes zeros."""

    def __call__(self, first: torch.Tensor, second: torch.Tensor, third: None, out: torch.Tensor) -> None:
        out.zero_()
