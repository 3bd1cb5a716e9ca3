"""Searches for the fastest kernel of one operation on one shape, in the time that is given.

It begins with what is known to be fast, of this shape or the nearest one, or else with a default, and some candidates
drawn at random; then come the neighbours of the fastest, until the time is up. Candidates are compiled in child
processes, checked against float64 and timed; at last the finalists are timed again, two times at least and longer,
since the fastest of many noisy times is too good to be true. Tensors take turns, so that they come from memory, see
`conv_bench.turns`. A candidate that fails to compile, crashes the compiler or computes something else is lost, alone.
"""

from __future__ import annotations

import itertools
import logging
import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

from hybridpar.codegen.build import Session, contents_of
from hybridpar.codegen.cache import KernelsUnavailable
from hybridpar.codegen.compile_pool import Builder, Built
from hybridpar.machine.process import available_cores
from hybridpar.tvm_kernels.measure import Bench, Call, Timing, is_clear, steady_timing, torch_threads
from hybridpar.tvm_kernels.operation import KernelKey, Parameters, operation_of
from hybridpar.tvm_kernels.record import is_right
from hybridpar.tvm_kernels.space import nearest, neighbours

_log = logging.getLogger(__name__)

#: Seconds for one build; straight code of the space's bound takes two or three.
BUILD_TIMEOUT = 30.0
#: Candidates that may be lost before any was measured; then nothing can be built or loaded here.
_MOST_LOST = 8

#: Seconds for timing a single candidate.
_QUICK = 0.2

#: Comparisons of a finalist, at most.
_MOST_COMPARED = 4

_Key = tuple[tuple[str, int], ...]


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
    own = Builder(len(available_cores()), BUILD_TIMEOUT) if builder is None else nullcontext(builder)
    with torch_threads(key.threads), own as build:
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
    found = {_key_of(one): one for one in (nearest(parameters, space) for parameters in wanted)}
    return list(found.values())


def _key_of(parameters: Parameters) -> _Key:
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
            self.pace = replace(self.pace, glance=0.0, longest=_QUICK)
        self.seed, self.builder, self.on_progress = seed, builder, on_progress
        self.space = self.operation.space(key) if only is None else [dict(only)]
        self.random, self.session = random.Random(seed), Session() if self.space else None
        self.results: dict[_Key, Tuned] = {}
        self.kernels: dict[_Key, Any] = {}
        self.asked: set[_Key] = set()
        self.lost = 0

    def sorted(self) -> list[Tuned]:
        """What was measured, finalists first, and of those the fastest."""
        return sorted(self.results.values(), key=lambda one: (not one.final, one.ms))

    def fastest(self, count: int) -> list[_Key]:
        """The candidates with the shortest times, the best first."""
        return sorted(self.results, key=lambda one: self.results[one].ms)[:count]

    def run(self, end: float, budget: float, known: Sequence[Parameters], trials: int | None) -> None:
        """Measure until the time is up."""
        cores = len(available_cores())
        self.bench = self.operation.bench(self.key, self.seed)
        self.stop = end - self.pace.reserved * budget
        allowed = len(self.space) if trials is None else trials
        building: dict[_Key, Future[Built]] = {}
        # Compilers have the cores that kernels of many threads are to be timed on.
        take = self._take_next if self.key.threads < cores else self._take_all
        try:
            for one in self._proposals(known):
                # A few ahead of what is measured, so that compilers have work and the order can still be changed.
                if len(self.asked) >= allowed:
                    break
                self.asked.add(_key_of(one))
                building[_key_of(one)] = self._build(one)
                if len(building) >= cores + 1:
                    take(building)
                if self._is_over():
                    break
            while building and not self._is_over():
                take(building)
        finally:
            for future in building.values():
                future.cancel()
        if self.key.threads >= cores:
            wait(building.values())
        self._finals(end, budget)

    def _build(self, one: Parameters) -> Future[Built]:
        """Begin to build a candidate; a single one is kept in the cache, as it is likely to be used."""
        variant = self.operation.variant(self.key, one)
        if variant is not None and not self.quick:
            return self.builder.submit(variant.request)
        built: Future[Built] = Future()
        content = (
            Built((), b"") if variant is None else contents_of([variant.path], [variant.request], 1, self.builder)[0]
        )
        if isinstance(content, KernelsUnavailable):
            built.set_exception(content)
        else:
            built.set_result(content)
        return built

    def _is_over(self) -> bool:
        """Whether the time for candidates is up."""
        return bool(self.results) and time.monotonic() > self.stop

    def _proposals(self, known: Sequence[Parameters]) -> Iterator[dict[str, int]]:
        """What to try, in order: first candidates, some at random, neighbours of what is best so far."""
        first = first_candidates(self.key, self.space, known, self.pace.finalists)
        drawn = self.random.sample(self.space, min(self.pace.drawn, len(self.space)))
        yield from {_key_of(one): one for one in (*first, *drawn)}.values()
        while len(self.asked) < len(self.space):
            best = [self.results[one].parameters for one in self.fastest(self.pace.finalists)]
            near = {_key_of(other): other for one in best for other in neighbours(one, self.space)}
            left = [one for key, one in near.items() if key not in self.asked]
            left = left or [one for one in self.space if _key_of(one) not in self.asked]
            yield from self.random.sample(left, min(4, len(left)))  # then look again at what is best

    def _take_all(self, building: dict[_Key, Future[Built]]) -> None:
        """Wait for all builds, and then measure them."""
        wait(building.values())
        while building:
            self._take_next(building)

    def _take_next(self, building: dict[_Key, Future[Built]]) -> None:
        """Wait for the oldest build, and load, check and measure it."""
        key = next(iter(building))
        future, parameters = building.pop(key), dict(key)
        what = f"{self.key.direction} {self.key.shape.text} {parameters}"
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
        self.kernels[key] = kernel
        glance = self.pace.glance
        timing = self.bench.compare(kernel, glance, 3 if glance else 1, self._rival(self.bench))
        found = Tuned(parameters, timing.ms, timing.stock_ms, error_found)
        self._note(key, replace(found, stock_error=stock_error, noise=timing.noise))
        for other in self.fastest(len(self.results))[self.pace.finalists + 2 :]:
            self.kernels.pop(other, None)  # unloads it

    def _rival(self, bench: Bench) -> Call | None:
        """What kernels are compared with: of torch the better of its layouts, which takes time to find out."""
        return bench.instead if self.quick else None

    def _note(self, key: _Key, result: Tuned) -> None:
        """Take in a result, and tell how it stands."""
        self.results[key] = result
        if self.on_progress is not None:
            self.on_progress(result, self.sorted()[0])

    def _finals(self, end: float, budget: float) -> None:
        """Time the fastest again, as long as there is time, in turn, until two comparisons agree.

        The second comparison is on other tensors than the first, and the worse of the two counts. A gain that it does
        not confirm is not used: there is no record of it, or one that says how far the two lay apart.
        """
        pace = self.pace
        best = [key for key in self.fastest(len(self.results)) if key in self.kernels][: pace.finalists]
        if not best:
            return
        further = [self.operation.bench(self.key, self.seed + one) for one in range(1, pace.benches)]
        benches = [self.bench, *further]
        rivals = 1 if self.quick or self.bench.stock == self.bench.instead else 2
        for place, key in enumerate(best):
            left = budget if self.quick else max(0.0, end - time.monotonic()) / (len(best) - place)
            share = min(left / rivals, pace.longest)
            timing = self._steady(benches, key, share / 2)
            ms = timing.stock_ms / timing.speedup
            again = replace(self.results[key], final=True, ms=ms, stock_ms=timing.stock_ms, noise=timing.noise)
            if rivals > 1:
                same = self._steady(benches, key, share / 2, alike=True)
                # The ratio is of pairs, the times of the two comparisons are not.
                again = replace(again, layout_ms=ms * same.speedup, noise=max(again.noise, same.noise))
            self._note(key, again)

    def _steady(self, benches: Sequence[Bench], key: _Key, seconds: float, alike: bool = False) -> Timing:
        """Compare a kernel with torch, or with torch in the kernel's layout, on each bench in turn."""
        turn, kernel, pairs = itertools.cycle(benches), self.kernels[key], self.pace.pairs

        def compare() -> Timing:
            bench = next(turn)
            return bench.compare(kernel, seconds, pairs, bench.instead if alike else self._rival(bench))

        return steady_timing(compare, _MOST_COMPARED, len(benches))
