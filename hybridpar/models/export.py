"""Writes a trained model into a file that runs without hybridpar, and checks what the file computes before it is kept.

Formats:

- `torch-export`: a graph for `torch.export.load`;
- `onnx`: for ONNX Runtime and others;
- `safetensors`: the weights alone, which need the model's code.

The first two take batches of any size.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from hybridpar.errors import ExportError, UsageError, cannot_write, shortened
from hybridpar.formats.output_files import written_aside
from hybridpar.formats.tensor_files import read_tensors, write_tensors
from hybridpar.models.outputs import main_output
from hybridpar.models.state import twin_of
from hybridpar.models.state_dicts import tensors_of

Format = Literal["torch-export", "onnx", "safetensors"]

#: What a file may differ from the model by, as a part of the largest output.
TOLERANCE = 1e-5

#: Under which name what is known of a model is kept in its file.
FACTS = "hybridpar.json"

#: Packages that a format needs, and the extra of hybridpar with them.
_NEEDS = {"onnx": (("onnx", "onnxscript", "onnxruntime"), "onnx")}


@dataclass(frozen=True)
class Export:
    """A file that was written and checked.

    Attributes:
        file: The file.
        bytes: Its size.
        batches: Sizes of the batches that it was checked with.
        difference: Largest difference of an output from that of the model.
        scale: Largest absolute output of the model.
    """

    file: Path
    bytes: int
    batches: tuple[int, ...]
    difference: float
    scale: float

    @property
    def relative(self) -> float:
        """The difference as a part of the scale."""
        return _relative(self.difference, self.scale)


def check_format(form: str) -> None:
    """Refuse a format that cannot be written here."""
    if form not in get_args(Format):
        raise UsageError(f"unknown format {form!r}", f"Formats: {', '.join(get_args(Format))}.")
    packages, extra = _NEEDS.get(form, ((), ""))
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(
            f"--format {form} needs {', '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed",
            fix=f"Install it: pip install 'hybridpar[{extra}]'",
        )


def export_model(
    model: nn.Module,
    images: Tensor,
    form: Format,
    file: Path,
    *,
    facts: Mapping[str, Any] | None = None,
) -> Export:
    """Write a model into a file, read it back, and compare what it computes with the model.

    The file is there when it has been checked, and not before.
    """
    check_format(form)
    text = json.dumps(dict(facts or {}))
    with torch.no_grad():
        scored = model if isinstance(model(images), Tensor) else _Scores(model)
        batches = tuple(sorted({len(images), len(images) - 1, 1}, reverse=True))
        expected = [scored(images[:size]) for size in batches]
    with _aside(file) as aside:
        with _explained(form), _quiet():
            _WRITERS[form](model if form == "safetensors" else scored, images, aside, text)
            loaded = _load_safetensors(model, aside) if form == "safetensors" else _LOADERS[form](aside)
            with torch.no_grad():
                outputs = [loaded(images[:size]) for size in batches]
        difference, scale = _compare(outputs, expected)
        if not _relative(difference, scale) <= TOLERANCE:  # also where it is no number
            raise ExportError(
                f"the file differs from the model by {difference:.3g}, where outputs are up to {scale:.3g}",
                f"It must not differ by more than {TOLERANCE:g} of that.",
                "Choose another format.",
            )
        size = aside.stat().st_size
    return Export(file, size, batches, difference, scale)


class _Scores(nn.Module):
    """A model that returns its scores alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = main_output(self.model(images))
        return scores


def _compare(outputs: Sequence[Tensor], expected: Sequence[Tensor]) -> tuple[float, float]:
    """The largest difference, and the largest absolute output of the model; NaN where there is one."""
    for one, own in zip(outputs, expected, strict=True):
        if one.shape != own.shape:
            raise ExportError(
                f"the file gives scores of shape {tuple(one.shape)} for {len(own)} images, the model "
                f"{tuple(own.shape)}",
                fix="Choose another format.",
            )
    differences = torch.cat([(one - own).abs().flatten() for one, own in zip(outputs, expected, strict=True)])
    return float(differences.max()), float(torch.cat([own.abs().flatten() for own in expected]).max())


def _relative(difference: float, scale: float) -> float:
    return difference / scale if scale else difference


def _write_program(model: nn.Module, images: Tensor, file: Path, facts: str) -> None:
    with torch.no_grad():
        program = torch.export.export(model, (images,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    torch.export.save(program, file, extra_files={FACTS: facts})


def _write_onnx(model: nn.Module, images: Tensor, file: Path, facts: str) -> None:
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


def _write_safetensors(model: nn.Module, images: Tensor, file: Path, facts: str) -> None:
    write_tensors(file, tensors_of(model), {"hybridpar": facts})


_WRITERS: dict[str, Callable[[nn.Module, Tensor, Path, str], None]] = {
    "torch-export": _write_program,
    "onnx": _write_onnx,
    "safetensors": _write_safetensors,
}


def _load_program(file: Path) -> Callable[[Tensor], Tensor]:
    loaded: Callable[[Tensor], Tensor] = torch.export.load(file).module()
    return loaded


def _load_onnx(file: Path) -> Callable[[Tensor], Tensor]:
    import onnxruntime

    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run(None, {"images": images.numpy()})[0])


def _load_safetensors(model: nn.Module, file: Path) -> Callable[[Tensor], Tensor]:
    """The model with the weights of the file, and with none of its own."""
    other = twin_of(model)
    with torch.no_grad():
        for tensor in tensors_of(other).values():
            tensor.zero_()
    other.load_state_dict(read_tensors(file), strict=False)  # extra states are the copy's
    return lambda images: main_output(other(images))


_LOADERS: dict[str, Callable[[Path], Callable[[Tensor], Tensor]]] = {
    "torch-export": _load_program,
    "onnx": _load_onnx,
}


@contextlib.contextmanager
def _aside(file: Path) -> Iterator[Path]:
    """Another name in the same folder, for what becomes the file once it is whole."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with written_aside(file) as aside:
            yield aside
    except OSError as error:
        raise ExportError(cannot_write(file, error), fix="Name a file that you can write with --output.") from error


@contextlib.contextmanager
def _explained(form: str) -> Iterator[None]:
    """Turn what torch raises of a model that it cannot write into one short error."""
    try:
        yield
    except (UsageError, ExportError, OSError):
        raise
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ExportError(
            f"the model cannot be written as {form}: {shortened(reason, 400)}",
            "Its forward pass must be traceable, with batches of any size.",
            "Choose another format; safetensors holds the weights of any model.",
        ) from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the advice of torch's exporters to those who develop them."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "torch.export", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
