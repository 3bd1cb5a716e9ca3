"""Predicts the step time and the memory of candidate plans, by simulating the list of actions that would be run.

A candidate is turned into costs, a program and a prediction. What many candidates share (the figures of a cut, the
links of a grid, the prices of buckets, a schedule) is computed once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import accumulate

from hybridpar.compress import Collective
from hybridpar.planner.codecs import BucketPrices, CodecChoice, stage_buckets
from hybridpar.planner.cuts import Cut, StageFigures
from hybridpar.planner.memory import device_bytes, device_limits, gradient_bytes
from hybridpar.planner.network import Network
from hybridpar.planner.space import Candidate, Space
from hybridpar.planner.speeds import LEAST_MS, shares_by_speed, stage_speeds, stage_throughputs
from hybridpar.schedule.actions import Schedule
from hybridpar.schedule.costs import BucketCost, Costs, Link
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
        self._workers = space.inputs.by_worker
        #: For every number of workers the least of the devices, and of the hosts, that they use.
        self._least_bandwidth = _running_least(host.memory_bandwidth for _, host in self._workers)
        self._figures = space.library.figures
        self._transfers = cache(self._make_transfers)
        self._network = cache(partial(Network, self._inputs.cluster))
        self._prices = cache(self._make_prices)
        self._buckets = cache(self._make_buckets)
        self._schedule = cache(self._make_schedule)
        self._throughput = cache(self._make_throughput)
        self._shares_of = cache(self._make_shares_of)
        self.shares = cache(self._make_shares)

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

    def costs(self, candidate: Candidate, *, replica: int = 0) -> Costs:
        """What its actions take on this cluster."""
        return self._costs(candidate, self.figures(candidate, replica), True, replica)

    def _costs(self, candidate: Candidate, figures: StageFigures, exchange: bool, replica: int) -> Costs:
        inputs, layout, count = self._inputs, candidate.layout, candidate.micro_batches
        parted = candidate.codec.outer is not None and exchange
        exchange = exchange and not parted
        throughput = self._throughput(layout, count, replica)
        network = self._network(layout)
        mine = layout.replica(replica, figures.edges)
        pairs = frozenset((mine.home(edge.source), mine.home(edge.target)) for edge in mine.edges)
        link, own = self._transfers(layout, pairs, replica)
        buckets = self._buckets(candidate.cut, layout, count, candidate.codec, throughput) if exchange else ()
        # Beside each pass the host's link brings out what one pass saved, or back.
        moving = self._moving_ms(candidate, figures)
        return Costs(
            forward_ms=tuple(
                max(time / speed, moved)
                for time, speed, moved in zip(figures.forward_ms, throughput, moving, strict=True)
            ),
            backward_ms=tuple(
                max(max(LEAST_MS, time) / speed, moved)
                for time, speed, moved in zip(figures.backward_ms, throughput, moving, strict=True)
            ),
            step_ms=self._update_ms(throughput, candidate, figures),
            saved_bytes=figures.saved_bytes,
            link=link,
            links=own,
            buckets=buckets,
            replicas=layout.replicas,
            sync_shares_link=True,
            sync_own_link=network.grouping.hosts == 1,
            sync_lanes=inputs.sync_lanes,
            # Between two exchanges of an outer loop workers agree on nothing.
            control_ms=network.control_ms() if layout.workers > 1 and not parted else 0.0,
        )

    def _moving_ms(self, candidate: Candidate, figures: StageFigures) -> tuple[float, ...]:
        """Milliseconds in which a stage's activations of a micro-batch move to the host's memory, or back."""
        if not candidate.cut.offload:
            return (0.0,) * len(figures.forward_ms)
        speed = min(host.host_link or math.inf for _, host in self._workers[: candidate.layout.workers])
        return tuple(1e3 * size / speed for size in figures.again_bytes)

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

    def outer(self, candidate: Candidate) -> tuple[float, float, float]:
        """What the exchange of an outer loop adds to each step: training waits for it every so many steps."""
        layout, choice = candidate.layout, candidate.codec
        if choice.outer is None:
            return 0.0, 0.0, 0.0
        count, profile = candidate.micro_batches, self._inputs.profile
        throughput, network = self._throughput(layout, count, 0), self._network(layout)
        buckets = self._buckets(candidate.cut, layout, count, choice, throughput)[0]
        codec = sum(one.encode_ms + one.decode_ms for one in buckets)
        link = sum((one.wire_ms or 0.0) + (one.latency_ms or 0.0) for one in buckets) + network.control_ms()
        factor = 2 * (layout.replicas - 1) / layout.replicas
        sent = factor * sum(one.bytes for one in buckets)
        if profile.batch_norm:  # mean and variance of each channel, float64, of which a norm has two parameters
            statistics = 8 * sum(one.count for one in profile.parameters if len(one.shape) == 1)
            link += statistics * network.exchange().ms_per_byte
            sent += factor * statistics
        return codec / choice.every, link / choice.every, sent / choice.every

    def simulation(
        self, candidate: Candidate, costs: Costs, replica: int = 0, schedule: Schedule | None = None
    ) -> Simulation:
        """One step, simulated over the actions of all workers of a replica; other replicas do the same."""
        layout = self.layout(candidate, replica)
        schedule = schedule or self.schedule(candidate, replica)
        counts = [len(buckets) for buckets in costs.buckets] if candidate.layout.replicas > 1 else ()
        program = lower(schedule, layout, counts, forward_ms=costs.forward_ms, backward_ms=costs.backward_ms)
        return simulate(program, costs)

    def outcome(self, candidate: Candidate) -> Outcome:
        """What a candidate is predicted to take."""
        kinds = candidate.layout.kinds
        results = [self.simulation(candidate, self.costs(candidate, replica=replica), replica) for replica in kinds]
        result = max(results, key=lambda one: one.step_ms)
        codec_ms, link_ms, outer_bytes = self.outer(candidate)
        step_ms = result.step_ms + codec_ms + link_ms
        sent = [size for one in results for size in one.bytes_sent]
        needs = [
            pair
            for replica in kinds
            for pair in zip(
                self.needs(candidate, results[replica].peak_saved_bytes, replica),
                device_limits(self._inputs, candidate.layout, replica),
                strict=True,
            )
        ]
        tightest = max(needs, key=lambda one: (one[0] / one[1], one[0]))
        updated = sum(self._owned(candidate)) * (candidate.layout.replicas - 1) if candidate.sharded else 0
        return Outcome(
            candidate,
            step_ms,
            step_ms * candidate.codec.steps,
            tightest[0],
            min(1.0, max(0.0, result.bubble)),
            max(0.0, *result.exposed_sync_ms) + codec_ms + link_ms,
            (sum(sent) + updated) / len(sent) + outer_bytes,
            max(max(one.peak_saved_bytes) for one in results),
            tightest[1],
        )

    def parts(self, candidate: Candidate) -> Parts:
        """Where the time of a candidate's step goes."""
        steps_ms = [
            self.simulation(candidate, self.costs(candidate, replica=replica), replica).step_ms
            for replica in candidate.layout.kinds
        ]
        slowest = steps_ms.index(max(steps_ms))
        costs = self.costs(candidate, replica=slowest)
        free = replace(
            costs,
            buckets=tuple(
                tuple(replace(one, encode_ms=0.0, decode_ms=0.0) for one in stage) for stage in costs.buckets
            ),
        )
        whole, without = (self.simulation(candidate, one, slowest) for one in (costs, free))
        codec_ms, link_ms, _ = self.outer(candidate)
        busy = max(without.busy_ms)
        layout, steps = self.layout(candidate, slowest), costs.step_ms or (0.0,) * candidate.layout.stages
        # A lane updates its stages one after the other.
        updating = max(sum(steps[stage] for stage in layout.stages_on(lane)) for lane in range(layout.lanes))
        update = min(without.step_ms - without.compute_ms, costs.control_ms + updating)
        return Parts(
            whole.step_ms + codec_ms + link_ms,
            busy,
            without.compute_ms - busy,
            without.step_ms - without.compute_ms - update + link_ms,
            whole.step_ms - without.step_ms + codec_ms,
            update,
        )

    def needs(self, candidate: Candidate, saved: tuple[int, ...], replica: int = 0) -> list[float]:
        """The bytes that the device of every worker needs, with the margin; see `planner.memory`."""
        layout, figures = candidate.layout, self.figures(candidate, replica)
        # Of unequal replicas figures are of their own samples.
        shares = self.shares(layout, candidate.micro_batches) if layout.is_equal else None
        return device_bytes(
            self._inputs,
            candidate,
            self.layout(candidate, replica),
            figures,
            saved,
            gradients=gradient_bytes(
                self._figures(candidate.cut, self.samples(layout, candidate.micro_batches)),
                layout.replicas,
                candidate.micro_batches,
                self._inputs.bucket_bytes,
            ),
            owned=self._owned(candidate) if candidate.sharded else figures.parameter_bytes,
            is_outer=candidate.codec.outer is not None,
            # A faster replica has larger micro-batches.
            larger=1.0 if shares is None else max(shares) * layout.replicas / sum(shares),
            hosts=self._network(layout).grouping.hosts,
        )

    # ---------------------------------------------------------------- made once

    def _make_throughput(self, layout: Layout, count: int, replica: int) -> tuple[float, ...]:
        shares = self.shares(layout, count) if layout.is_equal else None
        return stage_throughputs(self._inputs, layout, count, shares, replica)

    def _make_shares(self, layout: Layout, count: int) -> tuple[float, ...] | None:
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
        known: list[WorkCost] = []
        for _ in range(4):
            times = [self._time_of_part(candidate, replica, part) for replica, part in enumerate(parts)]
            halves = [self._time_of_part(candidate, replica, part / 2) for replica, part in enumerate(parts)]
            known = [
                WorkCost(max(0.0, 2 * half - time), max(LEAST_MS, 2 * (time - half) / part))
                for time, half, part in zip(times, halves, parts, strict=True)
            ]
            parts = [max(1.0, part) for part in best_division(known, batch)]
        return tuple(round(part, 2) for part in parts)

    def _time_of_part(self, candidate: Candidate, replica: int, samples: float) -> float:
        """Milliseconds of a step of one replica that has so many samples, with its exchange."""
        count = candidate.micro_batches
        figures = self._figures(candidate.cut, samples / count)
        costs = self._costs(candidate, figures, False, replica)
        layout = candidate.layout.replica(replica, figures.edges)
        request = ScheduleRequest(layout, count, forward_ms=costs.forward_ms, backward_ms=costs.backward_ms)
        schedule = make(order_of_replica(candidate.schedule, layout), request)
        return simulate(lower(schedule, layout), costs).step_ms

    def _parts_of_model(self, figures: StageFigures) -> list[float]:
        """For every stage its part of the model's parameters."""
        sizes = figures.parameter_bytes
        return [size / max(1, sum(sizes)) for size in sizes]

    def _update_ms(self, throughput: Sequence[float], candidate: Candidate, figures: StageFigures) -> tuple[float, ...]:
        update_ms = self._inputs.profile.update_ms
        if update_ms is not None:
            times = [
                part * update_ms / speed for part, speed in zip(self._parts_of_model(figures), throughput, strict=True)
            ]
        else:
            speed = self._least_bandwidth[candidate.layout.workers - 1]
            # Parameter, gradient and every tensor of the state are read; parameter and state are written.
            passes = 3 + 2 * self._inputs.optimizer_copies
            times = [1e3 * passes * size / speed for size in figures.parameter_bytes]
        if not candidate.sharded:
            return tuple(times)
        hand = self._network(candidate.layout).exchange(Collective.GATHER)
        return tuple(
            time * part / max(1, whole) + hand.latency_ms + hand.ms_per_byte * part
            for time, part, whole in zip(times, self._owned(candidate), figures.parameter_bytes, strict=True)
        )

    def _owned(self, candidate: Candidate) -> tuple[int, ...]:
        """For every stage the most bytes of parameters that one replica steps, where they divide the optimizer."""
        return self._shares_of(candidate.cut, candidate.layout.replicas)

    def _make_shares_of(self, cut: Cut, replicas: int) -> tuple[int, ...]:
        parts = self._figures(cut, self._inputs.profile.samples).parameters
        return tuple(4 * largest_share([one.count for one in own], replicas) for own in parts)

    def _make_transfers(
        self, layout: Layout, pairs: frozenset[tuple[int, int]], replica: int
    ) -> tuple[Link, dict[tuple[int, int], Link]]:
        return self._network(layout).transfers((pair for pair in pairs if pair[0] != pair[1]), replica)

    def _make_prices(self, layout: Layout, throughput: float) -> BucketPrices:
        return BucketPrices(self._network(layout), self._inputs.codec_rates, throughput)

    def _make_buckets(
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


def _running_least(values: Iterable[float | None]) -> list[float]:
    """For every number of values the least of them; what is not known is without limit."""
    return list(accumulate((math.inf if one is None else float(one) for one in values), min))
