"""Measures the hosts of a job, and the links inside of them and between them, with the workers that will use them.

For every host its memory and spare cores are measured, and every way of using its links (`link_ways`). Results are
cached; a few messages check them before they are used again.
"""

from __future__ import annotations

import logging
import statistics
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch

from hybridpar.comm.world import World
from hybridpar.formats.cache import forget_measurement, load_measurement, store_measurement
from hybridpar.machine.cluster import BUSY_LOAD, cpu_name, machine_load
from hybridpar.machine.cluster_file import ClusterSpec, Hosts, LinkLevel, in_runs
from hybridpar.machine.probe_worker import host_rate
from hybridpar.machine.process import available_cores, host_identity, usable_memory
from hybridpar.machine.steady import repeat_until_steady
from hybridpar.planner.link_ways import (
    LEAST_BYTES,
    MOST_BYTES,
    PLAIN_WAYS,
    STRIPED_WAYS,
    WAYS,
    laps_of,
    measure_level,
    most_of_all,
    spare_cores,
)
from hybridpar.planner.network import log_rounds
from hybridpar.planner.store import MOST_TRIES

_log = logging.getLogger(__name__)

#: Name of the measurements in the cache.
KIND = "links"

#: A link is measured again where it has become so many times faster or slower.
DRIFT = 1.5

#: What was measured is kept where a few messages right behind it take as long, but for such a factor.
CONFIRMED = 1.5

#: Hosts of one kind whose memory differs by less than this factor have the least of them.
ALIKE = 1.1

#: Seconds that one way of using a link is timed for, alone and again beside computing.
LINK_SECONDS = 0.12


def measure_cluster(
    world: World,
    *,
    fresh: bool = False,
    seconds: float = LINK_SECONDS,
    ways: Collection[str] = WAYS,
    name: str | None = None,
) -> ClusterSpec:
    """The hosts and links of a job, measured now or remembered; a collective, all workers get the same answer.

    What is remembered holds for these hosts, with so many workers each, and for as long as the link still carries about
    what it did, which a few messages tell; else all is measured again. So it is as soon as a machine is calmer that was
    busy then.
    """
    told, key = _key(world)
    load = machine_load()
    if not fresh:
        known = world.from_main(lambda: _remembered(key, ways, load))
        if known is not None and _still_true(known, world, DRIFT):
            return known

    def measure() -> ClusterSpec:
        spare: list[float] = [0.0]
        if world.device.type == "cpu":
            spare = world.gather(spare_cores(world, seconds))  # type: ignore[assignment]
        rate = None
        if world.device.type == "cuda":  # all at a time, as devices share their host's memory
            rate = -most_of_all(-host_rate(world.device, seconds / 2), world)
        hosts = _hosts(told, world, min(spare), rate)
        with world.named_errors("measuring the links between workers"):
            levels = _levels(world, [one.host for one in told], seconds, ways) if world.size > 1 else {}
        return ClusterSpec(name=name or _called(world), hosts=hosts, **levels)

    def doubt(tries: Sequence[ClusterSpec]) -> float:
        return float(not _still_true(tries[-1], world, CONFIRMED))

    tries, doubtful = repeat_until_steady(measure, doubt, 0.0, MOST_TRIES)
    if doubtful:
        _log.warning(
            "the links between workers change by more than %g times from one moment to the next: what was measured is "
            "used now and not kept",
            CONFIRMED,
        )
    else:
        world.from_main(lambda: _remember(key, ways, load, tries[-1]))
    return tries[-1]


def _key(world: World) -> tuple[list[_Place], dict[str, object]]:
    """Where all workers are, and what is remembered of their links is kept by; a collective."""
    told: list[_Place] = world.gather(_own_place(world))  # type: ignore[assignment]
    return told, {
        "places": [[one.host, one.cores] for one in told],
        "shared": world.transport,
        "device": told[0].name,
        "torch": str(torch.__version__),
    }


def _called(world: World) -> str:
    return f"a job over {world.transport}" if world.size > 1 else "this machine"


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


def _hosts(told: Sequence[_Place], world: World, spare: float, rate: float | None = None) -> tuple[Hosts, ...]:
    """The hosts of the workers, those that are alike as one entry; with spare cores and host link of each worker."""
    kind: Literal["cpu", "cuda"] = "cuda" if world.device.type == "cuda" else "cpu"
    counts = Counter(one.host for one in told)
    found: list[Hosts] = []
    for host, devices in counts.items():
        first = next(one for one in told if one.host == host)
        # Memory differs a little between hosts that are alike, and from an hour to the next.
        memory = min(one.memory for one in told if one.name == first.name and one.memory > first.memory / ALIKE)
        memory = memory // (devices if kind == "cpu" else 1) >> 20 << 20
        # Hosts with most memory come first in `by_worker`, and workers have the ranks that they have.
        memory = min([memory, *(one.memory for one in found if one.memory is not None)])
        host_found = Hosts(
            devices=devices, kind=kind, name=first.name, memory=memory, communication_cores=spare, host_link=rate
        )
        found.append(host_found)
    return in_runs(found)


def _remembered(key: Mapping[str, object], ways: Collection[str], load: float) -> ClusterSpec | None:
    """What was measured before in these ways at least; nothing that was taken on a much busier machine."""
    for one in _keys(key, ways):
        kept: Any = load_measurement(KIND, one)
        try:
            found, before = ClusterSpec.model_validate(kept["cluster"]), float(kept["load"])
        except (ValueError, KeyError, TypeError):
            continue
        if before <= BUSY_LOAD or load >= before / 2:
            return found
    return None


def _remember(key: Mapping[str, object], ways: Collection[str], load: float, spec: ClusterSpec) -> None:
    """Keep what was measured; what was remembered of more ways is as old as the rest, and would be found first."""
    *more, own = _keys(key, ways)
    for one in more:
        forget_measurement(KIND, one)
    store_measurement(KIND, own, {"load": load, "cluster": spec.model_dump(mode="json")})


def _keys(key: Mapping[str, object], ways: Collection[str]) -> list[dict[str, object]]:
    """Under what ways may be kept, with most others first."""
    return [{**key, "ways": sorted(one)} for one in (WAYS, STRIPED_WAYS, PLAIN_WAYS) if set(ways) <= set(one)]


def _still_true(spec: ClusterSpec, world: World, factor: float) -> bool:
    """Whether sums still take about as long as they did, but for a factor; a collective."""
    level = spec.outer
    if level is None:
        return True
    speed, share = level.bandwidth * level.efficiency.all_reduce, 2 * (world.size - 1) / world.size
    if level is spec.between and world.transport == "sockets":  # each sends stripes to all others, over its host's link
        beside = Counter(host for host, _ in spec.by_worker).values()
        share = max(2 * count * (world.size - count) / world.size for count in beside)
    # Of a length at which the link counts and not its latency.
    size = MOST_BYTES if MOST_BYTES / speed < 0.02 else LEAST_BYTES
    message = torch.zeros(size // 4, device=world.device)
    took = most_of_all(statistics.median(laps_of(world.lane_groups[0].all_reduce, message, 3)), world)
    expected = share * size / speed
    expected += 2 * log_rounds(world.size) * level.latency_ms / 1e3
    return 1 / factor <= took / expected <= factor


def _levels(world: World, hosts: Sequence[str], seconds: float, ways: Collection[str]) -> dict[str, LinkLevel]:
    """The links inside of hosts and between them, as far as there are any."""
    places = list(dict.fromkeys(hosts))
    inside = [[rank for rank, host in enumerate(hosts) if host == place] for place in places]
    leaders = [ranks[0] for ranks in inside]
    found: dict[str, LinkLevel] = {}
    most = max(map(len, inside))
    if most > 1:
        # Of hosts with several workers the first one's links count; all are measured at a time.
        pair = next((ranks[0], ranks[1]) for ranks in inside if len(ranks) > 1)
        found["inside"] = measure_level(world, inside, pair, seconds, ways)
    if len(places) > 1:
        rest = [[rank] for rank in range(world.size) if rank not in leaders]
        found["between"] = measure_level(world, [leaders, *rest], (leaders[0], leaders[1]), seconds, ways)
    return found
