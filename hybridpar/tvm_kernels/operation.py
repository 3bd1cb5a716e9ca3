"""Operations that can be tuned: what search, measurement, records and the choice of a kernel need to know of each.

Operations are modules in `hybridpar.tvm_kernels.operations`, which are all imported when the first one is asked for.
One operation may be there twice, for the CPU and for CUDA: the records are of one kind then, the kernels are not.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from hybridpar.codegen.build import Session
from hybridpar.codegen.cache import KernelsUnavailable
from hybridpar.codegen.compile_pool import Built
from hybridpar.tvm_kernels.machine import is_gpu
from hybridpar.tvm_kernels.measure import Bench
from hybridpar.tvm_kernels.shapes import Layout

Parameters = Mapping[str, int]


@dataclass(frozen=True, order=True)
class KernelKey:
    """What a kernel computes, and where: what a record must agree in to be of use.

    Attributes:
        direction: What of the operation is computed: "forward", for instance, or which gradient.
        shape: Of the operands; each operation has a class of shapes.
        layout: Of activations.
        threads: Threads that compute it.
        device: Fingerprint of the device.
        dtype: Of all tensors.
        op: Name of the operation.
    """

    direction: str
    shape: Any
    layout: Layout
    threads: int
    device: str
    dtype: str = "float32"
    op: str = "depthwise_conv2d"

    @property
    def text(self) -> str:
        """In words, for messages."""
        return f"{self.direction} {self.shape.text} {self.layout}, {self.threads} thread(s)"


@dataclass(frozen=True)
class Pace:
    """How the candidates of a search are gone through; times are seconds.

    Attributes:
        drawn: Candidates drawn at random, after the first one.
        glance: For timing a candidate.
        finalists: Candidates that are timed again at the end.
        longest: For timing one of them, at most.
        reserved: Part of the time that is kept for that.
        pairs: Pairs of calls of a final measurement, at least.
        benches: Benches that finalists are timed on, one comparison on each. Some kernels are fast on some tensors
            alone, by where these lie in memory; the worse of two counts.
    """

    drawn: int = 6
    glance: float = 0.12
    finalists: int = 3
    longest: float = 1.5
    reserved: float = 0.2
    pairs: int = 5
    benches: int = 2


class Operation(ABC):
    """An operation on one kind of device. It has no state.

    Attributes:
        name: As records call it.
        target: "cpu" or "cuda".
        shape: Class of its shapes; it has `parse`, `text`, `unlike` and `distance`, see `shapes.ConvShape`.
        limits: What can be computed, each with the largest error in float32 that a kernel may have: the difference from
            float64, relative to the largest value.
        own_versions: Besides those of torch and TVM, what its times depend on; raised where the same parameters come to
            mean other code.
        required: Whether a missing kernel is an error where HYBRIDPAR_KERNELS is `strict`.
        pace: How candidates are gone through.
    """

    name: ClassVar[str]
    target: ClassVar[str] = "cpu"
    shape: ClassVar[Any]
    limits: ClassVar[Mapping[str, float]]
    own_versions: ClassVar[Mapping[str, str]] = {}
    required: ClassVar[bool] = True
    pace: ClassVar[Pace] = Pace()

    @functools.cached_property
    def versions(self) -> tuple[tuple[str, str], ...]:
        """Versions that its times and those of its rival depend on, by name."""
        return tuple(sorted({**_installed(), **self.own_versions}.items()))

    def without_kernels(self, key: KernelKey) -> str:
        """Why there are no kernels for a key, whatever the records say; empty where there are some.

        Args:
            key: What is to be computed.
        """
        del key
        return ""

    @abstractmethod
    def reject(self, key: KernelKey, parameters: Parameters) -> str | None:
        """Why parameters make no kernel, or None; nothing else is compiled.

        Args:
            key: What is to be computed.
            parameters: Of a candidate.
        """

    @abstractmethod
    def space(self, key: KernelKey) -> list[dict[str, int]]:
        """All candidates that are worth a try.

        Args:
            key: What is to be computed.
        """

    def default(self, key: KernelKey) -> Parameters:
        """Where a search begins that knows nothing; the candidate that is most like it is taken.

        Args:
            key: What is to be computed, of which there is a candidate.
        """
        return self.space(key)[0]

    def variant(self, key: KernelKey, parameters: Parameters) -> Any:
        """A candidate as something to compile; None where nothing is to be compiled.

        Args:
            key: What is to be computed.
            parameters: Of a candidate.

        Returns:
            An object with the properties `request`, which compiles it, and `path`, its file in the cache.
        """
        del key, parameters

    @abstractmethod
    def load(self, key: KernelKey, parameters: Parameters, built: Built, session: Session | None) -> Any:
        """The kernel in what was built.

        Args:
            key: What it computes.
            parameters: How.
            built: What the compiler made of its request; empty where there is none.
            session: Where machine code goes that a search loads; None where it is to stay.

        Returns:
            The kernel.

        Raises:
            KernelsUnavailable: It cannot be had.
        """

    @abstractmethod
    def bench(self, key: KernelKey, seed: int) -> Bench:
        """Data on which a kernel is checked and timed.

        Args:
            key: What is computed.
            seed: Of the data.
        """

    @abstractmethod
    def weight(self, key: KernelKey) -> float:
        """A rough estimate of the time that it takes, in any unit: keys with the largest are tuned first.

        Args:
            key: What is to be computed.
        """


_OPERATIONS: dict[tuple[str, str], Operation] = {}
_Kind = TypeVar("_Kind", bound=type[Operation])


def register_operation(kind: _Kind) -> _Kind:
    """Decorator that enters an operation.

    Args:
        kind: The class.

    Returns:
        The class.

    Raises:
        ValueError: There is one of that name for that target (a programming error, so not a `UsageError`).
    """
    if (kind.name, kind.target) in _OPERATIONS:
        raise ValueError(f"operation {kind.name!r} is registered twice for {kind.target}")
    _OPERATIONS[kind.name, kind.target] = kind()
    return kind


def operations() -> Mapping[tuple[str, str], Operation]:
    """All operations, by name and target."""
    importlib.import_module("hybridpar.tvm_kernels.operations")
    return _OPERATIONS


def named_operation(name: str) -> Operation | None:
    """The operation of a name, for any target; None where there is none."""
    return next((one for (own, _), one in operations().items() if own == name), None)


def find_operation(key: KernelKey) -> Operation | None:
    """The operation of a key, on the key's kind of device; None where there is none."""
    return operations().get((key.op, "cuda" if is_gpu(key.device) else "cpu"))


def operation_of(key: KernelKey) -> Operation:
    """The operation of a key, on the key's kind of device."""
    found = find_operation(key)
    if found is None:
        raise KernelsUnavailable(f"there are no kernels of {key.op} for {key.device}")
    return found


@functools.cache
def _installed() -> dict[str, str]:
    found = {}
    for name, distribution in (("tvm", "apache-tvm"), ("torch", "torch")):
        try:
            found[name] = importlib.metadata.version(distribution).partition("+")[0]
        except importlib.metadata.PackageNotFoundError:
            found[name] = "none"
    return found
