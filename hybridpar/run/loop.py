"""What a training run shows, writes and decides beside its steps: the display, the metrics, the rule for saving, the
best result and the final report.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

from hybridpar.config import TrainConfig
from hybridpar.data import TestBatches
from hybridpar.machine.launch import end_at_once, note_orderly_end
from hybridpar.machine.process import TUNED_VARIABLE
from hybridpar.machine.process import describe as describe_process
from hybridpar.observe.files import replace_file
from hybridpar.observe.logger import Ending, LoggedRun, Loggers, logger_names
from hybridpar.observe.metrics import MetricsWriter, read_metrics
from hybridpar.observe.progress import Progress
from hybridpar.observe.records import EpochRecord, RunInfo, StepRecord
from hybridpar.plan import Plan
from hybridpar.run.best import keep_rule, stop_rule
from hybridpar.run.data import untested
from hybridpar.run.directory import plain_options
from hybridpar.run.figures import best_fields
from hybridpar.run.position import Standing
from hybridpar.run.save_rule import SaveRule
from hybridpar.run.timings import RunningMean
from hybridpar.train.checkpoint_files import prune_checkpoints
from hybridpar.train.evaluation import Evaluation
from hybridpar.train.trainer import Trainer


class RunLog:
    """What a worker shows, writes and decides of a run beside its steps."""

    #: What is known before the first step.
    info: RunInfo
    #: What the data set is, in a line, and the steps of the run.
    data_line: str
    total: int
    #: Why `--batch-size auto` chose the batch.
    batch_line: str = ""
    #: This worker's share of the test set.
    test: TestBatches
    trainer: Trainer

    def __init__(
        self,
        config: TrainConfig,
        model_name: str,
        rule: SaveRule,
        progress: Progress,
        is_main: bool,
        changes: Sequence[str] = (),
    ) -> None:
        self.config, self.model_name = config, model_name
        self.rule, self.progress, self.is_main = rule, progress, is_main
        self.at = Standing()
        self.keep_rule, self.stop_rule = keep_rule(config), stop_rule(config)
        self._changes = changes
        self._writer: MetricsWriter | None = None
        self._loggers: Loggers | None = None
        self._ending: Ending = "failed"
        self._sound = True
        self._last_save = time.monotonic()
        self._saved: object = None
        self._begin_epoch()

    # ------------------------------------------------------------------- parts

    def _open_loggers(self) -> Loggers:
        facts = ("workers", "device", "stages", "replicas", "micro_batches", "schedule", "codec", "parameters")
        options = {"model": self.model_name, **plain_options(self.config)}
        options |= {name: getattr(self.info, name) for name in facts}
        run = LoggedRun(self.at.directory, self.info, options, self.at.resumed_from)
        return Loggers(logger_names(self.config.log), run)

    def _close_loggers(self, loggers: Loggers) -> None:
        loggers.close(self._ending)
        self._tell(loggers.news())
        if loggers.are_stuck:
            end_at_once()

    def _tell(self, news: Sequence[str]) -> None:
        for text in news:
            self.progress.message(text)

    def _opening_notes(self) -> list[str]:
        tuned = [describe_process()] if os.environ.get(TUNED_VARIABLE) == "1" else []
        compiled = ["compile  the first step compiles the model, which may take minutes"] if self.config.compile else []
        return [*tuned, *compiled, *self._changes]

    def _begin_with(self, plan: Plan, device: str, **facts: Any) -> RunInfo:
        """What is known before the first step of a plan, which worker 0 writes."""
        assert plan.pipeline is not None
        if self.is_main:
            replace_file(self.at.directory / "plan.json", [plan.to_json().encode()])
        return RunInfo(
            model=self.model_name,
            data=self.config.data,
            data_line=self.data_line,
            batch_line=self.batch_line,
            device=device,
            steps_total=self.total,
            parameters=plan.model.parameters,
            batch_size=self.config.samples_per_step,
            run_dir=self.at.directory,
            stages=len(plan.partition.stages),
            micro_batches=plan.pipeline.micro_batches,
            schedule=plan.pipeline.schedule,
            **facts,
        )

    def _begin_epoch(self) -> None:
        self._epoch_began = time.monotonic()

    def _note_step(self, record: StepRecord, skipped: str) -> None:
        """Show and write a step; `skipped` says where its gradients did not count."""
        self._sound = self.config.guard or math.isfinite(record.loss)  # without the guard it reaches the weights
        self.at.losses.add(record.loss, record.samples)
        self.progress.step(record)
        if self._writer is not None:
            self._writer.write_step(record)
        if self._loggers is not None:
            self._loggers.put(record)
            self._tell(self._loggers.news())
        if record.skipped:
            self.progress.warn(f"step {record.step} {skipped}")

    def _note_epoch(
        self, epoch: int, step: int, evaluation: Evaluation, averaged: Evaluation | None = None, *, last: bool
    ) -> bool:
        """Show and write the end of an epoch; whether there is to be a checkpoint."""
        seconds = time.monotonic() - self._epoch_began
        end = EpochRecord(epoch, step, evaluation.accuracy, evaluation.loss, self.at.losses.value, seconds)
        if averaged is not None:
            end = replace(end, ema_test_accuracy=averaged.accuracy, ema_test_loss=averaged.loss)
        self.at.tested.append(end)
        self.at.losses = RunningMean()
        self._begin_epoch()
        self.progress.epoch(end)
        if (news := untested(evaluation.samples, self.test.total)) is not None:
            self.progress.warn(news)
        if self._writer is not None:
            self._writer.write_epoch(end)
        if self._loggers is not None:
            self._loggers.put(end)
        wanted = last or end in self.keep_rule.best(self.at.tested) or self._stops_early() is not None
        return self.rule.epoch or (self.rule != SaveRule() and wanted)

    def _evaluate_average(self) -> Evaluation | None:
        """The result of the moving average (`--model-ema`), if there is one."""
        if self.trainer.config.model_ema is None:
            return None
        with self.trainer.averaged():
            return self.trainer.evaluate(self.test)

    def _stops_early(self) -> str | None:
        """Why the run is to end before its time; None where it goes on."""
        return None if self.stop_rule is None else self.stop_rule.over(self.at.tested)

    def _is_save_due(self) -> bool:
        """Whether the last checkpoint is so old that rank 0 asks for another one."""
        seconds = self.rule.seconds
        return seconds is not None and self.is_main and time.monotonic() - self._last_save >= seconds

    def _progress_made(self) -> tuple[object, ...]:
        """What differs between two checkpoints of a run."""
        return self.trainer.steps_done, self.at.epoch, self.at.epoch_step, len(self.at.tested)

    def _may_save(self, step: int) -> bool:
        """Whether there is something new to save, and it is sound."""
        self._last_save = time.monotonic()
        if self._saved == self._progress_made():
            return False
        if not self._sound:
            self.progress.warn(f"no checkpoint at step {step}: the loss is not finite; the last good one is kept")
        return self._sound

    def _note_saved(self, step: int) -> None:
        self._saved = self._progress_made()
        if self.is_main:
            best = [one.step for one in self.keep_rule.best(self.at.tested)]
            prune_checkpoints(self.at.checkpoints, self.config.keep, best)
        self.progress.message(f"checkpoint saved at step {step}")

    def _summary(self, stopped: bool) -> dict[str, Any]:
        """The summary, as far as metrics and checkpoints say it."""
        ended: Literal["finished", "interrupted"] = "interrupted" if stopped else "finished"
        versions = {"cuda": torch.version.cuda} if torch.cuda.is_available() and torch.version.cuda else {}
        from hybridpar.observe.summary import summarize

        table = read_metrics(self.at.directory)
        summary = summarize(
            self.info,
            table,
            seed=self.config.seed,
            ended=ended,
            resumed_from=self.at.resumed_from,
            versions=versions,
        )
        return summary | best_fields(self.at.directory, self.at.tested, self.keep_rule)

    def _report(
        self,
        summary: dict[str, Any],
        stopped: int | None,
        *,
        pictures: Sequence[Path | None] = (),
        files: Sequence[Path] = (),
        warnings: Sequence[str] = (),
    ) -> None:
        """Write the summary and the picture of the loss, and print the report."""
        from hybridpar.observe.plots import draw_loss
        from hybridpar.observe.report import print_report
        from hybridpar.observe.summary import write_summary

        drawn = (draw_loss(self.at.directory, self.info), *pictures)
        written = [write_summary(self.at.directory, summary), *(one for one in drawn if one is not None)]
        print_report(summary, [*written, self.at.checkpoints, *files])
        for warning in warnings:
            print(f"warning: {warning}")
        note_orderly_end()
        if stopped is not None:
            print(f"stopped after step {stopped}; the same command with --resume goes on from there")
