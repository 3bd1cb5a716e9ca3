"""Fixtures for tests of compiled kernels: kernels are enabled, and a compiler is started once where one is needed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hybridpar.codegen.compile_pool import Builder
from hybridpar.tvm_kernels import norm_kernels


@pytest.fixture(autouse=True)
def _kernels_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYBRIDPAR_KERNELS", "on")


@pytest.fixture
def kernels(_kernels_on: None) -> None:
    """The kernels of norms, which are there."""
    if not norm_kernels.table():
        norm_kernels.table.cache_clear()
    assert norm_kernels.table(), "TVM is a dependency, so kernels can be built"


@pytest.fixture(scope="package")
def builder() -> Iterator[Builder]:
    """One child process that has TVM loaded, which takes longer than what it is then asked for."""
    with Builder(1) as one:
        yield one
