"""The commands that use a trained model: `hybridpar evaluate`, `predict` and `export`.

They are given a run, a checkpoint, or weights, and replace no file unless told to.
"""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from hybridpar.commands import register_command
from hybridpar.config.train import TrainedOptions
from hybridpar.errors import check
from hybridpar.formats.output_files import check_writable, replace_file
from hybridpar.machine.launch import import_torchvision, in_job, leaving_at_once, note_orderly_end, prepare_worker
from hybridpar.spec import AT_LEAST_1, check_rules

if TYPE_CHECKING:
    from hybridpar.observe.results import TestResult
    from hybridpar.run.trained import Trained

#: What a test writes.
_FILES = ("evaluation.json", "confusion.html")

#: File names need not be UTF-8.
_ERRORS = "surrogateescape"

#: Images, of noise, that an exported file is checked with.
_IMAGES = 8


class TrainedModel(TrainedOptions):
    """A trained model, and whether files may be replaced.

    Attributes:
        run: A run directory; a checkpoint in it (step-N); or weights as `train --weights` takes them, with --model and
            --data.
        force: Replace files that are there.
    """

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    force: bool = False

    def find(self) -> Trained:
        """The model, without importing torch."""
        from hybridpar.run.directory import before_the_start
        from hybridpar.run.trained import find_trained

        check_rules(self)
        with before_the_start():
            return find_trained(self.run, self)

    def refuse_replacing(self, *files: Path) -> None:
        """Refuse to replace what is there, before the work has taken its time."""
        taken = ", ".join(str(file) for file in files if file.exists())
        rule, fix = "A file is not replaced by itself.", "Add --force, or name another --output."
        check(self.force or not taken, f"there already: {taken}", rule, fix)


def import_torch(trained: Trained) -> None:
    """Set up this process for a model, and import torch."""
    prepare_worker(trained.config.tune_process)
    with leaving_at_once():
        import_torchvision()


def facts_of(trained: Trained) -> dict[str, Any]:
    """What is written down of the model."""
    return {
        "model": trained.name,
        "data": trained.config.data,
        "checkpoint": None if trained.checkpoint is None else str(trained.checkpoint),
        "step": trained.step,
        "weights": trained.weights or trained.source,
    }


# ------------------------------------------------------------------------------------------------------------- evaluate


class Evaluate(TrainedModel):
    """Test the model of a run, or weights, on the whole test set of its data.

    Attributes:
        batch_size: Images per batch, over all workers; default: that of the run.
        loader_workers: Loader processes per worker; default: 0 for data held in memory, else 2.
        amp: Precision of the forward pass; default: that of the run.
        nproc: Workers that the test set is divided among; default: one per GPU, else 1. Under torchrun: those it
            started.
        output: Write evaluation.json and confusion.html into this folder.
    """

    batch_size: int | None = None
    loader_workers: int | None = None
    amp: Literal["none", "bf16", "fp16"] | None = None
    nproc: Annotated[int | None, AT_LEAST_1] = None
    output: Annotated[Path | None, tyro.conf.arg(aliases=["-o"])] = None


@register_command("evaluate", Evaluate)
def run_evaluate(command: Evaluate, arguments: Sequence[str]) -> int:
    """Test on this worker, or start the workers of this machine and wait for them."""
    from hybridpar.machine.devices import gpu_count

    trained = command.find()
    if not in_job():
        if command.output is not None:
            command.refuse_replacing(*(command.output / name for name in _FILES))
        # What a CPU computes alone is divided among its cores by torch.
        workers = command.nproc or gpu_count() or 1
        if workers > 1:
            from hybridpar.machine.supervise import launch_workers

            return launch_workers(arguments, workers, restarts=0)
    import_torch(trained)
    from hybridpar.run.evaluate import evaluate_trained

    result = evaluate_trained(trained)
    if result is not None:
        _report(command.output, trained, result)
    return 0


def _report(output: Path | None, trained: Trained, result: TestResult) -> None:
    """Print the result, and write what --output asks for."""
    print(f"model     {trained}\ndata      {trained.config.data}\n{result.text()}", flush=True)
    if output is not None:
        figures, picture = (output / name for name in _FILES)
        replace_file(figures, [json.dumps({**facts_of(trained), **result.plain()}, indent=2).encode(), b"\n"])
        print(f"written   {figures}")
        if result.confusion is not None and importlib.util.find_spec("plotly") is None:
            print(f"{picture.name} needs plotly: pip install 'hybridpar[report]'", file=sys.stderr)
        elif result.confusion is not None:
            from hybridpar.observe.page import confusion_matrix, element, write_page

            matrix = confusion_matrix(result.confusion, result.classes)
            write_page(picture, f"{trained.name} on {trained.config.data}", [element("pre", result.text()), matrix])
            print(f"written   {picture}")
    note_orderly_end()


# -------------------------------------------------------------------------------------------------------------- predict


class Predict(TrainedModel):
    """Classify image files with the model of a run, as a table in CSV.

    Exits with 0 where all of them were classified, and with 1 where some could not be read, which are left out.

    Attributes:
        files: Image files, and folders of which all image files are taken.
        top: Number of classes to name for each image, the most probable first.
        output: Write into this file; default: standard output.
        batch_size: Images that are classified at once.
        loader_workers: Loader processes that decode images; default: 2, and 0 for few images.
    """

    files: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="FILE|FOLDER ...")] = ()
    top: Annotated[int, AT_LEAST_1] = 1
    output: Annotated[Path | None, tyro.conf.arg(aliases=["-o"])] = None
    batch_size: int = 64
    loader_workers: int | None = None


@register_command("predict", Predict)
def run_predict(command: Predict, _: Sequence[str]) -> int:
    """Classify files, and write a row for each."""
    check(bool(command.files), "no image is named", "Behind RUN stand image files, or folders that hold some.")
    if command.output is not None:
        check_writable("--output", command.output)
        command.refuse_replacing(command.output)
    trained = command.find()
    # Those of the run were for its training set.
    trained = replace(trained, config=replace(trained.config, loader_workers=command.loader_workers))
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


# --------------------------------------------------------------------------------------------------------------- export


class Export(TrainedModel):
    """Write the model of a run into a file that runs without hybridpar, checked against the model.

    Attributes:
        format: A graph for torch.export.load, or ONNX.
        output: The file to write.
    """

    format: Literal["torch-export", "onnx"]
    output: Annotated[Path, tyro.conf.arg(aliases=["-o"])]


@register_command("export", Export)
def run_export(command: Export, _: Sequence[str]) -> int:
    """Write and check the file."""
    check_writable("--output", command.output)
    command.refuse_replacing(command.output)
    check(
        command.format != "torch-export" or command.output.suffix == ".pt2",
        f"--output {command.output} with --format torch-export",
        "torch.export.load wants a name that ends in .pt2.",
        f"Name it {command.output.with_suffix('.pt2')}.",
    )
    trained = command.find()
    import_torch(trained)
    import torch

    from hybridpar.models.export import export_model
    from hybridpar.run.directory import before_the_start
    from hybridpar.run.trained import image_facts, load_trained

    with before_the_start():
        facts = image_facts(trained, command.image_size)
        model = load_trained(trained, len(facts.class_names))
    print(f"model     {trained}", flush=True)
    shape = _IMAGES, facts.sample_shape[0], facts.test_size, facts.test_size
    images = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    # What outputs mean, and how images are made inputs.
    inputs = {"classes": facts.class_names, "image_size": facts.test_size, "mean": facts.mean, "std": facts.std}
    done = export_model(model, images, command.format, command.output, facts={**facts_of(trained), **inputs})
    print(
        f"checked   batches of {', '.join(map(str, done.batches))} images: outputs differ by {done.difference:.2g} at "
        f"most, {done.relative:.2g} of the largest"
    )
    print(f"written   {command.output}, {command.output.stat().st_size / 1e6:.1f} MB")
    return 0
