"""Reads the description of a cluster from a TOML file, so that plans can be made for machines that are not at hand.

A description is hosts with devices, and links on two levels: between the devices of a host, and between hosts. It is a
TOML file:

    name = "two boxes"

    [[hosts]]
    count = 2                   # so many alike
    devices = 4
    kind = "cuda"
    memory = "24GB"             # of each device
    throughput = 8.0            # how many times as fast as the device that the profile is of

    [inside]                    # between the devices of a host
    bandwidth = "12GB/s"
    latency_ms = 0.01

    [between]                   # between hosts; its bandwidth is that of a host, in each direction
    bandwidth = "1Gbit/s"
    latency_ms = 0.1
    efficiency = { all_reduce = 0.9, all_to_all = 0.8, all_gather = 0.9, send = 0.95 }

What was measured can be read as a description too, so that the planner knows one kind of cluster only.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from hybridpar.errors import UsageError, nearest, shortened
from hybridpar.formats.file_reader import first_problem, read_toml
from hybridpar.machine.cluster import Cluster

#: Bytes per second that a CPU core moves through gloo where nothing was measured.
CORE_BANDWIDTH = 2e9

#: Devices of the largest cluster.
MOST_WORKERS = 1 << 17

#: Bytes of a device's memory; where a text says it, also that a link moves per second.
MOST_BYTES = 1e18

#: What is compared of hosts.
_COMPARED = ("devices", "kind", "name", "memory", "memory_bandwidth", "core_bandwidth")

_PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_AMOUNT = re.compile(r"(\d+(?:\.\d+)?(?:e[+-]?\d+)?)\s*([kmgt]?)(b|bit)?(/s)?")


def _amount(rate: bool) -> BeforeValidator:
    """Reads sizes (`24GB`) or rates (`12GB/s`, `1Gbit/s`); numbers are bytes, or bytes per second."""

    def read(value: object) -> object:
        if not isinstance(value, str):
            return value
        match = _AMOUNT.fullmatch(value.strip().lower())
        if match is None or (match[4] is not None) != rate or (match[3] == "bit" and not rate):
            example = "12GB/s or 1Gbit/s" if rate else "24GB"
            raise ValueError(f"not a {'rate' if rate else 'size'}; write {example}")
        amount = float(match[1]) * _PREFIXES[match[2]] / (8 if match[3] == "bit" else 1)
        if amount > MOST_BYTES:
            raise ValueError(f"more than {MOST_BYTES:g} bytes")
        return amount if rate else round(amount)  # 4.1e9 as a product is no whole number

    return BeforeValidator(read)


_Rate = Annotated[float, _amount(rate=True), Field(gt=0, allow_inf_nan=False)]
_Bytes = Annotated[int, _amount(rate=False), Field(gt=0, le=MOST_BYTES)]
_Share = Annotated[float, Field(gt=0, le=1)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


#: What a way of using a link is like, where nobody said what it reaches itself.
_LIKE = {"half_sum": "all_reduce", "integer_sum": "all_reduce"}


class _Ways(_Part):
    def of(self, way: str) -> float:
        """The number of a way, or, where nobody said, of the way that it is like."""
        found: float | None = getattr(self, way)
        return self.of(_LIKE[way]) if found is None else found


class Efficiency(_Ways):
    """What part of a link's bandwidth each way of using it reaches."""

    all_reduce: _Share = 1.0
    all_to_all: _Share = 1.0
    all_gather: _Share = 1.0
    send: _Share = 1.0
    half_sum: _Share | None = Field(default=None, description="of 16-bit numbers; without it, as `all_reduce`")
    integer_sum: _Share | None = Field(default=None, description="of integers; without it, as `all_reduce`")


_Use = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class CoreUse(_Ways):
    """How many cores of a worker each way of using a link keeps busy while bytes move; measured beside computing."""

    all_reduce: _Use = 0.0
    all_to_all: _Use = 0.0
    all_gather: _Use = 0.0
    send: _Use = 0.0
    receive: _Use = 0.0
    half_sum: _Use | None = None
    integer_sum: _Use | None = None


class LinkLevel(_Part):
    """The links of one level: all alike, full duplex."""

    bandwidth: _Rate = Field(description="bytes per second in each direction")
    latency_ms: float = Field(default=0.0, ge=0, allow_inf_nan=False, description="of an empty message, one way")
    efficiency: Efficiency = Efficiency()
    cores: CoreUse | None = Field(default=None, description="kept busy by bytes; without it, as `core_bandwidth` says")

    def faster(self, factor: float) -> LinkLevel:
        """The same link with so many times the bandwidth; a byte takes a core as long as before."""
        update: dict[str, object] = {"bandwidth": self.bandwidth * factor}
        if self.cores is not None:
            uses = self.cores.model_dump(exclude_none=True)
            update["cores"] = CoreUse(**{name: factor * use for name, use in uses.items()})
        return self.model_copy(update=update)


class Hosts(_Part):
    """Hosts that are alike, and the devices of each."""

    count: int = Field(default=1, ge=1)
    devices: int = Field(default=1, ge=1, description="of each host; one worker drives each")
    kind: Literal["cpu", "cuda"] = "cpu"
    name: str = ""
    memory: _Bytes | None = Field(default=None, description="bytes of each device; without it there is no limit")
    throughput: float = Field(default=1.0, gt=0, allow_inf_nan=False, description="over the device of the profile")
    memory_bandwidth: _Rate | None = Field(default=None, description="for the optimizer, where it was not timed")
    communication_cores: float = Field(
        default=0.0, ge=0, allow_inf_nan=False, description="beside those that compute, of each worker"
    )
    core_bandwidth: _Rate | None = Field(default=None, description="bytes per second that a core moves")
    host_link: _Rate | None = Field(
        default=None, description="between a device and its host's memory, each way; without it nothing waits there"
    )

    @property
    def bytes_per_core_second(self) -> float | None:
        """What moving bytes costs in time of a core; None where a device does it without."""
        if self.core_bandwidth is not None:
            return self.core_bandwidth
        return CORE_BANDWIDTH if self.kind == "cpu" else None


def in_runs(hosts: Iterable[Hosts]) -> tuple[Hosts, ...]:
    """Hosts one by one as entries: those beside each other that are alike are one entry."""
    return tuple(host.model_copy(update={"count": len(list(alike))}) for host, alike in groupby(hosts))


class ClusterSpec(_Part):
    """A cluster, described or measured."""

    name: str = "cluster"
    hosts: tuple[Hosts, ...] = Field(min_length=1)
    inside: LinkLevel | None = Field(default=None, description="between devices of a host")
    between: LinkLevel | None = Field(default=None, description="between hosts")

    @model_validator(mode="after")
    def _links_are_there(self) -> ClusterSpec:
        if self.inside is None and any(host.devices > 1 for host in self.hosts):
            raise ValueError("a host has several devices, but there is no [inside] that says what lies between them")
        if self.between is None and sum(host.count for host in self.hosts) > 1:
            raise ValueError("there are several hosts, but no [between] that says what lies between them")
        if self.workers > MOST_WORKERS:
            raise ValueError(f"{self.workers:,} devices; at most {MOST_WORKERS:,} can be planned for")
        kinds = sorted({host.kind for host in self.hosts})
        if len(kinds) > 1:
            raise ValueError(f"devices of several kinds ({', '.join(kinds)}); a model is planned for one kind")
        return self

    @property
    def workers(self) -> int:
        """One per device."""
        return sum(host.count * host.devices for host in self.hosts)

    @property
    def by_worker(self) -> tuple[tuple[int, Hosts], ...]:
        """For every worker the number of its host and what that is: the fastest first, then most memory."""
        ordered = sorted(
            self.hosts, key=lambda one: (-one.throughput, -math.inf if one.memory is None else -one.memory)
        )
        number, placed = 0, []
        for host in ordered:
            for _ in range(host.count):
                placed += [(number, host)] * host.devices
                number += 1
        return tuple(placed)

    @property
    def key(self) -> str:
        """Equal for equal descriptions, whatever their names."""
        told = self.model_dump(mode="json", exclude={"name"})
        return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def outer(self) -> LinkLevel | None:
        """What joins the workers that are furthest from each other: hosts where there are several, else devices."""
        return self.between if sum(host.count for host in self.hosts) > 1 else self.inside

    def first(self, workers: int) -> ClusterSpec:
        """The part of the cluster that a plan for fewer workers uses; on CPUs they get what the others leave."""
        used: dict[int, list[Hosts]] = {}
        for number, host in self.by_worker[:workers]:
            used.setdefault(number, []).append(host)
        hosts = []
        for own in used.values():
            host, devices = own[0], len(own)
            memory = host.memory
            if memory is not None and host.kind == "cpu":
                memory = memory * host.devices // devices
            hosts.append(host.model_copy(update={"count": 1, "devices": devices, "memory": memory}))
        return self.model_copy(update={"hosts": tuple(hosts)})

    @property
    def is_unequal(self) -> bool:
        """Whether hosts differ in speed."""
        return len({host.throughput for host in self.hosts}) > 1

    def at_speeds(self, places: Sequence[str], speeds: Sequence[float]) -> ClusterSpec | None:
        """The same hosts, in the workers' order, as fast as these were; None where ranks are in another order."""
        devices, throughput = Counter(places), dict(zip(places, speeds, strict=True))
        each = [host.model_copy(update={"count": 1}) for host in self.hosts for _ in range(host.count)]
        found = [
            host.model_copy(update={"devices": devices[one], "throughput": throughput[one]})
            for host, one in zip(each, devices, strict=True)
        ]
        spec = self.model_copy(update={"hosts": in_runs(found)})
        order = [list(devices).index(one) for one in places]
        placed = [(number, host.throughput) for number, host in spec.by_worker]
        return spec if placed == list(zip(order, speeds, strict=True)) else None

    def without(self, host: Hosts) -> ClusterSpec | None:
        """The cluster without hosts of one kind; None where there are no others."""
        hosts = tuple(one for one in self.hosts if one != host)
        return self.model_copy(update={"hosts": hosts}) if hosts else None

    def faster_links(self, factor: float) -> ClusterSpec:
        """The same cluster with so many times the bandwidth on the level that leaves a worker the least."""
        most = max(host.devices for host in self.hosts)
        several = sum(host.count for host in self.hosts) > 1
        used = {"inside": self.inside if most > 1 else None, "between": self.between if several else None}
        speeds = {
            name: link.bandwidth * link.efficiency.all_reduce / (most if name == "between" else 1)
            for name, link in used.items()
            if link is not None
        }
        if not speeds:
            return self
        slowest = min(speeds, key=lambda name: speeds[name])
        link: LinkLevel = getattr(self, slowest)
        return self.model_copy(update={slowest: link.faster(factor)})

    def with_another(self) -> ClusterSpec | None:
        """The same cluster with a device more, or where there are several hosts with one more of these.

        None where nothing says what would lie between them.
        """
        last = self.hosts[-1]
        if self.between is not None:
            more = last.model_copy(update={"count": last.count + 1})
        elif self.inside is not None:
            more = last.model_copy(update={"devices": last.devices + 1})
        else:
            return None
        return self.model_copy(update={"hosts": (*self.hosts[:-1], more)})

    def difference(self, other: ClusterSpec, tolerance: float) -> str:
        """The first thing in which another cluster differs: `hosts.0.devices is 4 there and 2 here`; else nothing.

        One of them may be described and the other measured. So hosts are compared one by one, whatever entries they are
        in, and what one of them does not say does not count. Nor do throughputs, which a measurement does not know.
        """
        there, here = self._each_host(), other._each_host()
        if len(there) != len(here):
            return f"the number of hosts is {len(there)} there and {len(here)} here"
        values: dict[str, tuple[Any, Any]] = {
            f"hosts.{at}.{name}": (getattr(one, name), getattr(two, name))
            for at, (one, two) in enumerate(zip(there, here, strict=True))
            for name in _COMPARED
        }
        values = {name: pair for name, pair in values.items() if not {None, ""} & set(pair)}
        values["between.bandwidth"] = (
            self.between.bandwidth if self.between is not None and len(there) > 1 else None,
            other.between.bandwidth if other.between is not None and len(here) > 1 else None,
        )
        for name, (one, two) in values.items():
            exactly = None in (one, two) or name.endswith((".devices", ".kind", ".name"))
            if one != two and (exactly or max(one, two) > tolerance * min(one, two)):
                return f"{name} is {one} there and {two} here"
        return ""

    def _each_host(self) -> list[Hosts]:
        """Every host by itself, in an order that does not depend on the file's."""
        hosts = [host for host in self.hosts for _ in range(host.count)]
        return sorted(hosts, key=lambda one: (-one.devices, one.kind, -(one.memory or 0), one.name))


def read_cluster_file(path: Path) -> ClusterSpec:
    """Read a description."""
    fix = "Name a file in TOML; docs/planner.md has an example."
    data = read_toml(path, "the cluster", UsageError, fix, why="A cluster is described in TOML.")
    return parse_cluster(data, shortened(path))


def parse_cluster(data: object, source: str = "the cluster") -> ClusterSpec:
    """Check and type a description that was read from somewhere.

    Args:
        data: What a parser of TOML or JSON returned.
        source: What it is called in messages.

    Returns:
        The nodes, their devices and the links between them.

    Raises:
        UsageError: As for `read_cluster_file`.
    """
    try:
        return ClusterSpec.model_validate(data)
    except ValidationError as error:
        where, problem = first_problem(error)
        first = error.errors(include_url=False, include_context=False)[0] if where else None
        if first is not None and first["type"] == "extra_forbidden":
            raise UsageError(
                f"{source}: unknown key {where}", fix=nearest(str(first["loc"][-1]), _keys(first["loc"]))
            ) from error
        what = problem if first is None else f"{where} is {shortened(repr(first['input']), 40)}: {problem}"
        raise UsageError(
            f"{source}: {what}",
            "A cluster is hosts with devices, and the links inside and between them.",
            "Correct this value; docs/planner.md has an example.",
        ) from error


def spec_of_measured(cluster: Cluster, workers: int, backend: str) -> ClusterSpec:
    """What was measured on this machine, as a description."""
    kind: Literal["cpu", "cuda"] = "cuda" if backend == "nccl" else "cpu"
    devices = cluster.of_kind(kind)
    link = cluster.link(backend)
    if workers > 1 and link is None:
        found = "; ".join(cluster.problems) or "this machine has too few devices or cores for two workers"
        raise UsageError(
            f"the link between {workers} workers over {backend} was not measured: {found}",
            "What gradients and activations cost depends on it.",
            "Mend what `hybridpar doctor` shows, or describe the cluster with --cluster FILE.",
        )
    share = workers if kind == "cpu" else 1
    hosts = Hosts(
        devices=workers,
        kind=kind,
        name=devices[0].name,
        memory=min(device.memory_bytes for device in devices) // share,
        memory_bandwidth=min(device.bytes_per_second for device in devices) / share,
        core_bandwidth=link.bytes_per_second if link is not None and kind == "cpu" else None,
        host_link=min((one.host_bytes_per_second for one in devices if one.host_bytes_per_second), default=None),
    )
    # The latency that was measured is of an all-reduce: there and back again for two, as a tree for more.
    level = None
    if link is not None:
        rounds = 2 * math.ceil(math.log2(link.world_size))
        level = LinkLevel(bandwidth=link.bytes_per_second, latency_ms=link.latency_ms / rounds)
    return ClusterSpec(name="this machine", hosts=(hosts,), inside=level)


def _keys(place: tuple[int | str, ...]) -> list[str]:
    """The keys that are known where an unknown one was found."""
    tables: dict[str, type[BaseModel]] = {"hosts": Hosts, "inside": LinkLevel, "between": LinkLevel}
    for name, part in (("efficiency", Efficiency), ("cores", CoreUse)):
        if name in place[:-1]:
            return list(part.model_fields)
    return list(tables.get(str(place[0]), ClusterSpec).model_fields if len(place) > 1 else ClusterSpec.model_fields)
