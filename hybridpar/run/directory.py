"""The run directory: where a run writes, which run it goes on with, and which options that run began with.

    runs/NAME/
      run.json       model, options, classes and form of the images, versions, and the job that writes here
      config.toml    the options, for `hybridpar train --config`
      plan.json      the plan; plan-N-workers.json is used again with N workers
      compress.csv   the codec of each parameter, where gradients are compressed
      metrics.jsonl  a line per step
      summary.json   the result
      tensorboard/   events; of other loggers the id that they gave the run, and their own files
      checkpoints/   see hybridpar.train.checkpoint
      profile/       traces of torch's profiler (`--profile`)
      flight/        what each worker does, while the run goes on (hybridpar.comm.flight)

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
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_type_hints

from hybridpar.config import TrainConfig
from hybridpar.config.data import data_name, images_over, read_images, samples_of
from hybridpar.config.files import config_text
from hybridpar.errors import CheckpointError, DataError, RunDirectoryError, UsageError
from hybridpar.formats.file_reader import first_problem, read_json
from hybridpar.formats.output_files import replace_file, run_directory_error
from hybridpar.train.checkpoint_files import latest_checkpoint, read_manifest, resolve_checkpoint, step_of

RUN_FILE = "run.json"
CONFIG_FILE = "config.toml"
#: Files and folders that a run writes.
_WRITTEN = (
    *(RUN_FILE, CONFIG_FILE, "plan.json", "compress.csv", "metrics.jsonl", "summary.json"),
    *("wandb.id", "mlflow.id", "events.out.tfevents.*"),
    *("checkpoints", "tensorboard", "wandb", "flight", "profile"),
)

#: Options that built the model of a run; the checkpoint itself says which others cannot change.
_FIXED = {"weights", "model_arg"}
#: Options of a command and not of the run: they are never recalled, and a change is not worth a line.
OPTIONS_OF_THE_COMMAND = {"resume", "resume_from", "overwrite", "run_dir", "debug", "hosts", "device", "timeout"}
#: Options that are not recalled, because the run has what followed from them, or the file is there already.
_NOT_RECALLED = {"plan", "timeline", "profile"}

_Config = TypeVar("_Config", bound=TrainConfig)


@dataclasses.dataclass(frozen=True)
class RunFolder:
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


def find_folder(config: TrainConfig, model: str, *, restarted: bool | None = None) -> RunFolder:
    """Decide on the run directory; called by one worker, the others are told.

    Nothing is written or deleted yet: the run may still turn out to be impossible, see `claim_folder`.
    """
    base = _base(config, model)
    job = os.environ.get("TORCHELASTIC_RUN_ID")
    again = was_restarted() if restarted is None else restarted
    if again and (mine := _folder_of_job(base, job)) is not None:
        checkpoint = latest_checkpoint(mine / "checkpoints") or _start(config)
        return RunFolder(mine, checkpoint, restarted=True)
    if (start := _start(config)) is not None:
        read_manifest(start)
    if config.resume:
        directory = resumed_directory(config, model)
        if (checkpoint := latest_checkpoint(directory / "checkpoints")) is None:
            raise CheckpointError(
                f"there is nothing to resume in {directory}",
                "--resume goes on from the newest whole checkpoint of the run directory.",
                "Name the directory with --run-dir, or leave --resume away to start a new run.",
            )
        return RunFolder(directory, checkpoint)
    if config.run_dir is None and not config.overwrite:
        return RunFolder(base, start, claim="make")
    if not (base / RUN_FILE).exists():
        return RunFolder(base, start)
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
    return RunFolder(base, start, claim="replace")


def _start(config: TrainConfig) -> Path | None:
    """The checkpoint of `--resume-from`."""
    return None if config.resume_from is None else resolve_checkpoint(config.resume_from).absolute()


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


def expected_directory(folder: RunFolder) -> Path:
    """The directory that a run is going to have, unless another run takes it meanwhile."""
    return next(_numbered(folder.directory)) if folder.claim == "make" else folder.directory


def recall_options(config: _Config, model: str) -> tuple[_Config, tuple[str, ...]]:
    """With `--resume`: the options that the run began with, but for those that are typed now, and lines on both.

    What files and presets say was for the run when it began.
    """
    if not config.resume:
        return config, ()
    directory = resumed_directory(config, model)
    checkpoint = latest_checkpoint(directory / "checkpoints")
    facts = read_facts(directory)
    began = facts.get("options")
    if checkpoint is None or not isinstance(began, dict):
        return config, ()
    if facts.get("model") != model:
        raise UsageError(
            f"the run in {directory} is of {facts.get('model')}, not of {model}",
            "A resumed run goes on with the weights of its own model.",
            "Name that model, or another --run-dir.",
        )
    hints, taken = get_type_hints(type(config)), dict[str, Any]()
    recalled, changed = [], []
    for name in (field.name for field in dataclasses.fields(TrainConfig)):
        now, before = getattr(config, name), began.get(name)
        if name in OPTIONS_OF_THE_COMMAND or name not in began or _plain(now) == before:
            continue
        option, is_typed = name.replace("_", "-"), config.given is None or name in config.given
        if not is_typed or (name == "batch_size" and now == "auto"):  # which the run has chosen
            # A longer run that is asked for by --epochs is not ended by a --steps that is not repeated.
            if name not in _NOT_RECALLED and not (name == "steps" and "epochs" in (config.given or ())):
                taken[name] = _typed(before, hints[name])
                recalled.append(f"{option} {_text(before)}")
            continue
        if name == "image_size":  # what is not named of it is as it was
            now = taken[name] = images_over(before, now)
        if name in _FIXED or (name == "image_size" and _seen(now) != _seen(before)):
            raise UsageError(
                f"--{option} is {_text(now)}, and the run in {directory} began with {_text(before)}",
                "A resumed run goes on with its own model, and images as the model has seen them.",
                f"Leave --{option} away, or start a new run.",
            )
        if _text(now) != _text(before):
            changed.append(f"resumed  {option}: {_text(before)} -> {_text(now)} after step {step_of(checkpoint)}")
    lines = [f"resumed  as the run began: {', '.join(recalled)}"] if recalled else []
    return dataclasses.replace(config, **taken), (*lines, *changed)


def _seen(image_size: int | str | None) -> tuple[Any, ...]:
    """What the images of a run cannot change."""
    images = read_images(image_size)
    return images.size, images.mean, images.std, images.channels


def recorded_batch(folder: RunFolder) -> int | None:
    """The batch of the run that goes on here, or whose checkpoint is gone on from; None where there is none."""
    if folder.continues:
        directory = folder.directory
    elif folder.checkpoint is not None:
        directory = folder.checkpoint.parents[1]
    else:
        return None
    batch = (read_facts(directory).get("options") or {}).get("batch_size")
    return batch if isinstance(batch, int) else None


def claim_folder(
    folder: RunFolder,
    config: TrainConfig,
    model: str,
    versions: Mapping[str, str],
    *,
    follows_plan: bool = False,
    images: Mapping[str, Any] | None = None,
) -> RunFolder:
    """Make the directory this run's own: delete the run that it replaces, write `run.json` and `config.toml`.

    Called by one worker once model, data and checkpoint are known to be good, so that a request which fails has
    deleted nothing.
    """
    facts: dict[str, Any] = {
        "model": model,
        "job": os.environ.get("TORCHELASTIC_RUN_ID"),
        "options": plain_options(config),
        "versions": dict(versions),
        "images": None if images is None else dict(images),
    }
    try:
        if folder.claim == "replace":
            _clear(folder.directory)
        elif folder.claim == "make":
            # Who replaces a worker that died goes on with the directory that it had made.
            made = _folder_of_job(folder.directory, facts["job"]) if was_restarted() else None
            folder = dataclasses.replace(folder, directory=made or _make_unused(folder.directory))
        folder.checkpoints.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise run_directory_error(folder.directory, error) from error
    replace_file(folder.directory / RUN_FILE, [json.dumps(facts, indent=2).encode() + b"\n"])
    text = config_text(config, model, config.given or (), "plan.json" if follows_plan else None)
    replace_file(folder.directory / CONFIG_FILE, [text.encode()])
    return folder


def plain_options(config: TrainConfig) -> dict[str, Any]:
    """The options of a run by name, as JSON has them."""
    return {key: _plain(value) for key, value in dataclasses.asdict(config).items() if key != "given"}


def _base(config: TrainConfig, model: str) -> Path:
    return config.run_dir or Path("runs") / f"{_slug(model)}-{_slug(data_name(config.data))}"


def resumed_directory(config: TrainConfig, model: str) -> Path:
    """The directory of the run that `--resume` goes on with."""
    if config.run_dir is not None:
        return config.run_dir
    base = _base(config, model)
    for directory in _family(base):
        began = read_facts(directory).get("options")
        # The first run with the data set hf/foo-2 has the name of the second with hf/foo.
        alike = not isinstance(began, dict) or samples_of(str(began.get("data"))) == samples_of(config.data)
        if alike and latest_checkpoint(directory / "checkpoints"):
            return directory
    return base


def was_restarted() -> bool:
    """Whether the launcher of this process has started the workers again."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def _folder_of_job(base: Path, job: str | None) -> Path | None:
    directories = () if job is None else _family(base)
    return next((directory for directory in directories if read_facts(directory).get("job") == job), None)


def read_facts(directory: Path) -> dict[str, Any]:
    """What a run's `run.json` says; nothing where there is none, or a damaged one."""
    try:
        facts = read_json(directory / RUN_FILE, "the run", RunDirectoryError)
    except RunDirectoryError:
        return {}
    return facts if isinstance(facts, dict) else {}


def run_facts(directory: Path) -> dict[str, Any]:
    """What the `run.json` of a run says; it names a model at least."""
    facts = read_facts(directory)
    if not isinstance(facts.get("model"), str):
        raise UsageError(
            f"{directory} is not the directory of a run: it has no readable {RUN_FILE}",
            "`hybridpar train` leaves that file in every run directory.",
            "Name such a directory; `hybridpar runs` lists those below runs/.",
        )
    return facts


def recorded_config(facts: Mapping[str, Any], directory: Path) -> TrainConfig:
    """The options that a run began with."""
    from pydantic import TypeAdapter, ValidationError

    began = facts.get("options")
    try:
        if not isinstance(began, dict) or not isinstance(facts.get("model"), str):
            raise UsageError("it names no model and no options")
        known = {field.name for field in dataclasses.fields(TrainConfig)} & began.keys()
        config = TypeAdapter(TrainConfig).validate_python({name: began[name] for name in known})
        config.check()
    except (ValidationError, UsageError) as error:
        told = error.what if isinstance(error, UsageError) else ": ".join(first_problem(error))
        raise CheckpointError(
            f"cannot read the options of the run in {directory}: {told}",
            f"Its {RUN_FILE} names the model and all options that it was trained with.",
            "Name its file of weights instead of the directory, with --model and --data.",
        ) from error
    return config


def _family(base: Path) -> list[Path]:
    """`base`, `base-2`, `base-3` ..., as far as they exist, newest first."""
    pattern = re.compile(re.escape(base.name) + r"(-\d+)?$")
    if not base.parent.is_dir():
        return []
    found = [entry for entry in base.parent.iterdir() if entry.is_dir() and pattern.match(entry.name)]
    return sorted(found, key=lambda entry: entry.stat().st_mtime, reverse=True)


def _make_unused(base: Path) -> Path:
    """Make `base`, or `base-N` with the first number that is free; of two jobs at a time each gets its own."""
    base.parent.mkdir(parents=True, exist_ok=True)
    while True:
        directory = next(_numbered(base))
        with contextlib.suppress(FileExistsError):  # another job was faster
            directory.mkdir()
            return directory


def _numbered(base: Path) -> Iterator[Path]:
    """`base`, `base-2`, `base-3` ..., those that are not there."""
    for number in itertools.count(1):
        directory = base if number == 1 else base.with_name(f"{base.name}-{number}")
        if not os.path.lexists(directory):
            yield directory


def _clear(directory: Path) -> None:
    for path in itertools.chain.from_iterable(map(directory.glob, _WRITTEN)):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def _slug(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.]+", "-", name).strip("-")


def _plain(value: object) -> object:
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def _typed(value: Any, hint: Any) -> Any:
    """A value of `run.json` as the options have it."""
    if isinstance(value, list):
        return tuple(value)
    return Path(value) if isinstance(value, str) and Path in (hint, *get_args(hint)) else value


def _text(value: object) -> str:
    """A value for a message."""
    if isinstance(value, (list, tuple)):
        return " ".join(map(str, value))
    return "the default" if value is None else str(value)
