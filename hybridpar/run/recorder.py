"""Shows the steps and epochs of a run, and sends them to `metrics.jsonl` and to the loggers."""

from __future__ import annotations

from hybridpar.machine.launch import end_at_once
from hybridpar.observe.loggers import LoggedRun, Loggers, logger_names
from hybridpar.observe.metrics import MetricsWriter
from hybridpar.observe.records import EpochRecord, StepRecord
from hybridpar.run.directory import plain_options
from hybridpar.run.part import Part, Run

#: Fields of `RunInfo` that loggers are given beside the options.
_FACTS = ("workers", "device", "stages", "replicas", "micro_batches", "schedule", "codec", "parameters")


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
        logged = LoggedRun(directory, run.info, options, resumed_from)
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
