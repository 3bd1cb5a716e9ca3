"""Tests the script that checks and times the codecs' kernels on a GPU, on a machine without one."""

from __future__ import annotations

import pytest
import torch

from hybridpar.compress import kernels
from hybridpar.compress.kernels.cuda import CudaKernels
from scripts import gpu_kernels

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def emulated(emulated_kernels: CudaKernels, monkeypatch: pytest.MonkeyPatch) -> CudaKernels:
    """What a GPU would run, run on the CPU; and less work than a GPU is given."""
    monkeypatch.setattr(kernels, "table", lambda device=CPU: emulated_kernels)
    monkeypatch.setattr(gpu_kernels, "SHAPES", ((1, 1), (3, 5), (20, 147), (2, 1001)))
    return emulated_kernels


def verdicts() -> dict[str, str]:
    return {result.name: result.verdict for result in gpu_kernels.run_checks(CPU)}


def test_kernels_are_like_torch() -> None:
    seen = verdicts()
    assert len(seen) == 4 * len(gpu_kernels.CODECS) + 4
    skipped = {name for name, verdict in seen.items() if verdict == "skipped"}
    assert skipped == {"another stream", "another GPU", "CUDA graph"}
    assert set(seen.values()) == {"ok", "skipped"}


def test_a_kernel_that_does_nothing_is_noticed(emulated: CudaKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(emulated.functions, "twobit_codes", lambda *_: None)  # type: ignore[arg-type]
    failed = {name.partition(",")[0] for name, verdict in verdicts().items() if verdict == "FAILED"}
    assert "twobit" in {name.partition("_")[0] for name in failed}
