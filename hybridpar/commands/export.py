"""`hybridpar export`: writes the model of a run into a file that runs without hybridpar."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import tyro

from hybridpar.commands import register_command
from hybridpar.commands.evaluate import TrainedModel, facts_of, import_torch
from hybridpar.errors import check
from hybridpar.formats.output_files import check_writable

#: Images, of noise, that a file is checked with.
_IMAGES = 8


class Export(TrainedModel):
    """Write the model of a run into a file that runs without hybridpar, checked against the model.

    Attributes:
        format: A graph for torch.export.load, or ONNX.
        output: The file to write.
    """

    format: Literal["torch-export", "onnx"]
    output: Annotated[Path, tyro.conf.arg(aliases=["-o"])]


@register_command(
    "export",
    "Write the model of a run into a file that runs without hybridpar: torch.export or ONNX.",
    Export,
)
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
