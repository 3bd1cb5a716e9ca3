"""Why: what a link carries, and what that takes of the cores, is measured between the very workers that will use it.

Every way in which gradients and activations really travel is timed over the job's own groups and channels: shared
memory where workers share a host, else the backend. Each is timed alone, and then done again while all workers compute:
on a CPU the threads that move bytes take cores away from those that compute, and how much, their account tells.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from hybridpar.cluster import BUSY_LOAD, cache_directory, cpu_name, machine_load
from hybridpar.cluster_file import ClusterSpec, CoreUse, Efficiency, Hosts, LinkLevel
from hybridpar.compress import TorchGroup
from hybridpar.pipeline.grid import Grid
from hybridpar.pipeline.transport import MessagePart
from hybridpar.pipeline.world import World
from hybridpar.planner.network import log_rounds
from hybridpar.process import available_cores, host_identity, usable_memory

#: A link is measured again where it has become so many times faster or slower.
DRIFT = 1.5

#: Seconds that one way of using a link is timed for, alone and again beside computing.
LINK_SECONDS = 0.25
_SMALL_BYTES, _LEAST_BYTES, _MOST_BYTES = 4 << 10, 1 << 20, 8 << 20
#: Elements on a side of the matrices that stand for computing; their product takes about a millisecond.
_SIDE = 384

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


def measure_cluster(
    world: World, *, fresh: bool = False, seconds: float = LINK_SECONDS, name: str = "this job"
) -> ClusterSpec:
    """The hosts and links of a job, measured now or remembered; a collective, all workers get the same answer.

    What is remembered holds for these hosts, with so many workers each, and for as long as the link still carries about
    what it did, which a few messages tell; else all is measured again. So it is as soon as a machine is calmer that was
    busy then.

    Args:
        world: All workers of the job. Nothing else is under way on it.
        fresh: Measure whatever is remembered.
        seconds: Time for each way of using a link. A slow link takes longer: 1 MiB is sent some times.
        name: What to call the cluster.

    Raises:
        SyncError: A worker died, or a link between two of them does not work; the message says what the backend says.
    """
    told: list[_Place] = world.gather(_own_place(world))  # type: ignore[assignment]
    key = {
        "places": [[one.host, one.cores] for one in told],
        "shared": world.transport,
        "device": told[0].name,
        "torch": str(torch.__version__),
    }
    load = machine_load()
    if not fresh:
        known = world.from_main(lambda: _read(key, load))
        if known is not None and _still_true(known, world):
            return known
    spare = _agreed_least(_spare_cores(world, seconds / 2), world) if world.device.type == "cpu" else 0.0
    hosts = _hosts(told, world, spare)
    with world.named_errors("measuring the links between workers"):
        levels = _levels(world, [one.host for one in told], seconds) if world.size > 1 else {}
    found = ClusterSpec(name=name, hosts=hosts, **levels)
    world.from_main(lambda: _write(key, load, found))
    return found


class _Place(NamedTuple):
    """Where a worker is.

    Attributes:
        host: Its host.
        memory: That it may use; on a CPU together with the others there.
        name: Of its device.
        cores: That it may use.
    """

    host: str
    memory: int
    name: str
    cores: int


def _own_place(world: World) -> _Place:
    if world.device.type == "cuda":
        properties = torch.cuda.get_device_properties(world.device)
        return _Place(host_identity(), properties.total_memory, properties.name, len(available_cores()))
    return _Place(host_identity(), usable_memory(), cpu_name(), len(available_cores()))


def _hosts(told: Sequence[_Place], world: World, spare: float) -> tuple[Hosts, ...]:
    """The hosts of the workers, those that are alike as one entry; with spare cores for each worker."""
    kind: Literal["cpu", "cuda"] = "cuda" if world.device.type == "cuda" else "cpu"
    counts = Counter(one.host for one in told)
    found: Counter[Hosts] = Counter()
    for host, devices in counts.items():
        first = next(one for one in told if one.host == host)
        memory = first.memory // (devices if kind == "cpu" else 1)
        # Bytes of memory differ a little between hosts that are alike, and from one hour to the next.
        memory = memory >> 20 << 20
        host_found = Hosts(devices=devices, kind=kind, name=first.name, memory=memory, communication_cores=spare)
        found[host_found] += 1
    return tuple(host.model_copy(update={"count": count}) for host, count in found.items())


def _path(key: Mapping[str, object]) -> Path:
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24]
    return cache_directory() / f"links-{digest}.json"


def _read(key: Mapping[str, object], load: float) -> ClusterSpec | None:
    """What was measured between these workers before; None where that cannot be read, or was taken on a busier machine.

    Args:
        key: What it holds for.
        load: Of the machine now.
    """
    try:
        kept = json.loads(_path(key).read_text(encoding="utf-8"))
        found, before = ClusterSpec.model_validate(kept["cluster"]), float(kept["load"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return None if before > BUSY_LOAD and load < before / 2 else found


def _write(key: Mapping[str, object], load: float, spec: ClusterSpec) -> None:
    path = _path(key)
    aside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    kept = {"key": key, "load": load, "cluster": spec.model_dump(mode="json")}
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        aside.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
        aside.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            aside.unlink()


def _still_true(spec: ClusterSpec, world: World) -> bool:
    """Whether sums still take about as long as they did; a collective."""
    level = spec.between or spec.inside
    if level is None:
        return True
    speed, factor = level.bandwidth * level.efficiency.all_reduce, 2 * (world.size - 1) / world.size
    # Of a length at which the link counts and not its latency.
    size = _MOST_BYTES if _MOST_BYTES / speed < 0.02 else _LEAST_BYTES
    message = torch.zeros(size // 4, device=world.device)
    took = _agreed(statistics.median(_laps(world.lane_sums[0].all_reduce, message, 3)), world)
    expected = factor * size / speed
    expected += 2 * log_rounds(world.size) * level.latency_ms / 1e3
    return 1 / DRIFT <= took / expected <= DRIFT


def _levels(world: World, hosts: Sequence[str], seconds: float) -> dict[str, LinkLevel]:
    """The links inside of hosts and between them, as far as there are any."""
    places = list(dict.fromkeys(hosts))
    inside = [[rank for rank, host in enumerate(hosts) if host == place] for place in places]
    leaders = [ranks[0] for ranks in inside]
    found: dict[str, LinkLevel] = {}
    most = max(map(len, inside))
    if most > 1:
        # Of hosts with several workers the first one's links count; all are measured at a time.
        pair = next((ranks[0], ranks[1]) for ranks in inside if len(ranks) > 1)
        found["inside"] = _level(world, inside, pair, seconds)
    if len(places) > 1:
        rest = [[rank] for rank in range(world.size) if rank not in leaders]
        found["between"] = _level(world, [leaders, *rest], (leaders[0], leaders[1]), seconds)
    return found


def _level(world: World, parties: Sequence[Sequence[int]], pair: tuple[int, int], seconds: float) -> LinkLevel:
    """The links of parties of workers that do the same at a time; what the slowest found counts."""
    party = world.split(parties, lanes=1)
    grid = Grid(world, world.size, [pair, pair[::-1]], lanes=1)
    try:
        mine = {name: _time(work, factor, world, seconds) for name, (work, factor) in _ways(party, grid, pair).items()}
    finally:
        grid.close()
        party.close()
    answers: list[dict[str, Way | None]] = world.gather(mine)  # type: ignore[assignment]
    known = {name: _slowest([way for one in answers if (way := one[name]) is not None]) for name in mine}
    most = max(way.bytes_per_second for way in known.values())
    uses = {name: way.cores for name, way in known.items()}
    return LinkLevel(
        bandwidth=most,
        # What was timed is there and back again for two, and a tree for more.
        latency_ms=known["all_reduce"].latency_ms / (2 * log_rounds(max(map(len, parties)))),
        efficiency=Efficiency(**{name: min(1.0, way.bytes_per_second / most) for name, way in known.items()}),
        cores=CoreUse(**uses, receive=uses["send"]),
    )


def _ways(party: World, grid: Grid, pair: tuple[int, int]) -> dict[str, tuple[_Work | None, float]]:
    """What this worker does with a message in every way of using a link, and the bytes that it sends for each of it.

    None where it has no part in that. Codecs do not only add, so their messages travel over a group, also where sums go
    through shared memory. A message is sent there and back again, and counts for both.
    """
    size, rank = party.size, grid.world.rank
    group = TorchGroup(party.control) if size > 1 else None

    def all_to_all(message: Tensor) -> None:
        assert group is not None
        each = message.numel() // size
        group.all_to_all(torch.empty_like(message), message, [each] * size, [each] * size)

    def all_gather(message: Tensor) -> None:
        assert group is not None
        piece = message[: message.numel() // size]
        group.all_gather(message.new_empty(piece.numel() * size), piece)

    def send(message: Tensor) -> None:
        part, first = [MessagePart(tuple(message.shape))], rank == pair[0]
        for sends in (first, not first):
            if sends:
                grid.senders[pair[first]].send([message], part)
            else:
                grid.receivers[pair[first]].receive(part)

    ways: dict[str, tuple[_Work | None, float]] = {"send": (send if rank in pair else None, 2.0)}
    share, alone = (size - 1) / size, size == 1
    ways["all_reduce"] = (None if alone else party.lane_sums[0].all_reduce, 2 * share)
    ways["all_to_all"] = (None if alone else all_to_all, share)
    ways["all_gather"] = (None if alone else all_gather, share)
    return ways


def _slowest(ways: Sequence[Way]) -> Way:
    return Way(
        max(way.latency_ms for way in ways),
        min(way.bytes_per_second for way in ways),
        statistics.mean(way.cores for way in ways),
    )


def _time(work: _Work | None, factor: float, world: World, seconds: float) -> Way | None:
    """Time one way of using a link, alone and beside computing; a collective.

    Args:
        work: Does it with a message, on the workers that take part.
        factor: Bytes that a worker sends for each byte of the message.
        world: All workers.
        seconds: For how long.
    """

    def laps(size: int, repeats: int) -> list[float]:
        return _laps(work or _nothing, torch.zeros(size // 4, device=world.device), repeats)

    small, size = laps(_SMALL_BYTES, 20), _LEAST_BYTES
    took = _agreed(min(laps(size, 1)), world)
    while size < _MOST_BYTES and 4 * took * 4 < seconds:
        size *= 4
        took = _agreed(min(laps(size, 1)), world)
    repeats = max(3, min(50, int(seconds / took)))
    world.barrier()
    alone = statistics.median(laps(size, repeats))
    used = _core_seconds(lambda: laps(size, repeats), world) / (repeats + 1)
    if work is None:
        return None
    # Of a small message's time only the least is latency for sure: threads that wake up late do so once per message,
    # and while a large one is under way they are awake.
    moving = max(alone - min(small), 0.5 * alone)
    return Way(1e3 * statistics.median(small), factor * size / moving, max(0.0, used) / alone)


def _laps(work: _Work, message: Tensor, repeats: int) -> list[float]:
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
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # so that one thread's account holds all of the computing
    try:
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
    finally:
        torch.set_num_threads(threads)


def _spare_cores(world: World, seconds: float) -> float:
    """Cores that a worker has beside those that compute, while all workers compute; a collective.

    That is what one thread more gets done, over what each of the others does. Less than a quarter is chance.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        gains = []
        for _ in range(3):
            rates = []
            for count in (threads, threads + 1):
                world.barrier()
                rates.append(_products(count, seconds))
            gains.append(threads * (rates[1] / max(1, rates[0]) - 1))
    finally:
        torch.set_num_threads(threads)
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


def _agreed(value: float, world: World) -> float:
    """The largest of all workers' values, by which all decide the same."""
    return max(_of_all(value, world))


def _agreed_least(value: float, world: World) -> float:
    """The least of all workers' values."""
    return min(_of_all(value, world))


def _of_all(value: float, world: World) -> list[float]:
    values: list[float] = world.gather(value)  # type: ignore[assignment]
    return values
