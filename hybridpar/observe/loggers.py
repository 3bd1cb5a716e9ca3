"""Sends the records of a run to the tools in which people watch runs: TensorBoard, Weights & Biases, MLflow.

The worker that writes files calls them, and they hand the figures to threads or processes of their own. One that fails
is not called again, after one warning; `metrics.jsonl` has every record.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any, ClassVar, Literal

from hybridpar.errors import check, not_installed, shortened
from hybridpar.formats.output_files import replace_file
from hybridpar.observe.records import EPOCH_FIGURES, STEP_FIGURES, EpochRecord, StepRecord
from hybridpar.registry import Registry

#: Seconds that a tool has at the end of a run.
CLOSE_SECONDS = 15.0

#: Experiment of MLflow and project of W&B where no variable names one.
_PROJECT = "hybridpar"

Ending = Literal["finished", "interrupted", "failed"]


@dataclass(frozen=True)
class LoggedRun:
    """What a logger is given of a run before its first record.

    Attributes:
        directory: Directory of the run.
        options: Its options by name, as plain values.
        resumed_from: Step that it goes on from; None for a new one.
    """

    directory: Path
    options: Mapping[str, Any]
    resumed_from: int | None = None

    def recall(self, name: str) -> str | None:
        """The id that a tool gave the run when it began; None for a new run."""
        file = self.directory / f"{name}.id"
        return file.read_text("utf-8").strip() if self.resumed_from is not None and file.exists() else None

    def remember(self, name: str, given: str) -> None:
        """Keep the id that a tool gave the run, by which a resumed run goes on there."""
        replace_file(self.directory / f"{name}.id", [given.encode()])


class Logger(ABC):
    """A tool that figures of a run are sent to, registered with `LOGGERS.register(name, description)`.

    It is created before the first step, with the `LoggedRun` that it begins or goes on with; its tool is imported
    there. Any method may raise: the logger is not called again.
    """

    #: What is imported of the tool; of ours, the extra of hybridpar that installs it is named so, too.
    package: ClassVar[str]

    #: Where the run can be seen, for the user.
    where = ""

    @abstractmethod
    def __init__(self, run: LoggedRun) -> None:
        """Begin, or go on with, a run.

        Args:
            run: The run.
        """

    @abstractmethod
    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """Take the figures of a step, or of the end of an epoch; training waits for it.

        Args:
            step: Global step.
            figures: By name.
        """

    @abstractmethod
    def close(self, ending: Ending) -> None:
        """End the run.

        Args:
            ending: How it ended.
        """


LOGGERS: Registry[type[Logger]] = Registry("logger")


def logger_names(log: Iterable[str]) -> tuple[str, ...]:
    """The loggers that `--log` names.

    Args:
        log: Its values: names, several joined by commas, `none`; empty for the default.

    Returns:
        Names, each once; by default `tensorboard`, where that is installed.

    Raises:
        UsageError: There is no such logger, its package is not installed, or `none` is not alone.
    """
    names = tuple(dict.fromkeys(name.strip() for text in log for name in text.split(",") if name.strip()))
    if not names:
        return ("tensorboard",) if importlib.util.find_spec("tensorboard") is not None else ()
    if "none" in names:
        only = f"--log {','.join(names)}"
        check(len(names) == 1, only, "`none` stands for no logger.", "Leave it out, or the others.")
        return ()
    for name in names:
        package = LOGGERS.get(name).package
        if importlib.util.find_spec(package) is None:
            raise not_installed(f"--log {name} needs {package}", package)
    return names


class Loggers:
    """All loggers of a run, on the worker that writes files. `say` shows a line to the user."""

    def __init__(self, names: Sequence[str], run: LoggedRun, say: Callable[[str], object]) -> None:
        self._say = say
        self._open: dict[str, Logger] = {}
        for name in names:
            with self._guarded(name):
                self._open[name] = logger = LOGGERS.get(name)(run)
                if logger.where:
                    say(f"{name:8} {logger.where}")

    def put(self, record: StepRecord | EpochRecord) -> None:
        """Send a record to all of them."""
        rows = EPOCH_FIGURES if isinstance(record, EpochRecord) else STEP_FIGURES
        values = {row.name: getattr(record, row.name) for row in rows if row.log}
        figures = {name: float(value) for name, value in values.items() if value is not None}
        for name, logger in list(self._open.items()):
            with self._guarded(name):
                logger.write(record.step, figures)

    def close(self, ending: Ending, seconds: float = CLOSE_SECONDS) -> bool:
        """End all at once, and wait for a limited time for each. False where a tool is still at it."""
        # A tool may upload for as long as there is no network; only its own thread is held up by that.
        threads = {name: Thread(target=self._end, args=(name, ending), daemon=True) for name in self._open}
        for thread in threads.values():
            thread.start()
        for name, thread in threads.items():
            thread.join(seconds)
            if thread.is_alive():
                self._say(f"warning: the logger {name} did not end in time; it may lack the last records")
        return not any(thread.is_alive() for thread in threads.values())

    def _end(self, name: str, ending: Ending) -> None:
        with self._guarded(name):
            self._open[name].close(ending)

    @contextlib.contextmanager
    def _guarded(self, name: str) -> Iterator[None]:
        """An error ends the logger, not the run."""
        try:
            yield
        except Exception as error:
            self._open.pop(name, None)
            reason = shortened(str(error).strip().partition("\n")[0])
            failed = f"the logger {name} failed: {type(error).__name__} {reason}".rstrip()
            self._say(f"warning: {failed}; it gets no more records. metrics.jsonl has them all")


# ------------------------------------------------------------------------------------------------------------- tools


@LOGGERS.register("tensorboard", "event files in the run directory, for TensorBoard")
class TensorBoardLogger(Logger):
    """A scalar for each figure, by global step, in `tensorboard/` of the run directory."""

    package: ClassVar[str] = "tensorboard"

    def __init__(self, run: LoggedRun) -> None:
        """Open a file. TensorBoard hides older events of the directory from here on: these steps are run again."""
        from torch.utils.tensorboard import SummaryWriter

        folder, first = str(run.directory / "tensorboard"), (run.resumed_from or 0) + 1
        self._writer = SummaryWriter(folder, purge_step=first, max_queue=1000, flush_secs=10)

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """Write a scalar for each figure."""
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def close(self, ending: Ending) -> None:
        """Flush and close the file."""
        self._writer.close()


@LOGGERS.register("wandb", "a run of Weights & Biases")
class WandbLogger(Logger):
    """A run with the options as its configuration; a resumed run goes on in the same one.

    `WANDB_PROJECT`, `WANDB_ENTITY` and `WANDB_MODE` are obeyed. Without an API key the run is written to `wandb/` in
    the run directory, from where `wandb sync` uploads it.
    """

    package: ClassVar[str] = "wandb"

    def __init__(self, run: LoggedRun) -> None:
        os.environ.setdefault("WANDB_SILENT", "true")  # the terminal is the display's
        import wandb

        has_key = os.environ.get("WANDB_MODE", "online") != "online" or wandb.login(prompt=False)
        self._run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT", _PROJECT),
            name=run.directory.name,
            id=run.recall("wandb"),
            resume="allow",
            reinit="create_new",
            dir=str(run.directory),
            config=dict(run.options),
            mode=None if has_key else "offline",
            settings=wandb.Settings(console="off", init_timeout=20),
        )
        run.remember("wandb", self._run.id)
        reason = "" if has_key else "there is no API key (`wandb login`), so it is "
        offline = f"{reason}written offline; upload it with: wandb sync {os.path.dirname(self._run.dir)}"
        self.where = str(self._run.url or offline)

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """Hand the figures to wandb's own process, which drops those of steps that it has."""
        self._run.log(dict(figures), step=step)

    def close(self, ending: Ending) -> None:
        """End the run, which uploads what is left."""
        self._run.finish(exit_code=0 if ending == "finished" else 1)


@LOGGERS.register("mlflow", "a run of MLflow")
class MlflowLogger(Logger):
    """A run with the options as its parameters; a resumed run goes on in the same one.

    `MLFLOW_TRACKING_URI` says where they are kept; without it in the folder `mlruns`.
    """

    package: ClassVar[str] = "mlflow"

    def __init__(self, run: LoggedRun) -> None:
        # A server that does not answer must not hold up a run's end for the minutes of MLflow's own defaults.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        if "MLFLOW_TRACKING_URI" not in os.environ:
            os.environ["MLFLOW_TRACKING_URI"] = Path("mlruns").absolute().as_uri()
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        import mlflow
        from mlflow.entities import Metric, Param

        self._metric, self._client, self._flush = Metric, mlflow.MlflowClient(), mlflow.flush_async_logging
        if (known := run.recall("mlflow")) is not None:
            self._client.update_run(known, status="RUNNING")
        else:
            experiment = mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", _PROJECT)).experiment_id
            known = self._client.create_run(experiment, run_name=run.directory.name).info.run_id
            run.remember("mlflow", known)
            self._client.log_batch(known, params=[Param(key, str(value)[:500]) for key, value in run.options.items()])
        self._id = known
        self.where = f"run {known} in {self._client.tracking_uri}"

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """Hand the figures to MLflow's own thread."""
        now = round(1000 * time.time())
        metrics = [self._metric(name, value, now, step) for name, value in figures.items()]
        self._client.log_batch(self._id, metrics=metrics, synchronous=False)

    def close(self, ending: Ending) -> None:
        """Set the status of the run, once all figures are there."""
        self._flush()
        status = {"finished": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}[ending]
        self._client.set_terminated(self._id, status)
