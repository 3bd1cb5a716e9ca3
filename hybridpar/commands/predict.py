"""`hybridpar predict`: classifies image files with the model of a run."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Literal

import tyro

from hybridpar.commands import register_command
from hybridpar.commands.evaluate import TrainedModel, import_torch
from hybridpar.config import TrainConfig
from hybridpar.errors import RunDirectoryError, cannot_write, check
from hybridpar.formats.output_files import check_writable, written_aside
from hybridpar.spec import AT_LEAST_1

if TYPE_CHECKING:
    from hybridpar.run.evaluate import Prediction


class Predict(TrainedModel):
    """Classify image files with the model of a run.

    Exits with 0 where all of them were classified, and with 1 where some could not be read, which are left out.

    Attributes:
        files: Image files, and folders of which all image files are taken.
        top: Number of classes to name for each image, the most probable first.
        format: Write a table with a header, or a JSON object on each line.
        output: Write into this file; default: standard output.
        batch_size: Images that are classified at once.
        loader_workers: Loader processes that decode images; default: 2, and 0 for few images.
    """

    files: Annotated[
        tuple[Path, ...],
        tyro.conf.Positional,
        tyro.conf.arg(metavar="FILE|FOLDER ...", help_behavior_hint=""),
    ]
    top: Annotated[int, AT_LEAST_1] = 1
    format: Literal["csv", "jsonl"] = "csv"
    output: Annotated[Path | None, tyro.conf.arg(aliases=["-o"])] = None
    batch_size: int = 64
    loader_workers: int | None = None

    def changed(self, config: TrainConfig) -> TrainConfig:
        """The options of a run, or those by default, with what is otherwise."""
        return replace(super().changed(config), batch_size=self.batch_size, loader_workers=self.loader_workers)


@register_command("predict", "Classify image files with the model of a run; as CSV or JSON lines.", Predict)
def run_predict(command: Predict, _: Sequence[str]) -> int:
    """Classify files, and write a row for each."""
    check(bool(command.files), "no image is named", "Behind RUN stand image files, or folders that hold some.")
    if command.output is not None:
        check_writable("--output", command.output)
        command.refuse_replacing(command.output)
    trained = command.find()
    import_torch(trained)
    from hybridpar.data.file_sets import find_images
    from hybridpar.observe.progress import progress_bar
    from hybridpar.run.evaluate import Predictor

    files = find_images(command.files)
    predictor = Predictor(trained, command.image_size)
    top = min(command.top, len(predictor.facts.class_names))
    print(f"model     {trained}", file=sys.stderr)
    done = 0
    with _opened(command.output) as stream, progress_bar("images", len(files)) as show:
        if command.format == "csv":
            numbers = ["", *(f"_{number}" for number in range(2, top + 1))]
            head = ["file", *(f"{key}{number}" for number in numbers for key in ("class", "probability"))]
            csv.writer(stream, lineterminator="\n").writerow(head)
        for predictions in predictor(files, top):
            _write(stream, command.format, predictions)
            done += len(predictions)
            show(advance=len(predictions))
    skipped = len(files) - done
    text = f"images    {done:,} classified"
    text += f", {skipped:,} cannot be read and {'is' if skipped == 1 else 'are'} left out" if skipped else ""
    print(text + (f"; written to {command.output}" if command.output is not None else ""), file=sys.stderr)
    return 1 if skipped else 0


def _write(stream: IO[str], form: Literal["csv", "jsonl"], predictions: Sequence[Prediction]) -> None:
    """Write a row for each."""
    for file, best in predictions:
        # Seven digits: what a float32 has.
        classes = [(name, float(f"{value:.7g}")) for name, value in best]
        if form == "csv":
            row = [file, *(cell for pair in classes for cell in pair)]
            csv.writer(stream, lineterminator="\n").writerow(row)
        else:
            named = [{"class": name, "probability": value} for name, value in classes]
            stream.write(json.dumps({"file": str(file), "predictions": named}) + "\n")
    stream.flush()


@contextlib.contextmanager
def _opened(output: Path | None) -> Iterator[IO[str]]:
    """Standard output, or a file that is there once all of it is written; file names need not be UTF-8."""
    if output is None:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="surrogateescape")
        yield sys.stdout
        return
    try:
        with (
            written_aside(output) as aside,
            open(aside, "w", encoding="utf-8", errors="surrogateescape", newline="") as stream,
        ):
            yield stream
    except OSError as error:
        raise RunDirectoryError(cannot_write(output, error)) from error
