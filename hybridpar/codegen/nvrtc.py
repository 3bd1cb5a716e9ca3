"""Compiles CUDA C with NVRTC, and loads the kernels.

Source text is compiled to machine code for one architecture by NVRTC, which comes with torch for CUDA and needs no GPU.
The result is kept in the user's cache (`hybridpar.codegen.cache`) and loaded by the CUDA driver
(`hybridpar.codegen.cuda_driver`).

Where nothing can be compiled or loaded one line is logged, and callers use their fallback. `HYBRIDPAR_KERNELS=off` says
that from the start.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import functools
import hashlib
import importlib.util
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from hybridpar.codegen.cache import KernelsUnavailable, cache_path, cached, load_or_warn
from hybridpar.codegen.cuda_driver import CudaFunction, driver

_log = logging.getLogger(__name__)

#: With it, a product and a sum stay two operations, as they are in torch: else what two devices decode from the same
#: bytes would differ in the last bit. Division, square root and denormals are exact without asking.
OPTIONS = ("--fmad=false", "--std=c++17")

#: Where a product and a sum may be one operation, which rounds once, and so is also nearer to the exact result. There
#: is no --use_fast_math: denormals, infinities and NaN stay as torch's own kernels have them.
CONTRACTED = ("--fmad=true", "--std=c++17")

#: The CUDA driver.
DRIVER = "libcuda.so.1"


def load_cuda_kernels(
    name: str, source: Path, parameters: Mapping[str, str], device: torch.device
) -> dict[str, CudaFunction] | None:
    """The kernels of a source file, built if that has not been done on this machine.

    It is no collective: each process loads for itself, and the first one of a machine builds.
    """

    def load() -> dict[str, CudaFunction]:
        major, minor = torch.cuda.get_device_capability(device)
        code = cubin(name, source.read_bytes(), f"sm_{major}{minor}")
        module = driver(DRIVER).load(code, device.index)
        return {kernel: module.function(kernel, values) for kernel, values in parameters.items()}

    return load_or_warn(f"{name} kernels on {device}", load)


def cubin(name: str, text: bytes, architecture: str, options: Sequence[str] = OPTIONS) -> bytes:
    """Compile a source, or take its machine code from the cache."""
    version, run = compiler(options)
    digest = hashlib.sha256(text).hexdigest()
    made_from = {"source": digest, "options": options, "compiler": version, "architecture": architecture}
    return cached(cache_path(name, made_from, ".cubin"), lambda: run(text, architecture)[0])


#: Compiles text for an architecture; returns machine code, and what ptxas says of registers and memory.
Compile = Callable[[bytes, str], tuple[bytes, str]]


def compiler(options: Sequence[str] = OPTIONS) -> tuple[str, Compile]:
    """NVRTC of this machine: its version, and what compiles by it."""
    library = _nvrtc()
    if library is None:
        raise KernelsUnavailable("there is no NVRTC, which comes with torch for CUDA")
    major, minor = ctypes.c_int(), ctypes.c_int()
    library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return f"nvrtc {major.value}.{minor.value}", functools.partial(_compile, library, options)


@functools.cache
def _nvrtc() -> ctypes.CDLL | None:
    """NVRTC of the CUDA version that torch was built for, as it comes with torch, else the system's."""
    for path in (*_bundled_nvrtc(), ctypes.util.find_library("nvrtc")):
        if path is not None:
            try:
                # It looks for this beside itself only if it was linked that way; what is loaded is not looked for.
                for part in sorted(Path(path).parent.glob("libnvrtc-builtins.so.*")):
                    ctypes.CDLL(str(part))
                return ctypes.CDLL(path)
            except OSError as error:
                _log.debug("%s cannot be loaded: %s", path, error)
    return None


def _bundled_nvrtc() -> Iterator[str]:
    spec = importlib.util.find_spec("nvidia")
    version = (torch.version.cuda or "*").partition(".")[0]
    for folder in (spec and spec.submodule_search_locations) or ():
        yield from map(str, sorted(Path(folder).glob(f"*/lib/libnvrtc.so.{version}")))


def _compile(library: ctypes.CDLL, options: Sequence[str], text: bytes, architecture: str) -> tuple[bytes, str]:
    def check(status: int) -> None:
        if status:
            library.nvrtcGetErrorString.restype = ctypes.c_char_p
            raise KernelsUnavailable(f"NVRTC: {library.nvrtcGetErrorString(status).decode()}")

    def content(what: str) -> bytes:
        size = ctypes.c_size_t()
        check(getattr(library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
        room = ctypes.create_string_buffer(size.value)
        check(getattr(library, f"nvrtcGet{what}")(program, room))
        return room.raw

    options = [f"--gpu-architecture={architecture}", *options, "--ptxas-options=-v"]
    listed = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    program = ctypes.c_void_p()
    check(library.nvrtcCreateProgram(ctypes.byref(program), text, b"kernels.cu", 0, None, None))
    try:
        status = library.nvrtcCompileProgram(program, len(options), listed)
        log = content("ProgramLog").rstrip(b"\0").decode(errors="replace")
        if status:
            raise KernelsUnavailable(f"NVRTC for {architecture}: {_first_error(log)}")
        return content("CUBIN"), log
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _first_error(log: str) -> str:
    lines = [line for line in log.splitlines() if line.strip()] or ["no reason given"]
    return next((line for line in lines if "error" in line), lines[0])
