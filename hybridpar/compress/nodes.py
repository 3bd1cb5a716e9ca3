"""Gradients summed in full precision inside a node, and exchanged by a codec between nodes.

A bucket goes in three steps. The workers of a node add it in full precision. Each node then has one sum, and for every
parameter one of its workers, the **leader**, exchanges that with the leaders of the other nodes through the codec.
At last everybody gets the result inside its node, which is a sum again: all but the leader add zero.

Leaders take turns by parameter and not by bucket: buckets are cut anew while training goes on, and what a leader did
not send would be with somebody else. So all links and cores of a node share the work in every bucket, and a residual
stays where it is. Nodes may be of different sizes; as many workers lead as the smallest node has.

Workers that sum gradients with each other are a **party**: all workers, or the replicas of a stage.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from hybridpar.comm.group import Group
from hybridpar.comm.world import World
from hybridpar.machine.process import host_identity

#: Ranks of the workers of a party by node, each ascending.
Nodes = tuple[tuple[int, ...], ...]


def nodes_of(names: Sequence[object]) -> Nodes:
    """Workers with equal names are on one node."""
    ranks: dict[object, list[int]] = defaultdict(list)
    for rank, name in enumerate(names):
        ranks[name].append(rank)
    return tuple(map(tuple, ranks.values()))


def columns_of(nodes: Nodes) -> list[list[int]]:
    """Workers that lead together, one of each node; then those that lead nothing, each alone."""
    led = [sorted(column) for column in zip(*nodes, strict=False)]
    return [*led, *([rank] for node in nodes for rank in node[len(led) :])]


class Leaders:
    """Which of a node's workers exchanges a parameter; equal on all nodes.

    It is decided when a parameter is first seen, for the worker that has the least to do, and stays so.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._sizes: dict[str, int] = {}
        #: Place in the node by parameter. A resumed run starts with what was saved.
        self.chosen: dict[str, int] = {}

    def of(self, name: str, size: int) -> int:
        """The leader of a parameter."""
        self._sizes[name] = size
        if name not in self.chosen:
            loads = [0] * self._count
            for known, leader in self.chosen.items():
                loads[leader] += self._sizes.get(known, 0)
            self.chosen[name] = loads.index(min(loads))
        return self.chosen[name]


class NodeWorlds:
    """The two worlds of a worker: its party on this node, and those of its party with its place on the other nodes."""

    def __init__(self, nodes: Nodes, inside: World, across: World) -> None:
        self.nodes = nodes
        self.inside = inside
        self.across = across

    @classmethod
    def open(cls, job: World, parties: Sequence[Sequence[int]], lanes: int) -> NodeWorlds | None:
        """Find the nodes and divide the parties; a collective of all workers of the job. None where nodes change
        nothing.
        """
        hosts = job.gather(host_identity())
        divided = [nodes_of([hosts[rank] for rank in party]) for party in parties]
        share = [len(nodes) < len(party) for party, nodes in zip(parties, divided, strict=True)]
        if len(set(hosts)) == 1 or not any(share):
            return None
        inside, across = list[list[int]](), list[list[int]]()
        for party, nodes, shares in zip(parties, divided, share, strict=True):
            inside += ([party[index] for index in node] for node in nodes)
            columns = columns_of(nodes) if shares else [[index] for index in range(len(party))]
            across += ([party[index] for index in column] for column in columns)
        worlds = job.split(inside, lanes), job.split(across, lanes)
        (mine,) = (number for number, party in enumerate(parties) if job.rank in party)
        # Worlds of one worker have nothing to close.
        return cls(divided[mine], *worlds) if share[mine] else None

    def groups(self, lane: int) -> tuple[Group | None, Group | None]:
        """Who exchanges by codecs on a sync lane, and who adds inside the node; None where this worker is alone."""
        across, inside = (world.lane_groups[lane] if world.size > 1 else None for world in (self.across, self.inside))
        return across, inside

    def close(self) -> None:
        """Leave both worlds. Safe to call twice."""
        self.inside.close()
        self.across.close()
