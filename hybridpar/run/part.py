"""A run, its trainer, and the base class of its parts: what looks at the steps beside the training loop (`run.py`).

Records, timeline, profile, the search for a batch size, shares, kernels and checkpoints are parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from hybridpar.comm.flight import FLIGHT
from hybridpar.comm.flight import FOLDER as FLIGHT_FOLDER
from hybridpar.comm.world import World
from hybridpar.config import TrainConfig
from hybridpar.observe.loggers import Ending
from hybridpar.observe.progress import Progress
from hybridpar.observe.records import EpochRecord, StepRecord
from hybridpar.plan import ResolvedPlan
from hybridpar.run.data import Samples
from hybridpar.run.directory import RunFolder
from hybridpar.run.state import RunState, why_over
from hybridpar.run.timings import Step, StepClock, Timings
from hybridpar.run.worker import MemoryMeter
from hybridpar.train.trainer import Trainer


class Part:
    """Hooks that do nothing. Those of all parts are called in the order of `Run.parts`.

    All workers call them at the same point of a run, so a hook may be a collective.
    """

    #: The name of its state in a checkpoint; empty where it has none.
    key: ClassVar[str] = ""

    def start(self, run: Run) -> None:
        """The directory of the run is there, and the first step comes next."""

    def begin_epoch(self, run: Run, epoch: int) -> None:
        """The first step of an epoch comes next, or of what a resumed run has left of it."""

    def begin_step(self, run: Run) -> None:
        """A step comes next."""

    def step(self, run: Run, step: Step) -> None:
        """A step of this worker is over."""

    def record(self, run: Run, record: StepRecord) -> None:
        """A step of the run is over; parameter servers tell of those that other workers made, too."""

    def epoch(self, run: Run, end: EpochRecord, *, last: bool) -> None:
        """An epoch is over, and tested."""

    def finish(self, run: Run) -> None:
        """There is no further step; the display is still there."""

    def summary(self, run: Run) -> dict[str, Any]:
        """What it adds to the summary."""
        return {}

    def close(self, run: Run) -> None:
        """The run has ended, perhaps by an error."""

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds of it, as plain values."""
        return {}

    def restore(self, run: Run, state: dict[str, Any] | None) -> None:
        """Go on from what `state` returned; None where the checkpoint was made without this part."""


class Saver(Part):
    """The part that writes checkpoints, as the training loop knows it."""

    #: Whether this worker asks for a checkpoint after the step that comes next.
    wanted = False
    #: Whether all workers save once the steps that are issued are over.
    due = False

    def save(self, run: Run) -> None:
        """Write a checkpoint, if there is something new and it is sound; all workers, after the same step."""
        raise NotImplementedError


class RunTrainer(Trainer):
    """A trainer whose workers make every step together. `ServedTrainer` answers the same for parameter servers."""

    #: Whether each worker goes at its pace, so that it goes through the data for itself, and worker 0 tests and saves.
    independent = False
    #: Whether this worker replaces another that died, and goes on from where the others are.
    joins = False
    #: What is shown of a step that did not count.
    skipped = "was skipped on all workers: a gradient was not finite"

    @property
    def lookahead(self) -> int:
        """Steps that are queued before the figures of one are read, so that reading does not keep a device waiting."""
        return int(self.world.device.type == "cuda" or self.engine.late)

    @property
    def leads(self) -> bool:
        """Whether this worker tests and saves; where workers go together all do, each its part."""
        return not self.independent or self.world.is_main

    def enter(self, folder: RunFolder, written: int) -> bool:
        """Come to the others before the first step, where so many are written; False where the run is over."""
        FLIGHT.open(folder.directory / FLIGHT_FOLDER, self.world.rank, self.world.size)
        return True

    def records(self, record: StepRecord, warn: Callable[[str], None]) -> list[StepRecord]:
        """The steps of the run that are over, now that this worker has made the step of a record."""
        return [record]

    def fetch(self) -> list[StepRecord]:
        """Have here what a checkpoint holds; the steps of the run that were not known before. A collective."""
        return []

    def gather_in_the_end(self, item: object) -> list[object]:
        """An item of each worker that is there still."""
        return self.world.gather(item)

    def summary(self) -> dict[str, Any]:
        """What it adds to the summary; on the worker that writes files."""
        return {}


@dataclass(eq=False, kw_only=True)
class Run:
    """A run on this worker.

    Attributes:
        config: What it is asked for; what options leave open is filled in as it is found.
        model_name: Name of its model.
        world: Its workers.
        progress: Its display.
        notes: Lines to show at the start.
        data_line: What the data set is.
        batch_line: Why `--batch-size auto` chose the batch; empty where it was given.
        folder: Where it writes.
        plan: How it trains.
        samples: What this worker sees of the data.
        trainer: What makes its steps.
        memory: How much memory of the device this worker needs.
        total: Steps to be done.
        epochs: Epochs to be done.
        checkpoints: When it saves.
        parts: All that looks at its steps; `checkpoints` is the last one.
        facts: What its summary says of it before the first step.
        state: How far it is.
        clock: Where the time between two steps goes.
        timings: What its steps took.
        stopping: Whether it ends after this step.
        ending: How it ended.
        warnings: What is to be said at the end.
        written: Files beside its directory, to be named at the end.
    """

    config: TrainConfig
    model_name: str
    world: World
    progress: Progress
    notes: list[str]
    data_line: str = ""
    batch_line: str = ""
    folder: RunFolder = field(init=False)
    plan: ResolvedPlan = field(init=False)
    samples: Samples = field(init=False)
    trainer: RunTrainer = field(init=False)
    memory: MemoryMeter = field(init=False)
    total: int = 0
    epochs: int = 0
    checkpoints: Saver = field(init=False)
    parts: Sequence[Part] = ()
    facts: dict[str, Any] = field(default_factory=dict)
    state: RunState = field(default_factory=RunState)
    clock: StepClock = field(default_factory=StepClock)
    timings: Timings = field(default_factory=Timings)
    stopping: bool = False
    ending: Ending = "failed"
    warnings: list[str] = field(default_factory=list)
    written: list[Path] = field(default_factory=list)

    @property
    def over(self) -> str | None:
        """Why it is to end before its last epoch; None where it goes on."""
        return why_over(self.config.saving, self.state.tested)

    def note(self, records: Iterable[StepRecord]) -> None:
        """Take steps of the run into account."""
        for record in records:
            self.state.losses.add(record.loss, record.samples)
            for part in self.parts:
                part.record(self, record)

    def find_position(self) -> None:
        """Note where in the data the run is, where that follows from the steps of all workers."""
        if self.trainer.independent:
            self.state.epoch, self.state.epoch_step = divmod(self.trainer.steps_done, self.samples.per_epoch)


def sync_of(config: TrainConfig, plan: ResolvedPlan) -> str:
    """How replicas are kept in step, as `--sync` takes it."""
    outer = plan.sync.outer is not None and config.outer is None
    return f"outer:{plan.sync.outer}" if outer else config.sync.strip()
