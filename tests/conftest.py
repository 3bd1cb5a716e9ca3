"""Fixtures for all tests: one thread, fixed seeds, and a cache directory that only this test session uses."""

from __future__ import annotations

import gc
import os
import random

import numpy
import pytest
import torch

pytest_plugins = ["tests.emulated.fixtures"]


@pytest.fixture(autouse=True)
def _same_start(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch):
    base = tmp_path_factory.getbasetemp()  # of this process; what one of them compiled is there for all
    monkeypatch.setenv("HYBRIDPAR_CACHE", str((base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "cache"))
    if "HYBRIDPAR_KERNELS" not in os.environ:  # compiling takes seconds; tests of kernels switch them on
        monkeypatch.setenv("HYBRIDPAR_KERNELS", "off")
    torch.set_flush_denormal(False)  # which runs switch on, for the whole process
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)


def pytest_configure(config: pytest.Config) -> None:
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    torch.set_num_threads(1)


def pytest_collection_finish(session: pytest.Session) -> None:
    # What was imported is never garbage. Otherwise each collection goes through millions of objects.
    gc.collect()
    gc.freeze()


def pytest_report_header(config: pytest.Config) -> str:
    return f"torch {torch.__version__}, {os.cpu_count()} cores, cuda {torch.cuda.is_available()}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    if config.option.markexpr == "":
        for item in items:
            if "sweep" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="a long sweep; run it with its make target"))
