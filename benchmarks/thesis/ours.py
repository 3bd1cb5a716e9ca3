"""hybridpar's part of the table: measures which layout of stages and replicas is fastest, then runs it.

Stages times replicas is the number of devices; on a single device stages are lanes of it. The choice is made on a few
steps of each layout, before anything that reaches the table, so luck in the choice cannot improve it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import Any, Literal

import torch

from benchmarks.rig.paired import highest, meet
from benchmarks.thesis.task import MOST_PARTS, Task, forget, settle
from hybridpar.comm.world import World
from hybridpar.errors import HybridparError, TrainingError
from hybridpar.plan import ResolvedPlan
from hybridpar.planner.planned_run import PlannedRun
from hybridpar.train.trainer import StepResult, Trainer

OURS = "hybridpar"
STAGES = (1, 2, 4)
MICRO_BATCHES = (2, 4, 8)
SCHEDULE = "greedy"
#: Steps of a layout before those that are timed, and more where a step is captured; then blocks of timed steps, each of
#: which ends when its work has.
PROBE_WARMUP, PROBE_WARMUP_GRAPH, PROBE_BLOCKS, PROBE_STEPS = 3, 15, 3, 10


@dataclass(frozen=True, kw_only=True)
class StageLayout:
    """One way to use the devices: stages of the model, copies of the pipeline, micro-batches, whole steps as graphs."""

    stages: int
    replicas: int
    micro_batches: int
    cuda_graph: Literal["on", "off"] = "off"

    def __str__(self) -> str:
        graph = ", CUDA graphs" if self.cuda_graph == "on" else ""
        return f"{self.stages} stages x {self.replicas} replicas, {self.micro_batches} micro-batches{graph}"


def layouts(workers: int, batch: int, *, graphs: bool, most_stages: int) -> Iterator[StageLayout]:
    """All layouts that fit. Several workers are divided evenly into stages; one has its stages on lanes."""
    for stages in STAGES:
        if stages > most_stages or (workers > 1 and workers % stages):
            continue
        replicas = workers // stages if workers > 1 else 1
        for count in [count for count in MICRO_BATCHES if count >= stages] if stages > 1 else [1]:
            # Every micro-batch needs two samples, for BatchNorm.
            if batch // (replicas * count) >= 2 and replicas * count <= MOST_PARTS:
                for graph in ("off", "on") if graphs else ("off",):
                    yield StageLayout(stages=stages, replicas=replicas, micro_batches=count, cuda_graph=graph)


class Ours:
    """hybridpar on this worker.

    Args:
        task: What it trains.
        world: The workers.
        layout: How they are used.
        plan: The stages, where they are known already.
    """

    def __init__(self, task: Task, world: World, layout: StageLayout, plan: ResolvedPlan | None = None) -> None:
        self._task, self._world, self._layout = task, world, layout
        schedule = SCHEDULE if layout.stages > 1 else None
        samples = max(2, task.batch // (layout.replicas * layout.micro_batches))
        self.trainer = Trainer(
            task.build(),
            config=replace(task.config, nproc=world.size, schedule=schedule, **asdict(layout)),
            total_steps=task.total_steps,
            steps_per_epoch=task.steps,
            world=world,
            example=torch.randn(samples, *task.images.sample_shape) if layout.stages > 1 else None,
            plan=None if plan is None else PlannedRun(plan),
            name=task.model,
        )
        torch.manual_seed(task.seed)

    @property
    def plan(self) -> ResolvedPlan | None:
        """The stages; None where the model is whole."""
        return self.trainer.plan if self.trainer.plan.is_staged else None

    def epoch(self, number: int, most_steps: int | None = None) -> None:
        """Train for one epoch, to the end of its last step.

        Raises:
            TrainingError: A step was skipped, so that not all methods would have trained equally.
        """
        layout, world = self._layout, self._world
        part = world.rank % layout.replicas
        batches = self._task.batches(number, world.device, part, layout.replicas, world.size, layout.micro_batches)
        previous: StepResult | None = None
        for batch in islice(batches, most_steps):
            # As the command does: figures of a step are read when the next one has been issued.
            result = self.trainer.step(batch)
            _require_done(previous)
            previous = result
        self.trainer.wait()
        settle(world.device)
        _require_done(previous)

    @property
    def captured(self) -> bool:
        """Whether steps are replayed from a graph; hybridpar goes on without where it cannot capture them."""
        graph = self.trainer.engine.graph
        return graph is not None and graph.captured

    def accuracy(self) -> float:
        """Share of the test images that are classified rightly; a collective."""
        world = self._world
        return self.trainer.evaluate(self._task.test(world.device, world.rank, world.size)).accuracy

    def close(self) -> None:
        """Release lanes, hooks and process groups."""
        self.trainer.close()


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The fastest layout, its stages (None where the model is whole), and what the table says of the probe."""

    layout: StageLayout
    plan: ResolvedPlan | None
    facts: dict[str, Any]


def choose(task: Task, world: World, graphs: bool, most_stages: int) -> Choice:
    """Run a few steps of every layout and take the fastest; a collective.

    Raises:
        HybridparError: No layout runs; the first one's error.
    """
    began = time.perf_counter()
    times: dict[StageLayout, float] = {}
    plans: dict[StageLayout, ResolvedPlan | None] = {}
    errors: dict[StageLayout, HybridparError] = {}
    for layout in layouts(world.size, task.batch, graphs=graphs, most_stages=most_stages):
        try:
            times[layout], plans[layout] = _probe(task, world, layout)
        except HybridparError as error:  # cutting and building fail on all workers alike
            errors[layout] = error
        forget(world.device)
    if not times:
        raise next(iter(errors.values()))
    best = min(times, key=lambda layout: times[layout])
    facts = {
        "layout": asdict(best),
        "schedule": SCHEDULE if best.stages > 1 else "none",
        "probe_ms": {str(layout): round(value, 3) for layout, value in times.items()},
        "probe_failed": {str(layout): error.what.splitlines()[0] for layout, error in errors.items()},
        "probe_s": round(time.perf_counter() - began, 1),
    }
    return Choice(layout=best, plan=plans[best], facts=facts)


def _probe(task: Task, world: World, layout: StageLayout) -> tuple[float, ResolvedPlan | None]:
    """Median milliseconds per step of the slowest worker, and the stages."""
    ours = Ours(task, world, layout)
    try:
        left = PROBE_WARMUP_GRAPH if layout.cuda_graph == "on" else PROBE_WARMUP
        while left > 0:
            ours.epoch(0, left)
            left -= task.steps
        if layout.cuda_graph == "on" and not ours.captured:
            raise TrainingError("the step was not captured as a CUDA graph")
        steps, blocks = min(PROBE_STEPS, task.steps), []
        for block in range(PROBE_BLOCKS):
            meet()
            begin = time.perf_counter()
            ours.epoch(block, steps)
            blocks.append(highest([(time.perf_counter() - begin) * 1e3 / steps])[0])
        return statistics.median(blocks), ours.plan
    finally:
        ours.close()


def _require_done(result: StepResult | None) -> None:
    if result is not None and result.skipped:
        raise TrainingError(f"step {result.step} of hybridpar was skipped", "A gradient was not finite.", "Lower --lr.")
