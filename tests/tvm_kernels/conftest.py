"""Why: here kernels are on; compiling is replaced wherever a test does not need it."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _kernels_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYBRIDPAR_KERNELS", "on")
