"""Measures how fast workers send and reduce tensors in each of the ways that plans use, and what that takes of the
cores.

Every way is timed over the job's own groups and channels alone, and then done again while all workers compute: on a CPU
the threads that move bytes take cores away from those that compute; how much is read from the CPU time of the process.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from hybridpar.comm.grid import Grid
from hybridpar.comm.transport import MessagePart
from hybridpar.comm.world import World
from hybridpar.machine.cluster_file import CoreUse, Efficiency, LinkLevel
from hybridpar.partition.unit_runner import intra_op_threads
from hybridpar.planner.network import log_rounds
from hybridpar.schedule.layout import Layout

#: Bytes of messages: a small one, and large ones on slow links and on fast ones.
_SMALL_BYTES, LEAST_BYTES, MOST_BYTES = 4 << 10, 1 << 20, 8 << 20
#: What a megabyte takes on a link that is slow: two messages say enough then, and little but its bytes counts.
_SLOW_SECONDS = 0.3
#: Elements on a side of the matrices that stand for computing; their product takes about a millisecond.
_SIDE = 384

#: What every plan uses; that and what codecs use whose messages are stripes; that and what those use that are added.
PLAIN_WAYS = ("send", "all_reduce")
STRIPED_WAYS = (*PLAIN_WAYS, "all_to_all", "all_gather")
WAYS = (*STRIPED_WAYS, "half_sum", "integer_sum")

_Work = Callable[[Tensor], object]


@dataclass(frozen=True)
class Way:
    """One way of using a link, as all workers found it.

    Attributes:
        latency_ms: Of a message of 4 KB.
        bytes_per_second: That each worker sends.
        cores: Of a worker, kept busy by that while it is under way.
    """

    latency_ms: float
    bytes_per_second: float
    cores: float


def measure_level(
    world: World,
    parties: Sequence[Sequence[int]],
    pair: tuple[int, int],
    seconds: float,
    ways: Collection[str] = WAYS,
) -> LinkLevel:
    """Measure the links of parties of workers that do the same at a time; a collective, what the
    slowest found counts.
    """
    party, slow = world.split(parties, lanes=1), False
    grid = Grid(world, Layout.dealt(world.size, world.size), [pair, pair[::-1]], lanes=1)
    try:
        mine: dict[str, Way | None] = {}
        for name, (work, factor) in _ways(party, grid, pair).items():
            if name in ways and (name in PLAIN_WAYS or not slow):
                mine[name], slow = _time(work, factor, world, seconds)
    finally:
        grid.close()
        party.close()
    answers: list[dict[str, Way | None]] = world.gather(mine)  # type: ignore[assignment]
    known = {name: _slowest([way for one in answers if (way := one[name]) is not None]) for name in mine}
    known = dict.fromkeys(STRIPED_WAYS, known["all_reduce"]) | known  # of sums a level says the same by itself
    most = max(way.bytes_per_second for way in known.values())
    uses = {name: way.cores for name, way in known.items()}
    uses["send"] /= 2  # what was measured is sending and receiving
    return LinkLevel(
        bandwidth=most,
        # What was timed is there and back again for two, and a tree for more.
        latency_ms=known["all_reduce"].latency_ms / (2 * log_rounds(max(map(len, parties)))),
        efficiency=Efficiency(**{name: min(1.0, way.bytes_per_second / most) for name, way in known.items()}),
        cores=CoreUse(**uses, receive=uses["send"]),
    )


def _ways(party: World, grid: Grid, pair: tuple[int, int]) -> dict[str, tuple[_Work | None, float]]:
    """What this worker does with a message in every way of using a link, and the bytes that it sends for each of it.

    None where it has no part in that, as a worker alone in its party has in no collective. Messages between two are
    sent in both directions at a time: one way alone would let a link with a token bucket fill the bucket again.
    """
    size, share = party.size, (party.size - 1) / party.size
    group = next(iter(party.lane_groups), None)

    def all_to_all(message: Tensor) -> None:
        assert group is not None
        each = message.numel() // size
        message = message[: each * size]
        group.all_to_all(torch.empty_like(message), message, [each] * size, [each] * size)

    def all_gather(message: Tensor) -> None:
        assert group is not None
        piece = message[: message.numel() // size]
        group.all_gather(message.new_empty(piece.numel() * size), piece)

    def sum_as(dtype: torch.dtype, message: Tensor) -> None:
        assert group is not None
        group.all_reduce(message.view(dtype))

    def send(message: Tensor) -> None:
        peer, part = pair[grid.world.rank == pair[0]], [MessagePart(tuple(message.shape))]
        sending = threading.Thread(target=grid.senders[peer].send, args=([message], part))
        sending.start()
        grid.receivers[peer].receive(part)
        sending.join()

    ways: dict[str, tuple[_Work, float]] = {
        "all_reduce": (partial(sum_as, torch.float32), 2 * share),
        "all_to_all": (all_to_all, share),
        "all_gather": (all_gather, share),
        "half_sum": (partial(sum_as, torch.float16), 2 * share),
        "integer_sum": (partial(sum_as, torch.int32), 2 * share),
    }
    own = {name: (None if group is None else work, factor) for name, (work, factor) in ways.items()}
    return {"send": (send if grid.world.rank in pair else None, 1.0), **own}


def _slowest(ways: Sequence[Way]) -> Way:
    return Way(
        max(way.latency_ms for way in ways),
        min(way.bytes_per_second for way in ways),
        statistics.mean(way.cores for way in ways),
    )


def _time(work: _Work | None, factor: float, world: World, seconds: float) -> tuple[Way | None, bool]:
    """Time one way of using a link, alone and beside computing; a collective.

    Of a slow link two messages each say enough.
    """

    def laps(size: int, repeats: int) -> list[float]:
        return laps_of(work or _nothing, torch.zeros(size // 4, device=world.device), repeats)

    small, size = laps(_SMALL_BYTES, 3), LEAST_BYTES
    if (more := min(17, int(seconds / most_of_all(min(small), world)) - 3)) > 0:
        small += laps(_SMALL_BYTES, more)
    took = most_of_all(min(laps(size, 1)), world)
    while size < MOST_BYTES and 4 * took * 4 < seconds:
        size *= 4
        took = most_of_all(min(laps(size, 1)), world)
    slow = took > _SLOW_SECONDS
    repeats = 2 if slow else max(3, min(50, int(seconds / took)))
    world.barrier()
    alone = statistics.median(laps(size, repeats))
    # Beside computing each message takes several times as long, and a mean needs fewer than a median.
    fewer = 1 if slow else max(3, repeats // 3)
    used = _core_seconds(lambda: laps(size, fewer), world) / (fewer + 1)
    if work is None:
        return None, slow
    # Of a small message's time only the least is latency for sure: threads that wake up late do so once per message,
    # and while a large one is under way they are awake.
    moving = max(alone - min(small), 0.5 * alone)
    return Way(1e3 * statistics.median(small), factor * size / moving, max(0.0, used) / alone), slow


def laps_of(work: _Work, message: Tensor, repeats: int) -> list[float]:
    """Seconds of one after the other, after one that is not counted: it also fills the queues of the link."""
    times = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        work(message)
        if message.device.type == "cuda":
            torch.cuda.synchronize(message.device)
        times.append(time.perf_counter() - started)
    return times[1:]


def _core_seconds(work: Callable[[], object], world: World) -> float:
    """What a worker's cores do for something while they compute as well, in seconds of a core; a collective.

    The process's account, which holds what all threads of the backend do, less what the computing thread did: so other
    programs on the machine do not count.
    """
    if world.device.type == "cuda":  # another processor computes
        world.barrier()
        work()
        return 0.0
    with intra_op_threads(1):  # so that one thread's account holds all of the computing
        one, other = torch.rand(_SIDE, _SIDE), torch.rand(_SIDE, _SIDE)
        failures: list[Exception] = []

        def run() -> None:
            try:
                work()
            except Exception as error:
                failures.append(error)

        world.barrier()
        thread = threading.Thread(target=run)
        process, own = time.process_time(), time.thread_time()
        thread.start()
        while thread.is_alive():
            torch.mm(one, other)
        if failures:
            raise failures[0]
        return (time.process_time() - process) - (time.thread_time() - own)


def spare_cores(world: World, seconds: float) -> float:
    """Cores that a worker has beside those that compute, while all workers compute; a collective.

    That is what one thread more gets done, over what each of the others does. Less than a quarter is chance.
    """
    threads, gains = torch.get_num_threads(), []
    with intra_op_threads(1):
        for _ in range(3):
            rates = []
            for count in (threads, threads + 1):
                world.barrier()
                rates.append(_products(count, seconds))
            gains.append(threads * (rates[1] / max(1, rates[0]) - 1))
    spare = statistics.median(gains)
    return round(min(1.0, spare), 2) if spare >= 0.25 else 0.0


def _products(threads: int, seconds: float) -> int:
    """Matrix products that so many threads finish together."""
    counts = [0] * threads
    end = time.perf_counter() + seconds

    def compute(place: int) -> None:
        torch.set_num_threads(1)  # every thread of a process has a number of its own
        one, other = torch.rand(_SIDE, _SIDE), torch.rand(_SIDE, _SIDE)
        out = torch.empty(_SIDE, _SIDE)
        while time.perf_counter() < end:
            torch.mm(one, other, out=out)
            counts[place] += 1

    workers = [threading.Thread(target=compute, args=(place,)) for place in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return sum(counts)


def _nothing(message: Tensor) -> None:
    """A worker that has no part in it."""


def most_of_all(value: float, world: World) -> float:
    """The largest of all workers' values, by which all decide the same."""
    values: list[float] = world.gather(value)  # type: ignore[assignment]
    return max(values)
