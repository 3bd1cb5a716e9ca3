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
from hybridpar.codegen.compile_pool import Builder, Request
from hybridpar.tvm_kernels.cuda_device import is_gpu
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
        benches: Sets of tensors that finalists are timed on. Some kernels are fast on one set alone, by where it lies
            in memory; the worse of two counts.
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
        """What must run on kernels of its own for this one to be of use; measured against what that takes.

        Args:
            key: What is to be computed.
        """
        del key
        return ()

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
    def space(self, key: KernelKey, parts: Sequence[Parameters]) -> list[tuple[dict[str, int], float]]:
        """Candidates, each with the cost that a model predicts.

        Args:
            key: What is to be computed.
            parts: Parameters of the kernels that its `parts` run on.
        """

    def request(self, key: KernelKey, parameters: Parameters) -> Request | None:
        """What compiles a candidate; None where nothing is to be compiled.

        Args:
            key: What is to be computed.
            parameters: Of a candidate.
        """
        del key, parameters
        return None

    def path(self, key: KernelKey, parameters: Parameters) -> Path:
        """The cache file of what the request gives.

        Args:
            key: What is to be computed.
            parameters: Of a candidate.

        Raises:
            KernelsUnavailable: Nothing can be built on this machine.
        """
        raise NotImplementedError

    @abstractmethod
    def load(
        self, key: KernelKey, parameters: Parameters, names: Sequence[str], image: bytes, session: Session | None
    ) -> Any:
        """The kernel in what was built.

        Args:
            key: What it computes.
            parameters: How.
            names: Its functions.
            image: What the compiler gave.
            session: Where machine code goes that a search loads; None where it is to stay.

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
        """

    def measure_speed(self, builder: Builder) -> Any:
        """What the device can do, for `floor_ms`; measured once for a tune.

        Args:
            builder: Builds what is timed.
        """
        del builder

    def floor_ms(self, key: KernelKey, speed: Any) -> float | None:
        """Milliseconds that neither arithmetic nor memory can beat; None where that is not known.

        Args:
            key: What is to be computed.
            speed: As `measure_speed` gives it.
        """
        del key, speed
        return None

    @abstractmethod
    def weight(self, key: KernelKey) -> float:
        """About how long it takes, in any unit: what takes longest is tuned first.

        Args:
            key: What is to be computed.
        """


_OPERATIONS: dict[tuple[str, str], Operation] = {}
_Kind = TypeVar("_Kind", bound=type[Operation])


def register_operation(kind: _Kind) -> _Kind:
    """Decorator that enters an operation.

    Args:
        kind: The class.

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
    """The operation of that name, for whichever target; None where there is none.

    Args:
        name: As records call it.
    """
    return next((one for (own, _), one in operations().items() if own == name), None)


def find_operation(key: KernelKey) -> Operation | None:
    """The operation that a key is of, on the key's kind of device; None where there is none.

    Args:
        key: What is to be computed.
    """
    return operations().get((key.op, "cuda" if is_gpu(key.device) else "cpu"))


def operation_of(key: KernelKey) -> Operation:
    """The operation that a key is of, on the key's kind of device.

    Args:
        key: What is to be computed.

    Raises:
        KernelsUnavailable: There is none.
    """
    found = find_operation(key)
    if found is None:
        raise KernelsUnavailable(f"there are no kernels of {key.op} for {key.device}")
    return found


def versions_of(name: str) -> dict[str, str]:
    """Versions that records of an operation need to be used.

    Args:
        name: Of the operation.
    """
    operation = named_operation(name)
    return {} if operation is None else dict(operation.versions)


def whole_numbers(parameters: Mapping[str, object]) -> dict[str, int]:
    """Those parameters of a record that are whole numbers, as all of a kernel's are.

    Args:
        parameters: Of a candidate.
    """
    return {name: value for name, value in parameters.items() if type(value) is int}


@functools.cache
def _installed() -> dict[str, str]:
    found = {}
    for name, distribution in (("tvm", "apache-tvm"), ("torch", "torch")):
        try:
            found[name] = importlib.metadata.version(distribution).partition("+")[0]
        except importlib.metadata.PackageNotFoundError:
            found[name] = "none"
    return found
