"""Why: a hook may neither share a process group with DDP nor wait for a worker that is configured in another way.

Groups are made here, in one order on all workers, when the hook is: for each lane one on which the codec exchanges, and
one inside of the node where gradients are added there first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from hybridpar.compress.codec import Collective
from hybridpar.compress.group import Group, TorchGroup, open_group
from hybridpar.compress.hierarchy import Nodes
from hybridpar.errors import UsageError
from hybridpar.formats.messages import gather_items
from hybridpar.machine.process import host_identity


@dataclass(frozen=True)
class Paths:
    """How a lane reaches the others.

    Attributes:
        codec: Those with whom this worker exchanges by the codec; None where it leads nothing in its node.
        inside: The node, where gradients are added there first and it has other workers.
        groups: All process groups, to be destroyed.
    """

    codec: Group | None
    inside: Group | None
    groups: tuple[Any, ...]

    def add(self, tensor: Tensor) -> None:
        """Add over the node."""
        if self.inside is not None:
            self.inside.all_reduce(tensor, Collective.SUM)


def open_paths(nodes: Nodes | None, group: dist.ProcessGroup | None, timeout: float) -> Paths:
    """Make the process groups of a lane; a collective.

    Args:
        nodes: Which workers are on which node; None where the codec is used between all.
        group: The workers; None for all of the job.
        timeout: Seconds after which a silent worker is an error.
    """
    everybody = tuple(range(dist.get_world_size(group)))
    codec = _own_group([everybody] if nodes is None else nodes.columns[: nodes.leaders], group, timeout)
    inside = None if nodes is None else _own_group([node for node in nodes.members if len(node) > 1], group, timeout)
    return Paths(
        TorchGroup(codec) if codec is not None else None,
        TorchGroup(inside) if inside is not None else None,
        tuple(one for one in (codec, inside) if one is not None),
    )


def _own_group(parties: Sequence[Sequence[int]], group: dist.ProcessGroup | None, timeout: float) -> Any:
    """Make a process group of each party of the group's ranks, and return this worker's; None where it is in none."""
    jobs = dist.get_process_group_ranks(group) if group is not None else list(range(dist.get_world_size()))
    mine, own = None, dist.get_rank(group)
    for party in parties:
        if group is None or own in party:
            # Inside of a part of the job only the members make a group: the rest knows nothing of this hook.
            made = open_group([jobs[rank] for rank in party], timeout, members_only=group is not None)
            mine = made if own in party else mine
    return mine


def require_agreement(mine: tuple[str, int, int, bool], group: dist.ProcessGroup | None) -> list[str]:
    """All workers use the same codec; a collective.

    Args:
        mine: Codec, seed, lanes, and whether it is hierarchical.
        group: The workers; None for all of the job.

    Returns:
        The node of each worker.

    Raises:
        UsageError: They do not.
    """
    answers = gather_items((mine, host_identity()), group)
    if len({own for own, _ in answers}) > 1:
        table = "; ".join(
            f"worker {rank}: {codec}, seed {seed}, {lanes} lane(s){', hierarchical' if hierarchical else ''}"
            for rank, ((codec, seed, lanes, hierarchical), _) in enumerate(answers)
        )
        raise UsageError(f"the workers do not agree: {table}", "One codec is used by all.", "Start all alike.")
    return [node for _, node in answers]
