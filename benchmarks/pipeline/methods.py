"""Pipelines of hybridpar and of `torch.distributed.pipelining`, and DDP, behind the same calls."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.rig.task import Loop, Setting, fast_ddp
from hybridpar.comm.world import World
from hybridpar.config import TrainConfig
from hybridpar.errors import DataError
from hybridpar.partition.planning import partition_model, stages_from_plan
from hybridpar.plan import Placement, Plan, parse_plan
from hybridpar.planner.planned_run import PlannedRun
from hybridpar.planner.resolve import resolve
from hybridpar.schedule.layout import Layout
from hybridpar.train.trainer import StepResult, Trainer

#: What all sides do, for the table.
WORK = "forward, backward, SGD with momentum 0.9 (fused); fp32"


class Method(Protocol):
    """One side of a comparison."""

    def step(self) -> None:
        """One step, to its end."""

    def loss(self) -> float:
        """Mean loss of the batch in the last step; the same on all workers. A collective."""

    def close(self) -> None:
        """End what it holds."""


def describe(setting: Setting, micro_batches: int) -> str:
    """A setting as the tables have it."""
    return f"{setting}, {micro_batches} micro-batches"


def cut_on_main(
    setting: Setting, world: World, micro_batches: int, *, replicas: int = 1, link_speed: float | None = None
) -> Plan:
    """Measure the model and cut it into two stages on rank 0; the plan is the same everywhere. A collective."""

    def cut() -> str:
        # A copy: what a stage saves is counted by storages, and a slice has that of the whole batch.
        example = setting.noise()[0][: setting.batch // (micro_batches * replicas)].clone()
        plan = partition_model(setting.build(), example, 2, link_speed=link_speed, threads=1).plan
        placement = Placement(layout=Layout.repeated(Layout.dealt(2, 2).rows[0], replicas), device="cpu")
        return plan.model_copy(update={"placement": placement}).to_json()

    return parse_plan(json.loads(world.from_main(cut)))


class Ours:
    """A model that hybridpar trains as a pipeline.

    Args:
        setting: What is trained.
        plan: How it is cut.
        world: The workers.
        config: Schedule, micro-batches and what is done to gradients.
    """

    def __init__(self, setting: Setting, plan: Plan, world: World, config: TrainConfig) -> None:
        run = resolve(config, world.size, plan, ())
        images, labels = setting.noise()
        self._trainer = Trainer(
            setting.build(),
            setting.optimizer,
            nn.CrossEntropyLoss(),
            config,
            world=world,
            plan=PlannedRun(run),
            example=images[: run.micro_batch_samples(setting.batch)],
        )
        replicas, replica = run.layout.replicas, run.layout.replica_of(world.rank)
        self._batch = images.chunk(replicas)[replica], labels.chunk(replicas)[replica]
        self.result: StepResult | None = None

    def step(self) -> None:
        self.result = self._trainer.step(self._batch)
        self._trainer.wait()

    def loss(self) -> float:
        assert self.result is not None
        return self.result.loss

    def close(self) -> None:
        self._trainer.close()


class Theirs:
    """The same two stages under a schedule of torch.distributed.pipelining, as its documentation sets it up.

    Shapes are found by torch in the first step, which is never timed. The loss is a mean, so gradients are scaled by
    torch (`scale_grads`).

    Args:
        setting: What is trained.
        plan: How it is cut.
        micro_batches: Of a step.
        schedule: Name of torch's class.
        rank: This worker.
    """

    def __init__(self, setting: Setting, plan: Plan, micro_batches: int, schedule: str, rank: int) -> None:
        from torch.distributed import pipelining

        stages = stages_from_plan(setting.build(), plan, relay=True)
        (mine,) = (stage for stage, (worker, _) in enumerate(plan.layout.rows[0]) if worker == rank)
        stage = pipelining.PipelineStage(stages[mine], mine, len(stages), torch.device("cpu"))
        kind: Any = getattr(pipelining, schedule)
        self._schedule = kind(stage, micro_batches, loss_fn=F.cross_entropy)
        self._optimizer = setting.optimizer(stages[mine])
        images, labels = setting.noise()
        self._inputs = (images,) if mine == 0 else ()
        self._target = labels if mine == len(stages) - 1 else None
        self._losses: list[Tensor] = []

    def step(self) -> None:
        self._optimizer.zero_grad()
        self._losses.clear()
        losses = self._losses if self._target is not None else None
        self._schedule.step(*self._inputs, target=self._target, losses=losses, return_outputs=False)
        self._optimizer.step()

    def loss(self) -> float:
        total = torch.stack(self._losses).mean() if self._target is not None else torch.zeros(())
        total = total.detach().double()
        dist.all_reduce(total)
        return float(total)

    def close(self) -> None:
        """Nothing to end."""


class Ddp:
    """DistributedDataParallel in its fastest documented form, on this rank's half of the batch."""

    def __init__(self, setting: Setting, rank: int, ranks: int) -> None:
        self._loop = Loop(setting, fast_ddp)
        images, labels = setting.noise()
        self._batch = images.chunk(ranks)[rank], labels.chunk(ranks)[rank]
        self._loss = torch.zeros(())

    def step(self) -> None:
        self._loss = self._loop.step(*self._batch)

    def loss(self) -> float:
        total = self._loss.double()
        dist.all_reduce(total)
        return float(total) / dist.get_world_size()

    def close(self) -> None:
        """Nothing to end."""


def require_same_loss(methods: Mapping[str, Method], tolerance: float = 1e-4) -> float:
    """Run the first step of every method, and refuse to compare methods that do not compute the same.

    Raises:
        DataError: Losses differ.
    """
    losses: dict[str, float] = {}
    for name, method in methods.items():
        method.step()
        losses[name] = method.loss()
    first = next(iter(losses.values()))
    for name, loss in losses.items():
        if not abs(loss - first) <= tolerance * abs(first):
            raise DataError(
                f"the first loss of {name!r} is {loss}, that of {next(iter(losses))!r} is {first}",
                "Methods with the same weights and the same batch have the same loss.",
                "They do not do the same work, so their times mean nothing.",
            )
    return first
