"""`hybridpar predict`: classifies image files with the model of a run."""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro

from hybridpar.commands import register_command
from hybridpar.commands.evaluate import TrainedModel, import_torch
from hybridpar.errors import check
from hybridpar.formats.output_files import check_writable, replace_file
from hybridpar.spec import AT_LEAST_1

#: File names need not be UTF-8.
_ERRORS = "surrogateescape"


class Predict(TrainedModel):
    """Classify image files with the model of a run.

    Exits with 0 where all of them were classified, and with 1 where some could not be read, which are left out.

    Attributes:
        files: Image files, and folders of which all image files are taken.
        top: Number of classes to name for each image, the most probable first.
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
    output: Annotated[Path | None, tyro.conf.arg(aliases=["-o"])] = None
    batch_size: int = 64
    loader_workers: int | None = None


@register_command("predict", "Classify image files with the model of a run, as a table in CSV.", Predict)
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
    stream, done = io.StringIO() if command.output is not None else sys.stdout, 0
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors=_ERRORS)
    table = csv.writer(stream, lineterminator="\n")
    numbers = ["", *(f"_{number}" for number in range(2, top + 1))]
    table.writerow(["file", *(f"{key}{number}" for number in numbers for key in ("class", "probability"))])
    with progress_bar("images", len(files)) as show:
        for predictions in predictor(files, top):
            for file, best in predictions:  # with seven digits, what a float32 has
                table.writerow([file, *(cell for name, value in best for cell in (name, f"{value:.7g}"))])
            stream.flush()
            done += len(predictions)
            show(advance=len(predictions))
    skipped = len(files) - done
    text = f"images    {done:,} classified"
    text += f", {skipped:,} cannot be read and {'is' if skipped == 1 else 'are'} left out" if skipped else ""
    if command.output is not None and isinstance(stream, io.StringIO):
        replace_file(command.output, [stream.getvalue().encode(errors=_ERRORS)])
        text += f"; written to {command.output}"
    print(text, file=sys.stderr)
    return 1 if skipped else 0
