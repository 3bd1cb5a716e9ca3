"""A random model in a random layout, drawn by a number, and how it is made."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hybridpar import TrainConfig
from tests.state.joinings import CLASSES, JOININGS
from tests.state.pieces import PIECES, TAGS, WIDTH

#: Steps of a case; after the second there may be a test, and before the third parameters may be thawed.
STEPS = 4

#: Schedules by the placement that they are made for.
SCHEDULES = {
    "linear": ("gpipe", "1f1b", "greedy", None),
    "loop": ("interleaved", "looped_bfs", "greedy", None),
    "v": ("greedy", None),
}


@dataclass(frozen=True)
class Case:
    """What is trained, and how.

    Attributes:
        sizes: Samples of each step, of all replicas together.
        frozen: Share of the parameters that are frozen in the first two steps.
        in_evaluation: Share of the modules that the caller has put into evaluation mode.
        bad_step: Step in which an input is not finite.
        tested: Whether there is a test after the second step.
    """

    seed: int
    joining: str
    pieces: tuple[str, ...]
    workers: int
    replicas: int
    stages: int
    micro_batches: int
    placement: str | None
    schedule: str | None
    recompute: tuple[int, ...]
    batch_norm: str
    optimizer: str
    clip_norm: float | None
    sizes: tuple[int, ...]
    frozen: float
    in_evaluation: float
    bad_step: int | None
    tested: bool

    def has(self, tag: str) -> bool:
        """Whether a piece has a tag of `TAGS`."""
        return not TAGS[tag].isdisjoint(self.pieces)

    @property
    def is_spread(self) -> bool:
        """Whether stages are on several workers."""
        return self.workers > self.replicas

    def build(self) -> nn.Module:
        """The model, equal at every call."""
        before, state = torch.get_default_dtype(), torch.get_rng_state()
        torch.set_default_dtype(torch.float64)
        try:
            torch.manual_seed(self.seed)
            model = JOININGS[self.joining]([PIECES[name]() for name in self.pieces])
        finally:
            torch.set_default_dtype(before)
            torch.set_rng_state(state)
        chance = random.Random(self.seed)
        for module in list(model.modules())[1:]:
            if chance.random() < self.in_evaluation:
                module.eval()
        for parameter in self.thawed(model):
            parameter.requires_grad_(False)
        return model

    def thawed(self, model: nn.Module) -> list[nn.Parameter]:
        """The parameters that are frozen at first and trained later, but for those of the head."""
        chance = random.Random(self.seed)
        trained = [parameter for parameter in model.parameters() if parameter.is_floating_point()][:-2]
        return [parameter for parameter in trained if chance.random() < self.frozen]

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """The optimizer of a model; the epsilon is large, as rounding would be divided by a small norm."""
        if self.optimizer == "adamw":
            return torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
        if self.optimizer == "sgd of trained parameters":
            return torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.05)
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Inputs and targets of each step, then those of the test."""
        generator = torch.Generator().manual_seed(self.seed)
        for step, size in enumerate((*self.sizes, 7)):
            x = torch.randn(size, WIDTH, generator=generator, dtype=torch.float64)
            if step == self.bad_step:
                x[size // 2, 3] = torch.nan
            yield x, torch.randint(CLASSES, (size,), generator=generator)

    @property
    def config(self) -> TrainConfig:
        """Its layout as options of a Trainer."""
        return TrainConfig(
            plan="none",
            stages=self.stages,
            replicas=self.replicas,
            micro_batches=self.micro_batches,
            placement=self.placement,
            schedule=self.schedule,
            recompute=self.recompute,
            batch_norm=self.batch_norm,  # type: ignore[arg-type]
            clip_grad=self.clip_norm,
            timeout=30.0,
        )


def draw(seed: int, workers: int = 1) -> Case:
    """The case of a number; every piece and every joining comes first once in so many numbers as there are."""
    chance = random.Random(f"{seed} on {workers}")
    names, joinings = list(PIECES), list(JOININGS)
    pieces = [names[seed % len(names)], *chance.choices(names, k=chance.randint(1, 4))]
    chance.shuffle(pieces)
    replicas = chance.choice((1, 2)) if workers == 2 else 1
    is_spread = workers > replicas
    stages = chance.choice((2, 2, 4)) if is_spread else chance.choice((1, 2, 2, 2, 3, 3, 4))
    each = stages // workers if is_spread else stages
    placements = ["linear"] if each == 1 else ["linear", "linear", "loop"] + ["v"] * (each == 2)
    placement = chance.choice(placements)
    micro_batches = chance.randint(1, 4)
    sizes = [replicas * (2 * micro_batches + chance.randint(0, 3))] * STEPS
    sizes[chance.randrange(STEPS)] = 2 * micro_batches * replicas
    recompute = tuple(stage for stage in range(stages) if chance.random() < 0.5) if chance.random() < 0.4 else ()
    return Case(
        seed=seed,
        joining=joinings[chance.randrange(len(joinings))],
        pieces=tuple(pieces),
        workers=workers,
        replicas=replicas,
        stages=stages,
        micro_batches=micro_batches,
        placement=placement if stages > 1 else None,
        schedule=chance.choice(SCHEDULES[placement]) if stages > 1 else None,
        recompute=recompute if stages > 1 else (),
        batch_norm="pooled" if replicas == 2 else chance.choice(("local", "pooled")),
        optimizer=chance.choice(("sgd", "adamw", "sgd of trained parameters")),
        clip_norm=chance.choice((None, None, 0.5)),
        sizes=tuple(sizes),
        frozen=chance.choice((0.0, 0.0, 0.3)),
        in_evaluation=chance.choice((0.0, 0.0, 0.3)),
        bad_step=chance.choice((None, None, None, chance.randrange(STEPS)))
        if not TAGS["poisoned"] & {*pieces}
        else None,
        # On two workers each tests the whole model on its share.
        tested=chance.random() < 0.7 and (workers == 1 or TAGS["tested"].isdisjoint(pieces)),
    )
