"""Runs several plans for a few steps each, in turns, and times them.

Every plan runs as a training would run it, by `Trainer`, on the job's own workers. All are open at the same time and
take one step each in a round, so that a disturbance of the machine affects all of them; the time of a step is that of
the slowest worker, and of a plan the median over the rounds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace

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
from hybridpar.train.trainer import Trainer

#: Steps of each plan that are not counted: shapes are found, buckets are cut anew.
FIRST_STEPS = 3


class Trial:
    """A plan that is ready to take steps. Making one is a collective over all workers of the job."""

    def __init__(
        self,
        plan: Plan,
        model: nn.Module,
        images: Tensor,
        targets: Tensor,
        world: World,
        base: TrainConfig,
    ) -> None:
        self._stack = ExitStack()
        self.trainer: Trainer | None = None
        config, workers, stages = replace(base, batch_size=len(images)), plan.workers or 1, len(plan.partition.stages)
        run = resolve(config, workers, plan, (), device=world.device.type)
        if stages > 1 and 1 < workers < world.size:
            raise UsageError(
                f"a pipeline on {workers} of {world.size} workers cannot be tried",
                "Workers that are not used would have to leave the job.",
                f"Start {workers} workers.",
            )
        try:
            own = self._place(world, run)
            if own is None:
                return
            replicas, replica = run.layout.replicas, run.layout.replica_of(own.rank)
            count = run.pipeline.micro_batches
            shares = run.placement.shares or (1.0,) * replicas
            counts = allot(len(targets), shares, FEWEST_PER_PART * count, idle=True, in_pairs=False)
            start = sum(counts[:replica])
            mine = [one[start : start + counts[replica]].tensor_split(count) for one in (images, targets)]
            parts = tuple(zip(*mine, strict=True)) if counts[replica] else ()
            self._batch = Batch(parts, counts[replica], len(targets))
            lanes = self._stack.enter_context(Lanes(own.device))
            self.trainer = Trainer(
                twin_of(model),
                config=config,
                world=own,
                lanes=lanes,
                plan=PlannedRun(run),
                example=images[: run.micro_batch_samples(len(images))],
            )
            self._stack.callback(self.trainer.close)
        except BaseException:
            self.close()
            raise

    def _place(self, world: World, run: ResolvedPlan) -> World | None:
        """The workers of the plan, of which this is one; None where it is not."""
        lanes = run.sync.groups
        workers = run.layout.workers
        if workers == world.size:
            made = World.join(lanes=lanes, timeout=world.timeout, device=world.device)
        else:
            parties = [list(range(workers)), *([rank] for rank in range(workers, world.size))]
            made = world.split(parties, lanes)
        self._stack.callback(made.close)
        return made if world.rank < workers else None

    def step(self) -> None:
        """One step, to its end; nothing on workers that the plan does not use."""
        if self.trainer is not None:
            self.trainer.step(self._batch)
            self.trainer.wait()

    def close(self) -> None:
        """End what it holds. Safe to call twice."""
        self._stack.close()


def time_plans(
    steps: Mapping[str, Callable[[], object]],
    world: World,
    *,
    rounds: int,
    seconds: float | None = None,
) -> dict[str, list[float]]:
    """Time plans in turns; a collective."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    order, begin = list(steps), time.perf_counter()
    for done in range(rounds):
        lap = time.perf_counter()
        for name in order:
            world.barrier()
            started = time.perf_counter()
            steps[name]()
            told: list[float] = world.gather(1e3 * (time.perf_counter() - started))  # type: ignore[assignment]
            times[name].append(max(told))
        order = order[1:] + order[:1]
        spent = time.perf_counter() - begin + (time.perf_counter() - lap)
        late: list[bool] = world.gather(seconds is not None and spent > seconds)  # type: ignore[assignment]
        if done >= 2 and any(late):
            break
    return times


def random_batch(shape: Sequence[int], samples: int, classes: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Images and labels, the same on all workers."""
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(samples, *shape, generator=generator)
    return images.to(device), torch.randint(0, classes, (samples,), generator=generator).to(device)
