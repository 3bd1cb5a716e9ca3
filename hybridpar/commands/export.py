"""`hybridpar export`: writes the model of a run into a file that runs without hybridpar."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from hybridpar.commands import register_command
from hybridpar.config.trained import RunArgument, TrainedOptions
from hybridpar.errors import DataError, UsageError
from hybridpar.machine.launch import import_torchvision, leaving_at_once, prepare_worker

if TYPE_CHECKING:
    from torch import Tensor

    from hybridpar.data.sources import ImageFacts
    from hybridpar.run.trained import Trained

#: Images that a file is checked with.
_IMAGES = 8


@dataclass(frozen=True, kw_only=True)
class Export(TrainedOptions):
    """Write the model of a run into a file that runs without hybridpar, checked against the model on real images."""

    run: RunArgument
    """Where the model is."""
    format: Literal["torch-export", "onnx"]
    """A graph for torch.export.load, or ONNX."""
    output: Annotated[Path, tyro.conf.arg(aliases=["-o"])]
    """The file to write."""
    images: Annotated[tuple[Path, ...], tyro.conf.UseAppendAction] = ()
    """Check with this image file, or folder of them; may be repeated. Default: test images of the run's data."""
    force: bool = False
    """Replace the file if it is there."""


@register_command(
    "export",
    "Write the model of a run into a file that runs without hybridpar: torch.export or ONNX.",
    Export,
    groups={"Model and data": (TrainedOptions,)},
    shown=[field.name for field in fields(TrainedOptions)],
)
def run_export(command: Export, _: Sequence[str]) -> int:
    """Write and check the file."""
    from hybridpar.run.directory import before_the_start
    from hybridpar.run.trained import find_trained

    if command.output.is_dir() or (command.output.exists() and not command.force):
        raise UsageError(
            f"{command.output} is {'a folder' if command.output.is_dir() else 'there already'}",
            "A file is not replaced by itself, and a folder never.",
            "Add --force, or name another." if command.output.is_file() else "Name a file.",
        )
    if command.format == "torch-export" and command.output.suffix != ".pt2":
        raise UsageError(
            f"--output {command.output} with --format torch-export",
            "torch.export.load wants a name that ends in .pt2.",
            f"Name it {command.output.with_suffix('.pt2')}.",
        )
    with before_the_start():
        trained = find_trained(command.run, command)
    prepare_worker(trained.config.tune_process)
    with leaving_at_once():
        import_torchvision()
        from hybridpar.models.export import export_model
        from hybridpar.run.trained import image_facts, load_trained
    with before_the_start():
        facts = image_facts(trained, command.image_size)
        trained, model = load_trained(trained, len(facts.class_names))
        images = _images(command, trained, facts)
    print(f"model     {trained}", flush=True)
    done = export_model(model, images, command.format, command.output, facts=_told(trained, facts))
    sizes = ", ".join(map(str, done.batches))
    print(
        f"checked   batches of {sizes} images: outputs differ by {done.difference:.2g} at most, "
        f"{done.relative:.2g} of the largest"
    )
    print(f"written   {done.file}, {done.bytes / 1e6:.1f} MB")
    return 0


def _images(command: Export, trained: Trained, facts: ImageFacts) -> Tensor:
    """Some images as the model takes them, at least two."""
    import torch

    from hybridpar.data import TestBatches, load_dataset
    from hybridpar.data.file_sets import find_images, named_images
    from hybridpar.run.trained import images_of_model

    try:
        if command.images:
            data = named_images(find_images(command.images)[:_IMAGES], facts, trained.config)
        else:
            data = load_dataset(images_of_model(trained))
        batches = TestBatches(data, batch_size=_IMAGES, rank=0, workers=1, loader_workers=0)
        images, _ = next(iter(batches), (torch.empty(0), None))
        if not len(images):
            raise DataError("not one image can be read to check the file with")
    except DataError as error:
        fix = "Name some images with --images, or the folder of the data with --data-root."
        raise DataError(error.what, "The file is checked on real images before it is kept.", fix) from error
    return images if len(images) > 1 else images.repeat(2, 1, 1, 1)


def _told(trained: Trained, facts: ImageFacts) -> dict[str, Any]:
    """What the file keeps of the model: what its outputs mean, and how images are made its inputs."""
    return {
        "model": trained.name,
        "data": trained.config.data,
        "step": trained.step,
        "weights": trained.weights or trained.source,
        "classes": facts.class_names,
        "image_size": facts.test_size,
        "mean": facts.mean,
        "std": facts.std,
    }
