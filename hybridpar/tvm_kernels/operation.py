"""Operations that can be tuned: what search, measurement, records and the choice of a kernel need to know of each.

Operations are modules in `hybridpar.tvm_kernels.operations`, which are all imported when the first one is asked for.
One operation may be there twice, for the CPU and for CUDA: the records are of one kind then, the kernels are not.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from hybridpar.codegen.build import Session
from hybridpar.codegen.cache import KernelsUnavailable
from hybridpar.codegen.compile_pool import Builder, Built, Request
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
        liked: First candidates that the cost model likes best.
        drawn: First candidates drawn at random.
        glance: For timing a candidate.
        finalists: Candidates that are timed again at the end.
        longest: For timing one of them, at most.
        reserved: Part of the time that is kept for that; 1 where candidates are so few that all are measured.
        pairs: Pairs of calls of a final measurement, at least.
        benches: Benches that finalists are timed on, one comparison on each. Some kernels are fast on some tensors
            alone, by where these lie in memory; the worse of two counts.
    """

    liked: int = 10
    drawn: int = 3
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
        shape: Class of its shapes; it has `parse`, `text` and `unlike`, see `shapes.ConvShape`.
        limits: What can be computed, each with the largest error in float32 that a kernel may have: the difference from
            float64, relative to the largest value.
        record: Class of its records.
        own_versions: Besides those of torch and TVM, what its times depend on; raised where the same parameters come to
            mean other code.
        words: What tables and plans say where the kernel runs, where it does not, and what it was compared with.
        required: Whether a missing kernel is an error where HYBRIDPAR_KERNELS is `strict`.
        pace: How candidates are gone through.
        least_seconds: A search in less time is not begun.
        longest: Seconds for one key, at most; None for as many as there are. With it keys get equal shares of the time.
        order: Place among the operations of a tune, the lowest first.
        share: Part of the time of a tune, at most, where there are other operations.
    """

    name: ClassVar[str]
    target: ClassVar[str] = "cpu"
    shape: ClassVar[Any]
    limits: ClassVar[Mapping[str, float]]
    record: ClassVar[Any]
    own_versions: ClassVar[Mapping[str, str]] = {}
    words: ClassVar[tuple[str, str, str]] = ("tuned", "stock", "torch")
    required: ClassVar[bool] = True
    pace: ClassVar[Pace] = Pace()
    least_seconds: ClassVar[float] = 2.0
    longest: ClassVar[float | None] = None
    order: ClassVar[int] = 1
    share: ClassVar[float] = 1.0

    @functools.cached_property
    def versions(self) -> tuple[tuple[str, str], ...]:
        """Versions that its times and those of its rival depend on, by name."""
        return tuple(sorted({**_installed(), **self.own_versions}.items()))

    def parts(self, key: KernelKey) -> tuple[KernelKey, ...]:
        """Operations that need kernels of their own for this one to be of use; their time is what it is compared with.

        Args:
            key: What is to be computed.

        Returns:
            Keys of the operations that this one is made of.
        """
        del key
        return ()

    def without_kernels(self, key: KernelKey) -> str:
        """Why there are no kernels for a key, whatever the records say; empty where there are some.

        Args:
            key: What is to be computed.

        Returns:
            A reason in words; empty where there are kernels.
        """
        del key
        return ""

    def covers(self, key: KernelKey) -> bool:
        """Whether there is any candidate.

        Args:
            key: What is to be computed.

        Returns:
            Whether there is; of an operation with parts that depends on their kernels.
        """
        return not self.without_kernels(key)

    @abstractmethod
    def reject(self, key: KernelKey, parameters: Parameters) -> str | None:
        """Why parameters make no kernel, or None; nothing else is compiled.

        Args:
            key: What is to be computed.
            parameters: Of a candidate.

        Returns:
            A reason in words; None where they make a kernel.
        """

    @abstractmethod
    def space(self, key: KernelKey, parts: Sequence[Parameters]) -> list[tuple[dict[str, int], float]]:
        """Candidates, each with the cost that a model predicts.

        Args:
            key: What is to be computed.
            parts: Parameters of the kernels that its `parts` run on.

        Returns:
            Parameters of each candidate and its predicted cost.
        """

    def variant(self, key: KernelKey, parameters: Parameters) -> Any:
        """A candidate as something to compile, with the properties `request` and `path`.

        Args:
            key: What is to be computed.
            parameters: Of a candidate.

        Returns:
            For instance a `kernel.Variant`; None where nothing is to be compiled.
        """
        del key, parameters

    def request(self, key: KernelKey, parameters: Parameters) -> Request | None:
        """What compiles a candidate.

        Args:
            key: What is to be computed.
            parameters: Of a candidate.

        Returns:
            The request; None where nothing is to be compiled.
        """
        variant = self.variant(key, parameters)
        return None if variant is None else variant.request

    def path(self, key: KernelKey, parameters: Parameters) -> Path:
        """The cache file of what the request compiles.

        Args:
            key: What is to be computed.
            parameters: Of a candidate that has a request.

        Returns:
            The file, which need not exist yet.

        Raises:
            KernelsUnavailable: Nothing can be compiled on this machine.
        """
        path: Path = self.variant(key, parameters).path
        return path

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
    def bench(self, key: KernelKey, seed: int, parts: Sequence[Any]) -> Bench:
        """Data on which a kernel is checked and timed.

        Args:
            key: What is computed.
            seed: Of the data.
            parts: Kernels that its `parts` run on.

        Returns:
            The bench.
        """

    def measure_speed(self, builder: Builder) -> Any:
        """Measure what the device can do, for `floor_ms`; called once for a tune.

        Args:
            builder: Builds what is timed.

        Returns:
            What `floor_ms` takes.
        """
        del builder

    def floor_ms(self, key: KernelKey, speed: Any) -> float | None:
        """The time that neither arithmetic nor memory can beat.

        Args:
            key: What is to be computed.
            speed: As `measure_speed` gives it.

        Returns:
            Milliseconds; None where it is not known.
        """
        del key, speed
        return None

    @abstractmethod
    def weight(self, key: KernelKey) -> float:
        """A rough estimate of the time that it takes: keys with the largest are tuned first.

        Args:
            key: What is to be computed.

        Returns:
            A number in any unit.
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
    """The operation of a name, for any target.

    Args:
        name: As records call it.

    Returns:
        The operation; None where there is none.
    """
    return next((one for (own, _), one in operations().items() if own == name), None)


def find_operation(key: KernelKey) -> Operation | None:
    """The operation of a key, on the key's kind of device.

    Args:
        key: What is to be computed.

    Returns:
        The operation; None where there is none.
    """
    return operations().get((key.op, "cuda" if is_gpu(key.device) else "cpu"))


def operation_of(key: KernelKey) -> Operation:
    """The operation of a key, on the key's kind of device.

    Args:
        key: What is to be computed.

    Returns:
        The operation.

    Raises:
        KernelsUnavailable: There is none.
    """
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
