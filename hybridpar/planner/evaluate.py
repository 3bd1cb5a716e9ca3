"""Predicts the step time and the memory of candidate plans, by simulating the list of actions that would be run.

A candidate is turned into costs, a program and a prediction. What many candidates share (the figures of a cut, the
links of a grid, the prices of buckets, a schedule) is computed once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

from hybridpar.compress import Collective
from hybridpar.planner.codecs import BucketPrices, CodecChoice, stage_buckets
from hybridpar.planner.cuts import Cut, StageFigures
from hybridpar.planner.memory import device_bytes, device_limits, gradient_bytes
from hybridpar.planner.network import Network
from hybridpar.planner.space import Candidate, Space
from hybridpar.planner.speeds import LEAST_MS, shares_by_speed, stage_speeds, stage_throughputs
from hybridpar.schedule.actions import Schedule
from hybridpar.schedule.costs import BucketCost, Costs
from hybridpar.schedule.layout import Layout
from hybridpar.schedule.program import lower
from hybridpar.schedule.schedules import ScheduleRequest, make, order_of_replica
from hybridpar.schedule.shares import WorkCost, best_division
from hybridpar.schedule.simulate import Simulation, simulate
from hybridpar.sync.shards import largest_share


@dataclass(frozen=True)
class Parts:
    """What a step is predicted to take, in milliseconds, and where it goes; the parts add up to the step.

    Attributes:
        step: The whole step.
        compute: Of the lane that computes longest.
        bubble: What that lane waits until the last lane has computed.
        sync: By which exchanging gradients outlasts computing, were codecs free.
        codec: What writing and reading the messages of codecs adds.
        update: The agreement of the workers, and the optimizer.
    """

    step: float
    compute: float
    bubble: float
    sync: float
    codec: float
    update: float


@dataclass(frozen=True)
class Outcome:
    """A candidate with what it is predicted to take.

    Attributes:
        candidate: The candidate.
        step_ms: One step.
        score: What candidates are ranked by: `step_ms` times the steps to the target over those of float32.
        memory_bytes: The most that a device needs, with the margin.
        bubble: Part of the time of computing in which lanes wait.
        exposed_sync_ms: By how much the exchange of gradients outlasts computing.
        bytes_sent: Mean over the workers.
        peak_saved_bytes: The most that a worker keeps for backward passes.
        limit_bytes: Memory of the device that needs `memory_bytes`: of unequal replicas the one with the least left.
    """

    candidate: Candidate
    step_ms: float
    score: float
    memory_bytes: float
    bubble: float
    exposed_sync_ms: float
    bytes_sent: float
    peak_saved_bytes: int
    limit_bytes: float = math.inf

    @property
    def fits(self) -> bool:
        """Whether all devices have the memory that they need."""
        return self.memory_bytes <= self.limit_bytes


class Evaluator:
    """Predicts the candidates of a space."""

    def __init__(self, space: Space) -> None:
        self.space = space
        self._inputs = space.inputs
        self._figures = space.library.figures
        self._network = cache(partial(Network, space.inputs.cluster))
        self._prices = cache(lambda layout, speed: BucketPrices(self._network(layout), space.inputs.codec_rates, speed))
        self._throughput = cache(self._throughput_of)
        self._buckets = cache(self._buckets_of)
        self._schedule = cache(self._make_schedule)
        self.shares = cache(self._shares_of)

    def samples(self, layout: Layout, count: int, replica: int | None = None) -> int:
        """Samples of the largest of so many micro-batches."""
        shares = None if layout.is_equal else self.shares(layout, count)
        if shares is None:
            return -(-self._inputs.batch // (layout.replicas * count))
        share = (max(shares) if replica is None else shares[replica]) / sum(shares)
        return max(1, math.ceil(self._inputs.batch * share / count - 1e-3))

    def layout(self, candidate: Candidate, replica: int = 0) -> Layout:
        """Where the stages of a candidate run, and what flows between them."""
        return candidate.layout.replica(replica, self.figures(candidate, replica).edges)

    def figures(self, candidate: Candidate, replica: int = 0) -> StageFigures:
        """What its stages cost on the device of the profile."""
        return self._figures(candidate.cut, self.samples(candidate.layout, candidate.micro_batches, replica))

    # ---------------------------------------------------------------- a step

    def costs(self, candidate: Candidate, *, replica: int = 0) -> Costs:
        """What its actions take on this cluster."""
        layout, count = candidate.layout, candidate.micro_batches
        costs = self._costs_of_passes(candidate, self.figures(candidate, replica), replica)
        if candidate.codec.outer is not None:  # between two exchanges workers agree on nothing
            return replace(costs, control_ms=0.0)
        throughput = self._throughput(layout, count, replica)
        return replace(costs, buckets=self._buckets(candidate.cut, layout, count, candidate.codec, throughput))

    def _costs_of_passes(self, candidate: Candidate, figures: StageFigures, replica: int) -> Costs:
        """What its actions take, but for the exchange of gradients."""
        layout, network = candidate.layout, self._network(candidate.layout)
        throughput = self._throughput(layout, candidate.micro_batches, replica)
        mine = layout.replica(replica, figures.edges)
        pairs = {(mine.home(edge.source), mine.home(edge.target)) for edge in mine.edges}
        link, links = network.transfers((pair for pair in pairs if pair[0] != pair[1]), replica)
        # Beside each pass the host's link brings out what one pass saved, or back.
        moving = self._moving_ms(candidate, figures)
        ahead, back = figures.forward_ms, [max(LEAST_MS, time) for time in figures.backward_ms]
        forward, backward = (
            tuple(max(time / speed, moved) for time, speed, moved in zip(times, throughput, moving, strict=True))
            for times in (ahead, back)
        )
        return Costs(
            forward_ms=forward,
            backward_ms=backward,
            step_ms=self._update_ms(throughput, candidate, figures),
            saved_bytes=figures.saved_bytes,
            link=link,
            links=links,
            replicas=layout.replicas,
            sync_shares_link=True,
            sync_own_link=network.grouping.hosts == 1,
            sync_lanes=self._inputs.sync_lanes,
            control_ms=network.control_ms() if layout.workers > 1 else 0.0,
        )

    def _moving_ms(self, candidate: Candidate, figures: StageFigures) -> tuple[float, ...]:
        """Milliseconds in which a stage's activations of a micro-batch move to the host's memory, or back."""
        if not candidate.cut.offload:
            return (0.0,) * len(figures.forward_ms)
        hosts = self._inputs.by_worker[: candidate.layout.workers]
        speed = min(host.host_link or math.inf for _, host in hosts)
        return tuple(1e3 * size / speed for size in figures.again_bytes)

    def _update_ms(self, throughput: Sequence[float], candidate: Candidate, figures: StageFigures) -> tuple[float, ...]:
        inputs, sizes = self._inputs, figures.parameter_bytes
        if (update_ms := inputs.profile.update_ms) is not None:
            whole = max(1, sum(sizes))
            times = [size / whole * update_ms / speed for size, speed in zip(sizes, throughput, strict=True)]
        else:
            hosts = inputs.by_worker[: candidate.layout.workers]
            bandwidth = min(host.memory_bandwidth or math.inf for _, host in hosts)
            # Parameter, gradient and every tensor of the state are read; parameter and state are written.
            passes = 3 + 2 * inputs.optimizer_copies
            times = [1e3 * passes * size / bandwidth for size in sizes]
        if not candidate.sharded:
            return tuple(times)
        hand = self._network(candidate.layout).exchange(Collective.GATHER)
        return tuple(
            time * part / max(1, size) + hand.latency_ms + hand.ms_per_byte * part
            for time, part, size in zip(times, self._stepped_bytes(candidate), sizes, strict=True)
        )

    def _stepped_bytes(self, candidate: Candidate) -> tuple[int, ...]:
        """For every stage the most bytes of parameters that a replica steps."""
        figures = self.figures(candidate)
        if not candidate.sharded:
            return figures.parameter_bytes
        sizes = [[parameter.count for parameter in stage] for stage in figures.parameters]
        return tuple(4 * largest_share(counts, candidate.layout.replicas) for counts in sizes)

    def outer(self, candidate: Candidate) -> tuple[float, float, float]:
        """What the exchange of an outer loop adds to each step: training waits for it every so many steps."""
        layout, choice = candidate.layout, candidate.codec
        if choice.outer is None:
            return 0.0, 0.0, 0.0
        count, profile, network = candidate.micro_batches, self._inputs.profile, self._network(layout)
        buckets = self._buckets(candidate.cut, layout, count, choice, self._throughput(layout, count, 0))[0]
        codec = sum(bucket.encode_ms + bucket.decode_ms for bucket in buckets)
        link = sum((bucket.wire_ms or 0.0) + (bucket.latency_ms or 0.0) for bucket in buckets) + network.control_ms()
        factor = 2 * (layout.replicas - 1) / layout.replicas
        sent = factor * sum(bucket.bytes for bucket in buckets)
        if profile.batch_norm:  # mean and variance of each channel, float64, of which a norm has two parameters
            statistics = 8 * sum(layer.count for layer in profile.parameters if len(layer.shape) == 1)
            link += statistics * network.exchange().ms_per_byte
            sent += factor * statistics
        return codec / choice.every, link / choice.every, sent / choice.every

    def simulation(self, candidate: Candidate, costs: Costs, replica: int = 0) -> Simulation:
        """One step, simulated over the actions of all workers of a replica; other replicas do the same."""
        counts = [len(buckets) for buckets in costs.buckets] if candidate.layout.replicas > 1 else ()
        schedule, layout = self.schedule(candidate, replica), self.layout(candidate, replica)
        program = lower(schedule, layout, counts, forward_ms=costs.forward_ms, backward_ms=costs.backward_ms)
        return simulate(program, costs)

    def _simulations(self, candidate: Candidate) -> list[Simulation]:
        """A step of every replica that differs from others."""
        replicas = candidate.layout.kinds
        return [self.simulation(candidate, self.costs(candidate, replica=replica), replica) for replica in replicas]

    # ---------------------------------------------------------------- what is said of it

    def outcome(self, candidate: Candidate) -> Outcome:
        """What a candidate is predicted to take."""
        steps, layout = self._simulations(candidate), candidate.layout
        slowest = max(steps, key=lambda step: step.step_ms)
        codec_ms, link_ms, outer_bytes = self.outer(candidate)
        step_ms = slowest.step_ms + codec_ms + link_ms
        sent = [size for step in steps for size in step.bytes_sent]
        devices: list[tuple[float, float]] = []
        for replica, step in enumerate(steps):
            limits = device_limits(self._inputs, layout, replica)
            devices += zip(self.needs(candidate, step.peak_saved_bytes, replica), limits, strict=True)
        needed, limit = max(devices, key=lambda device: (device[0] / device[1], device[0]))
        updated = sum(self._stepped_bytes(candidate)) * (layout.replicas - 1) if candidate.sharded else 0
        return Outcome(
            candidate,
            step_ms,
            step_ms * candidate.codec.steps,
            needed,
            min(1.0, max(0.0, slowest.bubble)),
            max(0.0, *slowest.exposed_sync_ms) + codec_ms + link_ms,
            (sum(sent) + updated) / len(sent) + outer_bytes,
            max(max(step.peak_saved_bytes) for step in steps),
            limit,
        )

    def parts(self, candidate: Candidate) -> Parts:
        """Where the time of a candidate's step goes."""
        steps = self._simulations(candidate)
        replica, whole = max(enumerate(steps), key=lambda pair: pair[1].step_ms)
        costs = self.costs(candidate, replica=replica)
        buckets = tuple(
            tuple(replace(bucket, encode_ms=0.0, decode_ms=0.0) for bucket in stage) for stage in costs.buckets
        )
        free = self.simulation(candidate, replace(costs, buckets=buckets), replica)
        codec_ms, link_ms, _ = self.outer(candidate)
        busy, after = max(free.busy_ms), free.step_ms - free.compute_ms
        layout, updates = self.layout(candidate, replica), costs.step_ms or (0.0,) * candidate.layout.stages
        # A lane updates its stages one after the other.
        updating = max(sum(updates[stage] for stage in layout.stages_on(lane)) for lane in range(layout.lanes))
        update = min(after, costs.control_ms + updating)
        return Parts(
            whole.step_ms + codec_ms + link_ms,
            busy,
            free.compute_ms - busy,
            after - update + link_ms,
            whole.step_ms - free.step_ms + codec_ms,
            update,
        )

    def needs(self, candidate: Candidate, saved: tuple[int, ...], replica: int = 0) -> list[float]:
        """The bytes that the device of every worker needs, with the margin; see `planner.memory`."""
        layout, count, inputs = candidate.layout, candidate.micro_batches, self._inputs
        # Of unequal replicas figures are of their own samples.
        shares = self.shares(layout, count) if layout.is_equal else None
        largest = self._figures(candidate.cut, self.samples(layout, count))
        return device_bytes(
            inputs,
            candidate,
            self.layout(candidate, replica),
            self.figures(candidate, replica),
            saved,
            gradients=gradient_bytes(largest, layout.replicas, count, inputs.bucket_bytes),
            owned=self._stepped_bytes(candidate),
            is_outer=candidate.codec.outer is not None,
            # A faster replica has larger micro-batches.
            larger=1.0 if shares is None else max(shares) * layout.replicas / sum(shares),
            hosts=self._network(layout).grouping.hosts,
        )

    def moved(self, candidate: Candidate) -> tuple[int, float]:
        """What moves to the host's memory and back in a step, where activations wait there."""
        figures, count = self.figures(candidate), candidate.micro_batches
        layout, here = self.layout(candidate), self.costs(candidate)
        kept = self.costs(replace(candidate, cut=replace(candidate.cut, offload=False)))
        sizes, longer = [0] * layout.workers, [0.0] * layout.workers
        for stage, size in enumerate(figures.again_bytes):
            home = layout.home(stage)
            sizes[home] += count * size
            longer[home] += count * (here.forward_ms[stage] - kept.forward_ms[stage])
            longer[home] += count * (here.backward_ms[stage] - kept.backward_ms[stage])
        return max(sizes), max(longer)

    # ---------------------------------------------------------------- made once

    def _throughput_of(self, layout: Layout, count: int, replica: int) -> tuple[float, ...]:
        shares = self.shares(layout, count) if layout.is_equal else None
        return stage_throughputs(self._inputs, layout, count, shares, replica)

    def _shares_of(self, layout: Layout, count: int) -> tuple[float, ...] | None:
        """Samples of each replica, where they differ in speed; None for equal parts.

        With BatchNorm parts stay equal: others would be normalised by other samples.
        """
        if self._inputs.profile.batch_norm:
            return None
        if layout.is_equal:
            return shares_by_speed(self._inputs, layout, count)
        return self._unequal_shares(layout, count)

    def _unequal_shares(self, layout: Layout, count: int) -> tuple[float, ...]:
        """Samples of replicas of different numbers of workers, by what a step is predicted to take each of them."""
        cut, batch = self.space.cut(layout), self._inputs.batch
        assert cut is not None
        candidate = Candidate(layout, count, cut, "1f1b")
        parts = [batch / layout.replicas] * layout.replicas
        for _ in range(4):
            work = []
            for replica, part in enumerate(parts):
                time, half = (self._time_of_part(candidate, replica, samples) for samples in (part, part / 2))
                work.append(WorkCost(max(0.0, 2 * half - time), max(LEAST_MS, 2 * (time - half) / part)))
            parts = [max(1.0, part) for part in best_division(work, batch)]
        return tuple(round(part, 2) for part in parts)

    def _time_of_part(self, candidate: Candidate, replica: int, samples: float) -> float:
        """Milliseconds of a step of one replica that has so many samples, without its exchange."""
        count = candidate.micro_batches
        figures = self._figures(candidate.cut, samples / count)
        costs = self._costs_of_passes(candidate, figures, replica)
        layout = candidate.layout.replica(replica, figures.edges)
        request = ScheduleRequest(layout, count, forward_ms=costs.forward_ms, backward_ms=costs.backward_ms)
        schedule = make(order_of_replica(candidate.schedule, layout), request)
        return simulate(lower(schedule, layout), costs).step_ms

    def _buckets_of(
        self, cut: Cut, layout: Layout, count: int, codec: CodecChoice, throughput: tuple[float, ...]
    ) -> tuple[tuple[BucketCost, ...], ...]:
        if layout.replicas == 1:
            return ((),) * cut.stages
        figures = self._figures(cut, self.samples(layout, count))
        factor = 2 * (layout.replicas - 1) / layout.replicas
        made = []
        for parameters, speed in zip(figures.parameters, throughput, strict=True):
            row, reached = [], 0.0
            prices = self._prices(layout, speed)
            for bucket in stage_buckets(parameters, self._inputs.bucket_bytes):
                times = prices.times(bucket, codec)
                reached = max(reached, *(figures.ready[one.name] for one in bucket))  # buckets leave in order
                row.append(
                    BucketCost(
                        round(times.bytes / factor),
                        reached,
                        times.encode_ms,
                        times.decode_ms,
                        times.wire_ms,
                        times.latency_ms,
                    )
                )
            made.append(tuple(row))
        return tuple(made)

    def schedule(self, candidate: Candidate, replica: int = 0) -> Schedule:
        """The order of computation of a replica."""
        one = candidate
        return self._schedule(one.schedule, one.layout, one.micro_batches, one.cut, replica)

    def _make_schedule(self, name: str, layout: Layout, count: int, cut: Cut, replica: int) -> Schedule:
        """A schedule; `greedy` is made for the link that the cut is for, as it will be by who follows the plan."""
        figures = self._figures(cut, self.samples(layout, count, replica))
        mine = layout.replica(replica, figures.edges)
        parts = stage_speeds(self._inputs, layout)
        request = ScheduleRequest(
            mine,
            count,
            # As the plan will say them.
            forward_ms=tuple(round(time / part, 4) for time, part in zip(figures.forward_ms, parts, strict=True)),
            backward_ms=tuple(round(time / part, 4) for time, part in zip(figures.backward_ms, parts, strict=True)),
            saved_bytes=figures.saved_bytes,
            bytes_per_second=cut.link_speed,
        )
        return make(name if layout.is_equal else order_of_replica(name, mine), request)
