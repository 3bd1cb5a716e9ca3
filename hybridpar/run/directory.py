"""The run directory: where a run writes, which run it goes on with, and which options that run began with.

    runs/NAME/
      run.json       model, options, classes and form of the images, and the job that writes here
      config.toml    the options, for `hybridpar train --config`
      plan.json      the plan; plan-N-workers.json is used again with N workers
      compress.csv   the codec of each parameter, where gradients are compressed
      metrics.jsonl  a line per step
      summary.json   the result
      tensorboard/   events; of other loggers the id that they gave the run, and their own files
      checkpoints/   see hybridpar.train.checkpoint
      profile/       traces of torch's profiler (`--profile`)
      flight/        what each worker does, while the run goes on (hybridpar.comm.flight)

A new run gets a directory of its own, and one that exists is continued with `--resume`; no run is ever deleted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import glob
import itertools
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from hybridpar.config import TrainConfig
from hybridpar.config.data import data_name, images_over, read_images, samples_of
from hybridpar.config.files import config_text
from hybridpar.errors import CheckpointError, DataError, RunDirectoryError, UsageError, check
from hybridpar.formats.checkpoint_files import latest_checkpoint, read_manifest, resolve_checkpoint, step_of
from hybridpar.formats.file_reader import first_problem, read_json
from hybridpar.formats.output_files import replace_file, run_directory_error

RUN_FILE = "run.json"
CONFIG_FILE = "config.toml"

#: Options that built the model of a run; the checkpoint itself says which others cannot change.
_FIXED = {"weights", "model_arg"}
#: Options of a command and not of the run: they are never recalled, and a change is not worth a line.
OPTIONS_OF_THE_COMMAND = {"resume", "resume_from", "run_dir", "debug", "hosts", "device", "timeout"}
#: Options that are not recalled, because the run has what followed from them, or the file is there already.
_NOT_RECALLED = {"plan", "timeline", "profile"}

#: Where runs are that are given no directory.
_RUNS = Path("runs")
_OPTIONS = tuple(field.name for field in dataclasses.fields(TrainConfig) if field.name != "given")

_Config = TypeVar("_Config", bound=TrainConfig)


@dataclasses.dataclass(frozen=True)
class RunFolder:
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
    def continues(self) -> bool:
        """Whether a run that began here goes on, rather than another one from a checkpoint."""
        return self.restarted or (self.checkpoint is not None and self.directory in self.checkpoint.parents)

    @property
    def checkpoints(self) -> Path:
        """Directory of the checkpoints."""
        return self.directory / "checkpoints"


def find_folder(config: TrainConfig, model: str, *, restarted: bool | None = None) -> RunFolder:
    """Decide on the run directory; called by one worker, the others are told.

    Nothing is written yet: the run may still turn out to be impossible, see `claim_folder`.
    """
    job = os.environ.get("TORCHELASTIC_RUN_ID")
    again = (was_restarted() if restarted is None else restarted) and job is not None
    claimed = (path for path in _directories(config, model) if again and read_facts(path).get("job") == job)
    mine = next(claimed, None)
    start = None if mine is None else latest_checkpoint(mine / "checkpoints")
    if start is None and config.resume_from is not None:  # which may be gone once the run has a checkpoint itself
        start = resolve_checkpoint(config.resume_from).absolute()
    if mine is not None:
        return RunFolder(mine, start, restarted=True)
    if start is not None:
        read_manifest(start)
    if config.resume:
        directory = resumed_directory(config, model)
        if (start := latest_checkpoint(directory / "checkpoints")) is None:
            raise CheckpointError(
                f"there is nothing to resume in {directory}",
                "--resume goes on from the newest whole checkpoint of the run directory.",
                "Name the directory with --run-dir, or leave --resume away to start a new run.",
            )
    else:
        directory = config.run_dir or next(path for path in _numbered(config, model) if not os.path.lexists(path))
        check(
            not (directory / RUN_FILE).exists(),
            f"{directory} already holds a run",
            "A run never replaces another one.",
            "Add --resume to continue it, name another --run-dir, or delete the directory.",
        )
    existing = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):  # said before anything is measured
        problem = errno.EACCES if existing.is_dir() else errno.ENOTDIR
        raise run_directory_error(directory, OSError(problem, os.strerror(problem)))
    return RunFolder(directory, start)


@contextlib.contextmanager
def before_the_start() -> Iterator[None]:
    """Context of all that a run does before it starts: what it cannot use was asked for, so the exit code is 2.

    Data, checkpoints and a run directory that turn out to be unusable later are a failure of the run.
    """
    try:
        yield
    except (DataError, CheckpointError, RunDirectoryError) as error:
        if not was_restarted():
            error.exit_code = UsageError.exit_code
        raise


def recall_options(config: _Config, model: str) -> tuple[_Config, tuple[str, ...]]:
    """With `--resume`: the options that the run began with, but for those that are typed now, and lines on these.

    What files and presets say was for the run when it began.
    """
    if not config.resume:
        return config, ()
    directory = resumed_directory(config, model)
    checkpoint, facts = latest_checkpoint(directory / "checkpoints"), read_facts(directory)
    if checkpoint is None or not facts:
        return config, ()
    check(
        facts["model"] == model,
        f"the run in {directory} is of {facts['model']}, not of {model}",
        "A resumed run goes on with the weights of its own model.",
        "Name that model, or another --run-dir.",
    )
    began, typed = recorded_config(facts, directory), set(_OPTIONS if config.given is None else config.given)
    if config.batch_size == "auto":  # it stands for what was chosen when the run began
        typed.discard("batch_size")
    if "image_size" in typed and config.image_size != began.image_size:  # what is not named of it is as it was
        config = dataclasses.replace(config, image_size=images_over(began.image_size, config.image_size))
    # A longer run that is asked for by --epochs is not ended by a --steps that is not repeated.
    stays = _NOT_RECALLED | ({"steps"} if "epochs" in typed else set())
    taken, changed = dict[str, Any](), []
    for name in (name for name in _OPTIONS if name not in OPTIONS_OF_THE_COMMAND):
        option, before, now = name.replace("_", "-"), getattr(began, name), getattr(config, name)
        was, is_now = option_text(before), option_text(now)
        if was == is_now or name in stays - typed:
            continue
        if name not in typed:
            taken[name] = before
            continue
        check(
            name not in _FIXED and (name != "image_size" or _seen(now) == _seen(before)),
            f"--{option} is {is_now}, and the run in {directory} began with {was}",
            "A resumed run goes on with its own model, and images as the model has seen them.",
            f"Leave --{option} away, or start a new run.",
        )
        was = "not given before" if before is None else was
        changed.append(f"resumed  {option}: {was} -> {is_now} after step {step_of(checkpoint)}")
    return dataclasses.replace(config, **taken), tuple(changed)


def _seen(image_size: int | str | None) -> tuple[Any, ...]:
    """What the images of a run cannot change."""
    images = read_images(image_size)
    return images.size, images.mean, images.std, images.channels


def recorded_batch(folder: RunFolder) -> int | None:
    """The batch of the run that goes on here, or whose checkpoint is gone on from; None where there is none."""
    began = folder.directory if folder.continues else folder.checkpoint and folder.checkpoint.parents[1]
    batch = read_facts(began).get("options", {}).get("batch_size") if began is not None else None
    return batch if isinstance(batch, int) else None


def claim_folder(
    folder: RunFolder, config: TrainConfig, model: str, images: object = None, plan: str | None = None
) -> RunFolder:
    """Make the directory this run's own, with `run.json` and `config.toml`.

    Called by one worker once model, data and checkpoint are known to be good, so that a request which fails leaves
    nothing behind.
    """
    job = os.environ.get("TORCHELASTIC_RUN_ID")
    facts = {"model": model, "job": job, "options": plain_options(config), "images": images}
    try:
        if not folder.continues and config.run_dir is None:
            folder = dataclasses.replace(folder, directory=next(filter(_is_made, _numbered(config, model))))
        folder.checkpoints.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise run_directory_error(folder.directory, error) from error
    replace_file(folder.directory / RUN_FILE, [json.dumps(facts, indent=2).encode() + b"\n"])
    text = config_text(config, model, config.given or (), plan)
    replace_file(folder.directory / CONFIG_FILE, [text.encode()])
    return folder


def plain_options(config: TrainConfig) -> dict[str, Any]:
    """The options of a run by name, as JSON has them."""
    options = {name: getattr(config, name) for name in _OPTIONS}
    plain: dict[str, Any] = json.loads(json.dumps(options, default=str))
    return plain


def _base(config: TrainConfig, model: str) -> Path:
    name = "-".join(re.sub(r"[^A-Za-z0-9_.]+", "-", part).strip("-") for part in (model, data_name(config.data)))
    return config.run_dir or _RUNS / name


def _numbered(config: TrainConfig, model: str) -> Iterator[Path]:
    """The directories of runs that are given none, in order."""
    base = _base(config, model)
    return (base.with_name(f"{base.name}-{number}") if number > 1 else base for number in itertools.count(1))


def _is_made(directory: Path) -> bool:
    """Make a directory; of two jobs that want the same one gets it."""
    try:
        directory.mkdir(parents=True)
    except FileExistsError:
        return False
    return True


def _directories(config: TrainConfig, model: str) -> Iterator[Path]:
    """Where a run of this model on these data may have begun, newest first."""
    if config.run_dir is not None:
        yield config.run_dir
        return
    base = _base(config, model)
    directories = [path for path in _RUNS.glob(f"{glob.escape(base.name)}*") if path.is_dir()]
    for directory in sorted(directories, key=lambda path: path.stat().st_mtime, reverse=True):
        number, facts = directory.name.removeprefix(base.name).removeprefix("-"), read_facts(directory)
        # The first run with the data set hf/foo-2 has the name of the second with hf/foo. Damaged facts tell nothing.
        data = samples_of(str(facts["options"].get("data"))) if facts else samples_of(config.data)
        alike = facts.get("model", model) == model and data == samples_of(config.data)
        if alike and (not number or number.isdigit()):
            yield directory


def resumed_directory(config: TrainConfig, model: str) -> Path:
    """The directory of the run that `--resume` goes on with: the newest that has a checkpoint."""
    with_checkpoint = (path for path in _directories(config, model) if latest_checkpoint(path / "checkpoints"))
    return next(with_checkpoint, _base(config, model))


def was_restarted() -> bool:
    """Whether the launcher of this process has started the workers again."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def read_facts(directory: Path) -> dict[str, Any]:
    """What a run's `run.json` says, its model and options at least; nothing where there is none, or a damaged one."""
    try:
        facts = read_json(directory / RUN_FILE, "the run", RunDirectoryError)
    except RunDirectoryError:
        return {}
    whole = isinstance(facts, dict) and isinstance(facts.get("model"), str) and isinstance(facts.get("options"), dict)
    return facts if whole else {}


def run_facts(directory: Path) -> dict[str, Any]:
    """What the `run.json` of a run says; without one there is no run."""
    facts = read_facts(directory)
    check(
        bool(facts),
        f"{directory} is not the directory of a run: it has no readable {RUN_FILE}",
        "`hybridpar train` leaves that file in every run directory.",
        "Name such a directory; `hybridpar runs` lists those below runs/.",
    )
    return facts


def recorded_config(facts: Mapping[str, Any], directory: Path) -> TrainConfig:
    """The options that a run began with."""
    from pydantic import TypeAdapter, ValidationError

    problem, cause = "it names no model and no options", None
    try:
        if facts:
            known = {name: value for name, value in facts["options"].items() if name in _OPTIONS}
            return TypeAdapter(TrainConfig).validate_python(known)
    except (ValidationError, UsageError) as error:
        problem, cause = error.what if isinstance(error, UsageError) else ": ".join(first_problem(error)), error
    raise CheckpointError(
        f"cannot read the options of the run in {directory}: {problem}",
        f"Its {RUN_FILE} names the model and all options that it was trained with.",
        "Name its file of weights instead of the directory, with --model and --data.",
    ) from cause


def option_text(value: object) -> str:
    """A value for a message."""
    if isinstance(value, (list, tuple)):
        return " ".join(map(str, value))
    return "none" if value is None else str(value)
