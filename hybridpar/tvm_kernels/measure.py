"""Times a kernel against what would run in its place, alternately and on the same data.

Both sides allocate what they return. What disturbs one call hits the pair that it is in, so ratios are taken pair by
pair, and pairs that were disturbed are dropped. Nothing is timed that was not found correct before. Calls on a GPU
return before they are done, so they are timed by the device's own events.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from hybridpar.machine.process import seconds_waited
from hybridpar.machine.steady import MOST_NOISE, relative_distance, repeat_until_steady

#: A pair is dropped where one of its sides took so many times its median.
_OUTLIER = 1.6
#: Most pairs of a measurement.
_MOST_PAIRS = 1000
#: Seconds that calls between two events of a GPU should take: an event's own time is some microseconds.
_STRETCH = 4e-4

Call = Callable[[], object]


@dataclass(frozen=True)
class Timing:
    """What pairs of calls took.

    Attributes:
        ms: Median of the one side.
        stock_ms: Median of the other.
        speedup: Median of the ratios, pair by pair.
        pairs: How many pairs were kept.
        noise: How far the ratio of the least times of both sides lies from the median of the ratios. Other programs
            only add to times, most to those of many threads, so the two agree where none ran. On several threads at
            least how much longer everything took as these waited for cores, relative.
    """

    ms: float
    stock_ms: float
    speedup: float
    pairs: int
    noise: float = 0.0


def time_pairs(
    kernel: Call, stock: Call, seconds: float, least: int = 3, threads: int = 1, device: torch.device | None = None
) -> Timing:
    """Time two functions in turn, each first in every other pair, until the time is over and there are enough pairs."""
    clock, times = time.thread_time if threads == 1 else time.perf_counter, 1
    if device is not None:
        kernel(), stock()
        slower = max(milliseconds(kernel, 2, device), milliseconds(stock, 2, device))
        times = max(1, min(200, round(_STRETCH / max(1e-3 * slower, 1e-7))))

    def taken(call: Call) -> float:
        """Seconds of a call."""
        if device is not None:
            return 1e-3 * milliseconds(call, times, device)
        start = clock()
        call()
        return clock() - start

    begin, waited = time.perf_counter(), seconds_waited()
    pairs: list[tuple[float, float]] = []
    while len(pairs) < least or (time.perf_counter() < begin + seconds and len(pairs) < _MOST_PAIRS):
        if len(pairs) % 2 == 0:
            pairs.append((taken(kernel), taken(stock)))
        else:
            pairs.append((taken(stock), taken(kernel))[::-1])
    timing = summarize_pairs(pairs)
    if threads == 1:
        return timing
    worked = (time.perf_counter() - begin) * threads
    waiting = max(0.0, seconds_waited() - waited)
    return replace(timing, noise=max(timing.noise, waiting / max(worked - waiting, 1e-9)))


def milliseconds(call: Call, times: int, device: torch.device) -> float:
    """Time some calls on a GPU by its own clock."""
    with torch.cuda.device(device):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        for _ in range(times):
            call()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / times


def summarize_pairs(pairs: Sequence[tuple[float, float]]) -> Timing:
    """Medians of pairs, without those that were disturbed."""
    usual = [_OUTLIER * statistics.median(side) for side in zip(*pairs, strict=True)]
    calm = [pair for pair in pairs if all(taken <= most for taken, most in zip(pair, usual, strict=True))] or pairs
    kernel, stock = ([1e3 * taken for taken in side] for side in zip(*calm, strict=True))
    speedup = statistics.median(right / left for left, right in calm)
    noise = relative_distance(speedup, min(stock) / min(kernel))
    return Timing(statistics.median(kernel), statistics.median(stock), speedup, len(calm), noise)


def is_gain(speedup: float, noise: float) -> bool:
    """Whether a kernel is faster than its rival for certain: the lower end of its speedup is a gain too.

    Kernels that are many times as fast as torch may differ by half of that from one measurement to the next, and are
    faster all the same; of one that is 1.1 times as fast, 25 % of noise says nothing.
    """
    return speedup > 1 + noise


def is_clear(speedup: float, noise: float) -> bool:
    """Whether a measurement is worth a record: it is a gain for certain, or steady enough to say that it is none."""
    return is_gain(speedup, noise) or noise <= MOST_NOISE


def steady_timing(compare: Callable[[], Timing], most: int = 3, benches: int = 1) -> Timing:
    """Compare with torch until two comparisons agree on which is faster."""

    def worse_of_agreeing(timings: Sequence[Timing]) -> Timing:
        pairs = itertools.combinations(enumerate(timings), 2)
        apart = [(first, second) for (i, first), (j, second) in pairs if benches == 1 or (j - i) % benches]
        best = min(apart, key=_noise_of)
        return replace(min(best, key=lambda timing: timing.speedup), noise=_noise_of(best))

    def unclear(timings: Sequence[Timing]) -> float:
        if len(timings) < 2:
            return math.inf
        worse = worse_of_agreeing(timings)
        gains = is_gain(worse.speedup, worse.noise)
        return 0.0 if gains or (worse.speedup <= 1 and is_clear(worse.speedup, worse.noise)) else math.inf

    return worse_of_agreeing(repeat_until_steady(compare, unclear, 0.0, most)[0])


def _noise_of(timings: tuple[Timing, Timing]) -> float:
    first, second = timings
    return max(first.noise, second.noise, relative_distance(first.speedup, second.speedup))


@contextmanager
def torch_threads(threads: int) -> Iterator[None]:
    """Context in which torch computes on a number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
