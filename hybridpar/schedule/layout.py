"""Where the stages of a model run, on all workers of a job.

A job has one or several replicas of a pipeline; a replica runs every stage once, on lanes of its workers. Here is also
the one rule by which workers get their ranks: replicas of a stage have neighbouring ranks, because launchers number the
workers of a host one after the other, and gradients are heavier than activations.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from hybridpar.errors import ScheduleError

#: How stages are dealt out to lanes: `linear` gives each lane one stage; `loop` deals them out round and round; `v`
#: goes up the lanes and down again, so that the first lane also has the last stage.
PlacementKind = Literal["linear", "loop", "v"]

_SLOT = re.compile(r"(\d{1,6})(?:\.(\d{1,6}))?")


@dataclass(frozen=True)
class Edge:
    """One stage uses what another makes. Bytes are per micro-batch.

    Attributes:
        source: The stage that makes it.
        target: The stage that uses it; always a later one.
        bytes: What is sent in the forward pass.
        gradient_bytes: What comes back in the backward pass; 0 where no gradient is needed.
    """

    source: int
    target: int
    bytes: int = 0
    gradient_bytes: int = 0


def chain(stages: int) -> tuple[Edge, ...]:
    """Every stage uses what the one before it makes; sizes are not known."""
    return tuple(Edge(stage, stage + 1, 0, 1) for stage in range(stages - 1))


@dataclass(frozen=True)
class Layout:
    """Where stages run, and what flows between them.

    A schedule, a program and a simulation are about a single replica: `replica` gives its layout, in which workers are
    numbered by position instead of rank. What is said of lanes and positions holds for the first replica.

    Attributes:
        rows: For every replica the rank and the lane that run each stage.
        edges: All pairs of stages between which tensors flow, in ascending order.
    """

    rows: tuple[tuple[tuple[int, int], ...], ...]
    edges: tuple[Edge, ...] = ()

    @classmethod
    def dealt(
        cls,
        stages: int,
        lanes: int,
        kind: str = "linear",
        *,
        workers: int | None = None,
        replicas: int = 1,
        edges: Iterable[Edge] = (),
    ) -> Layout:
        """The usual layouts: stages are dealt out to the lanes of a replica, and lanes in order to its workers.

        By default each worker has a lane. Edges that are not given are from every stage to the next, without sizes.
        """
        workers = lanes if workers is None else workers
        fits = {"linear": stages == lanes, "loop": lanes > 0 and stages % lanes == 0, "v": stages == 2 * lanes}
        if stages < 1 or not fits.get(kind, False) or workers < 1 or lanes % workers:
            raise ScheduleError(
                f"{stages} stages do not fit {lanes} lane(s) of {workers} worker(s) in {kind!r} placement",
                "Linear has one stage per lane, loop a whole number of them, v two; workers have equal numbers of "
                "lanes.",
                "Choose other numbers.",
            )
        row = [divmod(lane, lanes // workers) for lane in _dealt(stages, lanes, kind)]
        return cls.repeated(row, replicas, edges)

    @classmethod
    def repeated(cls, row: Iterable[tuple[int, int]], replicas: int = 1, edges: Iterable[Edge] = ()) -> Layout:
        """Replicas that are all alike, from the position and the lane of each stage."""
        row = list(row)
        rows = tuple(
            tuple((position * replicas + replica, lane) for position, lane in row) for replica in range(replicas)
        )
        return cls(rows, tuple(edges) or chain(len(row)))

    @classmethod
    def unequal(cls, ranks: Iterable[Iterable[int]]) -> Layout:
        """Replicas that may have different numbers of workers, from the rank of each of their stages."""
        rows = tuple(tuple((rank, 0) for rank in row) for row in ranks)
        return cls(rows, chain(len(rows[0])))

    @classmethod
    def parse(cls, texts: Sequence[str]) -> Layout:
        """A layout from what `texts` gives; a ValueError says why it is none."""
        slots = [[_SLOT.fullmatch(part.strip()) for part in text.split(",")] for text in texts]
        rows = tuple(tuple((int(slot[1]), int(slot[2] or 0)) for slot in row if slot) for row in slots)
        if not all(row and all(row) for row in slots) or len({len(row) for row in rows}) != 1:
            raise ValueError(
                f"{list(texts)} is no layout: each replica has a rank, as 1, or a lane of it, as 1.0, for every stage"
            )
        ranks = [rank for row in rows for rank in {rank for rank, _ in row}]
        if sorted(ranks) != list(range(len(ranks))):
            raise ValueError(f"{list(texts)} is no layout: each rank from 0 on is in one replica, and none is left out")
        return cls(rows, chain(len(rows[0])))

    def texts(self) -> tuple[str, ...]:
        """For every replica the rank of each stage; `1.2` is lane 2 of rank 1."""
        return tuple(",".join(f"{rank}.{lane}" if lane else str(rank) for rank, lane in row) for row in self.rows)

    def replica(self, index: int = 0, edges: tuple[Edge, ...] | None = None) -> Layout:
        """The layout of one replica alone, whose workers are numbered by position; default: with the same edges."""
        ranks = self.ranks[index]
        row = tuple((ranks.index(rank), lane) for rank, lane in self.rows[index])
        return Layout((row,), self.edges if edges is None else edges)

    @cached_property
    def _hash(self) -> int:
        return hash((self.rows, self.edges))

    def __hash__(self) -> int:
        return self._hash

    # ------------------------------------------------------------------ workers

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.rows[0])

    @property
    def replicas(self) -> int:
        """Copies of the pipeline."""
        return len(self.rows)

    @cached_property
    def ranks(self) -> tuple[tuple[int, ...], ...]:
        """For every replica the ranks of its workers, by position."""
        return tuple(tuple(sorted({rank for rank, _ in row})) for row in self.rows)

    @cached_property
    def workers(self) -> int:
        """Workers of all replicas."""
        return sum(map(len, self.ranks))

    @cached_property
    def positions(self) -> int:
        """Workers of the replica that has most."""
        return max(map(len, self.ranks))

    @cached_property
    def columns(self) -> tuple[tuple[int, ...], ...]:
        """Workers that add gradients together: for stages that lie on the same workers of all replicas their ranks."""
        return tuple(dict.fromkeys(self.column(stage) for stage in range(self.stages)))

    def column(self, stage: int) -> tuple[int, ...]:
        """For every replica the rank that runs a stage."""
        return tuple(row[stage][0] for row in self.rows)

    @cached_property
    def kinds(self) -> range:
        """Replicas that differ; of all alike the first."""
        patterns = {self.replica(index).rows for index in range(self.replicas)}
        return range(self.replicas if len(patterns) > 1 else 1)

    @property
    def is_equal(self) -> bool:
        """Whether all replicas place their stages alike."""
        return len(self.kinds) < 2

    @cached_property
    def _replica_of(self) -> dict[int, int]:
        return {rank: index for index, ranks in enumerate(self.ranks) for rank in ranks}

    def replica_of(self, rank: int) -> int:
        """The replica that a worker belongs to."""
        return self._replica_of[rank]

    def position_of(self, rank: int) -> int:
        """Which worker of its replica it is."""
        return self.ranks[self.replica_of(rank)].index(rank)

    def peer(self, rank: int, position: int) -> int:
        """The rank of another position in a worker's replica."""
        return self.ranks[self.replica_of(rank)][position]

    # -------------------------------------------------------------------- lanes

    @cached_property
    def _lanes(self) -> list[tuple[int, int]]:
        return sorted(set(self.rows[0]))

    @property
    def lanes(self) -> int:
        """Number of compute lanes over all workers."""
        return len(self._lanes)

    @cached_property
    def lane_of(self) -> tuple[int, ...]:
        """For every stage its lane, numbered over all workers."""
        return tuple(map(self._lanes.index, self.rows[0]))

    @cached_property
    def worker_of(self) -> tuple[int, ...]:
        """For every lane the position of its worker."""
        return tuple(self.ranks[0].index(rank) for rank, _ in self._lanes)

    @cached_property
    def lanes_each(self) -> int:
        """The most lanes of a worker."""
        return max(map(self.worker_of.count, self.worker_of))

    @cached_property
    def kind(self) -> PlacementKind | None:
        """How stages are dealt out to lanes, in the replica that has most of these; None where it is in another way."""
        most = max((self.replica(index) for index in self.kinds), key=lambda replica: replica.lanes)
        if most.lanes == most.stages:
            return "linear"
        kinds: tuple[PlacementKind, ...] = ("loop", "v")
        return next((kind for kind in kinds if most.lane_of == _dealt(self.stages, most.lanes, kind)), None)

    @property
    def is_usual(self) -> bool:
        """Whether stages are where the kind alone puts them, so that they can be dealt out to other workers as well."""
        if self.kind is None or self.lanes % self.positions:
            return False
        usual = Layout.dealt(self.stages, self.lanes, self.kind, workers=self.positions, replicas=self.replicas)
        return self.rows == usual.rows

    def home(self, stage: int) -> int:
        """The position of the worker that runs a stage."""
        return self.worker_of[self.lane_of[stage]]

    def stages_on(self, lane: int) -> list[int]:
        """The stages of a lane, ascending."""
        return [stage for stage in range(self.stages) if self.lane_of[stage] == lane]

    # -------------------------------------------------------------------- edges

    def into(self, stage: int) -> list[Edge]:
        """Edges that end in a stage."""
        return [edge for edge in self.edges if edge.target == stage]

    def out_of(self, stage: int) -> list[Edge]:
        """Edges that begin in a stage."""
        return [edge for edge in self.edges if edge.source == stage]

    def crosses(self, edge: Edge) -> bool:
        """Whether the two stages of an edge are on different workers."""
        return self.home(edge.source) != self.home(edge.target)


def _dealt(stages: int, lanes: int, kind: str) -> tuple[int, ...]:
    """For every stage its lane."""
    return tuple(2 * lanes - 1 - stage if kind == "v" and stage >= lanes else stage % lanes for stage in range(stages))
