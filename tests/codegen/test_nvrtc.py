"""Tests how CUDA kernels are compiled, cached, loaded and launched, on machines without a GPU.

The driver is a library that stands for libcuda and runs kernels on the CPU, see `tests/emulated`.
"""

from __future__ import annotations

import ctypes
import logging
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hybridpar.codegen import cuda_driver
from hybridpar.codegen import nvrtc as kernel_cuda
from hybridpar.codegen.cuda_driver import CudaFunction, CudaModule, Driver
from hybridpar.codegen.nvrtc import compiler, cubin, load_cuda_kernels
from tests.emulated import IMAGE, emulated_driver

SOURCE = """
struct Both { unsigned a; float b; };

extern "C" __global__ void mixed(
    double* out, unsigned char small, double large, unsigned count, Both both, const __grid_constant__ Both last) {
    const unsigned thread = blockIdx.x * blockDim.x + threadIdx.x;
    if (thread < count) out[thread] = small + large + both.a + both.b + last.a + last.b + thread;
}

extern "C" __global__ void meets(unsigned* out, unsigned leave) {
    if (threadIdx.x < leave) return;
    __syncthreads();
    out[threadIdx.x] = __shfl_xor_sync(0xFFFFFFFFu, threadIdx.x, 1);
}
"""
MIXED, MEETS = "PBdIIfIf", "PI"
HOPPER = (9, 0)


class Seen(ctypes.Structure):
    """What the driver remembers of the last launch, as in `tests/emulated/cuda.h`."""

    _fields_ = (
        *(("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared", ctypes.c_uint)),
        *(("stream", ctypes.c_uint64), ("context", ctypes.c_uint64), ("launches", ctypes.c_uint64)),
    )


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("source") / "mixed.cu"
    path.write_text(SOURCE)
    return path


@pytest.fixture(scope="module")
def library(source: Path) -> Path:
    return emulated_driver(source, ("mixed", "meets"), source.parent)


@pytest.fixture
def module(library: Path, monkeypatch: pytest.MonkeyPatch) -> CudaModule:
    monkeypatch.setattr(cuda_driver, "current_stream", lambda index: 7000 + index)
    return Driver(str(library)).load(IMAGE, 3)


@pytest.fixture(autouse=True)
def _wanted(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("HYBRIDPAR_KERNELS", "on")
    monkeypatch.setenv("HYBRIDPAR_CACHE", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: HOPPER)
    caplog.set_level(logging.INFO)
    yield
    cuda_driver.driver.cache_clear()


def mixed(function: CudaFunction, value: float, count: int = 100) -> list[float]:
    """What a launch writes, less the number of the thread."""
    out = torch.zeros(count, dtype=torch.float64)
    function((2, 1, 1), (64, 1, 1), out.data_ptr(), 200, value, count, 3, 0.25, 5, 0.5)
    return (out - torch.arange(count)).tolist()


# ------------------------------------------------------------------------------------------------------------ launching


def test_arguments_lie_where_a_compiler_puts_them(module: CudaModule) -> None:
    assert mixed(module.function("mixed", MIXED), 1e9) == [1e9 + 208.75] * 100


def test_a_launch_is_in_torchs_context_and_stream(module: CudaModule, library: Path) -> None:
    out = torch.zeros(64, dtype=torch.int32)
    module.function("meets", MEETS)((1, 1, 1), (64, 1, 1), out.data_ptr(), 0)
    emulated = ctypes.CDLL(str(library))
    seen = Seen.in_dll(emulated, "seen")
    assert (list(seen.grid), list(seen.block), seen.shared) == ([1, 1, 1], [64, 1, 1], 0)
    assert (seen.context, seen.stream) == (103, 7003)
    assert emulated.depth() == 0, "the context before is current again"
    assert out.tolist() == [lane ^ 1 for lane in range(64)]


# ------------------------------------------------------------------------------------------------------------ compiling


def is_machine_code(code: bytes) -> bool:
    """Whether it is an ELF file for CUDA."""
    return code[:4] == b"\x7fELF" and int.from_bytes(code[18:20], "little") == 190


@pytest.mark.usefixtures("cuda_compiler")
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
def test_what_was_compiled_is_kept(
    architecture: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = cubin("mixed", source.read_bytes(), architecture)
    assert is_machine_code(code)
    (path,) = (tmp_path / "kernels").glob("mixed-*.cubin")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    version, _ = compiler()
    monkeypatch.setattr(kernel_cuda, "compiler", lambda *_: (version, None))
    assert cubin("mixed", source.read_bytes(), architecture) == code, "nothing was compiled, there is nothing to do so"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(TypeError):
        cubin("mixed", source.read_bytes(), architecture)


def test_the_name_says_what_it_was_made_from(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_cuda, "compiler", lambda *_: ("one", lambda *_: (b"code", "")))
    other = tmp_path / "other.cu"
    other.write_text(SOURCE + "\n")
    cubin("mixed", source.read_bytes(), "sm_80")
    cubin("mixed", source.read_bytes(), "sm_90")
    cubin("mixed", other.read_bytes(), "sm_90")
    monkeypatch.setattr(kernel_cuda, "compiler", lambda *_: ("two", lambda *_: (b"code", "")))
    cubin("mixed", other.read_bytes(), "sm_90")
    assert len(list((tmp_path / "kernels").glob("mixed-*.cubin"))) == 4


# -------------------------------------------------------------------------------------------------------------- loading


def load(source: Path) -> dict[str, CudaFunction] | None:
    return load_cuda_kernels("mixed", source, {"mixed": MIXED, "meets": MEETS}, torch.device("cuda", 1))


def fails(source: Path, caplog: pytest.LogCaptureFixture) -> str:
    """The one line that says why there are no kernels."""
    assert load(source) is None
    (record,) = [one for one in caplog.records if one.levelno == logging.WARNING]
    assert "\n" not in record.message
    return record.message


def test_all_of_it(source: Path, library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(kernel_cuda, "compiler", lambda *_: ("none", lambda _, arch: (asked.append(arch) or IMAGE, "")))
    monkeypatch.setattr(kernel_cuda, "DRIVER", str(library))
    monkeypatch.setattr(cuda_driver, "current_stream", lambda index: 0)
    functions = load(source)
    assert functions is not None
    assert asked == ["sm_90"]
    assert mixed(functions["mixed"], 1.0) == [209.75] * 100


@pytest.mark.usefixtures("cuda_compiler")
def test_a_source_that_does_not_compile(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    bad = tmp_path / "bad.cu"
    bad.write_text('extern "C" __global__ void wrong() { nothing(); }')
    message = fails(bad, caplog)
    assert 'identifier "nothing" is undefined' in message
    assert "cuda:1" in message


def test_without_a_compiler(source: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(kernel_cuda, "_nvrtc", lambda: None)
    assert "there is no NVRTC" in fails(source, caplog)


def test_without_a_driver(source: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(kernel_cuda, "DRIVER", "libnothing.so.1")
    assert "libnothing.so.1" in fails(source, caplog)


def test_a_kernel_that_is_missing(
    source: Path, library: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kernel_cuda, "compiler", lambda *_: ("none", lambda *_: (IMAGE, "")))
    monkeypatch.setattr(kernel_cuda, "DRIVER", str(library))
    assert load_cuda_kernels("mixed", source, {"absent": "P"}, torch.device("cuda", 0)) is None
    assert "absent: named symbol not found" in caplog.text


def test_switched_off(source: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("HYBRIDPAR_KERNELS", "off")
    monkeypatch.setattr(kernel_cuda, "cubin", lambda *_: pytest.fail("it was built"))
    assert load(source) is None
    assert "HYBRIDPAR_KERNELS" in caplog.text
