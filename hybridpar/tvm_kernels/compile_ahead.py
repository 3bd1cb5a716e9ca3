"""Compiles the model's best candidates for a GPU that is not at hand, as records without a time."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from hybridpar.codegen.cache import KernelsUnavailable
from hybridpar.codegen.compile_pool import Builder
from hybridpar.machine.process import available_cores
from hybridpar.tvm_kernels.database import Database, append_records, read_database
from hybridpar.tvm_kernels.operation import KernelKey, operation_of
from hybridpar.tvm_kernels.operations.depthwise_cuda import compile_unspilled
from hybridpar.tvm_kernels.record import Record
from hybridpar.tvm_kernels.search import KEPT, Progress, SearchReport, records_of
from hybridpar.tvm_kernels.tuner import BUILD_TIMEOUT, Tuned

_log = logging.getLogger(__name__)


def compile_all(
    keys: Mapping[KernelKey, int] | Iterable[KernelKey],
    path: Path,
    seconds: float,
    *,
    again: bool = False,
    seed: int = 0,
    trials: int | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    builder: Builder | None = None,
) -> SearchReport:
    """Compile the model's best candidates, and append records of them without a time to a database.

    Args:
        keys: The convolutions, of a GPU.
        path: The database; machine code goes to a directory of the same name with `.cubins`.
        seconds: Time for all of it; what was begun is finished.
        again: Compile also where there is a record.
        seed: Not used; nothing is drawn.
        trials: At most so many candidates for each.
        on_progress: Called at the start of each.
        builder: Writes the sources; None for one of this call's own.

    Returns:
        What became of them.

    Raises:
        UsageError: The database cannot be read or written.
        KernelsUnavailable: Nothing can be compiled on this machine.
    """
    del seed
    keys = list(dict.fromkeys(keys))
    database = read_database(path) if path.exists() else Database(str(path))
    known = {record.key for record in database.records if record.current}
    todo = [key for key in keys if again or key not in known]
    report = SearchReport(skipped=len(keys) - len(todo))
    end = time.monotonic() + seconds
    own = builder or Builder(len(available_cores()), BUILD_TIMEOUT)
    try:
        for place, key in enumerate(todo):
            if place and time.monotonic() > end:
                report.left = len(todo) - place
                break
            if on_progress is not None:
                on_progress(Progress(report.skipped + place, len(keys), key))
            records = list(_compiled(key, path, own, trials or KEPT))
            append_records(path, records)
            report.tuned += bool(records)
            report.empty += not records
    except KeyboardInterrupt:
        report.stopped, report.left = True, len(todo) - report.tuned - report.empty
    finally:
        if builder is None:
            own.close()
    return report


def _compiled(key: KernelKey, path: Path, builder: Builder, count: int) -> Iterator[Record]:
    """Records of the best candidates."""
    folder, operation = path.with_suffix(".cubins"), operation_of(key)
    for parameters, seconds, code in compiled_candidates(key, builder, count):
        folder.mkdir(exist_ok=True)
        file = folder / f"{hashlib.sha256(code).hexdigest()[:24]}.cubin"
        file.write_bytes(code)
        none = dict.fromkeys(("ms", "stock_ms", "error", "noise"))
        more = {"align": 16, "predicted_ms": 1e3 * seconds, "cubin": f"{folder.name}/{file.name}"}
        candidate = Tuned(parameters, 0.0, 0.0, operation.floor_ms(key, None), 0.0)
        yield from records_of(operation, key, [candidate], **none, **more)


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
            code = compile_unspilled(builder.build(request).image, key.device.rpartition(" ")[2]).code
        except KernelsUnavailable as error:
            failed += 1
            _log.info("%s %s %s: %s", key.direction, key.shape.text, parameters, error)
            if failed > 4 and not found:
                raise
            continue
        found += 1
        yield parameters, seconds, code
