"""Tunes many keys in one budget, and appends what each search found to a database before the next one begins.

Keys that the database has a record of are skipped, so a run that was stopped goes on where it was. They go by what
torch takes for them in a step, the longest first, and each gets as large a part of the time that is left; a small
budget so goes where most is to be had. What torch takes is timed in a first quick pass; what there is no time for is
predicted, by what it reads and writes. A search begins from the best that is known of the same convolution or the
nearest one: in the database, and in the one that comes with the package, from other devices too.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hybridpar.codegen.build import contents_of
from hybridpar.codegen.compile_pool import Builder
from hybridpar.errors import UsageError
from hybridpar.machine.process import available_cores
from hybridpar.tvm_kernels.database import Database, append_records, packaged_records, read_database
from hybridpar.tvm_kernels.machine import is_gpu
from hybridpar.tvm_kernels.measure import torch_threads
from hybridpar.tvm_kernels.operation import KernelKey, Parameters, operation_of
from hybridpar.tvm_kernels.record import KernelRecord
from hybridpar.tvm_kernels.tuner import BUILD_TIMEOUT, Tuned, first_candidates, tune

_log = logging.getLogger(__name__)

#: Candidates of a search that are kept: the fastest, and others to begin the next search with.
KEPT = 3

#: Seconds in which a search is not begun.
_LEAST_SECONDS = 2.0

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
    quick: bool = False,
) -> SearchReport:
    """Tune keys of one operation, and append what is found to a database.

    Args:
        keys: What is to be tuned; where they are a mapping, with how often each one runs in a step.
        path: The database.
        seconds: Time for all of it.
        again: Search also where there is a record.
        seed: Of data and search.
        trials: At most so many candidates for each.
        on_progress: Called at the start of a search and with each candidate.
        tuner: Searches for one, as `tuner.tune`.
        weigher: Says how much is at stake for each, in so many seconds; None for `weigh`.
        quick: Time one candidate of each, and record it whatever comes out, so that it is done once. The record says
            so, and a tune that is not quick searches in spite of it.

    Returns:
        What became of them.

    Raises:
        UsageError: The database cannot be read or written, or the time is too short for a single search.
        KernelsUnavailable: Nothing can be built on this machine.
    """
    counts = dict(keys) if isinstance(keys, Mapping) else dict.fromkeys(keys, 1)
    database = read_database(path) if path.exists() else Database(str(path))
    todo = [key for key in counts if again or _is_to_do(database.best(key), quick)]
    report = SearchReport(skipped=len(counts) - len(todo))
    if not todo:
        return report
    least = 0.0 if quick else _LEAST_SECONDS
    if seconds < least:
        raise UsageError(
            f"a budget of {seconds:g} s is too short to try one candidate",
            f"A search takes {_LEAST_SECONDS:g} s at least, and {len(todo)} are to be done.",
            f"Use --budget {max(1, round(10 * len(todo) / 60))}m, for instance.",
        )
    end = time.monotonic() + seconds
    weighed = weigher or functools.partial(weigh, measure=None if quick else torch_ms)
    stakes = weighed({key: counts[key] for key in todo}, _WEIGHING * seconds) if len(todo) > 1 else {todo[0]: 1.0}
    todo = sorted(todo, key=lambda key: -stakes[key])
    known = Database("what is known", [*database.records, *packaged_records()])
    with Builder(len(available_cores()), BUILD_TIMEOUT) as builder:
        firsts: dict[KernelKey, Parameters] = {}
        for place, key in enumerate(todo):
            left = end - time.monotonic()
            # The first one is always begun: weighing them, too, has taken time.
            if left < least and (place or not least):
                report.left = len(todo) - place
                break
            share = left * stakes[key] / (sum(stakes[other] for other in todo[place:]) or 1.0)
            if quick and place % _AHEAD == 0:
                firsts |= _firsts(todo[place : place + _AHEAD], known, builder)
            if quick and key not in firsts:
                report.empty += 1
                continue

            def tell(best: Tuned | None, at: int = report.skipped + place, of: KernelKey = key) -> None:
                if on_progress is not None:
                    on_progress(Progress(at, len(counts), of, best))

            tell(None)
            try:
                found = tuner(
                    key,
                    max(share, least),
                    seed,
                    lambda _, best, tell=tell: tell(best),
                    known=() if quick else _known(known, key, operation_of(key).space(key)),
                    trials=trials,
                    builder=builder,
                    only=firsts.get(key),
                )
            except KeyboardInterrupt as stopped:
                report.stopped, found = True, getattr(stopped, "results", [])
            finals = [one for one in found if one.final]
            steady = [one for one in finals if one.clear]
            append_records(path, _records_of(key, (finals if quick else steady)[:KEPT], quick))
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


def _records_of(key: KernelKey, found: Sequence[Tuned], quick: bool) -> list[KernelRecord]:
    """The records of what a search found."""
    told = {**dataclasses.asdict(key), "shape": key.shape.text, "versions": dict(operation_of(key).versions)}
    told |= {"tuned_at": time.time(), "quick": quick or None}
    return [KernelRecord.model_validate({**told, **dataclasses.asdict(one)}) for one in found]


def _is_to_do(record: KernelRecord | None, quick: bool) -> bool:
    """Whether there is no record, or none of a search where one is wanted."""
    return record is None or bool(record.quick and not quick)


def _firsts(keys: Sequence[KernelKey], known: Database, builder: Builder) -> dict[KernelKey, Parameters]:
    """The candidates to begin with, built together on all cores before anything is timed."""
    firsts: dict[KernelKey, Parameters] = {}
    for key in keys:
        space = operation_of(key).space(key)
        if found := first_candidates(key, space, _known(known, key, space)):
            firsts[key] = found[0]
    variants = [one for key, own in firsts.items() if (one := operation_of(key).variant(key, own)) is not None]
    contents_of([one.path for one in variants], [one.request for one in variants], builder=builder)
    return firsts


def _known(database: Database, key: KernelKey, space: Sequence[Parameters]) -> list[dict[str, int]]:
    """Parameters that did well before, also with other versions, devices, threads and shapes, the nearest first.

    Of one shape those come first that are candidates here: of others vectors have another width.
    """
    alike = [
        (
            key.shape.distance(other.shape),
            other.device != key.device,
            best.numbers not in space,
            other.shape != key.shape,
            best,
        )
        for other in database
        if (other.op, other.direction, other.layout) == (key.op, key.direction, key.layout)
        and is_gpu(other.device) == is_gpu(key.device)
        if (best := database.best(other, current=False)) is not None
    ]
    return [best.numbers for *_, best in sorted(alike, key=lambda one: (*one[:4], one[4].ms / one[4].stock_ms))]


def weigh(
    counts: Mapping[KernelKey, int], seconds: float, measure: Callable[[KernelKey], float] | None = None
) -> dict[KernelKey, float]:
    """Estimate how long keys take in a step."""
    end = time.monotonic() + seconds
    weights = {key: operation_of(key).weight(key) for key in counts}
    measured: dict[KernelKey, float] = {}
    for key in sorted(counts, key=lambda one: -weights[one] * counts[one]):
        if measure is None or is_gpu(key.device) or time.monotonic() >= end:
            break
        measured[key] = measure(key)
    ratios = {key: ms / weights[key] for key, ms in measured.items()}

    def predicted(key: KernelKey) -> float:
        alike = [ratio for other, ratio in ratios.items() if other.direction == key.direction]
        return weights[key] * statistics.median(alike or ratios.values() or [1.0])

    stakes = {key: count * (measured[key] if key in measured else predicted(key)) for key, count in counts.items()}
    return dict(sorted(stakes.items(), key=lambda one: -one[1]))


def torch_ms(key: KernelKey) -> float:
    """Time one call of torch in the layout of the key."""
    with torch_threads(key.threads):
        call = operation_of(key).bench(key, 0).instead
        taken = []
        for _ in range(3):
            began = time.perf_counter()
            call()
            taken.append(time.perf_counter() - began)
        return 1e3 * min(taken[1:])
