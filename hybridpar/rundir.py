"""Why: what a run leaves behind must be found again, and never be overwritten by accident.

    runs/NAME/
      run.json       model, options, versions, and the job that writes here
      plan.json      the plan
      metrics.jsonl  a line per step
      summary.json   the result
      loss.png       the loss as a picture
      checkpoints/   see hybridpar.checkpoint

A new run gets a directory of its own; one that exists is continued with `--resume` or replaced with `--overwrite`,
both of which the user must ask for. Only files that a run writes are ever deleted.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

from hybridpar.checkpoint import latest_checkpoint
from hybridpar.config import TrainConfig
from hybridpar.errors import CheckpointError, RunDirectoryError, UsageError
from hybridpar.observe.files import replace_file, run_directory_error

RUN_FILE = "run.json"
_OWN_FILES = (RUN_FILE, "plan.json", "metrics.jsonl", "summary.json", "loss.png")
_OWN_FOLDERS = ("checkpoints", "tensorboard")


@dataclasses.dataclass(frozen=True)
class RunPlace:
    """Where a run writes, and what it goes on from.

    Attributes:
        directory: The run directory.
        checkpoint: The checkpoint to continue, or None for a new run.
        restarted: Whether a launcher started this job again after a worker died.
    """

    directory: Path
    checkpoint: Path | None = None
    restarted: bool = False

    @property
    def checkpoints(self) -> Path:
        """Directory of the checkpoints."""
        return self.directory / "checkpoints"


def find_place(config: TrainConfig, model: str) -> RunPlace:
    """Decide on the run directory and create it; called by one worker, the others are told.

    Raises:
        UsageError: The directory holds a run, and neither `--resume` nor `--overwrite` was given.
        CheckpointError: `--resume` without a checkpoint to resume.
        RunDirectoryError: The directory cannot be written.
    """
    base = config.run_dir or Path("runs") / f"{_slug(model)}-{_slug(config.data)}"
    job = os.environ.get("TORCHELASTIC_RUN_ID")
    restarted = job is not None and int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    if restarted and (mine := _place_of_job(base, job)) is not None:
        return RunPlace(mine, latest_checkpoint(mine / "checkpoints") or config.resume_from, restarted=True)
    if config.resume:
        directory = _newest(base) if config.run_dir is None else base
        if (checkpoint := latest_checkpoint(directory / "checkpoints")) is None:
            raise CheckpointError(
                f"there is nothing to resume in {directory}",
                "--resume goes on from the newest whole checkpoint of the run directory.",
                "Name the directory with --run-dir, or leave --resume away to start a new run.",
            )
        return RunPlace(directory, checkpoint)
    directory = base if config.run_dir is not None or config.overwrite else _unused(base)
    if (directory / RUN_FILE).exists():
        if not config.overwrite:
            raise UsageError(
                f"{directory} already holds a run",
                "A run never overwrites another one by itself.",
                "Add --resume to continue it, --overwrite to replace it, or name another --run-dir.",
            )
        _clear(directory)
    return RunPlace(directory, config.resume_from)


def write_run_file(place: RunPlace, config: TrainConfig, model: str, versions: dict[str, str]) -> None:
    """Create the directory and write `run.json`, which claims it for this job.

    Raises:
        RunDirectoryError: The directory cannot be written.
    """
    facts: dict[str, Any] = {
        "model": model,
        "job": os.environ.get("TORCHELASTIC_RUN_ID"),
        "options": {key: _plain(value) for key, value in dataclasses.asdict(config).items()},
        "versions": versions,
    }
    try:
        place.checkpoints.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise run_directory_error(place.directory, error) from error
    replace_file(place.directory / RUN_FILE, [json.dumps(facts, indent=2).encode() + b"\n"])


def _place_of_job(base: Path, job: str | None) -> Path | None:
    for directory in _family(base):
        try:
            if json.loads((directory / RUN_FILE).read_text(encoding="utf-8")).get("job") == job:
                return directory
        except (OSError, ValueError):
            continue
    return None


def _family(base: Path) -> list[Path]:
    """`base`, `base-2`, `base-3` ..., as far as they exist, newest first."""
    pattern = re.compile(re.escape(base.name) + r"(-\d+)?$")
    if not base.parent.is_dir():
        return []
    found = [entry for entry in base.parent.iterdir() if entry.is_dir() and pattern.match(entry.name)]
    return sorted(found, key=lambda entry: entry.stat().st_mtime, reverse=True)


def _newest(base: Path) -> Path:
    return next((entry for entry in _family(base) if latest_checkpoint(entry / "checkpoints")), base)


def _unused(base: Path) -> Path:
    number, directory = 1, base
    while directory.exists():
        number += 1
        directory = base.with_name(f"{base.name}-{number}")
    return directory


def _clear(directory: Path) -> None:
    try:
        for name in _OWN_FILES:
            (directory / name).unlink(missing_ok=True)
        for event_file in directory.glob("events.out.tfevents.*"):
            event_file.unlink()
        for name in _OWN_FOLDERS:
            if (directory / name).is_dir():
                shutil.rmtree(directory / name)
    except OSError as error:
        raise RunDirectoryError(
            f"cannot replace the run in {directory}: {error.strerror}",
            fix="Fix its permissions, or name another --run-dir.",
        ) from error


def _slug(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.]+", "-", name).strip("-")


def _plain(value: object) -> object:
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
