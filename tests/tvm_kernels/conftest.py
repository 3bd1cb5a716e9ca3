"""Why: kernels are compiled once for all tests that want them."""

from __future__ import annotations

import pytest

from hybridpar.tvm_kernels import norm_kernels


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYBRIDPAR_KERNELS", "on")
    if not norm_kernels.table():
        norm_kernels.table.cache_clear()
    assert norm_kernels.table(), "TVM is a dependency, so kernels can be built"
