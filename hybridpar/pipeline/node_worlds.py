"""Why: between nodes gradients are compressed and inside a node they are not, so each worker is in two smaller worlds.

One is its node, where CPU workers add through shared memory, the other the workers with the same place on the other
nodes. `hybridpar.compress.hierarchy` says what they do there.
"""

from __future__ import annotations

from torch import Tensor

from hybridpar.compress.exchange import Traffic
from hybridpar.compress.group import TorchGroup
from hybridpar.compress.hierarchy import Leaders, NodeExchange, Nodes
from hybridpar.pipeline.collective import BackendSum
from hybridpar.pipeline.world import World
from hybridpar.process import host_identity


class NodeWorlds:
    """The two worlds of a worker.

    Args:
        nodes: Which workers are on which node.
        inside: The workers of this node.
        across: Those with the same place on other nodes.
    """

    def __init__(self, nodes: Nodes, inside: World, across: World) -> None:
        self.nodes = nodes
        self.inside = inside
        self.across = across
        self.leaders = Leaders(nodes.leaders)

    @classmethod
    def open(cls, world: World, lanes: int) -> NodeWorlds | None:
        """Find the nodes and divide the workers; a collective.

        Args:
            world: The workers.
            lanes: Number of sync lanes.

        Returns:
            None where it cannot gain anything, because there is one node or each has one worker, or where the world is
            itself a part of the job, as the replicas of a stage are.
        """
        if world.size != world.job_size:
            return None
        nodes = Nodes.of(world.gather(host_identity()))
        if not nodes.pays:
            return None
        inside = world.split(nodes.members, lanes, shared_memory=True)
        return cls(nodes, inside, world.split(nodes.columns, lanes, shared_memory=False))

    def leads(self, name: str, count: int) -> bool:
        """Whether this worker exchanges a parameter with other nodes."""
        # The order of ranks in a node is that of places.
        return self.leaders.of(name, count) == self.inside.rank

    def run(self, exchange: NodeExchange, lane: int, flat: Tensor) -> Traffic:
        """Exchange a bucket on a sync lane.

        Returns:
            What this worker sent to other nodes, and where the time of that went.

        Raises:
            RuntimeError: A peer died or did not come in time.
        """

        def add(tensor: Tensor) -> None:
            if self.inside.size > 1:
                self.inside.lane_sums[lane].all_reduce(tensor)

        # A worker that does not lead may be alone with its place, and then has no group.
        group = self.across.lane_sums[lane] if self.inside.rank < self.nodes.leaders else None
        return exchange.run(add, TorchGroup(group.group) if isinstance(group, BackendSum) else None, flat)

    def close(self) -> None:
        """Leave both worlds. Safe to call twice."""
        self.inside.close()
        self.across.close()
