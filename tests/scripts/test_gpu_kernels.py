"""Tests the script that checks and times the codecs' kernels on a GPU, on a machine without one."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch

from benchmarks.rig.paired import Paired
from hybridpar.compress import kernels
from hybridpar.compress.kernels.cuda import CudaKernels
from scripts import gpu_kernels

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def found(emulated_kernels: CudaKernels, monkeypatch: pytest.MonkeyPatch) -> CudaKernels:
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


@pytest.mark.parametrize("kernel", ["onebit_decode", "twobit_codes", "qsgd_encode_planes"])
def test_a_kernel_that_does_nothing_is_noticed(
    kernel: str, found: CudaKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(found.functions, kernel, lambda *_: None)  # type: ignore[arg-type]
    failed = {name.partition(",")[0] for name, verdict in verdicts().items() if verdict == "FAILED"}
    assert kernel.partition("_")[0] in {name.partition("_")[0] for name in failed}


def test_without_kernels_nothing_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "table", lambda device=CPU: None)
    assert verdicts() == {"kernels": "FAILED"}


def test_times_stand_beside_torch_and_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    def once(methods: Mapping[str, Callable[[], object]], repeats: int) -> Paired:
        for method in methods.values():
            method()
        times = {"torch": 0.004, "kernels": 0.002, "copy": 0.001}
        return Paired({method: (times[method],) * 20 for method in methods}, dropped=0, load=0.0, loaded=False)

    monkeypatch.setattr(gpu_kernels, "paired", once)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(gpu_kernels, "TIMED", ((3, 40),))
    tables = list(gpu_kernels.time_kernels(CPU, "a GPU"))
    assert len(tables) == 3 * len(gpu_kernels.CODECS)
    assert [rows[0].setting for rows in tables[:3]] == [f"onebit, {way}, 3 x 40" for way in ("encode", "decode", "add")]
    for rows in tables:
        assert {row.device for row in rows} == {"a GPU"}
        rates = {row.method: row.extra["gradient_gb_per_second"] for row in rows}
        assert rates == {"torch": 0.12, "kernels": 0.24, "copy": 0.48}
        assert [row.ratio for row in rows] == [1.0, 0.5, 0.25]
