"""`hybridpar export`: writes the model of a run into a file that runs without hybridpar."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from hybridpar.commands import register_command
from hybridpar.commands.evaluate import TrainedModel, facts_of, import_torch
from hybridpar.errors import DataError, UsageError
from hybridpar.formats.output_files import check_writable

if TYPE_CHECKING:
    from torch import Tensor

    from hybridpar.data.sources import ImageFacts
    from hybridpar.run.trained import Trained

#: Images that a file is checked with.
_IMAGES = 8


class Export(TrainedModel):
    """Write the model of a run into a file that runs without hybridpar, checked against the model on real images.

    Attributes:
        format: A graph for torch.export.load, or ONNX.
        output: The file to write.
        images: Check with this image file, or folder of them; may be repeated. Default: test images of the run's data.
    """

    format: Literal["torch-export", "onnx"]
    output: Annotated[Path, tyro.conf.arg(aliases=["-o"])]
    images: Annotated[tuple[Path, ...], tyro.conf.UseAppendAction] = ()


@register_command(
    "export",
    "Write the model of a run into a file that runs without hybridpar: torch.export or ONNX.",
    Export,
)
def run_export(command: Export, _: Sequence[str]) -> int:
    """Write and check the file."""
    check_writable("--output", command.output)
    command.refuse_replacing(command.output)
    if command.format == "torch-export" and command.output.suffix != ".pt2":
        raise UsageError(
            f"--output {command.output} with --format torch-export",
            "torch.export.load wants a name that ends in .pt2.",
            f"Name it {command.output.with_suffix('.pt2')}.",
        )
    trained = command.find()
    import_torch(trained)
    from hybridpar.models.export import export_model
    from hybridpar.run.directory import before_the_start
    from hybridpar.run.trained import image_facts, load_trained

    with before_the_start():
        facts = image_facts(trained, command.image_size)
        model = load_trained(trained, len(facts.class_names))
        images = _images(command, trained, facts)
    print(f"model     {trained}", flush=True)
    # What outputs mean, and how images are made inputs.
    inputs = {"classes": facts.class_names, "image_size": facts.test_size, "mean": facts.mean, "std": facts.std}
    done = export_model(model, images, command.format, command.output, facts={**facts_of(trained), **inputs})
    print(
        f"checked   batches of {', '.join(map(str, done.batches))} images: outputs differ by {done.difference:.2g} at "
        f"most, {done.relative:.2g} of the largest"
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
