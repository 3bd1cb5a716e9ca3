"""What the actions of a candidate take on a cluster, and what its replicas exchange.

What many candidates share (the figures of a cut, the links of a grid, the prices of buckets) is computed once.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache, partial

from hybridpar.compress import Collective
from hybridpar.planner.cuts import StageFigures
from hybridpar.planner.network import Network, bucket_cost, stage_buckets
from hybridpar.planner.space import LEAST_MS, Candidate, Space
from hybridpar.schedule.costs import BucketCost, Costs
from hybridpar.schedule.layout import Layout
from hybridpar.schedule.program import lower
from hybridpar.schedule.schedules import ScheduleRequest, make, order_of_replica
from hybridpar.schedule.simulate import simulate
from hybridpar.sync.shards import largest_share


class CandidateCosts:
    """Costs of the candidates of a space."""

    def __init__(self, space: Space) -> None:
        self.space, self.inputs = space, space.inputs
        self.network = cache(partial(Network, space.inputs.cluster))
        self.kinds = cache(self._make_kinds)
        self.shares = cache(self._make_shares)
        self._buckets = cache(self._make_buckets)

    def samples(self, layout: Layout, count: int, replica: int | None = None) -> int:
        """Samples of the largest of so many micro-batches; default: of the replica that has most."""
        if (shares := self.shares(layout, count)) is None:
            return -(-self.inputs.batch // (layout.replicas * count))
        share = (max(shares) if replica is None else shares[replica]) / sum(shares)
        return max(1, math.ceil(self.inputs.batch * share / count - 1e-3))

    def throughput(self, layout: Layout, replica: int) -> tuple[float, ...]:
        """Of the device of every stage, over that of the profile."""
        return tuple(self.inputs.by_worker[rank][1].throughput for rank, _ in layout.rows[replica])

    def layout(self, candidate: Candidate, replica: int = 0) -> Layout:
        """Where the stages of a candidate run, and what flows between them."""
        return candidate.layout.replica(replica, self.figures(candidate, replica).edges)

    def figures(self, candidate: Candidate, replica: int = 0) -> StageFigures:
        """What its stages cost on the device of the profile, for a micro-batch of a replica."""
        samples = self.samples(candidate.layout, candidate.micro_batches, replica)
        return self.space.library.figures(candidate.cut, samples)

    def costs(self, candidate: Candidate, *, replica: int = 0) -> Costs:
        """What its actions take on this cluster."""
        costs = self._costs_of_passes(candidate, self.figures(candidate, replica), replica)
        if candidate.codec.outer is not None:  # between two exchanges workers agree on nothing
            return replace(costs, control_ms=0.0)
        return replace(costs, buckets=self.buckets(candidate, replica))

    def _costs_of_passes(self, candidate: Candidate, figures: StageFigures, replica: int) -> Costs:
        """What its actions take, but for the exchange of gradients."""
        layout, network = candidate.layout, self.network(candidate.layout)
        throughput = self.throughput(layout, replica)
        link, links = network.transfers(layout.replica(replica, figures.edges), replica)
        moving = (0.0,) * layout.stages
        if candidate.cut.offload:  # beside each pass the host's link brings out what one pass saved, or back
            hosts = self.inputs.by_worker[: layout.workers]
            speed = min(host.host_link or math.inf for _, host in hosts)
            moving = tuple(1e3 * size / speed for size in figures.again_bytes)
        least_backward = (max(LEAST_MS, time) for time in figures.backward_ms)
        forward, backward = (
            tuple(max(time / speed, moved) for time, speed, moved in zip(times, throughput, moving, strict=True))
            for times in (figures.forward_ms, least_backward)
        )
        return Costs(
            forward_ms=forward,
            backward_ms=backward,
            step_ms=self._update_ms(candidate, figures, throughput),
            saved_bytes=figures.saved_bytes,
            link=link,
            links=links,
            replicas=layout.replicas,
            sync_own_link=network.grouping.hosts == 1,
            sync_lanes=self.inputs.sync_lanes,
            control_ms=network.control_ms() if layout.workers > 1 else 0.0,
        )

    def _update_ms(
        self, candidate: Candidate, figures: StageFigures, throughput: tuple[float, ...]
    ) -> tuple[float, ...]:
        """For every stage the optimizer, and where replicas divide it that they hand round what they stepped."""
        inputs, sizes = self.inputs, figures.parameter_bytes
        if inputs.profile.update_ms is not None:
            ms_per_byte = inputs.profile.update_ms / max(1, sum(sizes))
            times = [size * ms_per_byte / speed for size, speed in zip(sizes, throughput, strict=True)]
        else:
            hosts = inputs.by_worker[: candidate.layout.workers]
            bandwidth = min(host.memory_bandwidth or math.inf for _, host in hosts)
            # Parameter, gradient and every tensor of the state are read; parameter and state are written.
            passes = 3 + 2 * inputs.optimizer_copies
            times = [1e3 * passes * size / bandwidth for size in sizes]
        if not candidate.sharded:
            return tuple(times)
        hand = self.network(candidate.layout).exchange(Collective.GATHER)
        return tuple(
            time * part / max(1, size) + hand.latency_ms + hand.ms_per_byte * part
            for time, part, size in zip(times, self.stepped_bytes(candidate), sizes, strict=True)
        )

    def stepped_bytes(self, candidate: Candidate) -> tuple[int, ...]:
        """For every stage the most bytes of parameters that a replica steps."""
        figures = self.figures(candidate)
        if not candidate.sharded:
            return figures.parameter_bytes
        sizes = [[parameter.count for parameter in stage] for stage in figures.parameters]
        return tuple(4 * largest_share(counts, candidate.layout.replicas) for counts in sizes)

    def outer(self, candidate: Candidate) -> tuple[float, float, float]:
        """What the exchange of an outer loop adds to each step, as it takes place every so many steps only.

        Milliseconds of the codec, milliseconds of the link, and bytes that a worker sends.
        """
        every, network = candidate.codec.every, self.network(candidate.layout)
        if every == 1:
            return 0.0, 0.0, 0.0
        buckets = self.buckets(candidate)[0]
        codec_ms = sum(bucket.encode_ms + bucket.decode_ms for bucket in buckets)
        link_ms = sum(bucket.total_ms for bucket in buckets) - codec_ms + network.control_ms()
        size: float = sum(bucket.bytes for bucket in buckets)
        if self.inputs.profile.batch_norm:  # mean and variance of each channel, float64: a norm has two parameters
            statistics = 8 * sum(layer.count for layer in self.inputs.profile.parameters if len(layer.shape) == 1)
            link_ms += statistics * network.exchange().ms_per_byte
            size += statistics
        replicas = candidate.layout.replicas
        return codec_ms / every, link_ms / every, 2 * (replicas - 1) / replicas * size / every

    def _make_kinds(self, layout: Layout) -> tuple[int, ...]:
        """For every replica the first one that takes as long with as many samples."""
        if not layout.is_equal:
            return tuple(range(layout.replicas))
        speeds = [self.throughput(layout, replica) for replica in range(layout.replicas)]
        return tuple(map(speeds.index, speeds))

    def _make_shares(self, layout: Layout, count: int) -> tuple[float, ...] | None:
        """Samples of each replica, by what a step is predicted to take it; None where all have as many.

        With BatchNorm parts stay equal: others would be normalised by other samples.
        """
        kinds, batch = self.kinds(layout), self.inputs.batch
        if self.inputs.profile.batch_norm or len(set(kinds)) == 1:
            return None
        cut = self.space.cut(layout)
        assert cut is not None
        candidate = Candidate(layout, count, cut, "1f1b")
        parts = [batch / layout.replicas] * layout.replicas
        for _ in range(8):
            times = {replica: self._time_of_part(candidate, replica, parts[replica]) for replica in set(kinds)}
            rates = [parts[kind] / max(LEAST_MS, times[kind]) for kind in kinds]
            parts = [max(1.0, batch * rate / sum(rates)) for rate in rates]
        return tuple(round(part, 2) for part in parts)

    def _time_of_part(self, candidate: Candidate, replica: int, samples: float) -> float:
        """Milliseconds of a step of one replica that has so many samples, without its exchange."""
        count = candidate.micro_batches
        figures = self.space.library.figures(candidate.cut, samples / count)
        costs = self._costs_of_passes(candidate, figures, replica)
        layout = candidate.layout.replica(replica, figures.edges)
        request = ScheduleRequest(layout, count, Costs(costs.forward_ms, costs.backward_ms))
        schedule = make(order_of_replica(candidate.schedule, layout), request)
        return simulate(lower(schedule, layout), costs).step_ms

    def buckets(self, candidate: Candidate, replica: int = 0) -> tuple[tuple[BucketCost, ...], ...]:
        """What the exchange of the gradients of every stage takes."""
        return self._buckets(replace(candidate, schedule="", sharded=False), replica)

    def _make_buckets(self, candidate: Candidate, replica: int) -> tuple[tuple[BucketCost, ...], ...]:
        layout = candidate.layout
        if layout.replicas == 1:
            return ((),) * layout.stages
        figures, throughput = self.figures(candidate, replica), self.throughput(layout, replica)
        stages = []
        for parameters, speed in zip(figures.parameters, throughput, strict=True):
            row, reached = [], 0.0
            for bucket in stage_buckets(parameters, self.inputs.bucket_bytes):
                reached = max(reached, *(figures.ready[parameter.name] for parameter in bucket))  # they leave in order
                how = {"throughput": speed, "ready": reached}
                row.append(bucket_cost(bucket, candidate.codec.codecs, self.network(layout), self.inputs.rates, **how))
            stages.append(tuple(row))
        return tuple(stages)
