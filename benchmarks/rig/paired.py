"""Times several methods in interleaved rounds.

Methods timed one after the other would differ also by what the machine did in the meantime.

Every round runs one step of every method, in an order that changes from round to round and is the same on all ranks,
and ratios are taken within rounds. Rounds during which other processes used the CPUs are dropped and taken again.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from benchmarks.rig import load
from benchmarks.rig.stats import Ratio, bootstrap_ratio
from hybridpar.errors import UsageError, nearest

#: Fewer rounds than this give no usable interval.
LEAST_ROUNDS = 20
#: Cores' worth of foreign work above which a round is dropped.
FOREIGN_LOAD = 0.15
#: How many times the rounds asked for are tried before busy ones are kept.
MOST_TRIES = 3

Method = Callable[[], object]


@dataclass(frozen=True)
class Paired:
    """Times of methods that ran in the same rounds; the same object on every rank.

    Args:
        milliseconds: Of each method, the time of one step in each kept round: of the slowest rank.
        dropped: Rounds that were tried and not kept.
        load: Foreign load while the kept rounds ran, at its highest, in cores.
        loaded: Whether busy rounds had to be kept.
        seed: Seed of the order and of the bootstrap.
    """

    milliseconds: Mapping[str, tuple[float, ...]]
    dropped: int
    load: float
    loaded: bool
    seed: int = 0

    @property
    def rounds(self) -> int:
        """Number of rounds kept."""
        return len(next(iter(self.milliseconds.values())))

    def median_ms(self, method: str) -> float:
        """Median time of one step in milliseconds."""
        return statistics.median(self._times(method))

    def min_ms(self, method: str) -> float:
        """Shortest time of one step in milliseconds."""
        return min(self._times(method))

    def ratio(self, method: str, over: str) -> Ratio:
        """Time of a method over time of another, below 1 where the first is faster.

        Raises:
            UsageError: No such method was measured.
        """
        return bootstrap_ratio(self._times(method), self._times(over), self.seed)

    def ratios(self) -> dict[tuple[str, str], Ratio]:
        """The ratio of every ordered pair of different methods."""
        names = list(self.milliseconds)
        return {(one, other): self.ratio(one, other) for one in names for other in names if one != other}

    def _times(self, method: str) -> tuple[float, ...]:
        if method not in self.milliseconds:
            raise UsageError(f"no method {method!r} was measured", fix=nearest(method, self.milliseconds))
        return self.milliseconds[method]


def paired(
    methods: Mapping[str, Method],
    rounds: int = LEAST_ROUNDS,
    warmup: int = 3,
    group: dist.ProcessGroup | None = None,
    *,
    repeats: int | Mapping[str, int] = 1,
    seed: int = 0,
    foreign_load: float = FOREIGN_LOAD,
) -> Paired:
    """Time methods against each other. Called by every rank, with the same arguments.

    All ranks must be on one machine: the load is the machine's. Load is judged over windows of at least half a second.
    Where a round is shorter, several of them are kept or dropped together, and more of them than were asked for.

    Args:
        methods: One step of each, by name. A step ends when its method returns, so it waits for its asynchronous work.
        rounds: Rounds to keep, at least 20.
        warmup: Rounds to run first and forget, at least 1.
        group: Ranks that run together; None is the default group, and a process alone where there is none.
        repeats: Steps that are timed as one, for all methods or by name. For steps below about 10 ms, and on a shaped
            link for messages that would fit into its bucket (128 KiB) and ride free.
        seed: Seed of the order and of the bootstrap.
        foreign_load: Cores' worth of foreign work above which rounds are dropped.

    Returns:
        Times of the rounds kept. Where three times the rounds asked for did not give enough undisturbed ones, the least
        disturbed of the others fill up, and the result says `loaded`.

    Raises:
        UsageError: There is no method, or a number is too small.
    """
    counts = _check(methods, rounds, warmup, repeats)
    ranks = _Ranks(group)
    orders = balanced_orders(methods, seed)
    for _ in range(warmup):
        times = _round(next(orders), methods, counts, ranks)
    round_seconds = sum(times[name] * counts[name] for name in methods) / 1e3
    # A window's length must be agreed on, or ranks would wait for each other in different rounds. All know this number.
    size = max(1, math.ceil(load.LEAST_WINDOW / max(round_seconds, 1e-6)))
    quiet: list[_Window] = []
    busy: list[_Window] = []
    for _ in range(MOST_TRIES * math.ceil(rounds / size)):
        window = _window(size, orders, methods, counts, ranks)
        (busy if window.load > foreign_load else quiet).append(window)
        if size * len(quiet) >= rounds:
            break
    # Sorted by load and not by time, so that what is kept favours no method.
    lacking = max(0, math.ceil((rounds - size * len(quiet)) / size))
    kept = quiet + sorted(busy, key=lambda window: window.load)[:lacking]
    return Paired(
        {name: tuple(times[name] for window in kept for times in window.times) for name in methods},
        dropped=size * (len(quiet) + len(busy) - len(kept)),
        load=max(window.load for window in kept),
        loaded=lacking > 0,
        seed=seed,
    )


def balanced_orders(names: Mapping[str, object] | Sequence[str], seed: int) -> Iterator[list[str]]:
    """Orders of the methods without end, depending on names and seed alone.

    As many rounds as there are methods make a block: a random order and its rotations, so that in each block every
    method takes every place once. Blocks differ, so that a method has no fixed predecessor.
    """
    generator = random.Random(seed)
    while True:
        block = sorted(names)
        generator.shuffle(block)
        for first in range(len(block)):
            yield block[first:] + block[:first]


@dataclass(frozen=True)
class _Window:
    times: list[dict[str, float]]
    load: float


class _Ranks:
    """The ranks that run together, or this process alone."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._together = group is not None or (dist.is_available() and dist.is_initialized())
        self._group = group

    def meet(self) -> None:
        if self._together:
            dist.barrier(self._group)

    def highest(self, values: Sequence[float]) -> list[float]:
        return self._reduce(values, dist.ReduceOp.MAX) if self._together else list(values)

    def total(self, value: float) -> float:
        return self._reduce([value], dist.ReduceOp.SUM)[0] if self._together else value

    def _reduce(self, values: Sequence[float], operation: dist.ReduceOp.RedOpType) -> list[float]:
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, operation, group=self._group)
        return [float(value) for value in tensor]


def _window(
    size: int, orders: Iterator[list[str]], methods: Mapping[str, Method], counts: Mapping[str, int], ranks: _Ranks
) -> _Window:
    ranks.meet()
    before = _accounts()
    times = [_round(next(orders), methods, counts, ranks) for _ in range(size)]
    # The ranks have just met in the last round's reduction, so their accounts are read at the same moment.
    seconds, busy, processes, own = (now - then for now, then in zip(_accounts(), before, strict=True))
    foreign = (max(busy, processes) - ranks.total(own)) / seconds
    return _Window(times, max(0.0, ranks.highest([foreign])[0]))


def _accounts() -> tuple[float, float, float, float]:
    relay = load.relay_seconds()
    return time.perf_counter(), load.busy_seconds() - relay, load.process_seconds() - relay, load.own_seconds()


def _round(
    order: Sequence[str], methods: Mapping[str, Method], counts: Mapping[str, int], ranks: _Ranks
) -> dict[str, float]:
    """Milliseconds of one step of each method, of the slowest rank."""
    times = []
    for name in order:
        method, count = methods[name], counts[name]
        ranks.meet()
        begin = time.perf_counter()
        for _ in range(count):
            method()
        times.append((time.perf_counter() - begin) * 1e3 / count)
    return dict(zip(order, ranks.highest(times), strict=True))


def _check(methods: Mapping[str, Method], rounds: int, warmup: int, repeats: int | Mapping[str, int]) -> dict[str, int]:
    if not methods:
        raise UsageError("no methods to time", "A paired run needs at least one.")
    if rounds < LEAST_ROUNDS:
        raise UsageError(f"{rounds} rounds", f"An interval needs at least {LEAST_ROUNDS}.")
    if warmup < 1:
        raise UsageError(f"{warmup} warm-up rounds", "At least 1: first steps allocate, and rounds are sized by it.")
    unknown = [] if isinstance(repeats, int) else [name for name in repeats if name not in methods]
    if unknown:
        raise UsageError(f"repeats for {unknown[0]!r}", "There is no such method.", nearest(unknown[0], methods))
    counts = {name: repeats if isinstance(repeats, int) else repeats.get(name, 1) for name in methods}
    for name, count in counts.items():
        if count < 1:
            raise UsageError(f"{count} repeats of {name!r}", "At least 1.")
    return counts
