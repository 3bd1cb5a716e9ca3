"""For a codec used between nodes only: the group inside a node and the group across nodes.

Workers that sum gradients with each other are a **party**: all workers, or the replicas of a stage. One of the two
worlds is what a party has on this node, where CPU workers add through shared memory, the other those of the party with
the same place on the other nodes. `hybridpar.compress.hierarchy` says what they do there.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from hybridpar.comm.group import Group
from hybridpar.comm.world import World
from hybridpar.compress.exchange import PhaseTimer
from hybridpar.compress.hierarchy import NodeExchange, Nodes
from hybridpar.machine.process import host_identity


class NodeWorlds:
    """The two worlds of a worker."""

    def __init__(self, nodes: Nodes, inside: World, across: World) -> None:
        self.nodes = nodes
        self.inside = inside
        self.across = across

    @classmethod
    def open(cls, job: World, parties: Sequence[Sequence[int]], lanes: int) -> NodeWorlds | None:
        """Find the nodes and divide the parties; a collective of all workers of the job."""
        hosts = job.gather(host_identity())
        divided = [Nodes.of([hosts[rank] for rank in party]) for party in parties]
        if len(set(hosts)) == 1 or not any(nodes.share for nodes in divided):
            return None
        inside, across = list[tuple[int, ...]](), list[tuple[int, ...]]()
        for party, nodes in zip(parties, divided, strict=True):
            inside += _ranks(party, nodes.members)
            across += _ranks(party, nodes.columns if nodes.share else [(place,) for place in range(len(party))])
        own = next(nodes for party, nodes in zip(parties, divided, strict=True) if job.rank in party)
        inner = job.split(inside, lanes)
        outer = job.split(across, lanes)
        # Worlds of one worker have nothing to close.
        return cls(own, inner, outer) if own.share else None

    def inner(self, lane: int) -> Group | None:
        """What adds inside the node on a sync lane; None where this worker is alone there."""
        return self.inside.lane_groups[lane] if self.inside.size > 1 else None

    def run(self, exchange: NodeExchange, lane: int, flat: Tensor) -> PhaseTimer | None:
        """Exchange a bucket on a sync lane."""
        # A worker that leads nothing has no group.
        group = self.across.lane_groups[lane] if self.across.size > 1 else None
        return exchange.run(self.inner(lane), group, flat)

    def close(self) -> None:
        """Leave both worlds. Safe to call twice."""
        self.inside.close()
        self.across.close()


def _ranks(party: Sequence[int], groups: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """Ranks in the job of groups of a party's workers."""
    return [tuple(party[place] for place in group) for group in groups]
