"""Sets up hybridpar, `torch.distributed.pipelining` and a hand-written loop behind the same three calls."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.pipeline.setups import Setting, optimizer_of, optimizer_step, placement_of
from benchmarks.rig.paired import balanced_orders
from hybridpar.comm.world import World
from hybridpar.errors import DataError
from hybridpar.lanes import Lanes
from hybridpar.partition.cost import Link
from hybridpar.partition.planning import stages_from_plan
from hybridpar.partition.stage import Stage
from hybridpar.pipeline.engine import PipelineEngine, PipelineOptions
from hybridpar.pipeline.step import LateOutcome
from hybridpar.plan import Plan
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
        lane_of, worker_of = placement_of(plan)
        replicas = world.size // (max(worker_of) + 1)
        sections = plan.partition.stages
        self.model = setting.build()
        stages = stages_from_plan(self.model, plan)
        forward, backward = times or (
            tuple(stage.forward_ms or 0.0 for stage in sections),
            tuple(stage.backward_ms or 0.0 for stage in sections),
        )
        options = PipelineOptions(
            lane_of,
            worker_of,
            schedule=schedule,
            threads=threads,
            forward_ms=forward,
            backward_ms=backward,
            latency_ms=link.latency_ms if link else 0.0,
            bytes_per_second=link.bytes_per_second if link else None,
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
        self.outcome = self.engine.step(self.micro_batches, self.setting.batch)
        self.engine.wait()

    def loss(self) -> float:
        """Mean loss of the batch in the last step; the same on all workers."""
        assert self.outcome is not None
        return self.outcome.loss

    def transport(self) -> str:
        """The transport by which activations are sent."""
        ends = self.engine.grid.senders.values() if self.engine.grid is not None else ()
        return next((end.transport for end in ends), "none")

    def close(self) -> None:
        """End lanes, channels and process groups."""
        self.engine.wait()
        self.engine.close()
        self.lanes.close()


class _Alias(torch.autograd.Function):
    """The same memory under another tensor, which is no view."""

    @staticmethod
    def forward(context: Any, tensor: Tensor) -> Tensor:
        return tensor.data

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return gradient


class _Outlet(nn.Module):
    """A stage as torch's split backward passes need it.

    They detach a stage's outputs in place, which is an error where an operation of the stage has saved its output, as
    ReLU does. An alias costs nothing and can be detached.
    """

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, *inputs: Tensor) -> Any:
        result = self.stage(*inputs)
        if isinstance(result, tuple):
            return tuple(_Alias.apply(tensor) if tensor.requires_grad else tensor for tensor in result)
        return result


class Theirs:
    """The same stages under a schedule of torch.distributed.pipelining, as its documentation sets it up.

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
        lane_of, worker_of = placement_of(plan)
        model = setting.build()
        stages = stages_from_plan(model, plan, relay=True)
        mine = [index for index, lane in enumerate(lane_of) if worker_of[lane] == rank]
        modules = {index: _Outlet(stages[index]) if schedule in SPLIT else stages[index] for index in mine}
        wrapped = [
            pipelining.PipelineStage(module, index, len(stages), torch.device("cpu"))
            for index, module in modules.items()
        ]
        kind: Any = getattr(pipelining, schedule, None) or getattr(pipelining.schedules, schedule)
        single = schedule in SINGLE
        self._schedule = kind(wrapped[0] if single else wrapped, setting.micro_batches, loss_fn=F.cross_entropy)
        self._optimizer = optimizer_of(*modules.values())
        images, labels = setting.data()
        self._arguments = (images,) if 0 in mine else ()
        self._target = labels if len(stages) - 1 in mine else None
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


#: Torch's schedules for one stage per rank, and all of them with the number of stages and the placement on 2 ranks.
SINGLE = ("ScheduleGPipe", "Schedule1F1B")
SPLIT = ("ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble", "ScheduleDualPipeV")
SCHEDULES_OF_TORCH: Mapping[str, tuple[int, str]] = {
    "Schedule1F1B": (2, "linear"),
    "ScheduleGPipe": (2, "linear"),
    "ScheduleInterleaved1F1B": (4, "loop"),
    "ScheduleLoopedBFS": (4, "loop"),
    "ScheduleInterleavedZeroBubble": (4, "loop"),
    "ScheduleZBVZeroBubble": (4, "v"),
    "ScheduleDualPipeV": (4, "v"),
}


class ByHand:
    """One process, the whole model, micro-batches one after another; `threads` intra-op threads.

    Args:
        setting: What is trained.
        threads: Intra-op threads.
    """

    def __init__(self, setting: Setting, threads: int = 1) -> None:
        self._threads = threads
        self._model = setting.build()
        self._optimizer = optimizer_of(self._model)
        images, labels = setting.data()
        count = setting.micro_batches
        self._batches = list(zip(images.chunk(count), labels.chunk(count), strict=True))
        self._loss = 0.0

    def step(self) -> None:
        """One step."""
        before = torch.get_num_threads()
        torch.set_num_threads(self._threads)
        self._optimizer.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        for images, labels in self._batches:
            loss = F.cross_entropy(self._model(images), labels) / len(self._batches)
            loss.backward()
            total += loss.detach()
        self._optimizer.step()
        torch.set_num_threads(before)
        self._loss = float(total)

    def loss(self) -> float:
        """Mean loss of the batch in the last step."""
        return self._loss

    def close(self) -> None:
        """Nothing to end."""


def fastest(methods: Mapping[str, Callable[[], object]], rounds: int, seed: int = 0) -> dict[str, float]:
    """A short interleaved run to choose candidates by: median milliseconds of each, of the slowest rank.

    What is chosen is measured again, so that luck in the choice does not reach a table.
    """
    times: dict[str, list[float]] = {name: [] for name in methods}
    orders = balanced_orders(methods, seed)
    for number in range(rounds + 1):
        for name in next(orders):
            if dist.is_initialized():
                dist.barrier()
            begin = time.perf_counter()
            methods[name]()
            took = torch.tensor([time.perf_counter() - begin], dtype=torch.float64)
            if dist.is_initialized():
                dist.all_reduce(took, dist.ReduceOp.MAX)
            if number:  # the first steps find shapes and allocate
                times[name].append(float(took) * 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


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
