"""Measures the hosts of a job, and the links inside of them and between them, with the workers that will use them.

Links are timed over the job's own groups and channels, in two ways: sums of all workers, and messages of a pair in both
directions. Results are cached; a few messages check them before they are used again.
"""

from __future__ import annotations

import logging
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from typing import NamedTuple

import torch
from pydantic import TypeAdapter
from torch import Tensor

from hybridpar.comm.transport import Grid, MessagePart
from hybridpar.comm.world import World
from hybridpar.formats.cache import load_measurement, store_measurement
from hybridpar.machine.cluster_file import ClusterSpec, Efficiency, Hosts, LinkLevel, in_runs
from hybridpar.machine.devices import cpu_name
from hybridpar.machine.process import host_identity, usable_memory
from hybridpar.machine.steady import repeat_until_steady
from hybridpar.planner.network import log_rounds
from hybridpar.schedule.layout import Layout

_log = logging.getLogger(__name__)

#: Name of the measurements in the cache.
KIND = "links"

SPEC: TypeAdapter[ClusterSpec] = TypeAdapter(ClusterSpec)

#: What was measured of a link is used again, and remembered, where a few messages take as long but for such a factor.
DRIFT = 1.5

#: Hosts of one kind whose memory differs by less than this factor have the least of them.
ALIKE = 1.1

#: Seconds that a way of using a link is timed for.
LINK_SECONDS = 0.12

#: Bytes of messages: a small one, and large ones on slow links and on fast ones; and of a copy in memory.
_SMALL_BYTES, _LEAST_BYTES, _MOST_BYTES, _COPY_BYTES = 4 << 10, 1 << 20, 16 << 20, 64 << 20
#: A copy takes at most this part of the memory.
_COPY_PART = 128

_Work = Callable[[Tensor], object]


def measure_cluster(world: World, *, fresh: bool = False, seconds: float = LINK_SECONDS) -> ClusterSpec:
    """The hosts and links of a job, measured now or remembered; a collective, all workers get the same answer.

    What is remembered holds for these hosts, with so many workers each, and for as long as the link still carries about
    what it did, which a few messages tell; else all is measured again.
    """
    workers: list[_Worker] = world.gather(_this_worker(world))  # type: ignore[assignment]
    key = {
        "hosts": [worker.host for worker in workers],
        "shared": world.transport,
        "device": workers[0].name,
        "torch": str(torch.__version__),
    }
    if not fresh:
        known = world.from_main(lambda: load_measurement(KIND, key, SPEC))
        if known is not None and _still_true(known, world):
            return known

    def measure() -> ClusterSpec:
        hosts = _hosts(workers, world.device.type, *_copy_rates(world))
        with world.named_errors("measuring the links between workers"):
            levels = _levels(world, [worker.host for worker in workers], seconds) if world.size > 1 else {}
        name = "this machine" if len({worker.host for worker in workers}) == 1 else "these machines"
        return ClusterSpec(name=name, hosts=hosts, **levels)

    def doubt(tries: Sequence[ClusterSpec]) -> float:
        return float(not _still_true(tries[-1], world))

    tries, doubtful = repeat_until_steady(measure, doubt, 0.0)
    if doubtful and world.is_main:
        _log.warning(
            "the links between workers become more than %g times faster or slower while they are measured: what was "
            "measured is used now and not remembered",
            DRIFT,
        )
    elif not doubtful:
        world.from_main(lambda: store_measurement(KIND, key, tries[-1].model_dump(mode="json")))
    return tries[-1]


def describe_hosts(world: World) -> ClusterSpec:
    """The hosts of the job with their memory, of which nothing is timed; a collective."""
    workers: list[_Worker] = world.gather(_this_worker(world))  # type: ignore[assignment]
    free = LinkLevel(bandwidth=1e12)  # which memory does not depend on
    return ClusterSpec(name="this job", hosts=_hosts(workers, world.device.type), inside=free, between=free)


class _Worker(NamedTuple):
    """The host of a worker, the memory that it may use (on a CPU together with the others there), and its device."""

    host: str
    memory: int
    name: str


def _this_worker(world: World) -> _Worker:
    if world.device.type == "cuda":
        properties = torch.cuda.get_device_properties(world.device)
        return _Worker(host_identity(), properties.total_memory, properties.name)
    return _Worker(host_identity(), usable_memory(), cpu_name())


def _hosts(
    workers: Sequence[_Worker], kind: str, inside: float | None = None, outside: float | None = None
) -> tuple[Hosts, ...]:
    """The hosts of the workers in the order of ranks, those that are alike as one entry.

    A device copies `inside` of its memory, and to its host's at the rate `outside`, in bytes per second.
    """
    on_gpu = kind == "cuda"
    counts = Counter(worker.host for worker in workers)
    hosts = []
    for name, row in groupby(workers, key=lambda worker: worker.host):
        first, *others = row
        # Memory differs a little between hosts that are alike, and from an hour to the next.
        alike = (each.memory for each in workers if each.name == first.name and each.memory > first.memory / ALIKE)
        memory = min(alike) // (1 if on_gpu else counts[name]) >> 20 << 20
        hosts.append(
            Hosts(
                devices=1 + len(others),
                kind="cuda" if on_gpu else "cpu",
                name=first.name,
                memory=memory,
                memory_bandwidth=None if inside is None else 2 * inside,  # a copy reads and writes
                host_link=outside,
            )
        )
    return in_runs(hosts)


def _copy_rates(world: World) -> tuple[float, float | None]:
    """How fast devices copy inside of their memory, and GPUs to their host's; a collective.

    All workers copy at the same time, as those of a host share its memory.
    """
    size: int = min(world.gather(min(_COPY_BYTES, usable_memory() // _COPY_PART)))  # type: ignore[type-var, assignment]
    source = torch.zeros(size, dtype=torch.uint8, device=world.device)
    inside = _copy_rate(source, torch.empty_like(source), world)
    if world.device.type != "cuda":
        return inside, None
    return inside, _copy_rate(source, torch.empty(size, dtype=torch.uint8, pin_memory=True), world)


def _copy_rate(source: Tensor, target: Tensor, world: World) -> float:
    """Bytes per second that the slowest worker copies; a collective."""
    world.barrier()
    took = min(laps_of(lambda message: target.copy_(message, non_blocking=True), source, 5))
    return source.nbytes / most_of_all(took, world)


def _still_true(spec: ClusterSpec, world: World) -> bool:
    """Whether sums still take about as long as they did; a collective."""
    level = spec.outer
    if level is None:
        return True
    speed, share = level.bandwidth * level.efficiency.all_reduce, 2 * (world.size - 1) / world.size
    if level is spec.between and world.transport == "sockets":  # each sends stripes to all others, over its host's link
        beside = Counter(host for host, _ in spec.by_worker).values()
        share = max(2 * count * (world.size - count) / world.size for count in beside)
    # Of a length at which the link counts and not its latency.
    size = _MOST_BYTES if _MOST_BYTES / speed < 0.02 else _LEAST_BYTES
    message = torch.zeros(size // 4, device=world.device)
    took = most_of_all(statistics.median(laps_of(world.lane_groups[0].all_reduce, message, 3)), world)
    expected = share * size / speed
    expected += 2 * log_rounds(world.size) * level.latency_ms / 1e3
    return 1 / DRIFT <= took / expected <= DRIFT


def _levels(world: World, hosts: Sequence[str], seconds: float) -> dict[str, LinkLevel]:
    """The links inside of hosts and between them, as far as there are any."""
    inside = [[rank for rank, host in enumerate(hosts) if host == name] for name in dict.fromkeys(hosts)]
    leaders = [ranks[0] for ranks in inside]
    levels = {}
    if len(leaders) < world.size:
        levels["inside"] = _measure_level(world, inside, seconds)
    if len(leaders) > 1:
        rest = [[rank] for rank in range(world.size) if rank not in leaders]
        levels["between"] = _measure_level(world, [leaders, *rest], seconds)
    return levels


def _measure_level(world: World, parties: Sequence[Sequence[int]], seconds: float) -> LinkLevel:
    """Measure the links of parties of workers, all of which add at a time; a collective, what the slowest takes counts.

    A worker that is alone in its party takes part in no sum, and only the first two of a party send, but all workers
    meet as often.
    """
    pair = next((ranks[0], ranks[1]) for ranks in parties if len(ranks) > 1)
    party = world.split(parties, lanes=1)
    grid = Grid(world, Layout.dealt(world.size, world.size), [pair, pair[::-1]], lanes=1)
    add = party.lane_groups[0].all_reduce if party.size > 1 else None
    send = partial(_send_both_ways, grid, pair[world.rank == pair[0]]) if world.rank in pair else None
    try:
        latency, adding = _time(add, 2 * (party.size - 1) / party.size, world, seconds)
        _, sending = _time(send, 1.0, world, seconds)
    finally:
        grid.close()
        party.close()
    most = max(adding, sending)
    return LinkLevel(
        bandwidth=most,
        # What was timed is there and back again for two, and a tree for more.
        latency_ms=1e3 * latency / (2 * log_rounds(max(map(len, parties)))),
        efficiency=Efficiency(all_reduce=adding / most, send=sending / most),
    )


def _send_both_ways(grid: Grid, peer: int, message: Tensor) -> None:
    """Send a message to another worker while it sends: a single way would let a token bucket on the link fill again."""
    parts = [MessagePart(tuple(message.shape))]
    sending = threading.Thread(target=grid.senders[peer].send, args=([message], parts))
    sending.start()
    grid.receivers[peer].receive(parts)
    sending.join()


def _time(work: _Work | None, sent: float, world: World, seconds: float) -> tuple[float, float]:
    """Seconds of a small message, and bytes per second of large ones, of the slowest worker; a collective.

    `sent` is what a worker sends for a byte of the message; a worker without work waits for the others.
    """

    def laps(size: int, repeats: int) -> list[float]:
        return laps_of(work or _nothing, torch.zeros(size // 4, device=world.device), repeats)

    small, size = laps(_SMALL_BYTES, 10), _LEAST_BYTES
    took = most_of_all(min(laps(size, 1)), world)
    while size < _MOST_BYTES and 16 * took < seconds:
        size *= 4
        took = most_of_all(min(laps(size, 1)), world)
    world.barrier()
    large = statistics.median(laps(size, max(2, min(50, int(seconds / took)))))
    # Of a small message's time only the least is latency for sure: threads that wake up late do so once per message,
    # and while a large one is under way they are awake.
    moving = max(large - min(small), 0.5 * large)
    local = None if work is None else (statistics.median(small), sent * size / moving)
    answers: list[tuple[float, float]] = [answer for answer in world.gather(local) if answer is not None]  # type: ignore[misc]
    return max(latency for latency, _ in answers), min(speed for _, speed in answers)


def laps_of(work: _Work, message: Tensor, repeats: int) -> list[float]:
    """Seconds of message after message, but for a first that is not counted: it also fills the queues of the link."""
    times = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        work(message)
        if message.device.type == "cuda":
            torch.cuda.synchronize(message.device)
        times.append(time.perf_counter() - started)
    return times[1:]


def _nothing(message: Tensor) -> None:
    """A worker that has no part in it."""


def most_of_all(value: float, world: World) -> float:
    """The largest of all workers' values, by which all decide the same."""
    values: list[float] = world.gather(value)  # type: ignore[assignment]
    return max(values)
