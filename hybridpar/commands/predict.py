"""`hybridpar predict`: classifies image files with the model of a run."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import IO, Annotated, Literal

import tyro

from hybridpar.commands import register_command
from hybridpar.config import TrainConfig
from hybridpar.config.trained import RunArgument, TrainedOptions
from hybridpar.errors import RunDirectoryError, UsageError, cannot_write
from hybridpar.formats.output_files import written_aside
from hybridpar.machine.launch import import_torchvision, leaving_at_once, prepare_worker


@dataclass(frozen=True, kw_only=True)
class Predict(TrainedOptions):
    """Classify image files with the model of a run.

    Exits with 0 where all of them were classified, and with 1 where some could not be read, which are left out.
    """

    run: RunArgument
    """Where the model is."""
    files: Annotated[
        tuple[Path, ...],
        tyro.conf.Positional,
        tyro.conf.arg(
            metavar="FILE|FOLDER ...",
            help="Image files, and folders of which all image files are taken.",
            help_behavior_hint="",
        ),
    ]
    """What is classified."""
    top: int = 1
    """Number of classes to name for each image, the most probable first."""
    format: Literal["csv", "jsonl"] = "csv"
    """Write a table with a header, or a JSON object on each line."""
    output: Annotated[Path | None, tyro.conf.arg(aliases=["-o"])] = None
    """Write into this file; default: standard output."""
    force: bool = False
    """Replace the file if it is there."""
    batch_size: int = 64
    """Images that are classified at once."""
    loader_workers: int | None = None
    """Loader processes that decode images; default: 2, and 0 for few images."""

    def changed(self, config: TrainConfig) -> TrainConfig:
        """The options of a run, or those by default, with what is otherwise."""
        return replace(super().changed(config), batch_size=self.batch_size, loader_workers=self.loader_workers)


@register_command(
    "predict",
    "Classify image files with the model of a run; as CSV or JSON lines.",
    Predict,
    groups={"Model and data": (TrainedOptions,)},
    shown=[field.name for field in fields(TrainedOptions)],
)
def run_predict(command: Predict, _: Sequence[str]) -> int:
    """Classify files, and write a row for each."""
    from hybridpar.run.directory import before_the_start
    from hybridpar.run.trained import find_trained

    if command.top < 1:
        raise UsageError(f"--top is {command.top}", "It must be at least 1.")
    if not command.files:
        raise UsageError("no image is named", "Behind RUN stand image files, or folders that hold some.")
    if command.output is not None and command.output.exists() and not command.force:
        raise UsageError(
            f"{command.output} is there already", "A file is not replaced by itself.", "Add --force, or name another."
        )
    with before_the_start():
        trained = find_trained(command.run, command)
    prepare_worker(trained.config.tune_process)
    with leaving_at_once():
        import_torchvision()
        from hybridpar.data.file_sets import find_images
        from hybridpar.observe.counter import Counter
        from hybridpar.run.predict import Predictor, Rows
    files = find_images(command.files)
    predictor = Predictor(trained, command.image_size)
    top = min(command.top, len(predictor.facts.class_names))
    _say(f"model     {predictor.trained}")
    done = 0
    with _opened(command.output) as stream, Counter("images", len(files)) as counter:
        rows = Rows(stream, command.format, top)
        for predictions in predictor(files, top):
            rows.write(predictions)
            done += len(predictions)
            counter.add(len(predictions))
    skipped = len(files) - done
    text = f"images    {done:,} classified"
    text += f", {skipped:,} cannot be read and {'is' if skipped == 1 else 'are'} left out" if skipped else ""
    _say(text + (f"; written to {command.output}" if command.output is not None else ""))
    return 1 if skipped else 0


@contextlib.contextmanager
def _opened(output: Path | None) -> Iterator[IO[str]]:
    """Standard output, or a file that is there once all of it is written."""
    if output is None:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="surrogateescape")  # file names need not be UTF-8
        yield sys.stdout
        return
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with (
            written_aside(output) as aside,
            open(aside, "w", encoding="utf-8", errors="surrogateescape", newline="") as stream,
        ):
            yield stream
    except OSError as error:
        what = cannot_write(output, error)
        raise RunDirectoryError(what, fix="Name a file that you can write with --output.") from error


def _say(text: str) -> None:
    print(text, file=sys.stderr)
