"""Why: the best tile depends on shape, batch, threads and CPU, so it is searched for, in the time that a user gives.

The space is ranked by the cost model. Its best candidates and some drawn at random are compiled in child processes,
checked against float64 and timed; then the neighbours of the fastest, again by the model's order, until the time is
up; at last the finalists are timed once more and longer, since the fastest of many noisy times is too good to be true.
A candidate that fails to compile, crashes the compiler or computes something else is lost, alone.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from hybridpar.codegen.build import Session
from hybridpar.codegen.cache import KernelsUnavailable
from hybridpar.codegen.compile_pool import Builder, Built
from hybridpar.machine.process import available_cores
from hybridpar.tvm_kernels.candidates import candidates, neighbours
from hybridpar.tvm_kernels.cost import Ranking, estimate, rank
from hybridpar.tvm_kernels.kernel import Kernel, Variant, load_image
from hybridpar.tvm_kernels.machine import Speed, measure_speed, this_machine
from hybridpar.tvm_kernels.measure import Bench, Timing, steady_timing, torch_threads
from hybridpar.tvm_kernels.record import is_right
from hybridpar.tvm_kernels.shapes import ConvShape, Direction, Layout
from hybridpar.tvm_kernels.standings import Standings, Tuned, TuningStopped, key_of

_log = logging.getLogger(__name__)

#: Seconds for one build; straight code of the space's bound takes two or three.
BUILD_TIMEOUT = 30.0
#: Of the first candidates, those that the model likes best and those drawn at random.
_LIKED, _DRAWN = 10, 3
#: Part of the time that is kept for timing the finalists again, how many they are, and the longest for one of them.
_FINAL, _FINALISTS, _LONGEST = 0.2, 3, 1.5
#: Seconds to time a candidate for.
_GLANCE = 0.12


def tune(
    shape: ConvShape,
    direction: Direction,
    layout: Layout,
    threads: int = 1,
    budget_s: float = 30.0,
    seed: int = 0,
    on_progress: Callable[[Tuned, Tuned], None] | None = None,
    *,
    known: Sequence[Mapping[str, int]] = (),
    builder: Builder | None = None,
    speed: Speed | Callable[[], Speed] | None = None,
    trials: int | None = None,
) -> list[Tuned]:
    """Search for the fastest kernel of one direction of one convolution.

    Args:
        shape: The convolution.
        direction: Which of its three directions.
        layout: Of the images.
        threads: That a call may use.
        budget_s: Seconds for all of it; at least one candidate is tried.
        seed: Of the data and of the random part of the search.
        on_progress: Called with each candidate that was measured and the best so far.
        known: Parameters measured earlier, best first: the first ones are measured anew, and their neighbours.
        builder: Builds candidates; None for one of this call's own.
        speed: What the CPU can do, for `floor_ms`, or what says so; None measures it.
        trials: At most so many candidates; None for as many as there is time for.

    Returns:
        All that were measured, best first: finalists before others. Empty where no kernel covers the convolution, or
        none could be built.

    Raises:
        TuningStopped: On KeyboardInterrupt, with what there is.
        KernelsUnavailable: Nothing at all can be built on this machine.
    """
    with torch_threads(threads), _own(builder) as build:
        search = _Search(shape, direction, layout, threads, seed, build, on_progress)
        if not search.space:
            return []
        search.speed = speed() if callable(speed) else speed or measure_speed(build)
        try:
            search.run(time.monotonic() + budget_s, budget_s, known, trials)
        except KeyboardInterrupt:
            raise TuningStopped(search.sorted()) from None
        return search.sorted()


def ranking(results: Sequence[Tuned], drawn_only: bool = False) -> Ranking:
    """How well the model ordered what was measured.

    Args:
        results: Of one search.
        drawn_only: Compare only candidates drawn at random: the others are the model's own choice, and alike.
    """
    chosen = [one for one in results if one.drawn or not drawn_only]
    return rank([one.predicted for one in chosen], [one.ms for one in chosen])


@contextmanager
def _own(builder: Builder | None) -> Iterator[Builder]:
    if builder is not None:
        yield builder
        return
    with Builder(len(available_cores()), BUILD_TIMEOUT) as own:
        yield own


class _Search(Standings[Kernel]):
    """One search."""

    speed: Speed

    def __init__(
        self,
        shape: ConvShape,
        direction: Direction,
        layout: Layout,
        threads: int,
        seed: int,
        builder: Builder,
        on_progress: Callable[[Tuned, Tuned], None] | None,
    ) -> None:
        self.shape, self.direction, self.layout, self.threads = shape, direction, layout, threads
        self.builder = builder
        machine = this_machine()
        space = list(candidates(shape, direction, layout, threads, machine))
        costs = [estimate(shape, direction, one, threads, machine, layout).cycles for one in space]
        order = sorted(range(len(space)), key=lambda index: costs[index])
        self.space = [space[index] for index in order]
        super().__init__({key_of(space[index]): costs[index] for index in order}, on_progress)
        self.random = random.Random(seed)
        self.seed = seed
        self.session = Session()

    def run(self, end: float, budget: float, known: Sequence[Mapping[str, int]], trials: int | None) -> None:
        """Measure until the time is up."""
        self.bench = Bench(self.shape, self.direction, self.layout, self.threads, self.seed)
        stop = end - _FINAL * budget
        allowed = len(self.space) if trials is None else trials
        building: dict[Future[Built], dict[str, int]] = {}
        cores = len(available_cores())
        take = self._take_next if self.threads < cores else self._take_all
        try:
            for one in self._proposals(known):
                # A few ahead of what is measured, so that compilers have work and the order can still be changed.
                if len(self.asked) >= allowed:
                    break
                self.asked.add(key_of(one))
                building[self.builder.submit(self._variant(one).request())] = one
                if len(building) >= cores + 1:
                    take(building)
                if self.results and time.monotonic() > stop:
                    break
            while building and (not self.results or time.monotonic() < stop):
                take(building)
        finally:
            for future in building:
                future.cancel()
        if self.threads >= cores:
            wait(building)
        self._finals(end)

    def _proposals(self, known: Sequence[Mapping[str, int]]) -> Iterator[dict[str, int]]:
        """What to try, in order; what is best so far decides what comes next."""
        fresh = {key_of(one): one for one in self.space}

        def take(one: Mapping[str, int]) -> Iterator[dict[str, int]]:
            if key_of(one) in fresh and key_of(one) not in self.asked:
                yield fresh[key_of(one)]

        # What was found for vectors of another width is not in the space, and no place to begin.
        for one in [one for one in known if key_of(one) in fresh][:_FINALISTS]:
            yield from take(one)
        drawn = self.random.sample(self.space, min(_DRAWN, len(self.space)))
        self.drawn = {key_of(one) for one in drawn}
        for one in (*self._liked(), *drawn):
            yield from take(one)
        while len(self.asked) < len(self.space):
            best = [self.results[one].parameters for one in self.fastest(_FINALISTS)]
            near = [other for one in best for other in neighbours(one, self.space)]
            near.sort(key=lambda one: self.predicted[key_of(one)])
            before = len(self.asked)
            for one in near[:4]:  # then look again at what is best
                yield from take(one)
            for one in near[4:]:
                if len(self.asked) > before:
                    break
                yield from take(one)
            if len(self.asked) == before:
                left = [one for one in self.space if key_of(one) not in self.asked]
                yield from (left[0], *([self.random.choice(left[1:])] if len(left) > 1 else []))

    def _liked(self) -> list[dict[str, int]]:
        """What the model likes best; of every schedule some, since it compares them less well than tiles of one."""
        apart: dict[frozenset[str], list[dict[str, int]]] = {}
        for one in self.space:
            apart.setdefault(frozenset(one), []).append(one)
        own = [one for place in range(_LIKED) for members in apart.values() for one in members[place : place + 1]]
        return own[:_LIKED]

    def _variant(self, parameters: Mapping[str, int]) -> Variant:
        return Variant(self.shape, self.direction, self.layout, parameters)

    def _take_all(self, building: dict[Future[Built], dict[str, int]]) -> None:
        """Wait for all builds, and then measure them: the compilers have the cores that kernels are to be timed on."""
        wait(building)
        while building:
            self._take_next(building)

    def _take_next(self, building: dict[Future[Built], dict[str, int]]) -> None:
        """Wait for the oldest build, and measure it."""
        future = next(iter(building))
        parameters = building.pop(future)
        try:
            built = future.result()
            kernel = load_image(self._variant(parameters), built.names, built.image, self.session)
        except (KernelsUnavailable, RuntimeError) as error:
            self.lose(f"{self.direction} {self.shape.text} {parameters}", error)
            return
        error_found, stock_error = self.bench.error(kernel), self.bench.stock_error
        if not is_right(error_found, self.direction, "float32", stock_error):
            _log.warning("%s %s %s is wrong by %.1e", self.direction, self.shape.text, parameters, error_found)
            return
        key = key_of(parameters)
        self.kernels[key] = kernel
        timing = self.bench.compare(kernel, _GLANCE)
        self.note(key, self.measured(parameters, timing, self._floor_ms, error_found, stock_error))
        for other in self.fastest(len(self.results))[_FINALISTS + 2 :]:
            self.kernels.pop(other, None)  # unloads it

    @property
    def _floor_ms(self) -> float:
        return self.speed.floor_ms(self.shape.multiply_adds, self.shape.least_bytes(self.direction), self.threads)

    def _finals(self, end: float) -> None:
        """Time the fastest once more, as long as there is time, in turn, until two comparisons agree.

        Some are fast on the tensors of the search alone, by where these lie in memory; what counts is the worse of two.
        """
        benches = self.bench, Bench(self.shape, self.direction, self.layout, self.threads, self.seed + 1)
        best = [key for key in self.fastest(len(self.results)) if key in self.kernels]
        for place, key in enumerate(best[:_FINALISTS]):
            left = max(0.0, end - time.monotonic()) / (min(len(best), _FINALISTS) - place)
            rivals = 1 if self.bench.stock_layout is self.layout else 2
            share = min(left / rivals, _LONGEST)
            compare = partial(_worse_of, [partial(one.compare, self.kernels[key], share / 4, 5) for one in benches])
            again = self.finish(key, steady_timing(compare))
            if rivals > 1:
                same = steady_timing(partial(self.bench.compare, self.kernels[key], share / 2, 5, self.layout))
                # The ratio is of pairs, the times of the two comparisons are not.
                again = replace(again, layout_ms=again.ms * same.speedup, noise=max(again.noise, same.noise))
            self.note(key, again)


def _worse_of(comparisons: Sequence[Callable[[], Timing]]) -> Timing:
    return min((compare() for compare in comparisons), key=lambda one: one.speedup)
