"""What a run says of itself: its plan and its facts at the start, its steps, and at the end what all workers measured.

`Recorder` shows steps and epochs, and sends them to `metrics.jsonl` and to the loggers.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from dataclasses import asdict, astuple
from pathlib import Path
from typing import Any

import torch

from hybridpar.compress import read_policy
from hybridpar.formats.checkpoint_files import list_checkpoints
from hybridpar.formats.output_files import replace_file
from hybridpar.machine.devices import machine_load
from hybridpar.machine.launch import end_at_once, note_orderly_end
from hybridpar.observe.loggers import LoggedRun, Loggers, logger_names
from hybridpar.observe.metrics import MetricsWriter, read_metrics
from hybridpar.observe.records import EpochRecord, StepRecord, format_bytes, format_duration
from hybridpar.observe.summary import print_report, step_without_data_ms, summarize, write_summary
from hybridpar.plan import ResolvedPlan, StepFigures, SyncRule
from hybridpar.run.directory import plain_options
from hybridpar.run.part import Part, Run, sync_of
from hybridpar.run.timings import Share, combine
from hybridpar.run.worker import device_name
from hybridpar.sync.figures import WireFormat

#: In the run directory: the codec of each parameter.
TABLE_FILE = "compress.csv"

#: Figures of a plan, by the keys of the summary.
_KEYS = tuple(name for name in StepFigures.model_fields if name != "step_ms")


# ----------------------------------------------------------------------------------------------------------- the start


def describe(run: Run) -> None:
    """Write down the plan of a run, and find what to show of it at the start."""
    config, trainer, world, directory = run.config, run.trainer, run.world, run.folder.directory
    if run.folder.restarted:
        since = f"step {run.state.resumed_from}" if run.state.resumed_from else "the start"
        run.notes.append(f"a worker died; all workers were restarted and go on from {since}")
    wire_format, device = trainer.engine.wire_format(), device_name(world.device)
    run.notes += wire_format_lines(wire_format, directory if world.is_main else None)
    run.plan = plan = _written_plan(run.plan, device, wire_format)
    run.notes += expected_lines(plan.predicted, run.total - trainer.steps_done)
    if world.is_main:
        replace_file(directory / "plan.json", [plan.to_json().encode()])
    servers = config.parameter_servers
    run.facts = {
        "model": run.model_name,
        "data": config.data,
        "device": device,
        "workers": world.job_size,
        "replicas": run.samples.replicas,
        "servers": 0 if servers is None else servers.servers,
        "batch_size": config.samples_per_step,
        "seed": config.seed,
        "stages": len(plan.partition.stages),
        "micro_batches": plan.pipeline.micro_batches,
        "schedule": plan.pipeline.schedule,
        "codec": str(wire_format.applied if servers is None else read_policy(config.compress)),
        "sync": sync_of(config, plan),
    }


def opening_lines(run: Run) -> Iterator[str]:
    """What to show of a run before its first step."""
    facts, counts = run.facts, [f"{count:,}" for count in run.samples.batches.counts]
    each = f"{counts[0]} each" if len({*counts}) == 1 else f"{', '.join(counts[:-1])} and {counts[-1]}"
    each = f", {each} on {len(counts)} replicas" if len(counts) > 1 else ""
    chosen = f" (auto: {run.batch_line})" if run.batch_line else ""
    yield f"model    {run.model_name}, {run.plan.model.parameters:,} parameters"
    yield f"data     {run.data_line}"
    yield f"workers  {facts['workers']} on {facts['device']}"
    yield f"batch    {facts['batch_size']:,} samples per step{each}{chosen}"
    yield f"steps    {run.total:,}, {run.samples.per_epoch:,} per epoch"
    yield f"run dir  {run.folder.directory}"
    yield from run.notes
    if run.state.resumed_from:
        yield f"resumed after step {run.state.resumed_from:,}"


def _written_plan(plan: ResolvedPlan, device: str, wire_format: WireFormat) -> ResolvedPlan:
    """The plan of a run as it is written down."""
    update: dict[str, object] = {}
    if plan.inputs is None:  # a search has said of every parameter what it is sent as
        rules = wire_format.applied.rules
        policy = tuple(SyncRule(pattern=rule.pattern, codec=rule.codec) for rule in rules)
        update["sync"] = plan.sync.model_copy(update={"policy": policy})
    if plan.measured.profile is None:  # else it says what the times of stages are from, which may be another machine
        here = {"device": device, "threads": torch.get_num_threads(), "versions": {"torch": torch.__version__}}
        update["measured"] = plan.measured.model_copy(update=here)
    return plan.model_copy(update=update)


def wire_format_lines(wire_format: WireFormat, directory: Path | None) -> list[str]:
    """A line on the codecs of gradients, which also writes the table of them; nothing where there is none."""
    layers, policy = wire_format.layers, wire_format.policy
    if not layers:
        return []
    if directory is not None:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([asdict(layers[0]), *map(astuple, layers)])
        replace_file(directory / TABLE_FILE, [text.getvalue().encode()])
    if wire_format.applied.changes_nothing and not policy.changes_nothing:
        return [f"warning: --compress {str(policy)[:60]} changes nothing: it fits no layer of this model"]
    rules = str(policy) if len(str(policy)) <= 60 else f"{len(policy.rules)} rules, the first that matches counts"
    before, after = (sum(getattr(row, name) for row in layers) for name in ("bytes_before", "bytes_after"))
    size = f"{format_bytes(before)} of a worker and step become {format_bytes(after)}"
    return [f"codec    {rules}: {size}; each layer is in {TABLE_FILE}"]


def expected_lines(predicted: StepFigures | None, steps: int) -> list[str]:
    """How long the steps that are left will take, and the memory of a worker; nothing where nothing was predicted."""
    if predicted is None or predicted.step_ms is None or steps <= 0:
        return []
    memory = "" if predicted.memory_bytes is None else f"; {format_bytes(predicted.memory_bytes)} per worker"
    return [f"expected about {format_duration(1e-3 * predicted.step_ms * steps)}, without data and tests{memory}"]


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
        options = {**plain_options(run.config), **run.facts, "parameters": run.plan.model.parameters}
        logged = LoggedRun(directory, options, resumed_from)
        self._loggers = Loggers(logger_names(run.config.log), logged, run.progress.message)

    def _put(self, record: StepRecord | EpochRecord) -> None:
        if self._writer is not None and self._loggers is not None:
            self._writer.write(record)
            self._loggers.put(record)

    def record(self, run: Run, record: StepRecord) -> None:
        """Show and write a step."""
        run.progress.step(record)
        self._put(record)
        if record.skipped:
            run.progress.warn(f"step {record.step} {run.trainer.skipped}")

    def epoch(self, run: Run, end: EpochRecord, *, last: bool) -> None:
        """Show and write the end of an epoch."""
        run.progress.epoch(end)
        self._put(end)

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
    summary = summarize(
        run.facts,
        read_metrics(directory),
        ended="interrupted" if run.stopping else "finished",
        resumed_from=run.state.resumed_from,
        versions={"cuda": torch.version.cuda} if torch.cuda.is_available() and torch.version.cuda else {},
    )
    summary["epochs"] = run.state.epoch  # whose steps were not always the same number
    if (divided := run.samples.batches.shares) is not None:
        summary["shares"] = ",".join(f"{share:g}" for share in divided)
    shares = {rank: share for rank, share in enumerate(answers) if isinstance(share, Share)}  # a worker may be lost
    summary |= combine(shares, run.plan.layout.ranks, summary["step_ms_median"])
    if run.plan.sync.outer is not None:  # few steps exchange anything
        summary |= run.timings.mean_step(run.config.samples_per_step)
    for fields in (*of_parts, trainer.summary()):
        summary |= fields
    warnings = _add_prediction(run, summary) + run.warnings
    folders = [run.folder.checkpoints] if list_checkpoints(run.folder.checkpoints) else []
    print_report(summary, [write_summary(directory, summary), *folders, *run.written])
    for warning in warnings:
        print(f"warning: {warning}")
    note_orderly_end()
    if run.stopping:
        print(f"stopped after step {trainer.steps_done}; the same command with --resume goes on from there")


def _add_prediction(run: Run, summary: dict[str, Any]) -> list[str]:
    """Note in the summary what was predicted of a step, and where that failed; the lines to show."""
    predicted, step_ms = run.plan.predicted, step_without_data_ms(summary)  # no plan predicts waiting for data
    if predicted is None or predicted.step_ms is None:
        return []
    summary |= {f"predicted_{key}": getattr(predicted, key) for key in _KEYS}
    summary["predicted_step_ms"] = round(predicted.step_ms, 3)
    summary["predicted_compute_ms"] = predicted.compute_ms
    if summary["compute_ms"] is None or step_ms is None:
        return []
    from hybridpar.planner.compare import prediction_warnings

    measured = StepFigures(step_ms=round(step_ms, 3), **{key: summary[key] for key in _KEYS})
    warnings = prediction_warnings(run.plan, measured, machine_load())
    summary["prediction_warning"] = "; ".join(warnings) or None
    return warnings
