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
    efficiency = { all_reduce = 0.9, send = 0.95 }

What was measured, and what is remembered of it, is a `ClusterSpec` too: nothing else says what machines are like.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from hybridpar.errors import UsageError, shortened
from hybridpar.formats.file_reader import first_problem, read_toml

#: Devices of the largest cluster.
MOST_WORKERS = 1 << 17

#: Bytes of a device's memory; where a text says it, also that a link moves per second.
MOST_BYTES = 1e18

#: What is compared of hosts.
_COMPARED = ("devices", "kind", "name", "memory")

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


class Efficiency(_Part):
    """What part of a link's bandwidth each way of using it reaches: collectives, and messages to another stage."""

    all_reduce: _Share = 1.0
    send: _Share = 1.0


class LinkLevel(_Part):
    """The links of one level: all alike, full duplex."""

    bandwidth: _Rate = Field(description="bytes per second in each direction")
    latency_ms: float = Field(default=0.0, ge=0, allow_inf_nan=False, description="of an empty message, one way")
    efficiency: Efficiency = Efficiency()


class Hosts(_Part):
    """Hosts that are alike, and the devices of each."""

    count: int = Field(default=1, ge=1)
    devices: int = Field(default=1, ge=1, description="of each host; one worker drives each")
    kind: Literal["cpu", "cuda"] = "cpu"
    name: str = ""
    memory: _Bytes | None = Field(default=None, description="bytes of each device; without it there is no limit")
    throughput: float = Field(default=1.0, gt=0, allow_inf_nan=False, description="over the device of the profile")
    memory_bandwidth: _Rate | None = Field(default=None, description="for the optimizer, where it was not timed")
    host_link: _Rate | None = Field(
        default=None, description="between a device and its host's memory, each way; without it nothing waits there"
    )


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
        """For every worker, in the order of ranks, the number of its host and what that is."""
        each = (host for host in self.hosts for _ in range(host.count))
        return tuple((number, host) for number, host in enumerate(each) for _ in range(host.devices))

    @property
    def key(self) -> str:
        """Equal for equal descriptions, whatever their names."""
        described = self.model_dump(mode="json", exclude={"name"})
        return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:16]

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
        for host, *others in used.values():
            devices = 1 + len(others)
            memory = host.memory
            if memory is not None and host.kind == "cpu":
                memory = memory * host.devices // devices
            hosts.append(host.model_copy(update={"count": 1, "devices": devices, "memory": memory}))
        return self.model_copy(update={"hosts": tuple(hosts)})

    def at_speeds(self, speeds: Sequence[float]) -> ClusterSpec:
        """The same hosts, as fast as the slowest of their workers, whose speeds are in the order of ranks."""
        hosts = []
        for _, workers in groupby(zip(self.by_worker, speeds, strict=True), key=lambda worker: worker[0][0]):
            (_, host), throughput = min(workers, key=lambda worker: worker[1])
            hosts.append(host.model_copy(update={"count": 1, "throughput": throughput}))
        return self.model_copy(update={"hosts": in_runs(hosts)})

    def difference(self, other: ClusterSpec, tolerance: float) -> str:
        """The first thing in which another cluster differs: `hosts.0.devices is 4 there and 2 here`; else nothing.

        One of them may be described and the other measured. So hosts are compared one by one, whatever entries they are
        in, and what one of them does not say does not count. Nor do throughputs, which a measurement does not know.
        """
        theirs, ours = self._each_host(), other._each_host()
        if len(theirs) != len(ours):
            return f"the number of hosts is {len(theirs)} there and {len(ours)} here"
        pairs = [
            (f"hosts.{index}.{name}", getattr(host, name), getattr(counterpart, name))
            for index, (host, counterpart) in enumerate(zip(theirs, ours, strict=True))
            for name in _COMPARED
        ]
        if len(theirs) > 1:
            there, here = (None if spec.between is None else spec.between.bandwidth for spec in (self, other))
            if there is None or here is None:
                return "" if there is here else f"between.bandwidth is {there} there and {here} here"
            pairs.append(("between.bandwidth", there, here))
        for name, there, here in pairs:
            if there == here or {None, ""} & {there, here}:
                continue
            exactly = name.endswith((".devices", ".kind", ".name"))
            if exactly or max(there, here) > tolerance * min(there, here):
                return f"{name} is {there} there and {here} here"
        return ""

    def _each_host(self) -> list[Hosts]:
        """Every host by itself, in an order that does not depend on the file's."""
        hosts = [host for host in self.hosts for _ in range(host.count)]
        return sorted(hosts, key=lambda host: (-host.devices, host.kind, -(host.memory or 0), host.name))


def read_cluster_file(path: Path) -> ClusterSpec:
    """Read a description."""
    fix = "Name a file in TOML; docs/planner.md has an example."
    data = read_toml(path, "the cluster", UsageError, fix, why="A cluster is described in TOML.")
    return parse_cluster(data, shortened(path))


def parse_cluster(data: object, source: str = "the cluster") -> ClusterSpec:
    """Check and type a description that was read from somewhere; the fastest hosts are used first, then most memory.

    Args:
        data: What a parser of TOML or JSON returned.
        source: What it is called in messages.

    Returns:
        The nodes, their devices and the links between them.

    Raises:
        UsageError: As for `read_cluster_file`.
    """
    try:
        spec = ClusterSpec.model_validate(data)
    except ValidationError as error:
        where, problem = first_problem(error)
        raise UsageError(
            f"{source}: {where or 'it'}: {problem}",
            "A cluster is hosts with devices, and the links inside and between them.",
            "Correct this value; docs/planner.md has an example.",
        ) from error
    order = sorted(spec.hosts, key=lambda host: (-host.throughput, -math.inf if host.memory is None else -host.memory))
    return spec.model_copy(update={"hosts": tuple(order)})
