"""Why: the links of a run are those between its own workers, so they measure them, over the groups that will be used.

A worker that shares memory with its peers adds there and nowhere else; one that does not uses collectives of the
backend, which reach different parts of the link's speed. Both are told as a `ClusterSpec`, the planner's one kind of
cluster. The answer is kept for a day, for these hosts since they were started.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

import torch

from hybridpar.cluster import cluster_path, host_fingerprint
from hybridpar.cluster_file import ClusterSpec, Efficiency, Hosts, LinkLevel
from hybridpar.compress import Meeting, TorchGroup
from hybridpar.compress.rates import LinkCost, measure_link, meet_over
from hybridpar.partition.profile_cache import device_name
from hybridpar.pipeline.collective import BackendSum
from hybridpar.pipeline.world import World
from hybridpar.planner.store import forget, load, store
from hybridpar.process import available_cores, host_identity, usable_memory

#: Links are measured again when they were measured longer ago than this, in seconds: others use them too.
STALE = 24 * 3600.0

#: What is kept.
KIND = "link"

#: A large message takes about this long, so that slow links are measured in a moment and fast ones with large messages.
_LARGE_MS = 40.0
_SIZES = (512 << 10, 8 << 20)
_REPEATS = 5
#: A link that is too fast to be timed, in bytes per second.
_FASTEST = 1e12

_STRIPES = (Meeting.SHARD, torch.uint8)
_GATHERS = (Meeting.GATHER, torch.uint8)


@dataclass(frozen=True)
class WorkerFacts:
    """What a worker says of the place where it runs.

    Attributes:
        host: Equal for workers that share memory.
        machine: Equal for measurements of the same machine, devices and versions.
        kind: `cpu` or `cuda`.
        name: Of its device.
        memory: Bytes of its device, or of its host's main memory.
        cores: Numbers of the cores that it may use.
        threads: Intra-op threads.
    """

    host: str
    machine: str
    kind: Literal["cpu", "cuda"]
    name: str
    memory: int
    cores: tuple[int, ...]
    threads: int

    @classmethod
    def of(cls, device: torch.device) -> WorkerFacts:
        """Of this worker."""
        on_gpu = device.type == "cuda"
        memory = torch.cuda.get_device_properties(device).total_memory if on_gpu else usable_memory()
        return cls(
            host_identity(),
            cluster_path(host_fingerprint()).stem,
            "cuda" if on_gpu else "cpu",
            device_name(device),
            memory,
            tuple(available_cores()),
            torch.get_num_threads(),
        )


@dataclass(frozen=True)
class WorkerLinks:
    """The cluster that the workers of a run are.

    Attributes:
        spec: The cluster.
        facts: Of every worker, by rank.
        key: All that its links depend on.
        cached: Whether they had been measured before.
    """

    spec: ClusterSpec
    facts: tuple[WorkerFacts, ...]
    key: dict[str, object]
    cached: bool


def measure_cluster(world: World, *, cached: bool = True) -> WorkerLinks:
    """The cluster that the workers of a job form, with the links between them; a collective.

    Args:
        world: The workers.
        cached: Whether an earlier measurement of the same workers will do.

    Raises:
        SyncError: A worker died or did not answer in time.
    """
    facts = tuple(one for one in world.gather(WorkerFacts.of(world.device)) if isinstance(one, WorkerFacts))
    key: dict[str, object] = {"transport": world.transport, "workers": [_data(one) for one in facts]}
    known = world.from_main(lambda: load(KIND, key, STALE)) if cached else None
    if known is not None:
        level = LinkLevel.model_validate(known)
        return WorkerLinks(_spec(facts, level, world.transport), facts, key, True)
    found = _measure(world) if world.size > 1 else None
    if world.is_main and found is not None:
        store(KIND, key, found.model_dump(mode="json"))
    return WorkerLinks(_spec(facts, found, world.transport), facts, key, found is None)


def forget_links(key: dict[str, object]) -> bool:
    """Have links measured again the next time; whether any were kept."""
    return forget(KIND, key)


def _data(facts: WorkerFacts) -> dict[str, object]:
    data = asdict(facts)
    return {**data, "cores": len(data["cores"])}  # which ones they are is no property of a link


def _measure(world: World) -> LinkLevel:
    """The slowest link that any worker sees, as one level."""
    group = world.lane_sums[0]

    def total_ms(size: int) -> float:
        message = torch.zeros(size // 4, device=world.device)
        times = []
        for _ in range(_REPEATS + 1):
            started = time.perf_counter()
            group.all_reduce(message)
            if world.device.type == "cuda":
                torch.cuda.synchronize(world.device)
            times.append(1e3 * (time.perf_counter() - started))
        return max(float(str(one)) for one in world.gather(statistics.median(times[1:])))

    with world.named_errors("measuring the links between workers"):
        small = total_ms(4 << 10)
        first = max(total_ms(_SIZES[0]) - small, 1e-3)
        size = int(min(_SIZES[1], max(_SIZES[0], _SIZES[0] * _LARGE_MS / first)))
        large = max(total_ms(size) - small, 1e-3) if size > _SIZES[0] else first
        others: dict[tuple[Meeting, torch.dtype], LinkCost] = {}
        if isinstance(group, BackendSum):
            others = measure_link([_STRIPES, _GATHERS], meet_over(TorchGroup(group.group)), world.device)
    part = (world.size - 1) / world.size
    # What each way of meeting makes of the link, in bytes that a worker sends per second.
    adding = 1e3 * 2 * part * size / large
    stripes = _rate(2 * part, others.get(_STRIPES)) or adding
    gathers = _rate(world.size - 1, others.get(_GATHERS)) or adding
    best = min(_FASTEST, max(adding, stripes, gathers))
    rounds = 2 * math.ceil(math.log2(world.size))
    return LinkLevel(
        bandwidth=best,
        latency_ms=small / rounds,
        efficiency=Efficiency(
            all_reduce=_share(adding, best),
            all_to_all=_share(stripes, best),
            all_gather=_share(gathers, best),
            send=_share(adding, best),
        ),
    )


def _rate(factor: float, cost: LinkCost | None) -> float | None:
    return 1e3 * factor / cost.ms_per_byte if cost is not None and cost.ms_per_byte > 0 else None


def _share(rate: float, best: float) -> float:
    return min(1.0, max(1e-3, rate / best))


def _spec(facts: Sequence[WorkerFacts], level: LinkLevel | None, transport: str) -> ClusterSpec:
    """Hosts in the order of their workers, all of whose devices are as fast as the one that is profiled."""
    by_host = Counter(one.host for one in facts)
    users = Counter((one.host, core) for one in facts for core in one.cores)
    hosts: dict[Hosts, int] = {}  # hosts that are alike, and how many they are
    for host, devices in by_host.items():
        own = [one for one in facts if one.host == host]
        on_cpu = own[0].kind == "cpu"
        cores = min(sum(1 / users[host, core] for core in one.cores) - one.threads for one in own)
        found = Hosts(
            devices=devices,
            kind=own[0].kind,
            name=own[0].name,
            memory=min(one.memory for one in own) // (devices if on_cpu else 1),
            communication_cores=max(0.0, cores) if on_cpu else 0.0,
            core_bandwidth=level.bandwidth if level is not None and on_cpu else None,
        )
        hosts[found] = hosts.get(found, 0) + 1
    several = len(by_host) > 1
    return ClusterSpec(
        name=f"the workers of this run, over {transport}" if len(facts) > 1 else "one worker",
        hosts=tuple(host.model_copy(update={"count": count}) for host, count in hosts.items()),
        inside=level if max(by_host.values()) > 1 else None,
        between=level if several else None,
    )
