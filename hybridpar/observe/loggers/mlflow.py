"""MLflow runs, by its tracking client (mlflow, or mlflow-skinny).

`MLFLOW_TRACKING_URI` says where they are kept. Without it that is MLflow's own default, or, where MLflow lacks what
that needs, the folder `mlruns`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from hybridpar.observe.logger import LOGGERS, Ending, Line, LoggedRun, Logger

#: Experiment where `MLFLOW_EXPERIMENT_NAME` names none.
EXPERIMENT = "hybridpar"

#: Metrics and parameters that MLflow takes in one call, and letters of a parameter.
_METRICS, _PARAMETERS, _LETTERS = 1000, 100, 500

_STATUS = {"finished": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}


@LOGGERS.register("mlflow", "a run of MLflow")
class MlflowLogger(Logger):
    """A run with the options as its parameters; a resumed run goes on in the same one."""

    package: ClassVar[str] = "mlflow"
    extra: ClassVar[str] = "mlflow"

    def __init__(self) -> None:
        import mlflow.entities
        import mlflow.exceptions
        import mlflow.tracking

        self._mlflow: Any = mlflow
        self._client: Any = None
        self._id = ""

    def start(self, run: LoggedRun) -> str | None:
        """Begin a run, or go on with the one that this run began."""
        self._client, entities = self._open(), self._mlflow.entities
        known = run.recall("mlflow")
        if known is not None:
            self._id = self._client.get_run(known).info.run_id
            self._client.update_run(self._id, status="RUNNING")
        else:
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME", EXPERIMENT)
            found = self._client.get_experiment_by_name(name)
            experiment = self._client.create_experiment(name) if found is None else found.experiment_id
            self._id = self._client.create_run(experiment, run_name=run.directory.name).info.run_id
            run.remember("mlflow", self._id)
            params = [entities.Param(key, str(value)[:_LETTERS]) for key, value in run.options.items()]
            for first in range(0, len(params), _PARAMETERS):
                self._client.log_batch(self._id, params=params[first : first + _PARAMETERS])
        return f"run {self._id} in {self._client.tracking_uri}"

    def _open(self) -> Any:
        if os.environ.get("MLFLOW_TRACKING_URI"):
            return self._mlflow.tracking.MlflowClient()
        try:
            return self._mlflow.tracking.MlflowClient()
        except self._mlflow.exceptions.MlflowException:  # mlflow-skinny without a database
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            return self._mlflow.tracking.MlflowClient(Path("mlruns").absolute().as_uri())

    def write(self, lines: Sequence[Line]) -> None:
        """Log the figures of all lines in as few calls as MLflow allows."""
        metric = self._mlflow.entities.Metric
        metrics = [
            metric(name, value, round(1000 * line.seconds), line.step)
            for line in lines
            for name, value in line.figures.items()
        ]
        for first in range(0, len(metrics), _METRICS):
            self._client.log_batch(self._id, metrics=metrics[first : first + _METRICS])

    def close(self, ending: Ending) -> None:
        """Set the status of the run."""
        self._client.set_terminated(self._id, _STATUS[ending])
