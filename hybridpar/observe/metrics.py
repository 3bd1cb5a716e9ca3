"""Reads and writes `metrics.jsonl`: one JSON object per step, in order, each step once.

Every line goes to the operating system at once, so a crash of the process loses none; a crash of
the machine or a full disk may cut the last line, which readers skip. A resumed run first takes away the lines of steps
that it will run again. Numbers that JSON does not know (NaN, infinities) are null.
"""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hybridpar.formats.file_reader import Unreadable, parse_json
from hybridpar.formats.output_files import replace_file, run_directory_error
from hybridpar.observe.records import EPOCH_FIGURES, STEP_FIGURES, EpochRecord, StepRecord

#: Name of the file in the run directory.
METRICS_FILE = "metrics.jsonl"

#: Units of columns that are written with all digits. Others are times, to the microsecond: finer digits are noise.
_EXACT = {"loss", "rate", "norm", "accuracy"}


class MetricsWriter:
    """Appends steps and epochs to `metrics.jsonl`. For one rank only.

    A run that goes on from `resume_step` first drops later lines, as their steps will run again; None starts a new
    file. A failing disk is an error once, for the write that met it, so that an orderly end does not meet it again.
    """

    def __init__(self, run_dir: Path, resume_step: int | None = None) -> None:
        self.path = Path(run_dir) / METRICS_FILE
        self._failed = False
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            goes_on = resume_step is not None and self.path.exists()
            if resume_step is not None and goes_on:
                lines = (line for line, row in _rows(self.path) if row["step"] <= resume_step)
                replace_file(self.path, lines)  # the old file stays until the new one is whole
            self._file = open(self.path, "ab" if goes_on else "wb")  # noqa: SIM115
        except OSError as error:
            raise run_directory_error(self.path, error) from error

    def write(self, record: StepRecord | EpochRecord) -> None:
        """Append a step, or the end of an epoch as a line with `"event": "epoch"`."""
        row: dict[str, Any] = {}
        if isinstance(record, EpochRecord):
            row = {"event": "epoch", "epoch": record.epoch, "step": record.step}
        for figure in EPOCH_FIGURES if row else STEP_FIGURES:
            value = _finite(getattr(record, figure.name))
            row[figure.name] = round(value, 3) if isinstance(value, float) and figure.unit not in _EXACT else value
        if isinstance(record, StepRecord) and record.residual_norms is not None:
            row["residual_norms"] = {name: _finite(float(f"{x:.6g}")) for name, x in record.residual_norms.items()}
        if self._failed:
            return
        try:
            self._file.write(json.dumps(row, allow_nan=False).encode() + b"\n")
            self._file.flush()
        except OSError as error:
            self._failed = True
            raise run_directory_error(self.path, error) from error

    def close(self) -> None:
        """Close the file; what was written is kept. May be called twice."""
        try:
            self._file.close()
        except OSError as error:  # a network file system may complain of earlier writes
            if not self._failed:
                raise run_directory_error(self.path, error) from error


@dataclass(frozen=True)
class MetricsTable:
    """What `metrics.jsonl` holds.

    Attributes:
        steps: One float64 array for each figure of a step, ordered by step; null is NaN, `skipped` is 0 or 1.
        epochs: The ends of epochs, in order.
    """

    steps: Mapping[str, NDArray[np.float64]]
    epochs: tuple[EpochRecord, ...]

    @property
    def last_step(self) -> int:
        """The last step that is recorded; 0 without any."""
        return int(self.steps["step"][-1]) if len(self.steps["step"]) else 0

    def tested(self, figure: str) -> list[float]:
        """A figure of all epochs that have it."""
        values = (getattr(epoch, figure) for epoch in self.epochs)
        return [value for value in values if value is not None and math.isfinite(value)]


def read_metrics(run_dir: Path) -> MetricsTable:
    """Read the metrics of a run, also while it is being written.

    Lines that are not whole are skipped. Of two lines for the same step, or for a test after it, the later one counts.
    """
    names = [figure.name for figure in STEP_FIGURES]
    steps: dict[int, array[float]] = {}
    epochs: dict[int, EpochRecord] = {}
    path = Path(run_dir) / METRICS_FILE
    for _, row in _rows(path) if path.exists() else ():
        if "event" not in row:
            steps[row["step"]] = array("d", [_number(row.get(name)) for name in names])
        elif row["event"] == "epoch" and isinstance(row.get("epoch"), int):
            figures: dict[str, Any] = {figure.name: _finite(_number(row.get(figure.name))) for figure in EPOCH_FIGURES}
            figures |= {name: math.nan for name in ("train_loss", "seconds") if figures[name] is None}
            epochs[row["step"]] = EpochRecord(epoch=row["epoch"], step=row["step"], **figures)
    columns = np.array([steps[step] for step in sorted(steps)]).reshape(-1, len(names)).T
    return MetricsTable(dict(zip(names, columns, strict=True)), tuple(epochs[step] for step in sorted(epochs)))


def _rows(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """The whole lines of a metrics file that are of a step or an epoch, raw and parsed."""
    with open(path, "rb") as file:
        for line in file:
            try:
                row = parse_json(line)
            except Unreadable:  # cut by a crash, or being written right now
                continue
            if isinstance(row, dict) and isinstance(row.get("step"), int) and line.endswith(b"\n"):
                yield line, row


def _number(value: Any) -> float:
    """A number of the file; NaN for what is none, and for infinities, which are never written."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else math.nan


def _finite(value: Any) -> Any:
    """The value, but None for NaN and infinities, which JSON does not know."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
