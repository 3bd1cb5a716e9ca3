"""Trains with every codec under random delays of workers, to find collectives that deadlock.

Collectives that one worker starts in another order hang once in a thousand steps, without an error. Every registered
codec trains a small model with buckets of a random size on a random number of sync lanes, while random pauses make
workers late in ever other places. All of it follows from a seed. A hang ends by the time-out of the process groups.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hybridpar.comm.world import World
from hybridpar.compress import CODECS
from hybridpar.pipeline.engine import PipelineEngine
from hybridpar.pipeline.stage_module import WholeModel
from hybridpar.pipeline.step import whole_options
from hybridpar.sync.stage_gradients import SyncOptions
from tests.lanes.checked import Checker, Lanes
from tests.pipeline.oracle import run_step, step_optimizer
from tests.ranks import run_ranks

#: Process groups that are made; a hunt uses some of them.
LANES = 4


class Prey(nn.Module):
    """Layers of every kind that codecs tell apart, one that only some workers use, and a parameter without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 12, 3)
        self.norm = nn.BatchNorm2d(12)
        self.wide = nn.Linear(12 * 4, 40)
        self.rare = nn.Linear(40, 40)
        self.deep = nn.Sequential(*(nn.Linear(40, 40) for _ in range(4)))
        self.last = nn.Linear(40, 3)
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.uses_rare = False

    def forward(self, images: Tensor) -> Tensor:
        x = self.wide(F.relu(self.norm(self.conv(images))).flatten(1))
        x = self.deep(F.relu(self.rare(x) if self.uses_rare else x))
        return self.last(x) + self.empty.sum()  # type: ignore[no-any-return]


def for_small(name: str) -> str:
    """The codec without its least size, where it has one, so that it compresses layers as small as these, too."""
    return f"{name}:least=32" if hasattr(CODECS.get(name), "least") else name


def pause(chance: random.Random) -> None:
    if chance.random() < 0.05:
        time.sleep(chance.random() * 2e-3)


def chase(world: World, codec: str, seed: int, steps: int, checked: bool = False) -> Tensor:
    """Train for some steps, and return the weights, which must be equal on all workers."""
    shared, own = random.Random(f"{codec}/{seed}"), random.Random(f"{codec}/{seed}/{world.rank}")
    torch.manual_seed(seed)
    model = Prey()
    options = SyncOptions(bucket_bytes=shared.choice((1, 2_000, 8_000, 1 << 20)), codec=for_small(codec), seed=seed)
    count = shared.randint(1, LANES)
    few = World(
        world.rank,
        world.size,
        timeout=world.timeout,
        lane_groups=world.lane_groups[:count],
        control_group=world.control_group,
        control=world.control,
        transport=world.transport,
    )
    for parameter in model.parameters():
        parameter.register_hook(lambda _: pause(own))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    draw = torch.Generator().manual_seed(seed * 10 + world.rank)

    def loss(output: Tensor, labels: Tensor) -> Tensor:
        # Now and then a step that must not count anywhere.
        return F.cross_entropy(output, labels) * (float("inf") if own.random() < 0.03 else 1.0)

    def step_of(_: nn.Module) -> Callable[[float | None, Tensor | None], None]:
        return lambda factor, commit, unwritten: step_optimizer(optimizer, unwritten)

    whole = whole_options(few.size, sync=options)
    with Lanes("cpu", check=Checker(seed=seed + world.rank) if checked else None) as lanes:
        engine = PipelineEngine(model, [WholeModel(model)], few, lanes, loss, step_of, whole, 1)
        for step in range(steps):
            images, labels = torch.randn(4, 3, 4, 4, generator=draw), torch.randint(0, 3, (4,), generator=draw)
            model.uses_rare = own.random() < 0.3
            run_step(engine, [(images, labels)], engine.executor.count_samples(4), rate_factor=0.01)
            pause(own)
            if step % 50 == 0:
                assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())
        engine.close()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def chase_all(world: World, codecs: Sequence[str], seed: int, steps: int, checked: bool = False) -> list[Tensor]:
    """Several codecs, one after the other."""
    return [chase(world, codec, seed, steps, checked) for codec in codecs]


def require_equal(codecs: Iterable[str], found: Sequence[Sequence[Tensor]]) -> None:
    """All workers have the same weights, bit for bit, for every codec."""
    for codec, *weights in zip(codecs, *found, strict=True):
        for other in weights[1:]:
            assert torch.equal(weights[0], other), f"replicas differ under {codec}"


@pytest.mark.parametrize(("workers", "checked"), [(3, False), (2, True)])
def test_some_steps_of_every_codec(workers: int, checked: bool) -> None:
    where = {"lanes": LANES, "timeout": 150, "shared_memory": False}
    found = run_ranks(chase_all, workers, list(CODECS), 3, 4, checked, **where)
    require_equal(CODECS, found)
