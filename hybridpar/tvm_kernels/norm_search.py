"""Why: which norms are worth fusing is measured once for a machine, within the time that a tune has.

Unlike a convolution's, a norm's kernel has nothing to search: each shape is one measurement of a second. Those that the
database has a record of are skipped, and each record is on disk before the next measurement begins.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from hybridpar.machine.steady import MOST_NOISE
from hybridpar.tvm_kernels import norm_kernels
from hybridpar.tvm_kernels.database import Database, append_records, read_database
from hybridpar.tvm_kernels.machine import measure_copies
from hybridpar.tvm_kernels.norm_measure import NormTime, measure_norm
from hybridpar.tvm_kernels.norm_records import NormKey, NormRecord, norm_versions
from hybridpar.tvm_kernels.record import WrongKernelError
from hybridpar.tvm_kernels.search import SearchReport, tell_unsteady

_log = logging.getLogger(__name__)

#: Seconds for one norm, at most.
LONGEST = 1.5

#: Part of the time of a tune that norms may take where there are convolutions to be searched too.
SHARE = 0.25


@dataclass(frozen=True)
class NormProgress:
    """How far measuring has come.

    Attributes:
        done: Norms that are finished, those skipped included.
        total: All norms.
        key: What is being measured.
    """

    done: int
    total: int
    key: NormKey


def measure_norms(
    keys: Iterable[NormKey],
    path: Path,
    seconds: float,
    *,
    again: bool = False,
    seed: int = 0,
    on_progress: Callable[[NormProgress], None] | None = None,
    measure: Callable[..., NormTime] | None = None,
) -> SearchReport:
    """Time fused norms against torch, and append the times to a database.

    Args:
        keys: The norms; kernels are for float32 in channels_last, other keys have none.
        path: The database.
        seconds: Time for all of it; no measurement is begun after it.
        again: Measure also where there is a record.
        seed: Of the data.
        on_progress: Called at the start of each measurement.
        measure: Measures one, as `measure_norm`, which is the default.

    Raises:
        UsageError: The database cannot be read or written.
    """
    keys = list(dict.fromkeys(keys))
    database = read_database(path) if path.exists() else Database(str(path))
    todo = [key for key in keys if again or database.best_norm(key) is None]
    report = SearchReport(skipped=len(keys) - len(todo))
    if todo and measure is None and not norm_kernels.table():
        _log.warning("there are no kernels of norms here, torch is used for all %d", len(todo))
        report.empty = len(todo)
        return report
    end = time.monotonic() + seconds
    # Copies depend on the machine alone; timed once, and only where something is measured.
    copies = measure_copies() if todo and measure is None else None
    for place, key in enumerate(todo):
        left = end - time.monotonic()
        if left <= 0:
            report.left = len(todo) - place
            break
        if on_progress is not None:
            on_progress(NormProgress(report.skipped + place, len(keys), key))
        try:
            share = min(LONGEST, left / (len(todo) - place))
            found = (measure or measure_norm)(key.shape, key.threads, share, seed, copies)
        except KeyboardInterrupt:
            report.stopped, report.left = True, len(todo) - place
            break
        except WrongKernelError as error:
            _log.warning("torch is used: %s", error)
            report.empty += 1
            continue
        if found.noise > MOST_NOISE:
            tell_unsteady(f"{key.op} {key.shape.text}", found.noise)
            report.unsteady += 1
            continue
        append_records(path, [_record_of(key, found)])
        report.tuned += 1
    return report


def _record_of(key: NormKey, found: NormTime) -> NormRecord:
    return NormRecord(
        rows=key.shape.rows,
        channels=key.shape.channels,
        activation=key.shape.act,
        layout=key.layout,
        device=key.device,
        threads=key.threads,
        versions=dict(norm_versions()),
        ms=found.ms,
        stock_ms=found.stock_ms,
        floor_ms=found.floor_ms,
        error=found.error,
        stock_error=found.stock_error,
        noise=found.noise,
        tuned_at=time.time(),
    )
