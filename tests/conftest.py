"""Fixtures for all tests: one thread, fixed seeds, and a cache directory that only this test session uses."""

from __future__ import annotations

import gc
import os
import random
import sys

import numpy
import pytest
import torch

from tests.ranks import keep_what_is_left, leave_to_the_system

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


@pytest.fixture(autouse=True, scope="module")
def _short_collections():
    yield
    keep_what_is_left()


def pytest_configure(config: pytest.Config) -> None:
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    torch.set_num_threads(1)
    os.fsync = leave_to_the_system
    # Loader processes that the garbage collector finds do not hear that they are to end, and are waited for so long.
    torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL = 0.5
    # Tests start many processes that import the package; without its byte code each of them compiles it anew.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session):
    gc.disable()  # what is made here stays, and going through it again and again took longer than making it
    try:
        return (yield)
    finally:
        keep_what_is_left()
        gc.enable()


def pytest_report_header(config: pytest.Config) -> str:
    return f"torch {torch.__version__}, {os.cpu_count()} cores, cuda {torch.cuda.is_available()}"


#: Files that take longest, and begin first: a core would wait for one of them that begins last.
LONGEST = (
    *("state/test_random_state.py", "machine/test_launch.py", "pipeline/test_engine.py", "pipeline/test_executor.py"),
    *("compress/test_every_codec.py", "server/test_runs.py", "test_docs.py", "test_examples.py"),
    *("integrations/test_converted.py", "tvm_kernels/test_schedules.py", "tvm_kernels/test_tune.py"),
)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not str(item.path).endswith(LONGEST))
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):  # a folder of the path may have that name, too
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    if config.option.markexpr == "":
        for item in items:
            if item.get_closest_marker("sweep"):
                item.add_marker(pytest.mark.skip(reason="a long sweep; run it with its make target"))
