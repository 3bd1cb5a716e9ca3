"""Compiles the model's best candidates for a GPU that is not at hand, as records without a time."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridpar.codegen.cache import KernelsUnavailable
from hybridpar.codegen.compile_pool import Builder
from hybridpar.tvm_kernels import cuda_kernel
from hybridpar.tvm_kernels.operation import KernelKey, operation_of
from hybridpar.tvm_kernels.search import KEPT, SearchReport, search_all

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Compiled:
    """A candidate that was compiled and not measured, with what a `KernelRecord` takes from it.

    Attributes:
        parameters: Of the schedule, by name.
        predicted_ms: Milliseconds that the cost model predicts.
        floor_ms: Milliseconds that neither arithmetic nor memory can beat; None where they are not known.
        cubin: File of the machine code, relative to the database's directory.
        align: What the addresses of all tensors are multiples of.
        ms: None: nothing was measured.
        stock_ms: Likewise.
        noise: 0, as there are no measurements that could differ.
        final: True, so that it is recorded.
    """

    parameters: dict[str, int]
    predicted_ms: float
    floor_ms: float | None
    cubin: str
    align: int = 16
    ms: None = None
    stock_ms: None = None
    noise: float = 0.0
    final: bool = True


def compile_all(
    keys: Mapping[KernelKey, int] | Iterable[KernelKey],
    path: Path,
    seconds: float,
    *,
    builder: Builder | None = None,
    **options: Any,
) -> SearchReport:
    """Compile the model's best candidates, and append records of them without a time to a database.

    Args:
        keys: The convolutions, of a GPU.
        path: The database; machine code goes to a directory of the same name with `.cubins`.
        seconds: Time for all of it; what was begun is finished.
        builder: Writes the sources; None for one of this call's own.
        options: As `search_all` takes them.

    Returns:
        What became of them.

    Raises:
        UsageError: The database cannot be read or written.
        KernelsUnavailable: Nothing can be compiled on this machine.
    """

    def tuner(key: KernelKey, *_: Any, trials: int | None, **told: Any) -> list[Any]:
        return list(_compiled(key, path.with_suffix(".cubins"), builder or told["builder"], trials or KEPT))

    return search_all(keys, path, seconds, tuner=tuner, measured=False, **options)


def _compiled(key: KernelKey, folder: Path, builder: Builder, count: int) -> Iterator[Compiled]:
    for parameters, seconds, code in compiled_candidates(key, builder, count):
        folder.mkdir(exist_ok=True)
        file = folder / f"{hashlib.sha256(code).hexdigest()[:24]}.cubin"
        file.write_bytes(code)
        floor_ms = operation_of(key).floor_ms(key, None)
        yield Compiled(parameters, 1e3 * seconds, floor_ms, f"{folder.name}/{file.name}")


def compiled_candidates(key: KernelKey, builder: Builder, count: int) -> Iterator[tuple[dict[str, int], float, bytes]]:
    """The best candidates that compile without keeping values in memory for want of registers.

    Args:
        key: A convolution on a GPU.
        builder: Writes sources.
        count: At most so many.

    Yields:
        Parameters, the seconds that the model predicts, and machine code.

    Raises:
        KernelsUnavailable: The first ones do not compile.
    """
    operation = operation_of(key)
    found = failed = 0
    for parameters, seconds in sorted(operation.space(key, ()), key=lambda one: one[1]):
        if found == count or failed > 2 * count + 4:
            return
        request = operation.request(key, parameters)
        assert request is not None, "sources of a GPU are always written"
        try:
            code = cuda_kernel.compile_unspilled(builder.build(request).image, key.device.rpartition(" ")[2])
        except KernelsUnavailable as error:
            failed += 1
            _log.info("%s %s %s: %s", key.direction, key.shape.text, parameters, error)
            if failed > 4 and not found:
                raise
            continue
        found += 1
        yield parameters, seconds, code
