"""Reads and writes `metrics.jsonl`: one JSON object per step, in order, each step once.

Every line goes to the operating system at once (a few microseconds), so a crash of the process loses none; a crash of
the machine may cut the last line, which readers skip. A resumed run first takes away the lines of steps that it will
run again. Numbers that JSON does not know (NaN, infinities) are null.
"""

from __future__ import annotations

import contextlib
import json
import math
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hybridpar.formats.file_reader import Unreadable, parse_json
from hybridpar.observe.files import replace_file, run_directory_error
from hybridpar.observe.records import EPOCH_FIGURES, STEP_FIGURES, EpochRecord, Figure, StepRecord

#: Name of the file in the run directory.
METRICS_FILE = "metrics.jsonl"

#: Bytes of a line that is read.
_LONGEST_LINE = 1 << 20

#: What a step's line holds of each layer, in the few steps in which it is measured.
_BY_LAYER = "residual_norms"

#: Units of columns that are written with all digits. Others are times, to the microsecond: finer digits are noise.
_EXACT = {"loss", "rate", "norm"}


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
            if resume_step is not None and self.path.exists():
                _drop_after(self.path, resume_step)
                mode = "ab"
            else:
                mode = "wb"
            # Unbuffered: a line is either with the operating system or has raised.
            self._file = open(self.path, mode, buffering=0)  # noqa: SIM115
            self._size = self._file.seek(0, 2)
        except OSError as error:
            raise run_directory_error(self.path, error) from error

    def write_step(self, record: StepRecord) -> None:
        """Append a step."""
        row: dict[str, Any] = {
            figure.name: _json_value(figure, getattr(record, figure.name)) for figure in STEP_FIGURES
        }
        if record.residual_norms is not None:
            row[_BY_LAYER] = {name: _finite(float(f"{norm:.6g}")) for name, norm in record.residual_norms.items()}
        self._write(row)

    def write_epoch(self, record: EpochRecord) -> None:
        """Append the end of an epoch, as a line with `"event": "epoch"`."""
        row = {key: _finite(value) for key, value in asdict(record).items()}
        if record.ema_test_accuracy is None:
            row = {key: value for key, value in row.items() if not key.startswith("ema_")}
        self._write({"event": "epoch"} | row)

    def _write(self, row: Mapping[str, object]) -> None:
        if self._failed:
            return
        line = json.dumps(row, allow_nan=False).encode() + b"\n"
        try:
            rest = memoryview(line)
            while rest:  # a nearly full disk takes a part first
                rest = rest[self._file.write(rest) :]
            self._size += len(line)
        except OSError as error:
            self._failed = True
            with contextlib.suppress(OSError):
                self._file.truncate(self._size)  # no half line stays behind
            raise run_directory_error(self.path, error) from error

    def close(self) -> None:
        """Close the file; what was written is kept. May be called twice."""
        # Unbuffered, so nothing is left to write; a network file system may still complain about earlier writes.
        try:
            self._file.close()
        except OSError as error:
            if not self._failed:
                self._failed = True
                raise run_directory_error(self.path, error) from error

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True)
class MetricsTable:
    """What `metrics.jsonl` holds.

    Attributes:
        steps: One float64 array for each figure of a step, ordered by step; null is NaN, `skipped` is 0 or 1.
        epochs: The ends of epochs, in order.
        residual_norms: Norm of what was not sent of each layer, when that was measured last.
    """

    steps: Mapping[str, NDArray[np.float64]]
    epochs: tuple[EpochRecord, ...]
    residual_norms: Mapping[str, float] = field(default_factory=dict)


def read_metrics(run_dir: Path) -> MetricsTable:
    """Read the metrics of a run, also while it is being written.

    Lines that are not whole are skipped. Of two lines for the same step, or for a test after it, the later one counts.
    """
    columns = {figure.name: array("d") for figure in STEP_FIGURES}
    epochs: dict[int, EpochRecord] = {}
    residual_norms: dict[str, float] = {}
    path = Path(run_dir) / METRICS_FILE
    for _, row in _rows(path) if path.exists() else ():
        if row.get("event") == "epoch":
            if isinstance(row.get("epoch"), int):
                end = _epoch(row)
                epochs[end.step] = end
        elif "event" not in row and row:
            if isinstance(norms := row.get(_BY_LAYER), dict):
                residual_norms = {name: _number(norm) for name, norm in norms.items()}
            for name, column in columns.items():
                value = row.get(name)
                column.append(math.nan if value is None else value if type(value) is float else _number(value))
    tables = {name: np.array(column, dtype=np.float64) for name, column in columns.items()}
    for values in tables.values():
        values[~np.isfinite(values)] = math.nan  # JSON has no infinity, so we never wrote one
    # np.unique keeps the first of equal values, so the reversed order keeps the line written last.
    _, from_end = np.unique(tables["step"][::-1], return_index=True)
    keep = len(tables["step"]) - 1 - from_end
    return MetricsTable(
        steps={name: values[keep] for name, values in tables.items()},
        epochs=tuple(epochs[epoch] for epoch in sorted(epochs)),
        residual_norms=residual_norms,
    )


def _epoch(row: Mapping[str, Any]) -> EpochRecord:
    values: dict[str, Any] = {figure.name: _if_number(row.get(figure.name)) for figure in EPOCH_FIGURES}
    values |= {name: math.nan for name in ("train_loss", "seconds") if values[name] is None}
    return EpochRecord(epoch=row["epoch"], step=row["step"], **values)


def _rows(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """The whole lines of a metrics file, raw and parsed; others come with an empty row."""
    with open(path, "rb") as file:
        while line := file.readline(_LONGEST_LINE):
            try:
                row = parse_json(line)
            except Unreadable:  # cut by a crash, or being written right now
                row = None
            if isinstance(row, dict) and isinstance(row.get("step"), int) and line.endswith(b"\n"):
                yield line, row
            elif line.endswith(b"\n") or len(line) == _LONGEST_LINE:
                yield line, {}


def _drop_after(path: Path, step: int) -> None:
    """Rewrite the file without the lines past a step; the old file stays until the new one is whole."""
    replace_file(path, (line for line, row in _rows(path) if row and row["step"] <= step))


def _finite(value: Any) -> Any:
    """The value, but None for NaN and infinities, which JSON does not know."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _json_value(figure: Figure, value: Any) -> Any:
    """A figure of a step as it is written."""
    value = _finite(value)
    return round(value, 3) if isinstance(value, float) and figure.unit not in _EXACT else value


def _if_number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else math.nan
