"""Writes a trained model into a file that runs without hybridpar, and checks what the file computes before it is kept.

Formats, which take batches of any size:

- `torch-export`: a graph for `torch.export.load`;
- `onnx`: for ONNX Runtime and others.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from hybridpar.errors import ExportError, HybridparError, cannot_write, not_installed, shortened
from hybridpar.formats.output_files import written_aside
from hybridpar.models.outputs import main_output

Format = Literal["torch-export", "onnx"]

#: What a file may differ from the model by, as a part of the largest output.
TOLERANCE = 1e-5

#: Under which name what is known of a model is kept in its file.
FACTS = "hybridpar.json"


class Checked(NamedTuple):
    """What the check of a file came to.

    Attributes:
        batches: Sizes of the batches that it was checked with.
        difference: Largest difference of an output from that of the model.
        relative: The same as a part of the largest absolute output of the model.
    """

    batches: tuple[int, ...]
    difference: float
    relative: float


def export_model(
    model: nn.Module, images: Tensor, form: Format, file: Path, *, facts: Mapping[str, Any] | None = None
) -> Checked:
    """Write a model into a file, read it back, and compare what it computes with the model.

    The file is there when it has been checked, and not before.
    """
    write = {"torch-export": _write_program, "onnx": _write_onnx}[form]
    batches = tuple(sorted({len(images), len(images) - 1, 1}, reverse=True))
    with torch.no_grad():
        scored = model if isinstance(model(images), Tensor) else _Scores(model)
        expected = [scored(images[:size]) for size in batches]
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            with written_aside(file) as aside:
                with _quiet():
                    loaded = write(scored, images, aside, json.dumps(dict(facts or {})))
                    outputs = [loaded(images[:size]) for size in batches]
                difference = max(_difference(*pair) for pair in zip(outputs, expected, strict=True))
                relative = difference / (max(float(scores.abs().max()) for scores in expected) or 1.0)
                if not relative <= TOLERANCE:  # also where it is no number
                    raise ExportError(
                        f"the file differs from the model by {difference:.3g}, {relative:.3g} of the largest output",
                        f"It must not differ by more than {TOLERANCE:g} of that.",
                        "Choose another format.",
                    )
        except HybridparError:
            raise
        except OSError as error:
            raise ExportError(cannot_write(file, error), fix="Name a file that you can write with --output.") from error
        except Exception as error:  # whatever torch raises of a model that it cannot write
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ExportError(
                f"the model cannot be written as {form}: {shortened(reason, 400)}",
                "Its forward pass must be traceable, with batches of any size.",
                "Choose another format; the weights of a run are in its checkpoints, as safetensors.",
            ) from error
    return Checked(batches, difference, relative)


class _Scores(nn.Module):
    """A model that returns its scores alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = main_output(self.model(images))
        return scores


def _difference(scores: Tensor, expected: Tensor) -> float:
    """The largest difference; infinite where there is a number that is none, or another shape."""
    if scores.shape != expected.shape:
        return float("inf")
    return float((scores - expected).abs().nan_to_num(nan=float("inf")).max())


def _write_program(model: nn.Module, images: Tensor, file: Path, facts: str) -> Callable[[Tensor], Tensor]:
    program = torch.export.export(model, (images,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    torch.export.save(program, file, extra_files={FACTS: facts})
    loaded: Callable[[Tensor], Tensor] = torch.export.load(file).module()
    return loaded


def _write_onnx(model: nn.Module, images: Tensor, file: Path, facts: str) -> Callable[[Tensor], Tensor]:
    try:
        import onnxruntime

        importlib.import_module("onnxscript")  # what torch writes the file with
    except ImportError as error:
        raise not_installed(f"--format onnx needs {error.name}", "onnx") from error
    program = torch.onnx.export(
        *(model, (images,)),
        dynamo=True,
        verbose=False,
        input_names=["images"],
        output_names=["scores"],
        dynamic_shapes=({0: torch.export.Dim("batch")},),
    )
    assert program is not None
    program.model.metadata_props["hybridpar"] = facts
    program.save(str(file))
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run(None, {"images": images.numpy()})[0])


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the advice of torch's exporters to those who develop them."""
    before = logging.root.manager.disable
    logging.disable(max(before, logging.WARNING))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
