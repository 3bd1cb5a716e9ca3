"""Searches the fastest kernels of many keys in one budget, by measuring, and records each before the next is begun.

Keys that the database has a record of are skipped, so a run that was stopped goes on where it was. Those that read and
write most in a step come first, and each gets as large a part of the time that is left.

The search for one key begins with the best that is known of the same convolution or the nearest one, in the database
and in the one that comes with the package, from other devices too; with a default where nothing is known; and with some
candidates drawn at random. Then come the neighbours of the fastest, until the time is up. Candidates are compiled in
child processes, checked against float64 and timed; at last the finalists are timed again, two times at least and
longer, since the fastest of many noisy times is too good to be true. A candidate that fails to compile, crashes the
compiler or computes something else is lost, alone.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hybridpar.codegen.build import Session, contents_of
from hybridpar.codegen.cache import KernelsUnavailable
from hybridpar.codegen.compile_pool import Builder, Built
from hybridpar.errors import UsageError
from hybridpar.machine.process import available_cores
from hybridpar.tvm_kernels.database import (
    Database,
    KernelRecord,
    append_records,
    is_right,
    packaged_records,
    read_database,
)
from hybridpar.tvm_kernels.machine import is_gpu
from hybridpar.tvm_kernels.measure import Bench, Timing, is_clear, steady_timing, torch_threads
from hybridpar.tvm_kernels.operation import KernelKey, Parameters, operation_of, versions
from hybridpar.tvm_kernels.space import nearest, neighbours

_log = logging.getLogger(__name__)

#: Candidates of a search that are kept: the fastest, and others to begin the next search with.
KEPT = 3
#: Seconds in which a search is not begun, and for one build; straight code of the space's bound takes two or three.
_LEAST_SECONDS, BUILD_TIMEOUT = 2.0, 30.0
#: Candidates drawn at random, candidates of a round of neighbours, and finalists.
_DRAWN, _ROUND, _FINALISTS = 6, 4, 3
#: Part of the time that is kept for finalists; comparisons of each, at most, and how many benches they take turns on:
#: some kernels are fast on some tensors alone, by where these lie in memory, and the worse of two counts.
_RESERVED, _MOST_COMPARED, _BENCHES = 0.2, 4, 2
#: Candidates that may be lost before any was measured; then nothing can be built or loaded here.
_MOST_LOST = 8

_Name = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Tuned:
    """A candidate that was measured.

    Attributes:
        parameters: Of the schedule.
        ms: Of one call: that of its rival over the median of the ratios of pairs.
        stock_ms: Of its rival, torch in its better layout for instance, in the same pairs; the median.
        error: Largest difference from float64, relative to the largest value.
        final: Whether it was timed as a finalist.
        layout_ms: Of torch's call in the layout of the kernel, where it is not its better one; of finalists only.
        stock_error: Torch's largest difference from float64, on the same data.
        noise: Of the ratio, see `measure.Timing`; of finalists that of repeated comparisons, see `steady_timing`.
    """

    parameters: Parameters
    ms: float
    stock_ms: float
    error: float
    final: bool = False
    layout_ms: float | None = None
    stock_error: float | None = None
    noise: float = 0.0

    @property
    def clear(self) -> bool:
        """Whether it is worth a record, see `measure.is_clear`."""
        rival = self.stock_ms if self.layout_ms is None else self.layout_ms
        return is_clear(rival / self.ms, self.noise)


class TuningStopped(KeyboardInterrupt):
    """The user stopped the search."""

    def __init__(self, results: list[Tuned]) -> None:
        super().__init__("stopped")
        self.results = results


# -------------------------------------------------------------------------------------------------------------- one key


def tune(
    key: KernelKey,
    seconds: float = 30.0,
    seed: int = 0,
    on_progress: Callable[[Tuned, Tuned], None] | None = None,
    *,
    known: Sequence[Parameters] = (),
    builder: Builder | None = None,
    trials: int | None = None,
    only: Parameters | None = None,
) -> list[Tuned]:
    """Search for the fastest kernel of one key."""
    pool = Builder(len(available_cores()), BUILD_TIMEOUT) if builder is None else nullcontext(builder)
    with torch_threads(key.threads), pool as build:
        search = _Search(key, seed, build, on_progress, only)
        if not search.space:
            return []
        try:
            search.run(time.monotonic() + seconds, seconds, known, trials)
        except KeyboardInterrupt:
            raise TuningStopped(search.sorted()) from None
        return search.sorted()


def first_candidates(
    key: KernelKey, space: list[dict[str, int]], known: Sequence[Parameters] = (), count: int = 1
) -> list[dict[str, int]]:
    """The candidates that are most likely to be fast, before anything is timed."""
    wanted = known[:count] or [operation_of(key).default(key)] if space else ()
    return list({_name_of(one): one for one in (nearest(parameters, space) for parameters in wanted)}.values())


def _name_of(parameters: Parameters) -> _Name:
    """What tells candidates apart."""
    return tuple(sorted(parameters.items()))


class _Search:
    """One search: what was asked for, what was measured, what is best."""

    def __init__(
        self,
        key: KernelKey,
        seed: int,
        builder: Builder,
        on_progress: Callable[[Tuned, Tuned], None] | None = None,
        only: Parameters | None = None,
    ) -> None:
        self.key, self.operation, self.quick = key, operation_of(key), only is not None
        self.pace = self.operation.pace
        if self.quick:
            self.pace = replace(self.pace, glance=0.0, longest=0.2)
        self.seed, self.builder, self.on_progress = seed, builder, on_progress
        self.space = self.operation.space(key) if only is None else [dict(only)]
        self.random, self.session = random.Random(seed), Session() if self.space else None
        self.results: dict[_Name, Tuned] = {}
        self.kernels: dict[_Name, Any] = {}
        self.asked: set[_Name] = set()
        self.lost = 0

    def sorted(self) -> list[Tuned]:
        """What was measured, finalists first, and of those the fastest."""
        return sorted(self.results.values(), key=lambda one: (not one.final, one.ms))

    def fastest(self) -> list[_Name]:
        """The candidates by their times, the best first."""
        return sorted(self.results, key=lambda name: self.results[name].ms)

    def run(self, end: float, budget: float, known: Sequence[Parameters], trials: int | None) -> None:
        """Measure until the time is up."""
        self.bench = self.operation.bench(self.key, self.seed)
        self.stop = end - _RESERVED * budget
        most = len(self.space) if trials is None else min(trials, len(self.space))
        first = first_candidates(self.key, self.space, known, _FINALISTS)
        candidates = first + self.random.sample(self.space, min(_DRAWN, len(self.space)))
        while candidates and len(self.asked) < most and not self._is_over():
            fresh = {_name_of(one): one for one in candidates if _name_of(one) not in self.asked}
            self._try(dict(itertools.islice(fresh.items(), most - len(self.asked))))
            candidates = self._next()
        self._finals(end, budget)

    def _is_over(self) -> bool:
        """Whether the time for candidates is up."""
        return bool(self.results) and time.monotonic() > self.stop

    def _next(self) -> list[dict[str, int]]:
        """Some neighbours of the fastest that were not tried; where there are none, some others."""
        best = [self.results[name].parameters for name in self.fastest()[:_FINALISTS]]
        near = {_name_of(other): other for one in best for other in neighbours(one, self.space)}
        left = [one for name, one in near.items() if name not in self.asked]
        left = left or [one for one in self.space if _name_of(one) not in self.asked]
        return self.random.sample(left, min(_ROUND, len(left)))

    def _try(self, candidates: Mapping[_Name, Parameters]) -> None:
        """Build some candidates together, and measure one after the other."""
        self.asked |= set(candidates)
        building = {name: self._build(parameters) for name, parameters in candidates.items()}
        if self.key.threads >= len(available_cores()):  # compilers have the cores that kernels are to be timed on
            wait(building.values())
        try:
            for name, future in building.items():
                if self._is_over():
                    break
                self._measure(name, candidates[name], future)
        finally:
            for future in building.values():
                future.cancel()

    def _build(self, parameters: Parameters) -> Future[Built]:
        """Begin to build a candidate; a single one is kept in the cache, as it is likely to be used."""
        variant = self.operation.variant(self.key, parameters)
        if not self.quick:
            return self.builder.submit(variant.request)
        built: Future[Built] = Future()
        (content,) = contents_of([variant.path], [variant.request], 1, self.builder)
        if isinstance(content, KernelsUnavailable):
            built.set_exception(content)
        else:
            built.set_result(content)
        return built

    def _measure(self, name: _Name, parameters: Parameters, future: Future[Built]) -> None:
        """Load, check and time a candidate."""
        what = f"{self.key.direction} {self.key.shape.text} {dict(parameters)}"
        try:
            kernel = self.operation.load(self.key, parameters, future.result(), self.session)
        except (KernelsUnavailable, RuntimeError, OSError) as error:
            self.lost += 1
            _log.info("%s: %s", what, error)
            if self.lost >= _MOST_LOST and not self.results:
                raise KernelsUnavailable(str(error)) from None
            return
        error_found, stock_error = self.bench.errors(kernel)
        if not is_right(error_found, self.key.direction, self.key.dtype, stock_error):
            _log.warning("a kernel of %s is wrong by %.1e", what, error_found)
            return
        glance = self.pace.glance
        timing = self.bench.compare(kernel, glance, 3 if glance else 1, self._rival(self.bench))
        self.kernels[name] = kernel
        found = Tuned(parameters, timing.ms, timing.stock_ms, error_found)
        self._note(name, replace(found, stock_error=stock_error, noise=timing.noise))
        for other in self.fastest()[_FINALISTS + 2 :]:
            self.kernels.pop(other, None)  # unloads it

    def _rival(self, bench: Bench) -> Callable[[], object] | None:
        """What kernels are compared with: of torch the better of its layouts, which takes time to find out."""
        return bench.instead if self.quick else None

    def _note(self, name: _Name, result: Tuned) -> None:
        """Take in a result, and tell how it stands."""
        self.results[name] = result
        if self.on_progress is not None:
            self.on_progress(result, self.sorted()[0])

    def _finals(self, end: float, budget: float) -> None:
        """Time the fastest again, as long as there is time, until two comparisons agree.

        The second comparison is on other tensors than the first, and the worse of the two counts. A gain that it does
        not confirm is not used: there is no record of it, or one that says how far the two lay apart.
        """
        best = [name for name in self.fastest() if name in self.kernels][:_FINALISTS]
        if not best:
            return
        benches = [self.bench, *(self.operation.bench(self.key, self.seed + one) for one in range(1, _BENCHES))]
        rivals = 1 if self.quick or self.bench.stock == self.bench.instead else 2
        for place, name in enumerate(best):
            left = budget if self.quick else max(0.0, end - time.monotonic()) / (len(best) - place)
            share = min(left / rivals, self.pace.longest) / 2
            timing = self._steady(benches, name, share)
            ms = timing.stock_ms / timing.speedup
            again = replace(self.results[name], final=True, ms=ms, stock_ms=timing.stock_ms, noise=timing.noise)
            if rivals > 1:
                same = self._steady(benches, name, share, alike=True)
                # The ratio is of pairs, the times of the two comparisons are not.
                again = replace(again, layout_ms=ms * same.speedup, noise=max(again.noise, same.noise))
            self._note(name, again)

    def _steady(self, benches: Sequence[Bench], name: _Name, seconds: float, alike: bool = False) -> Timing:
        """Compare a kernel with torch, or with torch in the kernel's layout, on each bench in turn."""
        turn, kernel = itertools.cycle(benches), self.kernels[name]

        def compare() -> Timing:
            bench = next(turn)
            return bench.compare(kernel, seconds, self.pace.pairs, bench.instead if alike else self._rival(bench))

        return steady_timing(compare, _MOST_COMPARED, len(benches))


# ------------------------------------------------------------------------------------------------------------- all keys


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


def weigh(counts: Mapping[KernelKey, int]) -> dict[KernelKey, float]:
    """What keys read and write in a step."""
    return {key: count * operation_of(key).weight(key) for key, count in counts.items()}


def search_all(
    keys: Mapping[KernelKey, int] | Iterable[KernelKey],
    path: Path,
    seconds: float,
    *,
    again: bool = False,
    seed: int = 0,
    trials: int | None = None,
    on_progress: Callable[[Progress], None] = lambda _: None,
    tuner: Callable[..., list[Tuned]] = tune,
    weigher: Callable[[Mapping[KernelKey, int]], Mapping[KernelKey, float]] = weigh,
    quick: bool = False,
) -> SearchReport:
    """Tune keys, and append what is found to a database.

    Keys come with how often each one runs in a step where they are a mapping. `again` searches also where there is a
    record; `trials` are candidates of each key, at most. `quick` times one candidate of each, and records it whatever
    comes out, so that it is done once; the record says so, and a tune that is not quick searches in spite of it.
    """
    counts = dict(keys) if isinstance(keys, Mapping) else dict.fromkeys(keys, 1)
    database = read_database(path) if path.exists() else Database(str(path))
    best = {key: database.best(key) for key in counts}
    todo = [key for key, record in best.items() if again or record is None or (record.quick and not quick)]
    report = SearchReport(skipped=len(counts) - len(todo))
    least = 0.0 if quick else _LEAST_SECONDS
    if todo and seconds < least:
        raise UsageError(
            f"a budget of {seconds:g} s is too short to try one candidate",
            f"A search takes {_LEAST_SECONDS:g} s at least, and {len(todo)} are to be done.",
            f"Use --budget {max(1, round(10 * len(todo) / 60))}m, for instance.",
        )
    end = time.monotonic() + seconds
    stakes = weigher({key: counts[key] for key in todo})
    todo.sort(key=lambda key: -stakes[key])
    known = Database("what is known", [*database.records, *packaged_records()])
    with Builder(len(available_cores()), BUILD_TIMEOUT) as builder:
        firsts = _firsts(todo, known, builder) if quick and todo else {}
        for place, key in enumerate(todo):
            left = end - time.monotonic()
            if left < least and (place or quick):
                report.left = len(todo) - place
                break
            if quick and key not in firsts:
                report.empty += 1
                continue

            def tell(best: Tuned | None, at: int = report.skipped + place, of: KernelKey = key) -> None:
                on_progress(Progress(at, len(counts), of, best))

            tell(None)
            share = left * stakes[key] / (sum(stakes[other] for other in todo[place:]) or 1.0)
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
            _record(path, key, found, report, quick)
            if report.stopped:
                report.left = len(todo) - place - any(one.final for one in found)
                break
    return report


def _record(path: Path, key: KernelKey, found: Sequence[Tuned], report: SearchReport, quick: bool) -> None:
    """Append the records of a search, and count it."""
    finals = [one for one in found if one.final]
    steady = [one for one in finals if one.clear]
    fields = {**dataclasses.asdict(key), "shape": key.shape.text, "versions": versions(key.device)}
    fields |= {"tuned_at": time.time(), "quick": quick or None}
    chosen = (finals if quick else steady)[:KEPT]
    append_records(path, [KernelRecord.model_validate({**fields, **dataclasses.asdict(one)}) for one in chosen])
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


def _firsts(keys: Sequence[KernelKey], known: Database, builder: Builder) -> dict[KernelKey, Parameters]:
    """The candidate of each key that is most likely to be fast; all are built together before anything is timed."""
    firsts: dict[KernelKey, Parameters] = {}
    for key in keys:
        space = operation_of(key).space(key)
        if found := first_candidates(key, space, _known(known, key, space)):
            firsts[key] = found[0]
    variants = [operation_of(key).variant(key, parameters) for key, parameters in firsts.items()]
    contents_of([one.path for one in variants], [one.request for one in variants], builder=builder)
    return firsts


def _known(database: Database, key: KernelKey, space: Sequence[Parameters]) -> list[dict[str, int]]:
    """Parameters that did well before, also with other versions, devices, threads and shapes, the nearest first.

    Of one shape those come first that are candidates here: of others vectors have another width.
    """
    found = []
    wanted = (key.direction, key.layout, is_gpu(key.device))
    for other in database:
        alike = (other.direction, other.layout, is_gpu(other.device)) == wanted
        if alike and (best := database.best(other, current=False)) is not None:
            odd = (other.device != key.device, best.parameters not in space, other.shape != key.shape)
            found.append(((key.shape.distance(other.shape), *odd, best.ms / best.stock_ms), best.parameters))
    return [dict(parameters) for _, parameters in sorted(found, key=lambda one: one[0])]
