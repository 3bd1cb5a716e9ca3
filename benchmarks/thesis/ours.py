"""hybridpar's part of the table: measures which layout of stages and replicas is fastest, then runs it.

Stages times replicas is the number of devices; on a single device stages are lanes of it. The choice is made on a few
steps of each layout, before anything that reaches the table, so luck in the choice cannot improve it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import Any, Literal

import torch

from benchmarks.thesis.rounds import Meeting
from benchmarks.thesis.task import Task, forget, settle
from hybridpar.comm.world import World
from hybridpar.config import TrainConfig
from hybridpar.errors import HybridparError, TrainingError
from hybridpar.models import seed_everything
from hybridpar.plan import ResolvedPlan
from hybridpar.planner.planned_run import PlannedRun
from hybridpar.train.trainer import StepResult, Trainer

STAGES = (1, 2, 4)
MICRO_BATCHES = (2, 4, 8)
SCHEDULE: Literal["greedy"] = "greedy"
#: Steps of a layout before those that are timed, and more where a step is captured; then blocks of timed steps, each of
#: which ends when its work has.
PROBE_WARMUP, PROBE_WARMUP_GRAPH, PROBE_BLOCKS = 3, 15, 3


@dataclass(frozen=True, kw_only=True)
class StageLayout:
    """One way to use the devices.

    Attributes:
        stages: Stages of the model.
        replicas: Copies of the pipeline.
        micro_batches: Micro-batches of each replica in a step.
        cuda_graph: Whether whole steps are captured as CUDA graphs.
    """

    stages: int
    replicas: int
    micro_batches: int
    cuda_graph: bool = False

    def __str__(self) -> str:
        graph = ", CUDA graphs" if self.cuda_graph else ""
        return f"{self.stages} stages x {self.replicas} replicas, {self.micro_batches} micro-batches{graph}"

    def config(self, config: TrainConfig) -> TrainConfig:
        """The options of a run that has this layout."""
        return replace(
            config,
            stages=self.stages,
            replicas=self.replicas,
            micro_batches=self.micro_batches,
            schedule=SCHEDULE if self.stages > 1 else None,
            cuda_graph=self.cuda_graph,
        )


def layouts(workers: int, batch: int, *, graphs: bool = False, most_stages: int = STAGES[-1]) -> list[StageLayout]:
    """All layouts that fit.

    Args:
        workers: Workers, each with a device. Several are divided evenly into stages; one has its stages on lanes.
        batch: Samples per step; every micro-batch needs two, for BatchNorm.
        graphs: Each layout also with CUDA graphs.
        most_stages: Layouts of more stages are left out.
    """
    found = []
    for stages in STAGES:
        if stages > most_stages or (workers > 1 and workers % stages):
            continue
        replicas = workers // stages if workers > 1 else 1
        counts = [count for count in MICRO_BATCHES if count >= stages] if stages > 1 else [1]
        for count in counts:
            if batch // (replicas * count) >= 2:
                found += [
                    StageLayout(stages=stages, replicas=replicas, micro_batches=count, cuda_graph=graph)
                    for graph in ((False, True) if graphs else (False,))
                ]
    return found


class Ours:
    """hybridpar on this worker.

    Args:
        task: What it trains.
        world: The workers.
        layout: How they are used.
        plan: The stages, where they are known already.
    """

    def __init__(self, task: Task, world: World, layout: StageLayout, plan: ResolvedPlan | None = None) -> None:
        self._task = task
        self._world = world
        self._layout = layout
        config = layout.config(task.config)
        samples = max(2, task.setting.batch // (layout.replicas * layout.micro_batches))
        model = task.build()
        self.trainer = Trainer(
            model,
            config=config,
            total_steps=task.total_steps,
            steps_per_epoch=task.steps,
            world=world,
            example=torch.randn(samples, *task.data.sample_shape) if layout.stages > 1 else None,
            plan=None if plan is None else PlannedRun(plan),
            name=task.setting.model,
        )
        seed_everything(task.seed)

    @property
    def plan(self) -> ResolvedPlan | None:
        """The stages; None where the model is whole."""
        return self.trainer.plan if self.trainer.plan.is_staged else None

    def epoch(self, number: int, most_steps: int | None = None) -> None:
        """Train for one epoch, to the end of its last step.

        Raises:
            TrainingError: A step was skipped, so that not all methods would have trained equally.
        """
        replicas = self._layout.replicas
        batches = self._task.batches(
            number,
            self._world.rank % replicas,
            replicas,
            readers=self._world.size,
            micro_batches=self._layout.micro_batches,
        )
        held: StepResult | None = None
        for batch in islice(batches, most_steps):
            # As the command does: figures of a step are read when the next one has been issued.
            held, last = self.trainer.step(batch), held
            _require(last)
        self.wait()
        _require(held)

    @property
    def captured(self) -> bool:
        """Whether steps are replayed from a graph; hybridpar goes on without where it cannot capture them."""
        graph = self.trainer.engine.graph
        return graph is not None and graph.captured

    def wait(self) -> None:
        """Wait for every step that was issued."""
        if self.trainer.plan.is_staged:
            self.trainer.engine.pipeline.wait()
        settle(self._task.device)

    def accuracy(self) -> float:
        """Share of the test images that are classified rightly; a collective."""
        return self.trainer.evaluate(self._task.test(self._world.rank, self._world.size)).accuracy

    def close(self) -> None:
        """Release lanes, hooks and process groups."""
        self.trainer.close()


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What the probe found.

    Attributes:
        layout: The fastest layout.
        plan: Its stages; None where the model is whole.
        step_ms: Milliseconds per step of every layout that ran, by its words.
        failed: First lines of the errors of those that did not.
        seconds: How long choosing took.
    """

    layout: StageLayout
    plan: ResolvedPlan | None
    step_ms: Mapping[str, float]
    failed: Mapping[str, str]
    seconds: float

    def facts(self) -> dict[str, Any]:
        """What the table says of it."""
        return {
            "layout": asdict(self.layout),
            "schedule": SCHEDULE if self.layout.stages > 1 else "none",
            "probe_ms": {name: round(value, 3) for name, value in self.step_ms.items()},
            "probe_failed": dict(self.failed),
            "probe_s": round(self.seconds, 1),
        }


def choose(task: Task, world: World, candidates: list[StageLayout], steps: int, meeting: Meeting) -> Choice:
    """Run a few steps of every layout and take the fastest; a collective.

    Args:
        task: What is trained.
        world: The workers.
        candidates: Layouts to try.
        steps: Timed steps of each, in each of three blocks.
        meeting: Where the workers wait for each other.

    Raises:
        HybridparError: No layout runs; the first one's error.
    """
    began = time.perf_counter()
    times: dict[StageLayout, float] = {}
    plans: dict[StageLayout, ResolvedPlan | None] = {}
    errors: dict[StageLayout, HybridparError] = {}
    for layout in candidates:
        try:
            times[layout], plans[layout] = _probe(task, world, layout, steps, meeting)
        except HybridparError as error:  # cutting and building fail on all workers alike
            errors[layout] = error
        forget(task.device)
    if not times:
        raise next(iter(errors.values()))
    best = min(times, key=lambda layout: times[layout])
    return Choice(
        layout=best,
        plan=plans[best],
        step_ms={str(layout): value for layout, value in times.items()},
        failed={str(layout): error.what.splitlines()[0] for layout, error in errors.items()},
        seconds=time.perf_counter() - began,
    )


def _probe(
    task: Task, world: World, layout: StageLayout, steps: int, meeting: Meeting
) -> tuple[float, ResolvedPlan | None]:
    """Median milliseconds per step of the slowest worker, and the stages."""
    ours = Ours(task, world, layout)
    try:
        left = PROBE_WARMUP_GRAPH if layout.cuda_graph else PROBE_WARMUP
        while left > 0:
            ours.epoch(0, left)
            left -= task.steps
        if layout.cuda_graph and not ours.captured:
            raise TrainingError("the step was not captured as a CUDA graph")
        blocks = []
        for block in range(PROBE_BLOCKS):
            meeting.meet()
            begin = time.perf_counter()
            ours.epoch(block, steps)
            blocks.append(meeting.highest((time.perf_counter() - begin) * 1e3 / min(steps, task.steps)))
        return statistics.median(blocks), ours.plan
    finally:
        ours.close()


def _require(result: StepResult | None) -> None:
    """A skipped step would mean that methods were not trained equally."""
    if result is not None and result.skipped:
        raise TrainingError(f"step {result.step} of hybridpar was skipped", "A gradient was not finite.", "Lower --lr.")
