"""Why: which convolutions should leave their moments to the norms behind them is measured once both are tuned alone.

Only pairs whose parts beat PyTorch each by itself are measured, those with the largest tensors first. There is little
to search (see `conv_norm_measure`). A record is on disk before the next measurement begins; it is measured anew where
one of the parts was since.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from hybridpar.codegen.cache import KernelsUnavailable
from hybridpar.codegen.compile_pool import Builder
from hybridpar.machine.process import available_cores
from hybridpar.machine.steady import MOST_NOISE
from hybridpar.tvm_kernels.conv_norm_choice import convolution_of
from hybridpar.tvm_kernels.conv_norm_measure import ConvNormTime, measure_conv_norm
from hybridpar.tvm_kernels.conv_norm_records import ConvNormKey, ConvNormRecord, conv_norm_versions
from hybridpar.tvm_kernels.database import Database, KernelRecord, append_records, read_database
from hybridpar.tvm_kernels.record import WrongKernelError
from hybridpar.tvm_kernels.search import SearchReport, tell_unsteady
from hybridpar.tvm_kernels.tuner import BUILD_TIMEOUT

_log = logging.getLogger(__name__)

#: Seconds for timing one pair, at most; building its kernels takes as long again.
LONGEST_PAIR = 1.5

#: Part of the time of a tune that is kept for pairs.
PAIR_SHARE = 0.1


@dataclass(frozen=True)
class ConvNormProgress:
    """How far measuring has come.

    Attributes:
        done: Pairs that are finished, those skipped included.
        total: All pairs.
        key: What is being measured.
    """

    done: int
    total: int
    key: ConvNormKey


def measure_conv_norms(
    keys: Mapping[ConvNormKey, int],
    path: Path,
    seconds: float,
    *,
    again: bool = False,
    seed: int = 0,
    on_progress: Callable[[ConvNormProgress], None] | None = None,
    measure: Callable[..., ConvNormTime] = measure_conv_norm,
) -> SearchReport:
    """Time convolutions together with the norms behind them, and append the times to a database.

    Args:
        keys: The pairs, and how often each one runs in a step; those whose parts are not both faster than PyTorch by
            the database's records are left out.
        path: The database.
        seconds: Time for all of it; no measurement is begun after it.
        again: Measure also where there is a record.
        seed: Of the data.
        on_progress: Called at the start of each measurement.
        measure: Measures one.

    Returns:
        What became of those that were not left out; `empty` are those that no kernel could be had for.

    Raises:
        UsageError: The database cannot be read or written.
    """
    database = read_database(path) if path.exists() else Database(str(path))
    parts = {key: own for key in keys if (own := _parts(database, key)) is not None}
    todo = [key for key, (_, newest) in parts.items() if again or _is_old(database, key, newest)]
    todo.sort(key=lambda key: -keys[key] * key.shape.norm.bytes)
    report = SearchReport(skipped=len(parts) - len(todo))
    if not todo:
        return report
    end = time.monotonic() + seconds
    with Builder(len(available_cores()), BUILD_TIMEOUT) as builder:
        for place, key in enumerate(todo):
            left = end - time.monotonic()
            if left <= 0:
                report.left = len(todo) - place
                break
            if on_progress is not None:
                on_progress(ConvNormProgress(report.skipped + place, len(parts), key))
            share = min(LONGEST_PAIR, left / (len(todo) - place))
            try:
                found = measure(key, parts[key][0], builder, share, seed)
            except KeyboardInterrupt:
                report.stopped, report.left = True, len(todo) - place
                break
            except (KernelsUnavailable, WrongKernelError) as error:
                _log.warning("%s: both stay apart: %s", key.shape.text, error)
                report.empty += 1
                continue
            if found.noise > MOST_NOISE:
                tell_unsteady(f"{key.direction} {key.shape.text}", found.noise)
                report.unsteady += 1
                continue
            append_records(path, [_record_of(key, found)])
            report.tuned += 1
    return report


def _parts(database: Database, key: ConvNormKey) -> tuple[dict[str, int], float] | None:
    """Parameters of the convolution's own kernel, and when the newer part was measured; None where one is torch's."""
    convolution, norm = database.best(convolution_of(key)), database.best_norm(key.norm)
    if convolution is None or norm is None or not (convolution.wins and norm.wins):
        return None
    return _numbers(convolution), max(convolution.tuned_at, norm.tuned_at)


def _numbers(record: KernelRecord) -> dict[str, int]:
    return {name: value for name, value in record.parameters.items() if isinstance(value, int)}


def _is_old(database: Database, key: ConvNormKey, newest: float) -> bool:
    record = database.best_conv_norm(key)
    return record is None or record.tuned_at < newest


def _record_of(key: ConvNormKey, found: ConvNormTime) -> ConvNormRecord:
    return ConvNormRecord(
        shape=key.shape.convolution.text,
        activation=key.shape.act,
        device=key.device,
        threads=key.threads,
        versions=dict(conv_norm_versions()),
        parameters=dict(found.parameters),
        ms=found.ms,
        apart_ms=found.apart_ms,
        error=found.error,
        stock_error=found.stock_error,
        noise=found.noise,
        tuned_at=time.time(),
    )
