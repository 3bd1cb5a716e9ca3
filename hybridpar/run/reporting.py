"""What a run says of itself: its plan and its facts at the start, its steps, and at the end what all workers measured.

`Recorder` shows steps and epochs, and sends them to `metrics.jsonl` and to the loggers.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import torch

from hybridpar.compress import format_codec, read_policy
from hybridpar.formats.output_files import replace_file
from hybridpar.machine.devices import machine_load
from hybridpar.machine.launch import end_at_once, note_orderly_end
from hybridpar.observe.loggers import LoggedRun, Loggers, logger_names
from hybridpar.observe.metrics import MetricsWriter, read_metrics
from hybridpar.observe.records import EpochRecord, RunInfo, StepRecord, format_bytes, format_duration
from hybridpar.observe.summary import (
    SUMMARY_FILE,
    print_report,
    read_summary,
    step_without_data_ms,
    summarize,
    write_summary,
)
from hybridpar.plan import Kernels, ResolvedPlan, StepFigures, SyncRule
from hybridpar.run.directory import plain_options
from hybridpar.run.part import Part, Run, RunTrainer, sync_of
from hybridpar.run.timings import OF_ANY_PART, Share, combine
from hybridpar.run.worker import device_name
from hybridpar.sync.compression_table import WireFormat

#: Fields of `RunInfo` that loggers are given beside the options.
_FACTS = ("workers", "device", "stages", "replicas", "micro_batches", "schedule", "codec", "parameters")

#: Figures of a plan, by the keys of the summary.
_KEYS = tuple(name for name in StepFigures.model_fields if name != "step_ms")


# ----------------------------------------------------------------------------------------------------------- the start


def describe(run: Run, kernels: Kernels | None) -> None:
    """Write down the plan of a run, and find what to show of it at the start."""
    config, trainer, world, directory = run.config, run.trainer, run.world, run.folder.directory
    if (shares := run.samples.batches.shares) is not None:
        run.notes.append(f"shares   {' : '.join(f'{share:g}' for share in shares)} of every batch")
    if run.folder.restarted:
        since = f"step {run.state.resumed_from}" if run.state.resumed_from else "the start"
        run.notes.append(f"a worker died; all workers were restarted and go on from {since}")
    wire_format = trainer.engine.wire_format()
    if wire_format.layers:
        from hybridpar.run.wire_table import wire_format_lines

        run.notes += wire_format_lines(wire_format, directory if world.is_main else None)
    run.plan = plan = _written_plan(trainer, device_name(world.device), wire_format, kernels)
    run.notes += expected_lines(plan.predicted, run.total - trainer.steps_done)
    if world.is_main:
        replace_file(directory / "plan.json", [plan.to_json().encode()])
    servers = config.parameter_servers
    run.info = RunInfo(
        model=run.model_name,
        data=config.data,
        data_line=run.data_line,
        batch_line=run.batch_line,
        workers=world.job_size,
        device=device_name(world.device),
        epochs=run.epochs,
        steps_total=run.total,
        steps_per_epoch=run.samples.per_epoch,
        parameters=plan.model.parameters,
        batch_size=config.samples_per_step,
        run_dir=directory,
        notes=tuple(run.notes),
        stages=len(plan.partition.stages),
        replicas=run.samples.replicas,
        micro_batches=plan.pipeline.micro_batches,
        schedule=plan.pipeline.schedule,
        codec=str(wire_format.applied if servers is None else read_policy(config.compress)),
        sync=sync_of(config, plan),
        servers=0 if servers is None else servers.servers,
    )


def _written_plan(trainer: RunTrainer, device: str, wire_format: WireFormat, kernels: Kernels | None) -> ResolvedPlan:
    """The plan of a run as it is written down."""
    plan, rules = trainer.plan, wire_format.applied.rules
    update: dict[str, object] = {} if kernels is None else {"kernels": kernels}
    if plan.inputs is None:  # a search has said of every parameter what it is sent as
        policy = tuple(SyncRule(pattern=rule.pattern, codec=format_codec(rule.codec)) for rule in rules)
        update["sync"] = plan.sync.model_copy(update={"policy": policy})
    if plan.measured.profile is None:  # else it says what the times of stages are from, which may be another machine
        here = {"device": device, "threads": torch.get_num_threads(), "versions": {"torch": torch.__version__}}
        update["measured"] = plan.measured.model_copy(update=here)
    return plan.model_copy(update=update)


def expected_lines(predicted: StepFigures | None, steps: int, now: datetime | None = None) -> list[str]:
    """When the steps that are left will be done, and the memory of a worker; nothing where nothing was predicted."""
    if predicted is None or predicted.step_ms is None or steps <= 0:
        return []
    begins = now or datetime.now()
    seconds = 1e-3 * predicted.step_ms * steps
    end = begins + timedelta(seconds=seconds)
    until = f"{end:%H:%M}" if end.date() == begins.date() else f"{end:%Y-%m-%d %H:%M}"
    memory = "" if predicted.memory_bytes is None else f"; {format_bytes(predicted.memory_bytes)} per worker"
    return [f"expected about {format_duration(seconds)}, until {until}, without data and tests{memory}"]


# ----------------------------------------------------------------------------------------------------------- the steps


class Recorder(Part):
    """Shows and writes what steps and epochs came to; files are written by one worker."""

    def __init__(self) -> None:
        self._writer: MetricsWriter | None = None
        self._loggers: Loggers | None = None

    def start(self, run: Run) -> None:
        """Open the metrics and the loggers."""
        if not run.world.is_main:
            return
        directory, resumed_from = run.folder.directory, run.state.resumed_from
        self._writer = MetricsWriter(directory, resumed_from)
        options = {"model": run.model_name, **plain_options(run.config)}
        options |= {name: getattr(run.info, name) for name in _FACTS}
        logged = LoggedRun(directory, options, resumed_from)
        self._loggers = Loggers(logger_names(run.config.log), logged, run.progress.message)

    def record(self, run: Run, record: StepRecord) -> None:
        """Show and write a step."""
        run.progress.step(record)
        if self._writer is not None and self._loggers is not None:
            self._writer.write(record)
            self._loggers.put(record)
        if record.skipped:
            run.progress.warn(f"step {record.step} {run.trainer.skipped}")

    def epoch(self, run: Run, end: EpochRecord, *, last: bool) -> None:
        """Show and write the end of an epoch."""
        run.progress.epoch(end)
        if self._writer is not None and self._loggers is not None:
            self._writer.write(end)
            self._loggers.put(end)

    def close(self, run: Run) -> None:
        """End the metrics, and the loggers, for a limited time."""
        if self._writer is not None:
            self._writer.close()
        loggers, self._loggers = self._loggers, None
        if loggers is not None and not loggers.close(run.ending):
            end_at_once()


# ------------------------------------------------------------------------------------------------------------- the end


def close_run(run: Run) -> None:
    """Gather what all workers measured, write the summary, and print the report; a collective."""
    trainer, world = run.trainer, run.world
    saved = trainer.engine.pipeline.peak_saved_bytes if run.plan.is_staged else None
    peaks = {"peak_saved_bytes": saved, "memory_bytes": run.memory.peak_bytes()}
    answers = trainer.gather_in_the_end(run.timings.share(run.clock.ahead, peaks))
    of_parts = [part.summary(run) for part in run.parts]
    if not world.is_main:
        return
    directory = run.folder.directory
    summary = _summary(run)
    shares = {rank: share for rank, share in enumerate(answers) if isinstance(share, Share)}  # a worker may be lost
    measured = combine(shares, run.plan.layout.ranks, summary["step_ms_median"])
    if run.state.resumed_from is not None:  # what all workers noted covers a part only
        measured = {key: measured[key] for key in OF_ANY_PART if key in measured}
    summary |= measured
    if run.plan.sync.outer is not None and (mean := run.timings.mean_step())["step_ms_mean"] > 0:
        images_per_second = 1e3 * run.config.samples_per_step / mean["step_ms_mean"]  # few steps exchange anything
        summary |= mean | {"images_per_second": round(images_per_second, 3)}
    for fields in (*of_parts, _predicted_fields(run.plan.predicted), trainer.summary()):
        summary |= fields
    warnings = _compare(run, summary) + run.warnings
    print_report(summary, [write_summary(directory, summary), run.folder.checkpoints, *run.written])
    for warning in warnings:
        print(f"warning: {warning}")
    note_orderly_end()
    if run.stopping:
        print(f"stopped after step {trainer.steps_done}; the same command with --resume goes on from there")


def _summary(run: Run) -> dict[str, Any]:
    """The summary, as far as options, metrics and checkpoints say it."""
    shares = run.samples.batches.shares
    summary = summarize(
        run.info,
        read_metrics(run.folder.directory),
        seed=run.config.seed,
        ended="interrupted" if run.stopping else "finished",
        resumed_from=run.state.resumed_from,
        versions={"cuda": torch.version.cuda} if torch.cuda.is_available() and torch.version.cuda else {},
    )
    if shares is not None:
        summary["shares"] = ",".join(f"{share:g}" for share in shares)
    summary["epochs"] = run.state.epoch  # whose steps were not always the same number
    return summary


def _predicted_fields(predicted: StepFigures | None) -> dict[str, Any]:
    """What the summary says of a prediction; nothing where there was none."""
    if predicted is None or predicted.step_ms is None:
        return {}
    fields: dict[str, Any] = {f"predicted_{key}": getattr(predicted, key) for key in _KEYS}
    fields["predicted_step_ms"] = round(predicted.step_ms, 3)
    fields["predicted_compute_ms"] = round(predicted.step_ms - (predicted.exposed_sync_ms or 0.0), 3)
    return fields


def _compare(run: Run, summary: dict[str, Any]) -> list[str]:
    """Note in the summary where the prediction of a step failed; the lines to show."""
    step_ms = step_without_data_ms(summary)  # no plan predicts waiting for data
    if run.plan.predicted is None or summary["compute_ms"] is None or step_ms is None:
        return []
    from hybridpar.planner.compare import prediction_warnings

    measured = StepFigures(step_ms=round(step_ms, 3), **{key: summary[key] for key in _KEYS})
    warnings = prediction_warnings(run.plan, measured, machine_load())
    summary["prediction_warning"] = "; ".join(warnings) or None
    return warnings


def say_finished(run: Run) -> int:
    """Show the result that a finished run has; what it left behind stays as it is."""
    if run.world.is_main and (result := read_summary(run.folder.directory)) is not None:
        longer = "--steps" if run.config.steps is not None else "--epochs"
        done = f"has done all of its {run.total:,} steps"
        if result["steps"] < run.total:
            longer, done = "stop= of --checkpoints", str(run.over)
        run.progress.message(
            f"nothing left to train: the run in {run.folder.directory} {done}; a larger {longer} goes on"
        )
        print_report(result, [run.folder.directory / SUMMARY_FILE, run.folder.checkpoints])
    return 0
