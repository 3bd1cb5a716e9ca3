"""How long the exchange of gradients takes on a cluster, from the bandwidth and latency of its links.

Workers are numbered host by host.
Links have two levels, so an all-reduce goes in three steps: within hosts, between them, and within them again; a codec
works between hosts alone. All formulas are those of algorithms that move the fewest bytes:

- all-reduce of n bytes by K workers: each sends 2(K-1)/K n (Patarasuk and Yuan 2009), in 2 log2(K) rounds (Rabenseifner
  2004; Thakur, Rabenseifner and Gropp 2005);
- all-to-all: (K-1)/K n in K - 1 messages; all-gather of n bytes each: (K-1) n in log2(K) rounds.

Nothing here is simulated per worker: hosts are alike, so one group of each kind stands for all.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from hybridpar.compress import Collective, parse_codec
from hybridpar.machine.cluster_file import ClusterSpec, LinkLevel
from hybridpar.planner.profile import Parameter
from hybridpar.planner.rates import CodecRate, lasting_rounds
from hybridpar.schedule.costs import BucketCost, Link
from hybridpar.schedule.layout import Layout
from hybridpar.sync.buckets import cut_buckets

_FREE = LinkLevel(bandwidth=1e300)


@dataclass(frozen=True)
class LinkCost:
    """What a collective costs.

    Attributes:
        latency_ms: Of an empty message.
        ms_per_byte: For each byte that a worker hands over.
    """

    latency_ms: float
    ms_per_byte: float


@dataclass(frozen=True)
class Grouping:
    """How the replicas of a stage lie on hosts.

    Attributes:
        workers: How many they are.
        hosts: Hosts that they are spread over.
        each: The most of them on one host.
        sharing: Groups that use the link of one host beside each other.
    """

    workers: int
    hosts: int
    each: int
    sharing: int

    @property
    def two_levels(self) -> bool:
        """Whether there are several hosts, and one of them has several of the workers."""
        return self.hosts > 1 and self.each > 1


@dataclass(frozen=True)
class Network:
    """The links of the workers of a layout.

    Attributes:
        spec: The cluster, of which the first workers are used.
        layout: Where stages run.
    """

    spec: ClusterSpec
    layout: Layout

    @cached_property
    def hosts(self) -> tuple[int, ...]:
        """For every worker its host."""
        return tuple(host for host, _ in self.spec.by_worker[: self.layout.workers])

    @property
    def _inside(self) -> LinkLevel:
        return self.spec.inside or _FREE

    @property
    def _between(self) -> LinkLevel:
        return self.spec.between or _FREE

    @cached_property
    def grouping(self) -> Grouping:
        """Of the replicas of the stage whose exchange takes longest; that of others is no worse."""
        counts = [Counter(self.hosts[rank] for rank in column) for column in self.layout.columns]
        users = Counter(host for count in counts if len(count) > 1 for host in count)
        if not self.layout.is_equal:
            # What a worker sends for several of its stages shares its link in the simulation.
            users = Counter({host: self.hosts.count(host) for host in self.hosts})
        return Grouping(
            self.layout.replicas,
            max(map(len, counts)),
            max(max(count.values()) for count in counts),
            max(users.values(), default=1),
        )

    def transfers(self, pipeline: Layout, replica: int) -> tuple[Link, dict[tuple[int, int], Link]]:
        """Connections between positions: the shared network of every worker, and pairs with a wire of their own."""
        inside, between = (self._sends(level, 1) for level in (self._inside, self._between))
        wires: dict[tuple[int, int], Link] = {}
        crossing: dict[int, set[int]] = {}
        alike = self.layout.ranks if self.layout.is_equal else [self.layout.ranks[replica]]
        for edge in filter(pipeline.crosses, pipeline.edges):
            ends = pipeline.home(edge.source), pipeline.home(edge.target)
            for first, second in (ends, ends[::-1]):
                pairs = [(ranks[first], ranks[second]) for ranks in alike]
                far = [rank for rank, other in pairs if self.hosts[rank] != self.hosts[other]]
                if not far:
                    wires[first, second] = inside
                for rank in far:
                    crossing.setdefault(self.hosts[rank], set()).add(rank)
        most = max((len(ranks) for ranks in crossing.values()), default=0)
        return (self._sends(self._between, most) if most else between, wires)

    def control_ms(self) -> float:
        """The small message by which all workers agree on a step."""
        workers = Counter(self.hosts)
        inside, between = log_rounds(max(workers.values())), log_rounds(len(workers))
        return 2 * (inside * self._inside.latency_ms + between * self._between.latency_ms)

    def exchange(self, collective: Collective = Collective.SUM) -> LinkCost:
        """What messages take until they have met, where all workers of a group send their own.

        Of groups on two levels that is right for sums alone; codecs then work between hosts.
        """
        inside, between = self.inside_hosts(collective), self.between_hosts(collective)
        return LinkCost(inside.latency_ms + between.latency_ms, inside.ms_per_byte + between.ms_per_byte)

    def between_hosts(self, collective: Collective = Collective.SUM) -> LinkCost:
        """What messages take between the leaders of hosts, which share the link of their host."""
        return _cost(collective, self._between, self.grouping.hosts, self.grouping.sharing)

    def inside_hosts(self, collective: Collective = Collective.SUM) -> LinkCost:
        """What messages take between the workers of a group that are on a host."""
        return _cost(collective, self._inside, self.grouping.each, 1)

    def _sends(self, level: LinkLevel, sharing: int) -> Link:
        speed = level.bandwidth * level.efficiency.send / max(1, sharing)
        return Link(level.latency_ms, speed)


def log_rounds(workers: int) -> int:
    """Rounds in which a tree reaches so many workers."""
    return math.ceil(math.log2(workers)) if workers > 1 else 0


def _cost(collective: Collective, level: LinkLevel, workers: int, sharing: int) -> LinkCost:
    """What a collective takes on a level whose link so many groups use beside each other."""
    speed = level.bandwidth * level.efficiency.all_reduce / (1e3 * sharing)  # bytes per millisecond
    part, rounds = (workers - 1) / workers, log_rounds(workers)
    if collective is Collective.SHARD:
        # Stripes go to their owners, and come back merged, of the same size.
        return LinkCost((workers - 1 + rounds) * level.latency_ms, 2 * part / speed)
    if collective is Collective.GATHER:
        return LinkCost(rounds * level.latency_ms, (workers - 1) / speed)
    return LinkCost(2 * rounds * level.latency_ms, 2 * part / speed)


def stage_buckets(parameters: Sequence[Parameter], limit: int) -> list[list[Parameter]]:
    """Parameters of a stage in the buckets that its first step cuts: from the last one to the first."""
    order = list(parameters)[::-1]
    return [
        [order[index] for index in bucket]
        for bucket in cut_buckets([4 * parameter.count for parameter in order], limit)
    ]


def bucket_cost(
    bucket: Sequence[Parameter],
    codecs: Mapping[str, str],
    network: Network,
    rates: Mapping[str, CodecRate],
    *,
    throughput: float = 1.0,
    ready: float = 1.0,
) -> BucketCost:
    """What a bucket takes between the replicas of a stage, whose devices are so many times as fast as the profile's.

    Parameters without a codec are sent as they are.
    Where there are hosts with several workers, codecs work between hosts: a sum in each host goes before, and one that
    hands the result out comes after. Leaders of hosts take turns.
    """
    group = network.grouping
    factor = 2 * (group.workers - 1) / group.workers
    peers, share = (group.hosts, group.each) if group.two_levels else (group.workers, 1)
    inside = network.inside_hosts() if group.two_levels else LinkCost(0.0, 0.0)
    plain = network.exchange()
    sent = wire = encode = decode = 0.0
    rounds = set[tuple[object, float]]()
    for parameter in bucket:
        size, text = 4 * parameter.count, codecs.get(parameter.name)
        if text is None or not parse_codec(text).fits(parameter.shape):
            rounds.add(("plain", plain.latency_ms))
            wire += size * plain.ms_per_byte
            sent += factor * size
            continue
        writing, reading = rates[text].times(parameter.count)
        encode += writing / (share * throughput)
        decode += reading / (share * throughput)
        for index, message in enumerate(lasting_rounds(parse_codec(text), parameter.shape, peers)):
            price = network.between_hosts if group.two_levels else network.exchange
            cost = price(message.collective)
            wire += message.bytes * cost.ms_per_byte
            sent += message.sent(peers) / share
            rounds.add(((index, message.collective, message.dtype), cost.latency_ms))
        if group.two_levels:
            rounds.add(("inside", 2 * inside.latency_ms))
            wire += 2 * size * inside.ms_per_byte
            sent += 2 * size * 2 * (group.each - 1) / group.each
    return BucketCost(round(sent / factor), ready, encode, decode, wire, sum(latency for _, latency in rounds))
