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

import itertools
import logging
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hybridpar.codegen.build import Session, contents_of
from hybridpar.codegen.cache import KernelsUnavailable
from hybridpar.codegen.compile_pool import Builder, Built
from hybridpar.errors import UsageError
from hybridpar.machine.process import available_cores
from hybridpar.tvm_kernels.conv_bench import ConvBench
from hybridpar.tvm_kernels.database import (
    Database,
    KernelRecord,
    append_records,
    most_error,
    packaged_records,
    read_database,
)
from hybridpar.tvm_kernels.kernel import variant_of
from hybridpar.tvm_kernels.machine import is_gpu
from hybridpar.tvm_kernels.measure import Timing, steady_timing, torch_threads
from hybridpar.tvm_kernels.shapes import KernelKey, Parameters
from hybridpar.tvm_kernels.space import candidates, default, nearest, neighbours

_log = logging.getLogger(__name__)

#: Records of a search: of the fastest, and of others to begin the next search with.
KEPT = 3
#: Seconds in which a search is not begun, and for one build; straight code of the space's bound takes two or three.
_LEAST_SECONDS, BUILD_TIMEOUT = 2.0, 30.0
#: Candidates drawn at random, candidates of a round of neighbours, and finalists.
_DRAWN, _ROUND, _FINALISTS = 6, 4, KEPT
#: Part of the time that is kept for finalists; comparisons of each, at most, and how many benches they take turns on:
#: some kernels are fast on some tensors alone, by where these lie in memory, and the worse of two counts.
_RESERVED, _MOST_COMPARED, _BENCHES = 0.2, 4, 2
#: Candidates that may be lost before any was measured; then nothing can be built or loaded here.
_MOST_LOST = 8

_Name = tuple[tuple[str, int], ...]


class Pace(NamedTuple):
    """Seconds for which a candidate is timed at a glance, and a finalist at most; pairs of a finalist, at least."""

    glance: float
    longest: float
    pairs: int


_PACES = {"cpu": Pace(0.12, 1.5, 5), "gpu": Pace(0.05, 0.5, 9), "quick": Pace(0.0, 0.2, 5)}


def bench_of(key: KernelKey, seed: int) -> ConvBench:
    """Random images, weights and gradients, on the CPU or the current GPU."""
    return ConvBench(key, seed, torch.device("cuda", torch.cuda.current_device()) if is_gpu(key.device) else None)


# -------------------------------------------------------------------------------------------------------------- one key


def tune(
    key: KernelKey,
    seconds: float = 30.0,
    seed: int = 0,
    on_progress: Callable[[KernelRecord], None] = lambda _: None,
    *,
    builder: Builder,
    known: Sequence[Parameters] = (),
    trials: int | None = None,
    only: tuple[Parameters, Built] | None = None,
) -> list[KernelRecord]:
    """Search for the fastest kernel of one key; returns what the finalists took, the fastest first.

    `only` is the one candidate of a quick search.
    """
    with torch_threads(key.threads):
        search = _Search(key, seed, builder, on_progress, only)
        if not search.space:
            return []
        search.run(time.monotonic() + seconds, seconds, known, trials)
        return sorted(search.finals, key=lambda record: record.ms)


def first_candidates(
    key: KernelKey, space: list[dict[str, int]], known: Sequence[Parameters] = (), count: int = 1
) -> list[dict[str, int]]:
    """The candidates that are most likely to be fast, before anything is timed."""
    wanted = known[:count] or [default(key)] if space else ()
    return list({_name_of(near): near for near in (nearest(parameters, space) for parameters in wanted)}.values())


def _name_of(parameters: Parameters) -> _Name:
    """What tells candidates apart."""
    return tuple(sorted(parameters.items()))


@dataclass
class _Search:
    """One search: what was tried, what was measured, what is best."""

    key: KernelKey
    seed: int
    builder: Builder
    on_progress: Callable[[KernelRecord], None]
    only: tuple[Parameters, Built] | None

    def __post_init__(self) -> None:
        self.pace = _PACES["quick" if self.only else "gpu" if is_gpu(self.key.device) else "cpu"]
        self.space = [dict(self.only[0])] if self.only else candidates(self.key)
        self.random, self.session = random.Random(self.seed), Session() if self.space else None
        self.began = time.time()
        self.results: dict[_Name, KernelRecord] = {}
        self.finals: list[KernelRecord] = []
        self.kernels: dict[_Name, Any] = {}
        self.tried: set[_Name] = set()
        self.lost = 0

    def fastest(self) -> list[_Name]:
        """The candidates by their times, the best first."""
        return sorted(self.results, key=lambda name: self.results[name].ms)

    def run(self, end: float, budget: float, known: Sequence[Parameters], trials: int | None) -> None:
        """Measure until the time is up."""
        self.bench = bench_of(self.key, self.seed)
        self.stop = end - _RESERVED * budget
        most = len(self.space) if trials is None else min(trials, len(self.space))
        first = first_candidates(self.key, self.space, known, _FINALISTS)
        batch = self._fresh(first + self.random.sample(self.space, min(_DRAWN, len(self.space))))
        while batch and len(self.tried) < most and not self._is_over():
            self._try(batch[: most - len(self.tried)])
            batch = self._next()
        self._finals(end, budget)

    def _is_over(self) -> bool:
        """Whether the time for candidates is up."""
        return bool(self.results) and time.monotonic() > self.stop

    def _fresh(self, tiles: Sequence[Parameters]) -> list[_Name]:
        """Those that were not tried."""
        return [name for name in dict.fromkeys(map(_name_of, tiles)) if name not in self.tried]

    def _next(self) -> list[_Name]:
        """Some neighbours of the fastest that were not tried; where there are none, some others."""
        near = [other for name in self.fastest()[:_FINALISTS] for other in neighbours(dict(name), self.space)]
        fresh = self._fresh(near) or self._fresh(self.space)
        return self.random.sample(fresh, min(_ROUND, len(fresh)))

    def _try(self, batch: Sequence[_Name]) -> None:
        """Build some candidates together, and measure one after the other."""
        self.tried |= set(batch)
        if self.only is not None:
            built = self.only[1]
            self._measure(batch[0], lambda: built)
            return
        building = {name: self.builder.submit(variant_of(self.key, dict(name)).request) for name in batch}
        if self.key.threads >= len(available_cores()):  # compilers have the cores that kernels are to be timed on
            wait(building.values())
        try:
            for name, future in building.items():
                if self._is_over():
                    break
                self._measure(name, future.result)
        finally:
            for future in building.values():
                future.cancel()

    def _measure(self, name: _Name, built: Callable[[], Built]) -> None:
        """Load, check and time a candidate."""
        parameters = dict(name)
        what = f"{self.key.direction} {self.key.shape.text} {parameters}"
        try:
            kernel = variant_of(self.key, parameters).load(built(), self.session)
        except (KernelsUnavailable, RuntimeError, OSError) as error:
            self.lost += 1
            _log.info("%s: %s", what, error)
            if self.lost >= _MOST_LOST and not self.results:
                raise KernelsUnavailable(str(error)) from None
            return
        difference, stock_error = self.bench.error(kernel), self.bench.stock_error
        if difference > most_error(self.key.direction, self.key.dtype, stock_error):
            _log.warning("a kernel of %s is wrong by %.1e", what, difference)
            return
        glance = self.pace.glance
        timing = self.bench.compare(kernel, glance, 3 if glance else 1)
        self.kernels[name] = kernel
        measured: dict[str, Any] = {"ms": timing.ms, "stock_ms": timing.stock_ms, "noise": timing.noise}
        measured |= {"error": difference, "stock_error": stock_error, "tuned_at": self.began}
        self.results[name] = KernelRecord.of(self.key, parameters, quick=True if self.only else None, **measured)
        for other in self.fastest()[_FINALISTS + 2 :]:
            self.kernels.pop(other, None)  # unloads it
        self.on_progress(self.results[self.fastest()[0]])

    def _finals(self, end: float, budget: float) -> None:
        """Time the fastest again, as long as there is time, until two comparisons agree.

        The second comparison is on other tensors than the first, and the worse of the two counts. A gain that it does
        not confirm is not used: there is no record of it, or one that says how far the two lay apart.
        """
        best = [name for name in self.fastest() if name in self.kernels][:_FINALISTS]
        if not best:
            return
        benches = [self.bench, *(bench_of(self.key, self.seed + number) for number in range(1, _BENCHES))]
        for index, name in enumerate(best):
            left = budget if self.only else max(0.0, end - time.monotonic()) / (len(best) - index)
            share, turn, kernel = min(left, self.pace.longest) / 2, itertools.cycle(benches), self.kernels[name]

            def compare(turn: Iterator[ConvBench] = turn, kernel: Any = kernel, share: float = share) -> Timing:
                return next(turn).compare(kernel, share, self.pace.pairs)

            timing = steady_timing(compare, _MOST_COMPARED, len(benches))
            ms = timing.stock_ms / timing.speedup
            measured = {"ms": ms, "stock_ms": timing.stock_ms, "noise": timing.noise}
            self.finals.append(self.results[name].model_copy(update=measured))
            self.on_progress(min(self.finals, key=lambda record: record.ms))


# ------------------------------------------------------------------------------------------------------------- all keys


class Progress(NamedTuple):
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
    best: KernelRecord | None = None


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
    """What keys read and write in a step, by each thread; counts are how often each one runs in it."""
    return {key: float(count * key.shape.least_bytes) / key.threads for key, count in counts.items()}


def search_all(
    weights: Mapping[KernelKey, float],
    path: Path,
    seconds: float,
    *,
    again: bool = False,
    seed: int = 0,
    trials: int | None = None,
    on_progress: Callable[[Progress], None] = lambda _: None,
    tuner: Callable[..., list[KernelRecord]] = tune,
    quick: bool = False,
) -> SearchReport:
    """Tune keys, and append what is found to a database; those with the largest weights first, and longest.

    `again` searches also where there is a record; `trials` are candidates of each key, at most. `quick` times one
    candidate of each, and records it whatever comes out, so that it is done once; the record says so, and a tune that
    is not quick searches in spite of it.
    """
    database = read_database(path) if path.exists() else Database(str(path))
    best = {key: database.best(key) for key in weights}
    todo = [key for key, record in best.items() if again or record is None or (record.quick and not quick)]
    todo.sort(key=lambda key: -weights[key])
    report = SearchReport(skipped=len(weights) - len(todo))
    least = 0.0 if quick else _LEAST_SECONDS
    if todo and seconds < least:
        raise UsageError(
            f"a budget of {seconds:g} s is too short to try one candidate",
            f"A search takes {_LEAST_SECONDS:g} s at least, and {len(todo)} are to be done.",
            f"Use --budget {max(1, round(10 * len(todo) / 60))}m, for instance.",
        )
    end = time.monotonic() + seconds
    known = Database("what is known", [*database.records, *packaged_records()])
    with Builder(len(available_cores()), BUILD_TIMEOUT) as builder:
        firsts = _firsts(todo, known, builder) if quick else {}
        for index, key in enumerate(todo):
            left = end - time.monotonic()
            if left < least and (index or quick):
                report.left = len(todo) - index
                break

            def show(record: KernelRecord | None, done: int = report.skipped + index, key: KernelKey = key) -> None:
                on_progress(Progress(done, len(weights), key, record))

            show(None)
            share = max(left * weights[key] / (sum(weights[other] for other in todo[index:]) or 1.0), least)
            options: dict[str, Any] = {"builder": builder, "trials": trials, "only": firsts.get(key)}
            try:
                near = () if quick else _known(known, key, candidates(key))
                is_built = not quick or key in firsts
                finals = tuner(key, share, seed, show, known=near, **options) if is_built else []
            except KeyboardInterrupt:
                report.stopped, report.left = True, len(todo) - index
                break
            _record(path, key, finals, report)
    return report


def _record(path: Path, key: KernelKey, finals: Sequence[KernelRecord], report: SearchReport) -> None:
    """Append the records of a search, and count it."""
    steady = [record for record in finals if record.clear]
    append_records(path, [record for record in finals if record.clear or record.quick])
    report.tuned += bool(steady)
    report.unsteady += bool(finals) and not steady
    report.empty += not finals
    if not finals:
        _log.warning("there is no kernel for %s", key.text)
    elif not steady:
        _log.warning(
            "%s %s: measurements lay %.0f %% apart, so none is recorded: tune again when nothing else runs",
            *(key.direction, key.shape.text, 100 * min(record.noise or 0.0 for record in finals)),
        )


def _firsts(keys: Sequence[KernelKey], known: Database, builder: Builder) -> dict[KernelKey, tuple[Parameters, Built]]:
    """The candidate of each key that is most likely to be fast; all are built together before anything is timed.

    They are kept in the cache, as they are likely to be used.
    """
    spaces = {key: space for key in keys if (space := candidates(key))}
    firsts = {key: first_candidates(key, space, _known(known, key, space))[0] for key, space in spaces.items()}
    variants = [variant_of(key, parameters) for key, parameters in firsts.items()]
    contents = contents_of([(variant.path, variant.request) for variant in variants], builder)
    pairs = zip(firsts.items(), contents, strict=True)
    return {key: (parameters, built) for (key, parameters), built in pairs if isinstance(built, Built)}


def _known(database: Database, key: KernelKey, space: Sequence[Parameters]) -> list[dict[str, int]]:
    """Parameters that did well before, also with other versions, devices, threads and shapes, the nearest first.

    Of one shape those come first that are candidates here: of others vectors have another width.
    """
    near = []
    wanted = (key.direction, key.layout, is_gpu(key.device))
    for other in database:
        alike = (other.direction, other.layout, is_gpu(other.device)) == wanted
        if alike and (best := database.best(other, current=False)) is not None:
            odd = (other.device != key.device, best.parameters not in space, other.shape != key.shape)
            near.append(((key.shape.distance(other.shape), *odd, best.ms / best.stock_ms), best.parameters))
    return [dict(parameters) for _, parameters in sorted(near, key=lambda pair: pair[0])]
