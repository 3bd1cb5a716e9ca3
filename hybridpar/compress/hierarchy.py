"""Gradients summed in full precision inside a node, and exchanged by a codec between nodes.

A bucket goes in three steps. The workers of a node add it in full precision. Each node then has one sum, and for every
parameter one of its workers, the **leader**, exchanges that with the leaders of the other nodes through the codec.
At last everybody gets the result inside its node, which is a sum again: all but the leader add zero.

Leaders take turns by parameter and not by bucket: buckets are cut anew while training goes on, and what a leader did
not send would be with somebody else. So all links and cores of a node share the work in every bucket, and a residual
stays where it is. Nodes may be of different sizes; as many workers lead as the smallest node has.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from hybridpar.comm.group import Group
from hybridpar.compress.codec import Coder
from hybridpar.compress.exchange import Exchange, PhaseTimer, Traffic


@dataclass(frozen=True)
class Nodes:
    """Which workers are on which node.

    Attributes:
        members: The workers' ranks by node, each ascending.
    """

    members: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, names: Sequence[object]) -> Nodes:
        """Workers with equal names are on one node."""
        found: dict[object, list[int]] = defaultdict(list)
        for rank, name in enumerate(names):
            found[name].append(rank)
        return cls(tuple(map(tuple, found.values())))

    @property
    def share(self) -> bool:
        """Whether a node has several workers."""
        return len(self.members) < sum(map(len, self.members))

    @property
    def pays(self) -> bool:
        """Whether there are several nodes, and one of them has several workers."""
        return len(self.members) > 1 and self.share

    @property
    def leaders(self) -> int:
        """How many workers of each node lead."""
        return min(map(len, self.members))

    @property
    def columns(self) -> tuple[tuple[int, ...], ...]:
        """Workers that lead together, one of each node; then those that lead nothing, each alone."""
        led = [tuple(sorted(node[place] for node in self.members)) for place in range(self.leaders)]
        return (*led, *((rank,) for node in self.members for rank in node[self.leaders :]))

    def node_of(self, rank: int) -> tuple[int, ...]:
        """The workers of a worker's node."""
        return next(node for node in self.members if rank in node)

    def place_of(self, rank: int) -> int:
        """A worker's place in its node."""
        return self.node_of(rank).index(rank)


class Leaders:
    """Which of a node's workers exchanges a parameter; equal on all nodes.

    It is decided when a parameter is first seen, for the one that has the least to do, and stays so.
    """

    def __init__(self, count: int) -> None:
        self._load = [0] * count
        self._counted: set[str] = set()
        #: Place in the node by parameter. A resumed run starts with what was saved.
        self.chosen: dict[str, int] = {}

    def of(self, name: str, count: int) -> int:
        """The leader of a parameter."""
        if name not in self.chosen:
            self.chosen[name] = self._load.index(min(self._load))
        leader = self.chosen[name]
        if name not in self._counted:
            self._counted.add(name)
            self._load[leader] += count
        return leader

    def adopt(self, chosen: Mapping[str, int]) -> None:
        """Go on with the leaders of the run that is resumed."""
        self.chosen, self._load, self._counted = dict(chosen), [0] * len(self._load), set()


class NodeExchange:
    """Exchanges the gradients of some parameters in full precision inside a node, and by a codec between nodes."""

    def __init__(self, sizes: Sequence[int], coders: Sequence[Coder | None], share: float = 1.0) -> None:
        own = [coder for coder in coders if coder is not None]
        self._sizes = list(sizes)
        self._leads = [coder is not None for coder in coders]
        self._exchange = Exchange(own) if own else None
        self._share = share

    @property
    def led(self) -> int:
        """Elements that this worker exchanges with other nodes."""
        return sum(size for size, leads in zip(self._sizes, self._leads, strict=True) if leads)

    @property
    def traffic(self) -> Traffic:
        """Bytes that this worker sends to other nodes in the next step; those inside a node are not counted."""
        return self._exchange.traffic if self._exchange is not None else Traffic()

    def run(self, inside: Group | None, across: Group | None, flat: Tensor) -> PhaseTimer | None:
        """Do a step, over the node, where it has other workers, and over the leaders, where this worker leads."""
        if inside is not None:
            inside.all_reduce(flat)
        if self._share != 1:
            flat.mul_(self._share)
        parts: Sequence[Tensor] = flat.split(self._sizes)  # type: ignore[no-untyped-call]
        mine = [part for part, leads in zip(parts, self._leads, strict=True) if leads]
        timer = None
        if self._exchange is not None:
            assert across is not None
            timer = self._exchange.run(across, mine, mine)
        for part, leads in zip(parts, self._leads, strict=True):
            if not leads:
                part.zero_()
        if inside is not None:
            inside.all_reduce(flat)
        return timer

    def commit(self, unused: Collection[str] = ()) -> None:
        """Keep the state of the step: it counts, but for the parameters named in `unused`."""
        if self._exchange is not None:
            self._exchange.commit(unused)
