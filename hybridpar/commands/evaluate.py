"""`hybridpar evaluate`: tests the model of a run, or weights, on a whole test set, on one or several workers."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from hybridpar.commands import register_command
from hybridpar.config import TrainConfig
from hybridpar.config.trained import RunArgument, TrainedOptions
from hybridpar.errors import RunDirectoryError, UsageError
from hybridpar.machine.launch import import_torchvision, in_job, leaving_at_once, note_orderly_end, prepare_worker

if TYPE_CHECKING:
    from hybridpar.observe.results import TestResult
    from hybridpar.run.trained import Trained

#: Classes of a confusion matrix that is drawn.
_MOST_DRAWN = 500

_FILES = ("evaluation.json", "confusion.html")


@dataclass(frozen=True, kw_only=True)
class Evaluate(TrainedOptions):
    """Test the model of a run, or weights, on the whole test set of its data."""

    run: RunArgument
    """Where the model is."""
    batch_size: int | None = None
    """Images per batch, over all workers; default: that of the run."""
    loader_workers: int | None = None
    """Loader processes per worker; default: 0 for data held in memory, else 2."""
    amp: Literal["none", "bf16", "fp16"] | None = None
    """Precision of the forward pass; default: that of the run."""
    nproc: int | None = None
    """Workers that the test set is divided among; default: one per GPU, else 1. Under torchrun: those it started."""
    json: bool = False
    """Print all figures as JSON, and nothing else, to standard output."""
    output: Annotated[Path | None, tyro.conf.arg(aliases=["-o"])] = None
    """Write evaluation.json and confusion.html into this folder."""
    force: bool = False
    """Replace such files that are there."""

    def changed(self, config: TrainConfig) -> TrainConfig:
        """The options of a run, or those by default, with what is otherwise."""
        options = {name: getattr(self, name) for name in ("batch_size", "loader_workers", "amp")}
        given = {name: value for name, value in options.items() if value is not None}
        return replace(super().changed(config), **given)


@register_command(
    "evaluate",
    "Test the model of a run, or weights: accuracy, by class, confusion, calibration.",
    Evaluate,
    groups={"Model and data": (TrainedOptions,)},
    shown=[field.name for field in fields(TrainedOptions)],
)
def run_evaluate(command: Evaluate, arguments: Sequence[str]) -> int:
    """Test on this worker, or start the workers of this machine and wait for them."""
    from hybridpar.run.directory import before_the_start
    from hybridpar.run.trained import find_trained

    if command.nproc is not None and command.nproc < 1:
        raise UsageError(f"--nproc is {command.nproc}", "It must be at least 1.")
    with before_the_start():
        trained = find_trained(command.run, command)
    if not in_job():
        _check_output(command)
        workers = command.nproc or _workers()
        if workers > 1:
            from hybridpar.machine.supervise import launch_workers

            return launch_workers(arguments, workers, restarts=0)
    prepare_worker(trained.config.tune_process)
    with leaving_at_once():
        import_torchvision()
        from hybridpar.run.evaluate import evaluate_trained
    trained, result = evaluate_trained(trained)
    if result is not None:
        _report(command, trained, result)
    return 0


def _workers() -> int:
    """One per GPU, else one: what a CPU computes alone is divided among its cores by torch."""
    from hybridpar.machine.devices import gpu_count, has_gpu_driver

    return (gpu_count() if has_gpu_driver() else 0) or 1


def _check_output(command: Evaluate) -> None:
    """Refuse to replace what is there, before the test has taken its time."""
    if command.output is None or command.force:
        return
    taken = [name for name in _FILES if (command.output / name).exists()]
    if taken:
        raise UsageError(
            f"{command.output} already has {', '.join(taken)}",
            "The result of a test is not replaced by itself.",
            "Add --force, or name another --output.",
        )


def _report(command: Evaluate, trained: Trained, result: TestResult) -> None:
    figures = {
        "model": trained.name,
        "data": trained.config.data,
        "checkpoint": None if trained.checkpoint is None else str(trained.checkpoint),
        "step": trained.step,
        "weights": trained.weights or trained.source,
        **result.plain(),
    }
    text = json.dumps(figures, indent=None if command.json else 2)
    aside = sys.stderr if command.json else sys.stdout
    print(f"model     {trained}\ndata      {trained.config.data}", file=aside)
    print(text if command.json else result.text(), flush=True)
    if command.output is not None:
        try:
            files = _write(command.output, trained, result, text)
        except RunDirectoryError as error:
            raise RunDirectoryError(error.what, fix="Name a folder that you can write with --output.") from error
        print("\n".join(f"written   {file}" for file in files), file=aside)
    note_orderly_end()


def _write(folder: Path, trained: Trained, result: TestResult, text: str) -> list[Path]:
    """Write figures and picture; returns the files."""
    from hybridpar.formats.output_files import replace_file

    written = [folder / "evaluation.json"]
    replace_file(written[0], [text.encode(), b"\n"])
    if result.confusion is None or len(result.classes) > _MOST_DRAWN:
        return written
    if importlib.util.find_spec("plotly") is None:
        print("confusion.html needs plotly: pip install 'hybridpar[report]'", file=sys.stderr)
        return written
    from hybridpar.observe.page import confusion_matrix, element, write_page

    matrix = confusion_matrix(result.confusion, result.classes)
    title = f"{trained.name} on {trained.config.data}"
    write_page(folder / "confusion.html", title, [element("pre", result.text()), matrix])
    return [*written, folder / "confusion.html"]
