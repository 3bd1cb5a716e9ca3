"""Turns costs of actions into phases on shared resources.

Every worker has cores, a way out to the network and a way in. What can never be short is left out, so that a
simulation without contention costs nothing extra.
"""

from __future__ import annotations

from collections.abc import Sequence

from hybridpar.schedule.actions import Action, Kind, Layout
from hybridpar.schedule.contention import Phase, Resource
from hybridpar.schedule.costs import Costs

_Uses = tuple[tuple[Resource, float], ...]


class _Worker:
    """The resources of a worker, and how much of them computing uses."""

    def __init__(self, lanes: int, costs: Costs) -> None:
        self.cores = None if costs.cores is None else Resource(costs.cores, fair=True)
        self.out, self.into = Resource(1), Resource(1)
        #: What all-reduces share, out of the worker and into it.
        self.sync = (Resource(1), Resource(1)) if costs.sync_own_link else (self.out, self.into)
        self.compute = self.core_time(costs.compute_cores)
        if costs.co_run > 1 and lanes > 1:
            # All lanes together want co_run times what there is, whatever it is that they share.
            self.compute += ((Resource(1), costs.co_run / lanes),)

    def core_time(self, part: float) -> _Uses:
        """So many cores."""
        return () if self.cores is None or part <= 0 else ((self.cores, part),)


class Machine:
    """The workers of one replica.

    Args:
        layout: Where stages run.
        costs: What actions take.
    """

    def __init__(self, layout: Layout, costs: Costs) -> None:
        self._layout, self._costs = layout, costs
        self._workers = [_Worker(layout.worker_of.count(worker), costs) for worker in range(layout.workers)]
        self._edges = {(edge.source, edge.target): edge for edge in layout.edges}

    def compute(self, action: Action, marks: Sequence[float] = ()) -> list[Phase]:
        """Phases of a forward or backward pass or an optimizer step.

        Args:
            action: The action.
            marks: Fractions of it, ascending, at which a phase is to end; the last phase ends with the action.
        """
        time = self._costs.compute_ms(action.stage, action.kind)
        uses = self._workers[self._layout.home(action.stage)].compute
        starts = (0.0, *marks)
        return [Phase(time * (end - start), uses) for start, end in zip(starts, (*marks, 1.0), strict=True)]

    def transfer_bytes(self, send: Action) -> int:
        """What a send sends.

        Args:
            send: A send; its receive is the same transfer.
        """
        assert send.peer is not None
        if send.kind is Kind.SEND_FORWARD:
            return self._edges[send.stage, send.peer].bytes
        return self._edges[send.peer, send.stage].gradient_bytes

    def transfer(self, send: Action) -> list[Phase]:
        """Phases of a send together with its receive: the latency, then the bytes.

        The bytes take as long as the wire needs for them or a processor at either end, whichever is slower.

        Args:
            send: A send; its receive is the same transfer.
        """
        assert send.peer is not None
        layout, costs = self._layout, self._costs
        pair = (layout.home(send.stage), layout.home(send.peer))
        source, target = (self._workers[worker] for worker in pair)
        link = costs.links.get(pair, costs.link)
        size = self.transfer_bytes(send)
        wire = link.wire_ms(size)
        send_cpu, receive_cpu = 1e3 * size * costs.send_cpu, 1e3 * size * costs.receive_cpu
        time = max(wire, send_cpu, receive_cpu)
        phases = [Phase(link.latency_ms)]
        if time > 0:
            uses = source.core_time(send_cpu / time) + target.core_time(receive_cpu / time)
            if pair not in costs.links and wire > 0:
                uses += ((source.out, wire / time), (target.into, wire / time))
            phases.append(Phase(time, uses))
        return phases

    def sync_bytes(self, action: Action) -> float:
        """What a worker sends, and receives, in an all-reduce.

        Args:
            action: A sum of one bucket.
        """
        return self._costs.sync_factor * self._costs.buckets[action.stage][action.index or 0].bytes

    def sync(self, action: Action) -> list[Phase]:
        """Phases of an all-reduce: encode, latency, bytes, decode. With one replica there is nothing to do.

        Args:
            action: A sum of one bucket.
        """
        costs = self._costs
        if costs.replicas == 1:
            return [Phase(0.0)]
        worker = self._workers[self._layout.home(action.stage)]
        bucket = costs.buckets[action.stage][action.index or 0]
        size = self.sync_bytes(action)
        wire = costs.sync_link.wire_ms(size) if bucket.wire_ms is None else bucket.wire_ms
        latency = costs.sync_link.latency_ms if bucket.latency_ms is None else bucket.latency_ms
        cpu = costs.sync_core_ms(bucket)
        time = max(wire, cpu)
        bytes_phase = Phase(0.0)
        if time > 0:
            uses = worker.core_time(cpu / time)
            on_wire = costs.link.wire_ms(size) if bucket.wire_ms is None else bucket.link_part * wire
            shared = min(1.0, on_wire / time)
            if costs.sync_shares_link and shared > 0:
                uses += tuple((way, shared) for way in worker.sync)
            bytes_phase = Phase(time, uses)
        return [
            Phase(bucket.encode_ms, worker.core_time(1.0)),
            # Where threads of this worker move bytes, handing a message from one to the next keeps a core busy as well.
            Phase(latency, () if bucket.core_ms is None else worker.core_time(1.0)),
            bytes_phase,
            Phase(bucket.decode_ms, worker.core_time(1.0)),
        ]
