"""`hybridpar evaluate`: tests the model of a run, or weights, on a whole test set, on one or several workers.

What it shares with `predict` and `export` is here: the model that they are given, and files that are not replaced.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from hybridpar.commands import register_command
from hybridpar.config.train import TrainedOptions
from hybridpar.errors import check
from hybridpar.formats.output_files import replace_file
from hybridpar.machine.launch import import_torchvision, in_job, leaving_at_once, note_orderly_end, prepare_worker
from hybridpar.spec import AT_LEAST_1, check_rules

if TYPE_CHECKING:
    from hybridpar.observe.results import TestResult
    from hybridpar.run.trained import Trained

_FILES = ("evaluation.json", "confusion.html")


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


@register_command(
    "evaluate", "Test the model of a run, or weights: accuracy, by class, confusion, calibration.", Evaluate
)
def run_evaluate(command: Evaluate, arguments: Sequence[str]) -> int:
    """Test on this worker, or start the workers of this machine and wait for them."""
    from hybridpar.machine.devices import gpu_count, has_gpu_driver

    trained = command.find()
    if not in_job():
        if command.output is not None:
            command.refuse_replacing(*(command.output / name for name in _FILES))
        # What a CPU computes alone is divided among its cores by torch.
        workers = command.nproc or (gpu_count() if has_gpu_driver() else 0) or 1
        if workers > 1:
            from hybridpar.machine.supervise import launch_workers

            return launch_workers(arguments, workers, restarts=0)
    import_torch(trained)
    from hybridpar.run.evaluate import evaluate_trained

    trained, result = evaluate_trained(trained)
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
