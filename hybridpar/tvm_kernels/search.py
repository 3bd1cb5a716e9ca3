"""Tunes many keys in one budget, and appends what each search found to a database before the next one begins.

Keys that the database has a record of are skipped, so a run that was stopped goes on where it was. They go by what
torch takes for them in a step, the longest first, and each gets as large a part of the time that is left; a small
budget so goes where most is to be had. What torch takes is timed in a first quick pass; what there is no time for is
predicted, by its floor and by how far above their floors those of the same direction were. A search begins from the
best that is known of the same shape: in the database, and in the one that comes with the package, from other devices
too.

Operations with one kernel, or few, are measured rather than searched: each key takes a second or so.

Also compiles the model's best candidates for a GPU that is not at hand, as records without a time.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import logging
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from hybridpar.codegen.build import contents_of
from hybridpar.codegen.cache import KernelsUnavailable
from hybridpar.codegen.compile_pool import Builder
from hybridpar.errors import UsageError
from hybridpar.machine.process import available_cores
from hybridpar.tvm_kernels import cuda_kernel
from hybridpar.tvm_kernels.database import Database, append_records, packaged_records, read_database
from hybridpar.tvm_kernels.kernel import make_kernels
from hybridpar.tvm_kernels.machine import is_gpu
from hybridpar.tvm_kernels.measure import torch_threads
from hybridpar.tvm_kernels.operation import KernelKey, Operation, Parameters, operation_of
from hybridpar.tvm_kernels.record import Record
from hybridpar.tvm_kernels.tuner import BUILD_TIMEOUT, Tuned, first_candidate, tune

_log = logging.getLogger(__name__)

#: Candidates of a search that are kept: the fastest, and others to begin the next search with.
KEPT = 3

#: Candidates that are built before they are timed, where each key has one.
_AHEAD = 12

#: Part of the time that may be spent on finding out how long torch takes.
_WEIGHING = 0.1


@dataclass(frozen=True)
class Progress:
    """How far tuning has come.

    Attributes:
        done: Keys that are finished, those skipped included.
        total: All keys.
        key: What is being searched for.
        best: The best candidate of this search so far.
    """

    done: int
    total: int
    key: KernelKey
    best: Tuned | None = None


@dataclass
class SearchReport:
    """Counts of what a tune did with its keys.

    Attributes:
        skipped: Keys that the database had a record of.
        tuned: Keys that got a record.
        empty: Keys that no kernel was found for.
        left: Keys for which no time was left.
        stopped: Whether the user stopped it.
        unsteady: Keys whose repeated measurements did not agree, so that nothing was recorded.
    """

    skipped: int = 0
    tuned: int = 0
    empty: int = 0
    left: int = 0
    stopped: bool = False
    unsteady: int = 0

    def plus(self, other: SearchReport) -> SearchReport:
        """Add another report.

        Args:
            other: Of other keys.

        Returns:
            The report of both.
        """
        return SearchReport(
            *(a + b for a, b in zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True))
        )


def tune_all(
    keys: Mapping[KernelKey, int],
    path: Path,
    seconds: float,
    search: Callable[..., SearchReport] | None = None,
    *,
    quick: bool = False,
    **options: Any,
) -> SearchReport:
    """Tune keys of several operations: those that are measured first, those made of others last.

    Args:
        keys: What is to be tuned, and how often each one runs in a step.
        path: The database.
        seconds: Time for all of it.
        search: Tunes the keys of one operation; None for `search_all`.
        quick: Time one candidate of each. Those that are measured are not faster then, and gain less: they come later.
        options: Handed to the search.

    Returns:
        What became of all of them.

    Raises:
        UsageError: The database cannot be read or written, or the time is too short for a single search.
        KernelsUnavailable: Nothing can be built on this machine.
    """
    end, report = time.monotonic() + seconds, SearchReport()
    options |= {"quick": True} if quick else {}
    ordered = sorted(keys, key=lambda key: (quick and operation_of(key).longest is not None, operation_of(key).order))
    groups = [(one, list(own)) for one, own in groupby(ordered, key=operation_of)]

    def reserved(operation: Operation, own: Sequence[KernelKey]) -> float:
        """Seconds that are kept for what is measured; building takes as long again."""
        return 0.0 if operation.longest is None else min(operation.share * seconds, 2 * operation.longest * len(own))

    for place, (operation, own) in enumerate(groups):
        if report.stopped:
            report.left += len(own)
            continue
        rest = groups[place + 1 :]
        left = end - time.monotonic() - sum(reserved(*one) for one in rest)
        if rest and operation.longest is not None:
            left = min(left, operation.share * seconds)
        # What came before may take longer than its share, and must not take the time of a last search.
        left = max(left, reserved(operation, own), min(seconds, operation.least_seconds))
        report = report.plus((search or search_all)({key: keys[key] for key in own}, path, left, **options))
    return report


def search_all(
    keys: Mapping[KernelKey, int] | Iterable[KernelKey],
    path: Path,
    seconds: float,
    *,
    again: bool = False,
    seed: int = 0,
    trials: int | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    tuner: Callable[..., list[Tuned]] = tune,
    weigher: Callable[[Mapping[KernelKey, int], float], Mapping[KernelKey, float]] | None = None,
    measured: bool = True,
    quick: bool = False,
) -> SearchReport:
    """Tune keys of one operation, and append what is found to a database.

    Args:
        keys: What is to be tuned; where they are a mapping, with how often each one runs in a step. Those whose parts
            are not all faster than torch by the database's records are left out.
        path: The database.
        seconds: Time for all of it.
        again: Search also where there is a record.
        seed: Of data and search.
        trials: At most so many candidates for each.
        on_progress: Called at the start of a search and with each candidate.
        tuner: Searches for one, as `tuner.tune`.
        weigher: Says how much is at stake for each, in so many seconds; None for `weigh`.
        measured: Whether what it finds was measured; otherwise any record that is not of other versions is enough.
        quick: Time one candidate of each, and record it whatever comes out, so that it is done once. The record says
            so, and a tune that is not quick searches in spite of it.

    Returns:
        What became of those that were not left out.

    Raises:
        UsageError: The database cannot be read or written, or the time is too short for a single search.
        KernelsUnavailable: Nothing can be built on this machine.
    """
    counts = dict(keys) if isinstance(keys, Mapping) else dict.fromkeys(keys, 1)
    database = read_database(path) if path.exists() else Database(str(path))
    parts = {key: own for key in counts if (own := _parts_of(database, key)) is not None}
    there = set() if measured else {record.key for record in database.records if record.current}
    todo = [
        key for key, own in parts.items() if again or (key not in there and _is_old(database.best(key), own, quick))
    ]
    report = SearchReport(skipped=len(parts) - len(todo))
    if not todo:
        return report
    operation = operation_of(todo[0])
    least = 0.0 if quick else operation.least_seconds
    if seconds < least:
        raise UsageError(
            f"a budget of {seconds:g} s is too short to try one candidate",
            f"A search takes {operation.least_seconds:g} s at least, and {len(todo)} are to be done.",
            f"Use --budget {max(1, round(10 * len(todo) / 60))}m, for instance.",
        )
    end = time.monotonic() + seconds
    timed = operation.longest is None and not quick
    weighed = weigher or functools.partial(weigh, measure=torch_ms if timed else None)
    stakes = weighed({key: counts[key] for key in todo}, _WEIGHING * seconds) if len(todo) > 1 else {todo[0]: 1.0}
    todo = sorted(todo, key=lambda key: -stakes[key])
    known = Database("what is known", [*database.records, *packaged_records()])
    with Builder(len(available_cores()), BUILD_TIMEOUT) as builder:
        speed, firsts = functools.cache(lambda: operation.measure_speed(builder)), dict[KernelKey, Parameters]()
        for place, key in enumerate(todo):
            left = end - time.monotonic()
            # The first one is always begun: weighing them, too, has taken time.
            if left < least and (place or not least):
                report.left = len(todo) - place
                break
            share = left * stakes[key] / (sum(stakes[other] for other in todo[place:]) or 1.0)
            if operation.longest is not None:
                share = min(operation.longest, left / (len(todo) - place))
            if quick and place % _AHEAD == 0:
                firsts |= _firsts(todo[place : place + _AHEAD], known, builder)
            if quick and key not in firsts:
                report.empty += 1
                continue

            def tell(best: Tuned | None, at: int = report.skipped + place, of: KernelKey = key) -> None:
                if on_progress is not None:
                    on_progress(Progress(at, len(parts), of, best))

            tell(None)
            try:
                found = tuner(
                    key,
                    max(share, least),
                    seed,
                    lambda _, best, tell=tell: tell(best),
                    known=_known(known, key),
                    parts=_made(parts[key]),
                    trials=trials,
                    builder=builder,
                    speed=speed,
                    only=firsts.get(key),
                )
            except KernelsUnavailable as error:
                if operation.longest is None:
                    raise
                _log.warning("no kernel for %s: %s", key.text, error)
                found = []
            except KeyboardInterrupt as stopped:
                report.stopped, found = True, getattr(stopped, "results", [])
            finals = [one for one in found if one.final]
            steady = [one for one in finals if one.clear]
            append_records(path, _records_of(operation, key, (finals if quick else steady)[:KEPT], quick))
            report.tuned += bool(steady)
            report.unsteady += bool(finals) and not steady
            if not found and not report.stopped:
                report.empty += 1
                _log.warning("there is no kernel for %s", key.text)
            if finals and not steady:
                _log.warning(
                    "%s %s: measurements lay %.0f %% apart, so none is recorded: tune again when nothing else runs",
                    *(key.direction, key.shape.text, 100 * min(one.noise for one in finals)),
                )
            if report.stopped:
                report.left = len(todo) - place - bool(finals)
                break
    return report


def _records_of(operation: Operation, key: KernelKey, found: Sequence[Tuned], quick: bool) -> list[Record]:
    """The records of what a search found."""
    now = time.time()
    shape = {name: getattr(key.shape, name, None) for name in ("rows", "channels")}
    told = {**dataclasses.asdict(key), **shape, "versions": dict(operation.versions), "tuned_at": now}
    told |= {"quick": quick or None}
    told |= {"shape": getattr(key.shape, "convolution", key.shape).text, "activation": getattr(key.shape, "act", None)}
    return [operation.record.model_validate({**told, **dataclasses.asdict(one)}) for one in found]


def _parts_of(database: Database, key: KernelKey) -> list[Record] | None:
    """The records of what an operation is made of; None where one of them is not faster than torch."""
    found = [database.best(part) for part in operation_of(key).parts(key)]
    won = [one for one in found if one is not None and one.wins]
    return won if len(won) == len(found) else None


def _is_old(record: Record | None, parts: Sequence[Record], quick: bool) -> bool:
    """Whether there is no record, or none of a search where one is wanted, or one of its parts was measured since."""
    if record is None or (record.quick and not quick):
        return True
    return any(part.tuned_at > record.tuned_at for part in parts)


def _firsts(keys: Sequence[KernelKey], known: Database, builder: Builder) -> dict[KernelKey, Parameters]:
    """The candidates to begin with, built together on all cores before anything is timed."""
    told = ((key, first_candidate(key, _known(known, key))) for key in keys)
    firsts: dict[KernelKey, Parameters] = {key: one for key, one in told if one is not None}
    asked = [(key, one, request) for key, one in firsts.items() if (request := operation_of(key).request(key, one))]
    contents_of(
        [operation_of(key).path(key, one) for key, one, _ in asked], [one for *_, one in asked], builder=builder
    )
    return firsts


def _made(parts: Sequence[Record]) -> list[tuple[Parameters, Any]]:
    """Parameters and kernels of parts.

    Raises:
        KernelsUnavailable: One cannot be had.
    """
    kernels = make_kernels(parts)
    for kernel in kernels:
        if isinstance(kernel, KernelsUnavailable):
            raise kernel
    return [(one.numbers, own) for one, own in zip(parts, kernels, strict=True)]


def _known(database: Database, key: KernelKey) -> list[dict[str, int]]:
    """Parameters that did well before, also with other versions, other devices, threads or batches: where to begin."""
    alike = [
        (other != key, other.device != key.device, other.shape != key.shape, best.ms / best.stock_ms, best)
        for other in database
        if (other.op, other.direction, other.layout) == (key.op, key.direction, key.layout)
        and is_gpu(other.device) == is_gpu(key.device)
        and other.shape.unlike(key.shape) is not None
        if (best := database.best(other, current=False)) is not None and best.ms and best.stock_ms
    ]
    ordered = [best for *_, best in sorted(alike, key=lambda one: one[:4])]
    return [one.numbers for one in ordered]


def weigh(
    counts: Mapping[KernelKey, int], seconds: float, measure: Callable[[KernelKey], float] | None = None
) -> dict[KernelKey, float]:
    """Estimate how long keys take in a step.

    Args:
        counts: Keys of one operation, and how often each runs in a step.
        seconds: For timing; what is left then is predicted.
        measure: Milliseconds of one call of torch; None to predict all of them. On a GPU nothing is timed.

    Returns:
        By key, the largest first; milliseconds where torch was timed, else in the unit of the operation's `weight`.
    """
    end = time.monotonic() + seconds
    floors = {key: operation_of(key).weight(key) for key in counts}
    measured: dict[KernelKey, float] = {}
    for key in sorted(counts, key=lambda one: -floors[one] * counts[one]):
        if measure is None or is_gpu(key.device) or time.monotonic() >= end:
            break
        measured[key] = measure(key)
    ratios = {key: ms / floors[key] for key, ms in measured.items()}

    def predicted(key: KernelKey) -> float:
        alike = [ratio for other, ratio in ratios.items() if other.direction == key.direction]
        return floors[key] * statistics.median(alike or ratios.values() or [1.0])

    stakes = {key: count * (measured[key] if key in measured else predicted(key)) for key, count in counts.items()}
    return dict(sorted(stakes.items(), key=lambda one: -one[1]))


def torch_ms(key: KernelKey) -> float:
    """Time one call of torch in the layout of the key.

    Args:
        key: What is computed, and where.

    Returns:
        Milliseconds, the shorter of two calls after a first one.
    """
    with torch_threads(key.threads):
        call = operation_of(key).bench(key, 0, ()).instead
        taken = []
        for _ in range(3):
            began = time.perf_counter()
            call()
            taken.append(time.perf_counter() - began)
        return 1e3 * min(taken[1:])


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
        clear: Likewise.
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
    clear: bool = True


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
