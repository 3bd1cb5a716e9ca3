"""Replicas with rank 0's weights, which are sent only where workers built others."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import nn

from hybridpar.comm import replicate as replicating
from hybridpar.comm.world import World
from tests.ranks import run_ranks


def _replicated(world: World, differs: str) -> tuple[int, list[torch.Tensor]]:
    torch.manual_seed(world.rank if differs == "all" else 0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 2)).to(memory_format=torch.channels_last)
    if world.rank == 1 and differs == "a counter":
        net[1].num_batches_tracked.add_(1)
    if world.rank == 1 and differs == "a bit":
        with torch.no_grad():
            net[2].bias[1] = -net[2].bias[1]
    with mock.patch.object(replicating.dist, "broadcast", side_effect=replicating.dist.broadcast) as sent:
        replicating.replicate(net, world)
    return sent.call_count, [one.clone() for one in net.state_dict().values()]


@pytest.mark.parametrize("differs", ["nothing", "a bit", "a counter", "all"])
def test_workers_get_the_weights_of_rank_0_which_are_sent_where_any_differ(differs: str) -> None:
    (sent, first), (_, other) = run_ranks(_replicated, 2, differs)
    assert bool(sent) == (differs != "nothing")
    assert all(map(torch.equal, first, other))
