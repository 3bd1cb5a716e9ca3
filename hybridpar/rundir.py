"""Why: what a run leaves behind must be found again, and never be overwritten by accident.

    runs/NAME/
      run.json       model, options, versions, and the job that writes here
      plan.json      the plan; plan-N-workers.json is one that waits for N workers again
      compress.csv   what each parameter travels as, where gradients are compressed
      policy.toml    the same as rules, where they were measured
      metrics.jsonl  a line per step
      summary.json   the result
      loss.png       the loss as a picture
      staleness.png  how old gradients were when they arrived, in a run with parameter servers
      checkpoints/   see hybridpar.checkpoint

A new run gets a directory of its own; one that exists is continued with `--resume` or replaced with `--overwrite`,
both of which the user must ask for. Only files that a run writes are ever deleted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any, Literal

from hybridpar.checkpoint import latest_checkpoint
from hybridpar.config import TrainConfig
from hybridpar.errors import CheckpointError, UsageError
from hybridpar.observe.files import replace_file, run_directory_error

RUN_FILE = "run.json"
_OWN_FILES = (
    *(RUN_FILE, "plan.json", "compress.csv", "policy.toml", "metrics.jsonl", "summary.json", "loss.png"),
    "staleness.png",
)
_OWN_FOLDERS = ("checkpoints", "tensorboard")


@dataclasses.dataclass(frozen=True)
class RunPlace:
    """Where a run writes, and what it goes on from.

    Attributes:
        directory: The run directory.
        checkpoint: The checkpoint to continue, or None for a new run.
        restarted: Whether a launcher started this job again after a worker died.
        claim: How the directory is made the run's own: used as it is; made anew, with a number behind its name where
            that is taken; or used after the run in it has been deleted.
    """

    directory: Path
    checkpoint: Path | None = None
    restarted: bool = False
    claim: Literal["use", "make", "replace"] = "use"

    @property
    def continues(self) -> bool:
        """Whether a run that began here goes on, rather than another one from a checkpoint."""
        return self.restarted or (self.checkpoint is not None and self.directory in self.checkpoint.parents)

    @property
    def checkpoints(self) -> Path:
        """Directory of the checkpoints."""
        return self.directory / "checkpoints"


def find_place(config: TrainConfig, model: str) -> RunPlace:
    """Decide on the run directory; called by one worker, the others are told.

    Nothing is written or deleted yet: the run may still turn out to be impossible, see `claim_place`.

    Raises:
        UsageError: The directory holds a run, and neither `--resume` nor `--overwrite` was given.
        CheckpointError: `--resume` without a checkpoint to resume.
    """
    base = config.run_dir or Path("runs") / f"{_slug(model)}-{_slug(config.data)}"
    job = os.environ.get("TORCHELASTIC_RUN_ID")
    restarted = job is not None and int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    if restarted and (mine := _place_of_job(base, job)) is not None:
        checkpoint = latest_checkpoint(mine / "checkpoints") or config.resume_from
        return RunPlace(mine, checkpoint, restarted=True)
    if config.resume:
        directory = _newest(base) if config.run_dir is None else base
        if (checkpoint := latest_checkpoint(directory / "checkpoints")) is None:
            raise CheckpointError(
                f"there is nothing to resume in {directory}",
                "--resume goes on from the newest whole checkpoint of the run directory.",
                "Name the directory with --run-dir, or leave --resume away to start a new run.",
            )
        return RunPlace(directory, checkpoint)
    if config.run_dir is None and not config.overwrite:
        return RunPlace(base, config.resume_from, claim="make")
    if not (base / RUN_FILE).exists():
        return RunPlace(base, config.resume_from)
    if not config.overwrite:
        raise UsageError(
            f"{base} already holds a run",
            "A run never overwrites another one by itself.",
            "Add --resume to continue it, --overwrite to replace it, or name another --run-dir.",
        )
    if config.resume_from is not None and config.resume_from.resolve().is_relative_to(base.resolve()):
        raise UsageError(
            f"--overwrite would delete {config.resume_from}, which --resume-from names",
            "The run that is replaced is deleted with its checkpoints.",
            "Use --resume instead to continue that run, or name another --run-dir.",
        )
    return RunPlace(base, config.resume_from, claim="replace")


def claim_place(place: RunPlace, config: TrainConfig, model: str, versions: dict[str, str]) -> RunPlace:
    """Make the directory this run's own: delete the run that it replaces, and write `run.json`.

    Called by one worker once model, data and checkpoint are known to be good, so that a request which fails has
    deleted nothing.

    Returns:
        The place with the directory that the run really got.

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
        if place.claim == "replace":
            _clear(place.directory)
        elif place.claim == "make":
            place = dataclasses.replace(place, directory=_make_unused(place.directory))
        place.checkpoints.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise run_directory_error(place.directory, error) from error
    replace_file(place.directory / RUN_FILE, [json.dumps(facts, indent=2).encode() + b"\n"])
    return place


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


def _make_unused(base: Path) -> Path:
    """Make `base`, or `base-N` with the first number that is free; of two jobs at a time each gets its own."""
    base.parent.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(1):
        directory = base if number == 1 else base.with_name(f"{base.name}-{number}")
        with contextlib.suppress(FileExistsError):
            directory.mkdir()
            break
    return directory


def _clear(directory: Path) -> None:
    for name in _OWN_FILES:
        (directory / name).unlink(missing_ok=True)
    for numbered in (*directory.glob("events.out.tfevents.*"), *directory.glob("plan-[0-9]*-workers.json")):
        numbered.unlink()
    for name in _OWN_FOLDERS:
        if (directory / name).is_dir():
            shutil.rmtree(directory / name)


def _slug(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.]+", "-", name).strip("-")


def _plain(value: object) -> object:
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
