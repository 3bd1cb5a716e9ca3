"""Fixtures for tests of commands that are given a run: one that was trained, and what a run sets is set back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.runs import restored_modes, train


@pytest.fixture(scope="session")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one epoch."""
    run_dir = tmp_path_factory.mktemp("trained") / "run"
    assert train(run_dir, epochs=1) == 0
    return run_dir


@pytest.fixture
def modes() -> Iterator[None]:
    with restored_modes():
        yield
