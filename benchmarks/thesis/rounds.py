"""Times epochs of all methods in turn; each method trains for the same number of epochs.

The rig's `paired` drops a busy round and takes it again. An epoch of training cannot be taken again, so here every
round trains, and the busy ones are only left out of the times, by the rig's own rule.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.rig import load
from benchmarks.rig.paired import FOREIGN_LOAD, LEAST_ROUNDS, Paired, balanced_orders

Accounts = tuple[float, float, float, float]


class Meeting:
    """Where the workers wait for each other, on the host: a worker that waits must leave its device idle.

    Goes by the default process group and its time-out, for CPU tensors; a process alone never waits.
    """

    def __init__(self) -> None:
        self.together = dist.is_initialized()

    def meet(self) -> None:
        """Wait until all workers are here."""
        self._reduce([0.0], dist.ReduceOp.SUM)

    def highest(self, value: float) -> float:
        """The highest value of all workers."""
        return self._reduce([value], dist.ReduceOp.MAX)[0]

    def total(self, value: float) -> float:
        """The sum over all workers."""
        return self._reduce([value], dist.ReduceOp.SUM)[0]

    def _reduce(self, values: Sequence[float], operation: dist.ReduceOp.RedOpType) -> list[float]:
        if not self.together:
            return list(values)
        tensor: Tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, operation)
        return [float(value) for value in tensor]


def train_in_turn(
    methods: Mapping[str, Callable[[int], object]],
    epochs: int,
    warmup: int,
    meeting: Meeting,
    *,
    seed: int = 0,
    on_round: Callable[[int], object] = lambda _: None,
) -> Paired:
    """Run every epoch of every method, one epoch of each in a round, and time them. Called by all workers.

    Args:
        methods: By name, what runs an epoch, given its number, and returns when its work is done on this worker.
        epochs: Number of rounds.
        warmup: Rounds at the start that are not timed.
        meeting: Where workers meet.
        seed: Seed of the order of the methods.
        on_round: Called with the number of rounds that are done.

    Returns:
        Milliseconds per epoch of each method, of the slowest worker, in the rounds that count.
    """
    orders = balanced_orders(methods, seed)
    times: dict[str, list[float]] = {name: [] for name in methods}
    accounts: list[Accounts] = []
    for epoch in range(epochs):
        if epoch == warmup:
            accounts.append(_account(meeting))
        for name in next(orders):
            meeting.meet()
            begin = time.perf_counter()
            methods[name](epoch)
            took = meeting.highest((time.perf_counter() - begin) * 1e3)
            if epoch >= warmup:
                times[name].append(took)
        if epoch >= warmup:
            accounts.append(_account(meeting))
        on_round(epoch + 1)
    return keep_quiet(times, foreign_loads(accounts), seed)


def _account(meeting: Meeting) -> Accounts:
    own = meeting.total(load.own_seconds())
    return time.perf_counter(), load.busy_seconds(), load.process_seconds(), own


def foreign_loads(accounts: Sequence[Accounts]) -> list[float]:
    """What others did in each round, in cores.

    Short rounds are judged together, because the kernel's counters are coarse.

    Args:
        accounts: At the start and after every round: the clock; then CPU seconds of the machine by the two accounts of
            `benchmarks.rig.load`, and of the workers.
    """
    loads: list[float] = []
    first = 0
    for last in range(1, len(accounts)):
        seconds, busy, processes, own = (now - then for now, then in zip(accounts[last], accounts[first], strict=True))
        if seconds >= load.LEAST_WINDOW or last == len(accounts) - 1:
            loads += [max(0.0, (max(busy, processes) - own) / max(seconds, 1e-9))] * (last - first)
            first = last
    return loads


def keep_quiet(times: Mapping[str, Sequence[float]], loads: Sequence[float], seed: int = 0) -> Paired:
    """Leave busy rounds out; where fewer than 20 are quiet, the least disturbed of the others fill up.

    Args:
        times: Milliseconds of each method in each round.
        loads: Foreign load of each round, in cores.
        seed: Seed of the bootstrap.
    """
    quiet = [number for number, value in enumerate(loads) if value <= FOREIGN_LOAD]
    busy = sorted((number for number in range(len(loads)) if number not in quiet), key=lambda number: loads[number])
    filled = busy[: max(0, LEAST_ROUNDS - len(quiet))]
    kept = sorted(quiet + filled)
    return Paired(
        {name: tuple(values[number] for number in kept) for name, values in times.items()},
        dropped=len(loads) - len(kept),
        load=max(loads[number] for number in kept),
        loaded=bool(filled),
        seed=seed,
    )
