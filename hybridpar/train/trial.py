"""Takes steps of a model as a run would take them, on a copy of it, so that they can be timed and compared.

The planner times ways to compute a model, and plans, by real steps: those of a `Trainer` with the options or the plan
in question. Nothing that they do is seen by the model.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from hybridpar.comm.world import World
from hybridpar.config import TrainConfig
from hybridpar.data import Batch
from hybridpar.data.sampling import FEWEST_PER_PART, allot
from hybridpar.errors import UsageError
from hybridpar.lanes import Lanes
from hybridpar.models.state import twin_of
from hybridpar.plan import Plan, ResolvedPlan
from hybridpar.planner.planned_run import PlannedRun
from hybridpar.planner.resolve import resolve
from hybridpar.planner.trials import StepValues, any_loss

#: With such a learning rate float32 weights stay as they are.
_PLAIN = TrainConfig(plan="none", lr=1e-12)
#: Options that a trial does not take from the run: they are of its data, its length and its files, or a plan says them.
_LEFT_OUT = (
    *("plan", "lr", "timeline", "select_batch", "mix", "sync"),
    *("stages", "replicas", "micro_batches", "schedule", "placement", "recompute", "offload", "shares", "compress"),
    "freeze",
)


class Trial:
    """Steps of a copy of a model that can be taken; opening it is a collective of the world's workers.

    Of the options those that say how work is divided do not count: `plan` says it, by default plain data parallelism.
    `example` is the inputs of the whole batch, the same on all workers. `open_trainer` makes the `Trainer`.
    """

    #: The trainer; None on a worker that the plan does not use.
    trainer: Any = None

    def __init__(
        self,
        open_trainer: Callable[..., Any],
        model: nn.Module,
        config: TrainConfig,
        world: World,
        example: Tensor,
        plan: Plan | None = None,
    ) -> None:
        workers = world.size if plan is None else plan.workers or 1
        if plan is not None and 1 < workers < world.size and len(plan.partition.stages) > 1:
            raise UsageError(
                f"a pipeline on {workers} of {world.size} workers cannot be tried",
                "Workers that are not used would have to leave the job.",
                f"Start {workers} workers.",
            )
        plain = {name: getattr(_PLAIN, name) for name in _LEFT_OUT}
        if config.cuda_graph == "auto":  # whoever compares two ways says which has a graph
            config = replace(config, cuda_graph="off")
        config = replace(config, batch_size=len(example), **plain)
        run = resolve(config, workers, plan, (), device=world.device.type)
        #: Steps from one exchange of an outer loop to the next.
        self.interval = run.sync.outer or 1
        is_used = world.rank < workers
        with ExitStack() as opened:
            if not workers == world.size == 1:
                world = _users_of(run, world)
                opened.callback(world.close)
            if is_used:
                self._batch = _share(example, run, world.rank)
                self.trainer = open_trainer(
                    twin_of(model),
                    config=config,
                    loss=any_loss,
                    world=world,
                    lanes=opened.enter_context(Lanes(world.device)),
                    plan=PlannedRun(run),
                    example=example[: run.micro_batch_samples(len(example))],
                )
                opened.callback(self.trainer.close)
            self._opened = opened.pop_all()

    def step(self) -> None:
        """Take a step, to its end; nothing on workers that the plan does not use."""
        if self.trainer is not None:
            self.trainer.step(self._batch)
            self.trainer.wait()

    def values(self) -> StepValues:
        """Take a step of the whole model on this worker, and return what it computed."""
        assert self.trainer is not None
        model, device = self.trainer.model, self.trainer.world.device
        before = _draw_state(device)
        result = self.trainer.step(self._batch)
        self.trainer.wait()
        gradients = {name: p.grad.float().clone() for name, p in model.named_parameters() if p.grad is not None}
        return StepValues(float(result.loss), gradients, draws=not torch.equal(before, _draw_state(device)))

    def close(self) -> None:
        """End what it holds. Safe to call twice."""
        self._opened.close()


def _users_of(run: ResolvedPlan, world: World) -> World:
    """The workers of a plan, or, where this worker is none of them, it alone."""
    workers = run.layout.workers
    if workers == world.size:
        return World.join(lanes=run.sync.groups, timeout=world.timeout, device=world.device)
    return world.split([range(workers), *([rank] for rank in range(workers, world.size))], run.sync.groups)


def _draw_state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _share(example: Tensor, run: ResolvedPlan, rank: int) -> Batch:
    """A worker's micro-batches of a batch."""
    replicas, replica = run.layout.replicas, run.layout.replica_of(rank)
    count = run.pipeline.micro_batches
    shares = run.placement.shares or (1.0,) * replicas
    counts = allot(len(example), shares, FEWEST_PER_PART * count, idle=True, in_pairs=False)
    start = sum(counts[:replica])
    parts = example[start : start + counts[replica]].tensor_split(count) if counts[replica] else ()
    return Batch(tuple((part, part) for part in parts), counts[replica], len(example))
