"""What search, records and the choice of a kernel need to know of depthwise convolutions on a kind of device.

There are two operations, for the CPU and for GPUs (`hybridpar.tvm_kernels.depthwise`): records are of one kind, the
kernels are not.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from hybridpar.codegen.build import Session
from hybridpar.codegen.compile_pool import Built
from hybridpar.tvm_kernels.machine import is_gpu
from hybridpar.tvm_kernels.measure import Bench
from hybridpar.tvm_kernels.shapes import ConvShape, Direction, Layout

Parameters = Mapping[str, int]

#: What records call it.
OPERATION: Literal["depthwise_conv2d"] = "depthwise_conv2d"
#: Of CPUs and GPUs; raised where the same parameters come to mean other code.
_SCHEDULES = {False: "2", True: "3"}


@dataclass(frozen=True, order=True)
class KernelKey:
    """What a kernel computes, and where: what a record must agree in to be of use.

    Attributes:
        direction: What is computed.
        shape: Of the operands.
        layout: Of activations.
        threads: Threads that compute it.
        device: Fingerprint of the device.
        dtype: Of all tensors.
    """

    direction: Direction
    shape: ConvShape
    layout: Layout
    threads: int
    device: str
    dtype: str = "float32"

    @property
    def text(self) -> str:
        """In words, for messages."""
        return f"{self.direction} {self.shape.text} {self.layout}, {self.threads} thread(s)"


@dataclass(frozen=True)
class Pace:
    """How long candidates are timed: at a glance, as finalists at most, in seconds; and finalists in pairs at least."""

    glance: float
    longest: float
    pairs: int


class Operation(ABC):
    """Depthwise convolutions on one kind of device. It has no state."""

    pace: Pace

    @abstractmethod
    def without_kernels(self, key: KernelKey) -> str:
        """Why there are no kernels for a key, whatever the records say; empty where there are some."""

    @abstractmethod
    def reject(self, key: KernelKey, parameters: Parameters) -> str | None:
        """Why parameters make no kernel, or None; nothing else is compiled."""

    @abstractmethod
    def space(self, key: KernelKey) -> list[dict[str, int]]:
        """All candidates that are worth a try."""

    @abstractmethod
    def default(self, key: KernelKey) -> Parameters:
        """Where a search begins that knows nothing; the candidate that is most like it is taken."""

    @abstractmethod
    def variant(self, key: KernelKey, parameters: Parameters) -> Any:
        """A candidate, with the properties `request`, which compiles it, and `path`, its file in the cache."""

    @abstractmethod
    def load(self, key: KernelKey, parameters: Parameters, built: Built, session: Session | None) -> Any:
        """The kernel in what was built; a session is given for what a search loads, and None for what is to stay.

        `KernelsUnavailable` says that it cannot be had.
        """

    @abstractmethod
    def bench(self, key: KernelKey, seed: int) -> Bench:
        """Data on which a kernel is checked and timed."""

    @abstractmethod
    def weight(self, key: KernelKey) -> float:
        """What is read and written: keys with much of it are tuned first."""


def operation_of(key: KernelKey) -> Operation:
    """The operation for a key's kind of device."""
    found: Operation = importlib.import_module("hybridpar.tvm_kernels.depthwise").OPERATIONS[is_gpu(key.device)]
    return found


@functools.cache
def versions(device: str) -> dict[str, str]:
    """Versions that times of kernels and of their rivals on a device depend on, by name."""
    found = {"schedules": _SCHEDULES[is_gpu(device)]}
    for name, distribution in (("torch", "torch"), ("tvm", "apache-tvm")):
        try:
            found[name] = importlib.metadata.version(distribution).partition("+")[0]
        except importlib.metadata.PackageNotFoundError:
            found[name] = "none"
    return found
