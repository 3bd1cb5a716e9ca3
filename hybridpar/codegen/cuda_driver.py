"""Loads and launches machine code by the CUDA driver, in torch's context and on its streams.

Code is loaded into torch's context. Launches go to torch's current stream, so kernels are in order with torch's, and
keep to its rules of memory. A launch is three short calls, with arguments in a buffer that is kept, and nothing waits
for the device.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from typing import Any

import torch

#: Marks of `cuLaunchKernel`: here is a buffer with all arguments; here is its size; the end.
_BUFFER, _SIZE, _END = 1, 2, 0


class CudaError(RuntimeError):
    """An error that the CUDA driver reports."""


@functools.cache
def driver(path: str) -> Driver:
    """Load the CUDA driver from a shared library, once."""
    return Driver(path)


class Driver:
    """The few functions of the CUDA driver that kernels need."""

    def __init__(self, path: str) -> None:
        # Calls that may wait let other threads have the GIL. To give it up for those that do not would cost more.
        waiting, quick = ctypes.CDLL(path), ctypes.PyDLL(path)
        pointer, unsigned = ctypes.c_void_p, ctypes.c_uint
        self._message = quick.cuGetErrorString
        self._init, self._device, self._retain = waiting.cuInit, waiting.cuDeviceGet, waiting.cuDevicePrimaryCtxRetain
        self._load, self.find = waiting.cuModuleLoadData, waiting.cuModuleGetFunction
        self.push, self.pop, self.launch = quick.cuCtxPushCurrent_v2, quick.cuCtxPopCurrent_v2, waiting.cuLaunchKernel
        self._load.argtypes = [pointer, ctypes.c_char_p]
        self.find.argtypes = [pointer, pointer, ctypes.c_char_p]
        self.push.argtypes, self.pop.argtypes = [pointer], [pointer]
        self.launch.argtypes = [pointer, *[unsigned] * 7, pointer, pointer, pointer]

    def check(self, call: str, status: int) -> None:
        """Raise an error for a status other than success."""
        if status:
            text = ctypes.c_char_p()
            self._message(status, ctypes.byref(text))
            raise CudaError(f"{call}: {(text.value or b'unknown error').decode()} ({status})")

    def load(self, code: bytes, index: int) -> CudaModule:
        """Load machine code into torch's context on a device."""
        device, context, module = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p()
        self.check("cuInit", self._init(0))
        self.check("cuDeviceGet", self._device(ctypes.byref(device), index))
        # The primary context is the one of the CUDA runtime, so of torch. It is kept for good, as the module is.
        self.check("cuDevicePrimaryCtxRetain", self._retain(ctypes.byref(context), device))
        loaded = CudaModule(self, context, module, index)
        with loaded:
            self.check("cuModuleLoadData", self._load(ctypes.byref(module), code))
        return loaded


class CudaModule:
    """Machine code on one device. Inside a `with` block its context is current, and afterwards the one before."""

    def __init__(self, driver: Driver, context: ctypes.c_void_p, handle: ctypes.c_void_p, index: int) -> None:
        self.driver = driver
        self.index = index
        self._context = context
        self._handle = handle

    def function(self, name: str, parameters: str) -> CudaFunction:
        """Find a kernel in the module."""
        handle = ctypes.c_void_p()
        with self:
            status = self.driver.find(ctypes.byref(handle), self._handle, name.encode())
        self.driver.check(f"cuModuleGetFunction {name}", status)
        return CudaFunction(self, handle, name, parameters)

    def __enter__(self) -> None:
        self.driver.check("cuCtxPushCurrent", self.driver.push(self._context))

    def __exit__(self, *_: object) -> None:
        self.driver.check("cuCtxPopCurrent", self.driver.pop(ctypes.byref(ctypes.c_void_p())))


class _Arguments(threading.local):
    """Memory for the arguments of a launch, one for each thread; the driver copies it before a launch returns."""

    def __init__(self, size: int) -> None:
        self.buffer, self.size = ctypes.create_string_buffer(size), ctypes.c_size_t(size)
        addresses = (_BUFFER, ctypes.addressof(self.buffer), _SIZE, ctypes.addressof(self.size), _END)
        self.extra = (ctypes.c_void_p * 5)(*addresses)


class CudaFunction:
    """A kernel; calling it launches it on torch's current stream of its device. Threads may do so at the same time."""

    def __init__(self, module: CudaModule, handle: ctypes.c_void_p, name: str, parameters: str) -> None:
        self.name = name
        #: Where arguments lie: as a C compiler aligns them, which is how CUDA does.
        self.layout = struct.Struct(f"@{parameters}")
        self._module = module
        self._handle = handle
        self._arguments = _Arguments(self.layout.size)

    def __call__(self, grid: tuple[int, int, int], block: tuple[int, int, int], *arguments: Any) -> None:
        """Launch the kernel on torch's current stream of its device."""
        self.layout.pack_into(self._arguments.buffer, 0, *arguments)
        launch, stream = self._module.driver.launch, current_stream(self._module.index)
        with self._module:
            status = launch(self._handle, *grid, *block, 0, stream, None, self._arguments.extra)
        self._module.driver.check(f"cuLaunchKernel {self.name}", status)


def current_stream(index: int) -> int:
    """Torch's current stream of a device, as the driver knows it."""
    return int(torch.cuda.current_stream(index).cuda_stream)
