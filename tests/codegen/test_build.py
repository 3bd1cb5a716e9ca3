"""Tests the cache of compiled kernels: reuse, checks of cached files, and the fallback where nothing can be built."""

from __future__ import annotations

import logging
import os
import stat
import subprocess
import sys
from concurrent.futures import Future
from pathlib import Path

import pytest

from hybridpar.codegen import build as kernel_build
from hybridpar.codegen import cache as kernel_cache
from hybridpar.codegen.build import kernel_path, load_kernels
from hybridpar.codegen.compile_pool import Builder, Built, Request

ROOT = Path(__file__).parents[2]

SOURCE = """
def define(w):
    def body(place, value):
        w.store(w.view(place, "int64"), w.t.int64(0), value * 2)
    return {"double": w.function("double", ("place", "value"), body)}
"""

USE = """
import ctypes, sys
from pathlib import Path
from hybridpar.codegen.build import load_kernels
place = ctypes.c_int64()
load_kernels("tiny", [Path(sys.argv[1])])["double"](ctypes.addressof(place), 21)
print(place.value, "tvm" in sys.modules)
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("source") / "tiny_source.py"
    path.write_text(SOURCE)
    return path


@pytest.fixture(scope="module")
def object_file(source: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """What the build leaves in the cache, made once by two processes that start together."""
    cache = tmp_path_factory.mktemp("built")
    environment = {**os.environ, "HYBRIDPAR_CACHE": str(cache), "HYBRIDPAR_KERNELS": "on", "PYTHONPATH": str(ROOT)}
    both = [
        subprocess.Popen([sys.executable, "-c", USE, str(source)], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    assert [one.communicate(timeout=400)[0].strip() for one in both] == ["42 False"] * 2
    (path,) = (cache / "kernels").glob("tiny-*.o")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert {entry.suffix for entry in path.parent.iterdir()} == {".o", ".lock"}, "nothing is left beside it"
    return path.read_bytes()


@pytest.fixture(autouse=True)
def place(
    source: Path, object_file: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> Path:
    """The cache file, as the build left it; nothing is compiled from here on unless a test says so."""
    caplog.set_level(logging.INFO)
    monkeypatch.setenv("HYBRIDPAR_CACHE", str(tmp_path))
    monkeypatch.setenv("HYBRIDPAR_KERNELS", "on")
    path = kernel_path("tiny", [source])
    path.parent.mkdir(mode=0o700)
    path.write_bytes(object_file)
    path.chmod(0o600)
    return path


@pytest.fixture
def builds(object_file: bytes, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """What was built; the build itself takes what was compiled before."""
    built: list[Path] = []

    def submit(builder: Builder, request: Request) -> Future[Built]:
        built.extend(request.sources)
        future: Future[Built] = Future()
        future.set_result(kernel_build._parted(object_file[kernel_cache._DIGEST :]))  # type: ignore[arg-type]
        return future

    monkeypatch.setattr(Builder, "submit", submit)
    return built


def test_a_warm_start_needs_no_compiler_and_no_tvm(source: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "PATH": str(tmp_path / "empty"), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", USE, str(source)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["42", "False"]


def test_what_is_there_is_used(source: Path, builds: list[Path], caplog: pytest.LogCaptureFixture) -> None:
    functions = load_kernels("tiny", [source])
    assert functions is not None
    assert set(functions) == {"double"}
    assert not builds
    assert not caplog.records


@pytest.mark.parametrize("harm", ["a bit", "cut", "empty", "writable", "link"])
def test_what_cannot_be_trusted_is_built_anew(
    harm: str, source: Path, place: Path, object_file: bytes, builds: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    data = place.read_bytes()
    if harm == "a bit":
        place.write_bytes(data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
    elif harm == "cut":
        place.write_bytes(data[: len(data) // 2])
    elif harm == "empty":
        place.write_bytes(b"")
    elif harm == "writable":
        place.chmod(0o666)
    else:
        place.rename(place.with_suffix(".elsewhere"))
        place.symlink_to(place.with_suffix(".elsewhere"))
    assert load_kernels("tiny", [source]) is not None
    assert builds == [source]
    assert place.read_bytes() == object_file
    assert len([one for one in caplog.records if one.levelno == logging.WARNING]) == 1
    assert "built anew" in caplog.text


def test_another_users_file_is_built_anew(source: Path, builds: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    real = kernel_cache._private
    monkeypatch.setattr(kernel_cache, "_private", lambda about: stat.S_ISDIR(about.st_mode) and real(about))
    assert load_kernels("tiny", [source]) is not None
    assert len(builds) == 1


def test_a_directory_that_others_can_write_to_is_refused(
    source: Path, place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place.parent.chmod(0o777)
    assert load_kernels("tiny", [source]) is None
    assert "chmod 700" in caplog.text


def test_the_name_says_what_it_was_made_from(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = kernel_path("tiny", [source])
    other = tmp_path / "other_source.py"
    other.write_text(SOURCE.replace("* 2", "* 3"))
    assert kernel_path("tiny", [other]) != here
    monkeypatch.setattr(kernel_build, "_cpu", lambda: ["another"])
    assert kernel_path("tiny", [source]) != here


def fails(source: Path, caplog: pytest.LogCaptureFixture) -> str:
    """The one line that says why there are no kernels."""
    assert load_kernels("tiny", [source]) is None
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "\n" not in record.message
    return record.message


def test_without_tvm(source: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def version(name: str) -> str:
        raise kernel_build.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(kernel_build.importlib.metadata, "version", version)
    assert "apache-tvm is not installed" in fails(source, caplog)


def test_without_a_loader(source: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "tvm_ffi_orcjit", None)
    monkeypatch.setattr(kernel_build, "session", kernel_build.Session)  # what was loaded before stays
    assert "tvm_ffi_orcjit" in fails(source, caplog)


def test_where_nothing_can_be_written(
    source: Path, place: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HYBRIDPAR_CACHE", "/proc/nowhere")
    assert "cannot be made" in fails(source, caplog)
    caplog.clear()
    monkeypatch.setenv("HYBRIDPAR_CACHE", str(place.parents[1]))
    place.unlink()
    real = os.open

    def read_only(path: object, flags: int, *rest: object) -> int:  # root may write to any directory
        if flags & os.O_CREAT:
            raise OSError(30, "Read-only file system")
        return real(path, flags, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(kernel_cache.os, "open", read_only)
    assert "Read-only file system" in fails(source, caplog)


def test_a_source_that_does_not_compile(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    bad = tmp_path / "bad_source.py"
    bad.write_text("def define(w):\n    raise ValueError('no such kernel')\n")
    assert "no such kernel" in fails(bad, caplog)


def test_switched_off(
    source: Path, builds: list[Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HYBRIDPAR_KERNELS", "off")
    assert load_kernels("tiny", [source]) is None
    assert "HYBRIDPAR_KERNELS" in caplog.text
    assert not builds
