"""A trainer whose gradients go to parameter servers, and what of its state is where.

Servers hold weights, momentum and clocks; each worker its position in the data, its random numbers and the residuals of
its codecs. Worker 0 brings the servers their first state, and asks them for it when a checkpoint is written.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hybridpar.comm.world import World, default_device
from hybridpar.config import TrainConfig
from hybridpar.errors import SyncError
from hybridpar.machine.launch import StopRequest
from hybridpar.models.state import twin_of
from hybridpar.observe.records import StepRecord
from hybridpar.optim.build import expand
from hybridpar.plan import ResolvedPlan
from hybridpar.planner.planned_run import PlannedRun
from hybridpar.planner.resolve import resolve
from hybridpar.run.directory import RunFolder
from hybridpar.run.part import RunTrainer
from hybridpar.server.engine import ServedEngine
from hybridpar.server.link import Servers, merged_states, shard_starts
from hybridpar.server.process import ServerWorld, find_process
from hybridpar.server.shard import StepRow
from hybridpar.server.wire import AskState, Start, Weights
from hybridpar.train.engine import EngineParts
from hybridpar.train.results import StepResult


def join_servers(config: TrainConfig, job: contextlib.ExitStack) -> ServerWorld | None:
    """The workers of a run with servers, until `job` ends; None on a server, once all workers have left."""
    process = find_process(config)
    if process.is_worker:
        job.enter_context(process.serving(config))
        return ServerWorld(process, default_device(), config.timeout)
    job.callback(StopRequest().release)  # signals are for workers: until they have left, they need the servers to save
    process.serve(config)
    return None


class ServedTrainer(RunTrainer):
    """One worker's part of a training with servers; `steps_done` are those of the servers."""

    engine: ServedEngine
    world: ServerWorld

    def __init__(
        self, model: nn.Module, *, config: TrainConfig, world: ServerWorld, plan: PlannedRun, **known: Any
    ) -> None:
        self._plan = plan.plan
        if self._plan.channels_last:  # before anybody looks where parameters lie
            model.to(memory_format=torch.channels_last)
        asked = expand(config, total_steps=None, replicas=1)  # learning rates per sample
        self.servers = Servers(model, asked, world.rank, world.addresses, world.process.token)
        self.independent = not self.servers.barrier
        if self.independent:
            self.skipped = "did not count a gradient that was not finite"
        #: Of this worker's last push.
        self._latest: StepRecord | None = None
        #: Of a checkpoint that was loaded: clocks and counts of the shards.
        self._progress: Sequence[Mapping[str, Any]] = ()
        alone = replace(asked, sync="allreduce", compress="none", shares="equal")
        self.joins = world.process.joins
        super().__init__(model, config=alone, world=world, plan=PlannedRun(resolve(alone, 1)), **known)

    def _open_engine(self, optimizer: Any, plan: ResolvedPlan, example: Tensor | None) -> ServedEngine:
        self._channels_last, self.peak_rate = plan.channels_last, self.config.peak_lr
        world = World(device=self.world.device, timeout=self.config.timeout)
        parts = EngineParts(self.model, plan, None, optimizer, self._loss, self.config, world, self.lanes)
        return ServedEngine(parts, self.servers)

    @property
    def plan(self) -> ResolvedPlan:
        """What all workers do together."""
        return self._plan

    @property
    def answer(self) -> Weights:
        """What shard 0 said to the last push."""
        return self.engine.gradients.answer

    def step(self, batch: Any, *, stop: bool = False, save: bool = False) -> StepResult:
        """Push the gradient of a batch; the weights are then those of the servers."""
        result = super().step(batch, stop=stop, save=save)
        self.steps_done = self.answer.step
        return replace(result, step=self.steps_done)

    @property
    def lookahead(self) -> int:
        """None: the answer of the servers says what came of a step."""
        return 0

    def records(self, record: StepRecord, warn: Callable[[str], None]) -> list[StepRecord]:
        """What servers told of steps that are over, with their last answer."""
        self._latest = record
        for text in self.answer.news:
            warn(text)
        return self._records_of(self.answer.rows)

    def _records_of(self, rows: Sequence[StepRow]) -> list[StepRecord]:
        """Of steps in which this worker's pushes took a part like its last one."""
        squares, records = self.servers.squares, []
        for row in rows if self._latest is not None else ():
            figures = asdict(row)
            figures |= {"lr": row.lr * self.peak_rate, "skipped": row.skipped > 0}
            figures |= {"epoch": (row.step - 1) // self.steps_per_epoch}
            figures |= {"grad_norm": None if squares is None else math.sqrt(squares)}
            records.append(replace(self._latest, **figures))
        return records

    def gather_in_the_end(self, item: object) -> list[object]:
        """An item of each worker that is there still."""
        return list(self.servers.gather("the end", item).values())

    def summary(self) -> dict[str, Any]:
        """The staleness of all gradients."""
        ages = dict(sorted(self.servers.links[0].ask(AskState()).state["histogram"].items()))
        if not ages:  # no gradient has come
            return {"staleness": None}
        mean = round(sum(age * count for age, count in ages.items()) / sum(ages.values()), 4)
        return {"staleness": {"mean": mean, "most": max(ages), "histogram": {str(age): ages[age] for age in ages}}}

    def _end(self, error: BaseException | None) -> None:
        try:
            super()._end(error)
        finally:
            self.servers.close(graceful=error is None)

    # ------------------------------------------------------------------- begin

    def load(self, path: str | Path) -> dict[str, Any]:
        """Continue from a checkpoint, before `enter`."""
        with self.world.alone():  # who replaces a worker that died does not read it
            extra = super().load(path)
        self._progress = extra.get("shards", [])
        return extra

    def enter(self, folder: RunFolder, written: int) -> bool:
        """Bring weights to servers that have none, and take theirs; False where the run is over.

        A worker that replaces another begins with the weights of now. Worker 0, or all that are in step, hear of the
        steps that come after those which are written.
        """
        main = self.world.is_main
        self.servers.heard = written if main or not self.independent else None
        try:
            welcome = self.servers.come(self._starts if main else None)
        except SyncError:
            if not (self.joins and self.world.process.is_over()):
                raise
            print(f"worker {self.servers.worker} came back when the run was over", file=sys.stderr)
            return False
        self.model.load_state_dict(welcome.rest, strict=False)
        self.engine.gradients.take_weights()
        if self.joins:
            self.steps_done = welcome.step
            self.engine.go_on_from(welcome.step)
        elif not self.steps_done:
            self.engine.load_average_state(self.model.state_dict())
        self.world.go_over(self.servers)
        return True

    def _starts(self) -> list[Start]:
        assert self.total_steps is not None
        workers, progress = self.world.size, self._progress
        return shard_starts(
            self.model,
            self.servers,
            limit=self.total_steps * workers,
            optimizer=self.engine.saved[1],
            progress=progress,
            taken=self.steps_done * workers,
            clock=max((int(shard["clock"]) for shard in progress), default=self.steps_done),
        )

    # -------------------------------------------------------------------- save

    def fetch(self) -> list[StepRecord]:
        """Bring the state of the servers to worker 0, to be saved; the steps that it had not heard of."""
        rows: list[StepRow] = []

        def ask() -> int:
            answers = self.servers.states()
            model = twin_of(self.model).cpu()
            optimizer, progress = merged_states(model, self.servers.stripes, [answer.state for answer in answers])
            self.engine.saved = dict(model.state_dict()), {"kind": self.servers.kind, **optimizer}
            self._progress = progress
            rows.extend(answers[0].rows)
            return int(answers[0].state["taken"]) // self.world.job_size

        self.steps_done = self.world.from_main(ask)
        return self._records_of(rows)

    def save(self, directory: str | Path, extra: Mapping[str, Any] | None = None) -> Path:
        """Write a checkpoint of what `fetch` brought: worker 0 alone, or all workers that are in step."""
        try:
            return super().save(directory, {**(extra or {}), "shards": self._progress})
        finally:
            self.engine.saved = {}, {}
