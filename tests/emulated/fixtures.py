"""Fixtures that run the codecs' CUDA kernels on a CPU; they are compiled once, as that takes seconds."""

from __future__ import annotations

import pytest

from hybridpar.codegen import cuda_driver
from hybridpar.codegen import nvrtc as kernel_cuda
from hybridpar.codegen.cache import KernelsUnavailable
from hybridpar.compress.kernels.cuda import PARAMETERS, SOURCE, CudaKernels
from tests.emulated import IMAGE, emulated_driver


@pytest.fixture(scope="session")
def emulated_module(tmp_path_factory: pytest.TempPathFactory) -> cuda_driver.CudaModule:
    """The codecs' kernels behind a driver that runs them on the CPU."""
    path = emulated_driver(SOURCE, PARAMETERS, tmp_path_factory.mktemp("emulated"))
    return cuda_driver.Driver(str(path)).load(IMAGE, 0)


@pytest.fixture
def emulated_kernels(emulated_module: cuda_driver.CudaModule, monkeypatch: pytest.MonkeyPatch) -> CudaKernels:
    """They take tensors of the CPU, as that is where they run."""
    monkeypatch.setattr(cuda_driver, "current_stream", lambda index: 0)
    return CudaKernels({name: emulated_module.function(name, taken) for name, taken in PARAMETERS.items()})


@pytest.fixture
def cuda_compiler() -> kernel_cuda.Compile:
    """What compiles CUDA C here; skips where nothing does, as where torch is made for CPUs alone."""
    try:
        return kernel_cuda.compiler()[1]
    except KernelsUnavailable as reason:
        pytest.skip(str(reason))
