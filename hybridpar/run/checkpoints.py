"""When a run saves, as `--checkpoints` says, and what it keeps; and how it goes on from a checkpoint."""

from __future__ import annotations

import math
import time
from typing import Any

from hybridpar.comm.flight import outside
from hybridpar.config import TrainConfig
from hybridpar.formats.checkpoint_files import list_checkpoints, prune_checkpoints, usable
from hybridpar.observe.records import EpochRecord, StepRecord
from hybridpar.observe.summary import read_summary
from hybridpar.run.part import Run, Saver
from hybridpar.run.state import best_checkpoints, best_epochs
from hybridpar.run.timings import Step


class Checkpoints(Saver):
    """Decides when to save, and which checkpoints stay."""

    def __init__(self, config: TrainConfig) -> None:
        self._config, self._rule = config, config.saving
        self._is_sound = True  # whether the weights are worth a checkpoint
        self._saved: tuple[int, ...] | None = None  # what the last checkpoint has
        self._step_before, self._last_time = 0, time.monotonic()

    def start(self, run: Run) -> None:
        """What the run goes on from is saved already."""
        self._step_before, self._last_time = run.trainer.steps_done, time.monotonic()
        if run.state.resumed_from is not None:
            self._saved = _progress(run)

    def begin_step(self, run: Run) -> None:
        """On rank 0: ask for a checkpoint where the last one is old."""
        seconds = self._rule.seconds
        self.wanted = seconds is not None and run.world.is_main and time.monotonic() - self._last_time >= seconds
        if self.wanted:  # the step that saves may be behind the next one that asks
            self._last_time = time.monotonic()

    def record(self, run: Run, record: StepRecord) -> None:
        """Without the guard a loss that is not finite reaches the weights."""
        self._is_sound = self._config.guard or math.isfinite(record.loss)

    def step(self, run: Run, step: Step) -> None:
        """Save after so many steps, or where a worker asked for it."""
        before, self._step_before = self._step_before, step.result.step
        steps = self._rule.steps
        self.due |= step.result.outcome.save or (steps is not None and step.result.step // steps > before // steps)

    def epoch(self, run: Run, end: EpochRecord, *, last: bool) -> None:
        """Save after an epoch, or where it is the last one or among the best."""
        wanted = last or end in best_epochs(self._rule, run.state.tested) or run.over is not None
        if "epoch" in self._rule.every or (not self._rule.never and wanted):
            self.save(run)

    def save(self, run: Run) -> None:
        """Write a checkpoint, if there is something new and it is sound; all workers, after the same step.

        Those that are neither among the last nor among the best are deleted.
        """
        self.due = False
        if not run.trainer.leads or self._saved == _progress(run):
            return
        folder, is_alone = run.folder.checkpoints, self._config.guard or run.trainer.independent
        # In an outer loop losses differ between workers, which all write or none.
        if not (self._is_sound if is_alone else all(run.world.gather(self._is_sound))):
            step = run.trainer.steps_done
            run.progress.warn(f"no checkpoint at step {step}: the loss is not finite; the last good one is kept")
            return
        run.note(run.trainer.fetch())
        run.find_position()
        extra = run.state.to_extra(run.config) | {part.key: part.state() for part in run.parts if part.key}
        with run.clock.away(), outside("saving a checkpoint"):
            run.trainer.save(folder, extra)
        self._saved, self._last_time = _progress(run), time.monotonic()
        if run.world.is_main:
            checkpoints = list_checkpoints(folder)
            best = best_checkpoints(self._rule, run.state.tested, checkpoints)[: self._rule.best]
            prune_checkpoints(folder, {*checkpoints[-self._rule.keep :], *(path for _, path in best)})
        run.progress.message(f"checkpoint saved at step {run.trainer.steps_done}")

    def summary(self, run: Run) -> dict[str, Any]:
        """On rank 0: the best checkpoint, if it is there."""
        checkpoints = list_checkpoints(run.folder.checkpoints) if run.world.is_main else []
        for end, path in best_checkpoints(self._rule, run.state.tested, checkpoints)[:1]:
            fields = {"step": end.step, "test_accuracy": end.test_accuracy, "metric": self._rule.by}
            return {"best": {**fields, "checkpoint": path.relative_to(run.folder.directory).as_posix()}}
        return {}


def _progress(run: Run) -> tuple[int, ...]:
    """What differs between two checkpoints."""
    return run.trainer.steps_done, run.state.epoch, run.state.epoch_step, len(run.state.tested)


def resume(run: Run) -> None:
    """Go on from the checkpoint of a run, if there is any."""
    checkpoint = run.folder.checkpoint
    if checkpoint is None:
        return
    extra = run.trainer.load(checkpoint)
    with usable(checkpoint):
        run.state.go_on_from(extra, run.config, checkpoint)
        for part in run.parts:
            if part.key:
                part.restore(run, extra.get(part.key))
        # An epoch of another number of workers may be a step shorter, see `cut_epoch`.
        run.state.epoch_step = min(run.state.epoch_step, run.samples.per_epoch)
    run.state.resumed_from = run.trainer.steps_done


def is_finished(run: Run) -> bool:
    """Whether a run that is resumed has nothing left to train, and its result is there."""
    result = read_summary(run.folder.directory) if run.folder.continues else None
    return (
        result is not None
        and result["exit"] == "finished"
        and run.state.resumed_from == result["steps"]
        and (result["steps"] >= run.total or run.state.epoch >= run.epochs or run.over is not None)
    )
