"""The end of a run: what all workers measured, beside what was predicted, in summary, plan and report."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import torch

from hybridpar.errors import RunDirectoryError
from hybridpar.formats.output_files import replace_file
from hybridpar.machine.devices import machine_load
from hybridpar.machine.launch import note_orderly_end
from hybridpar.observe.metrics import read_metrics
from hybridpar.observe.summary import SUMMARY_FILE, read_summary, step_without_data_ms, summarize, write_summary
from hybridpar.observe.text import format_bytes, format_duration
from hybridpar.plan import Plan, StepFigures
from hybridpar.run.part import Run, sync_of
from hybridpar.run.timings import OF_ANY_PART, Share, combine

#: Figures of a plan, by the keys of the summary.
_KEYS = tuple(name for name in StepFigures.model_fields if name != "step_ms")


def close_run(run: Run) -> None:
    """Gather what all workers measured, write the summary, and print the report; a collective."""
    trainer, world = run.trainer, run.world
    saved = trainer.engine.pipeline.peak_saved_bytes if run.plan.is_staged else None
    peaks = {"peak_saved_bytes": saved, "memory_bytes": run.memory.peak_bytes()}
    answers = trainer.gather_in_the_end(run.timings.share(run.clock.ahead, peaks))
    of_parts = [part.summary(run) for part in run.parts]
    if not world.is_main:
        return
    from hybridpar.observe.report import print_report

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
    for fields in (*of_parts, predicted_fields(run.plan.predicted), trainer.summary()):
        summary |= fields
    warnings = close_plan(run.plan, summary, directory / "plan.json") + run.warnings
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
    summary["sync"] = sync_of(run.config, run.plan)
    return summary


def predicted_fields(predicted: StepFigures | None) -> dict[str, Any]:
    """What the summary says of a prediction; nothing where there was none."""
    if predicted is None or predicted.step_ms is None:
        return {}
    fields: dict[str, Any] = {f"predicted_{key}": getattr(predicted, key) for key in _KEYS}
    fields["predicted_step_ms"] = round(predicted.step_ms, 3)
    fields["predicted_compute_ms"] = round(predicted.step_ms - (predicted.exposed_sync_ms or 0.0), 3)
    return fields


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


def ran_of(summary: Mapping[str, Any]) -> StepFigures | None:
    """What a run measured of its plan, without waiting for data, which no plan predicts; None without a step."""
    step_ms = step_without_data_ms(summary)
    if summary["compute_ms"] is None or step_ms is None:
        return None
    return StepFigures(step_ms=round(step_ms, 3), **{key: summary[key] for key in _KEYS})


def close_plan(plan: Plan, summary: dict[str, Any], path: Path) -> list[str]:
    """Add what was measured to the plan of a run, and say where its prediction failed; for the worker that writes."""
    ran = ran_of(summary)
    if plan.predicted is None or ran is None:
        return []
    problems: list[str] = []
    try:
        replace_file(path, [plan.model_copy(update={"ran": ran}).to_json().encode()])
    except RunDirectoryError as error:
        problems.append(f"what was measured is not in the plan: {error.what}")
    from hybridpar.planner.compare import prediction_warnings

    warnings = prediction_warnings(plan, ran, machine_load())
    summary["prediction_warning"] = "; ".join(warnings) or None
    return warnings + problems


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
        from hybridpar.observe.report import print_report

        print_report(result, [run.folder.directory / SUMMARY_FILE, run.folder.checkpoints])
    return 0
