"""Sets up hybridpar and `torch.distributed.pipelining` behind the same three calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from benchmarks.pipeline.setups import Setting, optimizer_of, optimizer_step
from hybridpar.comm.world import World
from hybridpar.errors import DataError
from hybridpar.lanes import Lanes
from hybridpar.partition.planning import stages_from_plan
from hybridpar.pipeline.engine import PipelineEngine, PipelineOptions
from hybridpar.pipeline.step import LateOutcome, StepRequest
from hybridpar.plan import Plan
from hybridpar.schedule.costs import Costs, Link
from hybridpar.schedule.layout import Layout
from hybridpar.schedule.schedules import ScheduleRequest, make_all
from hybridpar.sync.options import SyncOptions


class Ours:
    """A model that hybridpar trains as a pipeline. `step` returns when the step is over on this worker.

    Args:
        setting: What is trained.
        plan: How it is cut.
        world: The workers.
        schedule: Name of the schedule.
        sync: How gradients are synchronised; by default with the guard, and BatchNorm's statistics pooled.
        threads: Intra-op threads of a lane.
        lanes_of_sync: Lanes that gradients are sent on.
        link: What the schedule `greedy` is told of the link.
    """

    def __init__(
        self,
        setting: Setting,
        plan: Plan,
        world: World,
        schedule: str,
        *,
        sync: SyncOptions | None = None,
        threads: int = 1,
        lanes_of_sync: int = 2,
        link: Link | None = None,
        times: tuple[tuple[float, ...], tuple[float, ...]] | None = None,
    ) -> None:
        self.setting = setting
        replicas = world.size // plan.layout.workers
        sections = plan.partition.stages
        self.model = setting.build()
        stages = stages_from_plan(self.model, plan)
        forward, backward = times or (
            tuple(stage.forward_ms or 0.0 for stage in sections),
            tuple(stage.backward_ms or 0.0 for stage in sections),
        )
        layout = Layout.repeated(plan.layout.rows[0], replicas)
        request = ScheduleRequest(layout, setting.micro_batches, Costs(forward, backward, link=link or Link()))
        options = PipelineOptions(
            layout,
            make_all(schedule, request),
            threads=threads,
            costs=Costs(forward, backward),
            sync=sync or SyncOptions(),
            sync_lanes=lanes_of_sync,
        )
        self.lanes = Lanes("cpu")
        self.engine = PipelineEngine(
            self.model, stages, world, self.lanes, F.cross_entropy, optimizer_step, options, setting.micro_batches
        )
        images, labels = setting.data(replicas, self.engine.replica)
        count = setting.micro_batches
        self.micro_batches = list(zip(images.chunk(count), labels.chunk(count), strict=True))
        self.outcome: LateOutcome | None = None

    def step(self) -> None:
        """One step, to its end."""
        samples = sum(len(labels) for _, labels in self.micro_batches)
        self.outcome = self.engine.executor.step(StepRequest(self.micro_batches, samples), self.setting.batch)
        self.engine.wait()

    def loss(self) -> float:
        """Mean loss of the batch in the last step; the same on all workers."""
        assert self.outcome is not None
        return self.outcome.loss

    def transport(self) -> str:
        """The transport by which activations are sent."""
        ends = self.engine.grid.senders.values() if self.engine.grid is not None else ()
        return next((end.group.transport for end in ends), "none")

    def close(self) -> None:
        """End lanes, channels and process groups."""
        self.engine.wait()
        self.engine.close()
        self.lanes.close()


class Theirs:
    """The same two stages under a schedule of torch.distributed.pipelining, as its documentation sets it up.

    Shapes are found by torch in the first step, which is never timed. The loss is a mean, so gradients are scaled by
    torch (`scale_grads`).

    Args:
        setting: What is trained.
        plan: How it is cut.
        schedule: Name of torch's class.
        rank: This worker.
    """

    def __init__(self, setting: Setting, plan: Plan, schedule: str, rank: int) -> None:
        from torch.distributed import pipelining

        self.setting = setting
        model = setting.build()
        stages = stages_from_plan(model, plan, relay=True)
        (mine,) = (stage for stage, (worker, _) in enumerate(plan.layout.rows[0]) if worker == rank)
        stage = pipelining.PipelineStage(stages[mine], mine, len(stages), torch.device("cpu"))
        kind: Any = getattr(pipelining, schedule)
        self._schedule = kind(stage, setting.micro_batches, loss_fn=F.cross_entropy)
        self._optimizer = optimizer_of(stages[mine])
        images, labels = setting.data()
        self._arguments = (images,) if mine == 0 else ()
        self._target = labels if mine == len(stages) - 1 else None
        self._losses: list[Tensor] = []

    def step(self) -> None:
        """One step, to its end."""
        self._optimizer.zero_grad()
        self._losses.clear()
        losses = self._losses if self._target is not None else None
        self._schedule.step(*self._arguments, target=self._target, losses=losses, return_outputs=False)
        self._optimizer.step()

    def loss(self) -> float:
        """Mean loss of the batch in the last step; the same on all workers. A collective."""
        total = torch.stack(self._losses).mean() if self._target is not None else torch.zeros(())
        total = total.detach().double()
        dist.all_reduce(total)
        return float(total)

    def close(self) -> None:
        """Nothing to end."""


class Method(Protocol):
    """One side of a comparison."""

    def step(self) -> None:
        """One step, to its end."""

    def loss(self) -> float:
        """Mean loss of the batch in the last step; the same on all workers."""

    def close(self) -> None:
        """End what it holds."""


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
