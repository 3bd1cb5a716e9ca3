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

    def _times(self, method: str) -> tuple[float, ...]:
        if method not in self.milliseconds:
            raise UsageError(f"no method {method!r} was measured", fix=nearest(method, self.milliseconds))
        return self.milliseconds[method]


def paired(
    methods: Mapping[str, Method],
    rounds: int = LEAST_ROUNDS,
    warmup: int = 3,
    *,
    repeats: int | Mapping[str, int] = 1,
    seed: int = 0,
    keep_busy: bool = False,
) -> Paired:
    """Time methods against each other. Called by every rank, with the same arguments.

    All ranks must be on one machine: the load is the machine's. Load is judged over windows of at least half a second.
    Where a round is shorter, several of them are kept or dropped together, and more of them than were asked for.

    Args:
        methods: One step of each, by name. A step ends when its method returns, so it waits for its asynchronous work.
        rounds: Rounds to keep, at least 20.
        warmup: Rounds to run first and forget, at least 1.
        repeats: Steps that are timed as one, for all methods or by name. For steps below about 10 ms, and on a shaped
            link for messages that would fit into its bucket (128 KiB) and ride free.
        seed: Seed of the order and of the bootstrap.
        keep_busy: Keep all rounds, exactly as many as were asked for, also those in which others used the machine.

    Returns:
        Times of the rounds kept. Where three times the rounds asked for did not give enough undisturbed ones, the least
        disturbed of the others fill up, and the result says `loaded`.

    Raises:
        UsageError: There are fewer rounds than an interval needs.
    """
    if rounds < LEAST_ROUNDS:
        raise UsageError(f"{rounds} rounds", f"An interval needs at least {LEAST_ROUNDS}.")
    counts = {name: repeats if isinstance(repeats, int) else repeats.get(name, 1) for name in methods}
    orders = balanced_orders(methods, seed)
    for _ in range(warmup):
        times = _round(next(orders), methods, counts)
    round_seconds = sum(times[name] * counts[name] for name in methods) / 1e3
    # A window's length must be agreed on, or ranks would wait for each other in different rounds. All know this number.
    size = 1 if keep_busy else max(1, math.ceil(load.LEAST_WINDOW / max(round_seconds, 1e-6)))
    quiet: list[_Window] = []
    busy: list[_Window] = []
    for _ in range(MOST_TRIES * math.ceil(rounds / size)):
        window = _window(size, orders, methods, counts)
        (busy if window.load > FOREIGN_LOAD and not keep_busy else quiet).append(window)
        if size * len(quiet) >= rounds:
            break
    # Sorted by load and not by time, so that what is kept favours no method.
    lacking = max(0, math.ceil((rounds - size * len(quiet)) / size))
    chosen = quiet + sorted(busy, key=lambda window: window.load)[:lacking]
    return Paired(
        {name: tuple(times[name] for window in chosen for times in window.times) for name in methods},
        dropped=size * (len(quiet) + len(busy) - len(chosen)),
        load=max(window.load for window in chosen),
        loaded=lacking > 0,
        seed=seed,
    )


def balanced_orders(names: Mapping[str, object] | Sequence[str], seed: int) -> Iterator[list[str]]:
    """Orders of the methods without end, depending on names and seed alone.

    As many rounds as there are methods make a block: a random order and its rotations, so that in each block every
    method comes at every position once. Blocks differ, so that a method has no fixed predecessor.
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


def _window(
    size: int, orders: Iterator[list[str]], methods: Mapping[str, Method], counts: Mapping[str, int]
) -> _Window:
    meet()
    before = load.account()
    times = [_round(next(orders), methods, counts) for _ in range(size)]
    # The ranks have just met in the last round's reduction, so their accounts are read at the same moment.
    foreign = load.foreign_cores(before, load.account(), total)
    return _Window(times, highest([foreign])[0])


def _round(order: Sequence[str], methods: Mapping[str, Method], counts: Mapping[str, int]) -> dict[str, float]:
    """Milliseconds of one step of each method, of the slowest rank."""
    times = []
    for name in order:
        method, count = methods[name], counts[name]
        meet()
        begin = time.perf_counter()
        for _ in range(count):
            method()
        times.append((time.perf_counter() - begin) * 1e3 / count)
    return dict(zip(order, highest(times), strict=True))


def meet() -> None:
    """Wait until all ranks are here, on the host: a rank that waits must leave its device idle."""
    total(0.0)


def highest(values: Sequence[float]) -> list[float]:
    """The highest of all ranks; a process alone has its own."""
    return _reduce(values, dist.ReduceOp.MAX)


def total(value: float) -> float:
    """The sum over all ranks."""
    return _reduce([value], dist.ReduceOp.SUM)[0]


def _reduce(values: Sequence[float], operation: dist.ReduceOp.RedOpType) -> list[float]:
    if not dist.is_initialized():
        return list(values)
    tensor = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(tensor, operation)
    return tensor.tolist()
