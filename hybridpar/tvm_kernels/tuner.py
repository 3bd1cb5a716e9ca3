"""Searches for the fastest kernel of one operation on one shape, in the time that is given.

The space is ranked by the operation's cost model. Its best candidates and some drawn at random are compiled in child
processes, checked against float64 and timed; then the neighbours of the fastest, again by the model's order, until the
time is up; at last the finalists are timed again, two times at least and longer, since the fastest of many noisy times
is too good to be true. Tensors take turns, so that they come from memory, see `machine.turns`. A candidate that fails
to compile, crashes the compiler or computes something else is lost, alone.
"""

from __future__ import annotations

import itertools
import logging
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from hybridpar.tvm_kernels.space import neighbours

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
        floor_ms: What neither arithmetic nor memory can beat; None where that is not known.
        error: Largest difference from float64, relative to the largest value.
        speedup: Median of the ratios, pair by pair.
        predicted: What the model said.
        final: Whether it was timed as a finalist.
        drawn: Whether it was drawn at random, and not chosen.
        layout_ms: Of torch's call in the layout of the kernel, where it is not its better one; of finalists only.
        stock_error: Torch's largest difference from float64, on the same data.
        noise: Of the ratio, see `measure.Timing`; of finalists that of repeated comparisons, see `steady_timing`.
    """

    parameters: Parameters
    ms: float
    stock_ms: float
    floor_ms: float | None
    error: float
    speedup: float = 0.0
    predicted: float = 0.0
    final: bool = False
    drawn: bool = False
    layout_ms: float | None = None
    stock_error: float | None = None
    noise: float = 0.0

    @property
    def clear(self) -> bool:
        """Whether it is worth a record, see `measure.is_clear`."""
        rival = self.stock_ms if self.layout_ms is None else self.layout_ms
        return is_clear(rival / self.ms, self.noise)


class TuningStopped(KeyboardInterrupt):
    """The user stopped the search.

    Args:
        results: What was measured until then, best first.
    """

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
    parts: Sequence[tuple[Parameters, Any]] = (),
    builder: Builder | None = None,
    speed: Any = None,
    trials: int | None = None,
    only: Parameters | None = None,
) -> list[Tuned]:
    """Search for the fastest kernel of one key.

    Args:
        key: What is to be computed, and where.
        seconds: For all of it; at least one candidate is tried.
        seed: Of the data and of the random part of the search.
        on_progress: Called with each candidate that was measured and the best so far.
        known: Parameters measured earlier, best first: the first ones are measured anew, and their neighbours.
        parts: Parameters and kernels that the operation's `parts` run on.
        builder: Builds candidates; None for one of this call's own.
        speed: What the device can do, for `floor_ms`, or what says so; None measures it.
        trials: At most so many candidates; None for as many as there is time for.
        only: Time but this candidate, for a short time, beside torch in the layout of the key; its machine code is kept
            in the cache, and its floor is not known.

    Returns:
        All that were measured, best first: finalists before others. Empty where no kernel covers the key, or none could
        be built.

    Raises:
        TuningStopped: On KeyboardInterrupt, with what there is.
        KernelsUnavailable: Nothing at all can be built on this machine.
    """
    own = Builder(len(available_cores()), BUILD_TIMEOUT) if builder is None else nullcontext(builder)
    with torch_threads(key.threads), own as build:
        search = _Search(key, seed, build, parts, on_progress, only)
        if not search.space:
            return []
        if only is None:
            found = speed() if callable(speed) else speed
            found = search.operation.measure_speed(build) if found is None else found
            search.floor_ms = search.operation.floor_ms(key, found)
        try:
            search.run(time.monotonic() + seconds, seconds, known, trials)
        except KeyboardInterrupt:
            raise TuningStopped(search.sorted()) from None
        return search.sorted()


def first_candidate(key: KernelKey, known: Sequence[Parameters] = ()) -> dict[str, int] | None:
    """The candidate that is most likely to be fast, before anything is timed.

    Args:
        key: What is to be computed, and where; of an operation without parts.
        known: Parameters measured earlier, best first.

    Returns:
        The first known one that suits this device, else the one that the model likes best; None where there is none.
    """
    ranked = [one for one, _ in _ranked(key, ())]
    fresh = {_key_of(one): one for one in ranked}
    return next((fresh[_key_of(one)] for one in known if _key_of(one) in fresh), ranked[0] if ranked else None)


def _ranked(key: KernelKey, parts: Sequence[Parameters]) -> list[tuple[dict[str, int], float]]:
    """All candidates with what the model says, the best first."""
    return sorted(operation_of(key).space(key, parts), key=lambda one: one[1])


def _key_of(parameters: Parameters) -> _Key:
    """What tells candidates apart."""
    return tuple(sorted(parameters.items()))


class _Search:
    """One search: what was asked for, what was measured, what is best."""

    floor_ms: float | None = None

    def __init__(
        self,
        key: KernelKey,
        seed: int,
        builder: Builder,
        parts: Sequence[tuple[Parameters, Any]] = (),
        on_progress: Callable[[Tuned, Tuned], None] | None = None,
        only: Parameters | None = None,
    ) -> None:
        self.key, self.operation, self.quick = key, operation_of(key), only is not None
        self.pace = (
            replace(self.operation.pace, glance=0.0, longest=_QUICK, reserved=1.0)
            if self.quick
            else self.operation.pace
        )
        self.seed, self.builder, self.on_progress = seed, builder, on_progress
        self.part_kernels = [kernel for _, kernel in parts]
        ranked = [(dict(only), 0.0)] if only is not None else _ranked(key, [own for own, _ in parts])
        self.space = [one for one, _ in ranked]
        self.predicted = {_key_of(one): cost for one, cost in ranked}
        self.random, self.session = random.Random(seed), Session() if ranked else None
        self.results: dict[_Key, Tuned] = {}
        self.kernels: dict[_Key, Any] = {}
        self.asked: set[_Key] = set()
        self.drawn: set[_Key] = set()
        self.lost = 0

    def sorted(self) -> list[Tuned]:
        """What was measured, finalists first, and of those the fastest."""
        return sorted(self.results.values(), key=lambda one: (not one.final, one.ms))

    def fastest(self, count: int) -> list[_Key]:
        """The candidates with the shortest times, the best first."""
        return sorted(self.results, key=lambda one: self.results[one].ms)[:count]

    def run(self, end: float, budget: float, known: Sequence[Parameters], trials: int | None) -> None:
        """Measure until the time is up."""
        pace, cores = self.pace, len(available_cores())
        self.bench = self.operation.bench(self.key, self.seed, self.part_kernels)
        self.stop = end - pace.reserved * budget
        allowed = len(self.space) if trials is None else trials
        building: dict[_Key, Future[Built] | None] = {}
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
            futures = [one for one in building.values() if one is not None]
            for future in futures:
                future.cancel()
        if self.key.threads >= cores:
            wait(futures)
        self._finals(end, budget)

    def _build(self, one: Parameters) -> Future[Built] | None:
        """Begin to build a candidate; a single one is kept in the cache, as it is likely to be used."""
        request = self.operation.request(self.key, one)
        if request is None or not self.quick:
            return None if request is None else self.builder.submit(request)
        built: Future[Built] = Future()
        (content,) = contents_of([self.operation.path(self.key, one)], [request], builder=self.builder)
        if isinstance(content, KernelsUnavailable):
            built.set_exception(content)
        else:
            built.set_result(content)
        return built

    def _is_over(self) -> bool:
        """Whether the time for candidates is up; where they are few, all are measured."""
        few = self.pace.reserved == 1.0
        return bool(self.results) and time.monotonic() > self.stop and not few

    def _proposals(self, known: Sequence[Parameters]) -> Iterator[Mapping[str, int]]:
        """What to try, in order; what is best so far decides what comes next."""
        pace = self.pace
        fresh = {_key_of(one): one for one in self.space}

        def take(one: Parameters) -> Iterator[dict[str, int]]:
            if _key_of(one) in fresh and _key_of(one) not in self.asked:
                yield fresh[_key_of(one)]

        # What was found for vectors of another width is not in the space, and no place to begin.
        for one in [one for one in known if _key_of(one) in fresh][: pace.finalists]:
            yield from take(one)
        drawn = self.random.sample(self.space, min(pace.drawn, len(self.space)))
        self.drawn = {_key_of(one) for one in drawn}
        for one in (*self._liked(), *drawn):
            yield from take(one)
        while len(self.asked) < len(self.space):
            best = [self.results[one].parameters for one in self.fastest(pace.finalists)]
            near = [other for one in best for other in neighbours(one, self.space)]
            near.sort(key=lambda one: self.predicted[_key_of(one)])
            before = len(self.asked)
            for one in near[:4]:  # then look again at what is best
                yield from take(one)
            for one in near[4:]:
                if len(self.asked) > before:
                    break
                yield from take(one)
            if len(self.asked) == before:
                left = [one for one in self.space if _key_of(one) not in self.asked]
                yield from (left[0], *([self.random.choice(left[1:])] if len(left) > 1 else []))

    def _liked(self) -> list[dict[str, int]]:
        """What the model likes best; of every schedule some, since it compares them less well than tiles of one."""
        apart: dict[frozenset[str], list[dict[str, int]]] = {}
        for one in self.space:
            apart.setdefault(frozenset(one), []).append(one)
        count = self.pace.liked
        own = [one for place in range(count) for members in apart.values() for one in members[place : place + 1]]
        return own[:count]

    def _take_all(self, building: dict[_Key, Future[Built] | None]) -> None:
        """Wait for all builds, and then measure them."""
        wait([one for one in building.values() if one is not None])
        while building:
            self._take_next(building)

    def _take_next(self, building: dict[_Key, Future[Built] | None]) -> None:
        """Wait for the oldest build, and load, check and measure it."""
        key = next(iter(building))
        future, parameters = building.pop(key), dict(key)
        what = f"{self.key.direction} {self.key.shape.text} {parameters or ''}".strip()
        try:
            built = Built((), b"") if future is None else future.result()
            kernel = self.operation.load(self.key, parameters, built, self.session)
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
        found = Tuned(parameters, timing.ms, timing.stock_ms, self.floor_ms, error_found, timing.speedup)
        drawn, cost = key in self.drawn, self.predicted[key]
        self._note(key, replace(found, predicted=cost, drawn=drawn, stock_error=stock_error, noise=timing.noise))
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
        further = [self.operation.bench(self.key, self.seed + one, self.part_kernels) for one in range(1, pace.benches)]
        benches = [self.bench, *further]
        rivals = 1 if self.quick or self.bench.stock == self.bench.instead else 2
        for place, key in enumerate(best):
            least = budget if pace.reserved == 1.0 else 0.0
            left = max(least, end - time.monotonic()) / (len(best) - place)
            share = min(left / rivals, pace.longest)
            timing = self._steady(benches, key, share / 2)
            ms = timing.stock_ms / timing.speedup
            again = replace(self.results[key], final=True, ms=ms, stock_ms=timing.stock_ms)
            again = replace(again, speedup=timing.speedup, noise=timing.noise)
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
