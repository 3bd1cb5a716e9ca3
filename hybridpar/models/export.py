"""Writes a trained model into a file that runs without hybridpar, and checks what the file computes before it is kept.

Formats:

- `torch-export`: a graph for `torch.export.load`;
- `torchscript`: a traced module for `torch.jit.load`, also in C++;
- `onnx`: for ONNX Runtime and others;
- `safetensors`: the weights alone, which need the model's code.

The first three take batches of any size.

Also folds BatchNorm layers into the convolutions and linear layers in front of them, for a model that is only used.

In evaluation mode a BatchNorm is y = g (x - m) / sqrt(v + eps) + b with constants g, m, v and b per channel. Behind
x = W u + a it is a layer of weights W g / sqrt(v + eps) and bias (a - m) g / sqrt(v + eps) + b (Jacob et al. 2018,
"Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference", section 3.2).
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import json
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, fx, nn

from hybridpar.errors import ExportError, UsageError, cannot_write, shortened
from hybridpar.models.deferred import is_deferred, like_tensor, saved_tensors, storage_of
from hybridpar.models.outputs import main_output
from hybridpar.models.weight_files import map_safetensors

_ATEN = torch.ops.aten

#: Layers whose weights have the output channels as their first dimension.
_FOLDED = (_ATEN.conv1d.default, _ATEN.conv2d.default, _ATEN.conv3d.default, _ATEN.linear.default)


@dataclass(frozen=True)
class Folded:
    """A model without the BatchNorm layers that could be folded.

    Attributes:
        module: The model, which computes the same up to rounding.
        folded: Number of layers that were folded.
        layers: Number of BatchNorm layers that there were.
    """

    module: nn.Module
    folded: int
    layers: int


def fold_batch_norm(program: torch.export.ExportedProgram) -> Folded:
    """Fold BatchNorm layers into the layer in front of them, where nothing else uses that layer's result or weights.

    Args:
        program: A model in evaluation mode, as `torch.export.export` returns it; it is not changed.

    Returns:
        The model as a graph.
    """
    module = program.module(check_guards=False)
    graph = module.graph
    norms = [node for node in graph.nodes if node.target is _ATEN.batch_norm.default]
    folded = 0
    for number, norm in enumerate(norms):
        layer, *_ = norm.args
        if not _can_fold(norm, layer):
            continue
        weight, bias = _folded_values(module, norm, layer)
        arguments: list[Any] = [*layer.args, None][: max(3, len(layer.args))]
        with graph.inserting_before(layer):
            for place, (kind, value) in enumerate((("weight", weight), ("bias", bias)), start=1):
                module.register_parameter(f"folded_{number}_{kind}", nn.Parameter(value, requires_grad=False))
                arguments[place] = graph.get_attr(f"folded_{number}_{kind}")
        layer.args = tuple(arguments)
        norm.replace_all_uses_with(layer)
        graph.erase_node(norm)
        folded += 1
    for node in reversed(graph.nodes):
        if node.op == "get_attr" and not node.users:
            graph.erase_node(node)
    graph.lint()
    # A new module has the constants that are used, and not the checks of inputs, which cannot be traced.
    return Folded(fx.GraphModule(module, graph), folded, len(norms))


def _can_fold(norm: fx.Node, layer: Any) -> bool:
    if not isinstance(layer, fx.Node) or layer.target not in _FOLDED or layer.kwargs or norm.kwargs:
        return False
    if len(layer.users) > 1 or norm.args[5]:  # another reader wants the result as it is; statistics of the batch
        return False
    constants = [one for one in (*layer.args[1:3], *norm.args[1:5]) if one is not None]
    return all(isinstance(one, fx.Node) and one.op == "get_attr" for one in constants)


@torch.no_grad()
def _folded_values(module: nn.Module, norm: fx.Node, layer: fx.Node) -> tuple[Tensor, Tensor]:
    """Weights and bias of the layer with its norm, computed in float64."""
    gain, shift, mean, variance = (_value(module, node) for node in norm.args[1:5])
    weight, bias = (_value(module, node) for node in (*layer.args[1:3], None)[:2])
    assert weight is not None
    assert mean is not None
    assert variance is not None
    epsilon = norm.args[7]
    assert isinstance(epsilon, float)
    scale = (variance + epsilon).rsqrt() * (1.0 if gain is None else gain)
    offset = (0.0 if bias is None else bias) - mean
    dtype = module.get_parameter(str(layer.args[1].target)).dtype  # type: ignore[union-attr]
    folded = weight * scale.view(-1, *[1] * (weight.ndim - 1))
    return folded.to(dtype), (offset * scale + (0.0 if shift is None else shift)).to(dtype)


def _value(module: nn.Module, node: Any) -> Tensor | None:
    """The constant that a node stands for, in float64."""
    if node is None:
        return None
    owner, _, name = str(node.target).rpartition(".")
    value: Tensor = getattr(module.get_submodule(owner), name)
    return value.detach().double()


Format = Literal["torch-export", "onnx", "safetensors", "torchscript"]

#: What a file may differ from the model by, as a part of the largest output.
TOLERANCE = 1e-5

#: Under which name what is known of a model is kept in its file.
FACTS = "hybridpar.json"

#: Packages that a format needs, and the extra of hybridpar with them.
_NEEDS = {"onnx": (("onnx", "onnxscript", "onnxruntime"), "onnx"), "safetensors": (("safetensors",), "safetensors")}


@dataclass(frozen=True)
class Export:
    """A file that was written and checked.

    Attributes:
        file: The file.
        bytes: Its size.
        batches: Sizes of the batches that it was checked with.
        difference: Largest difference of an output from that of the model.
        scale: Largest absolute output of the model.
        folded: What became of BatchNorm layers; None where they were not to be folded.
    """

    file: Path
    bytes: int
    batches: tuple[int, ...]
    difference: float
    scale: float
    folded: tuple[int, int] | None = None

    @property
    def relative(self) -> float:
        """The difference as a part of the scale."""
        return _relative(self.difference, self.scale)


def check_format(form: str, *, fold: bool = False) -> None:
    """Refuse a format that cannot be written here.

    Args:
        form: Name of the format.
        fold: Whether BatchNorm layers are to be folded.

    Raises:
        UsageError: There is no such format, a package is missing, or it cannot hold a folded model.
    """
    if form not in get_args(Format):
        raise UsageError(f"unknown format {form!r}", f"Formats: {', '.join(get_args(Format))}.")
    packages, extra = _NEEDS.get(form, ((), ""))
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(
            f"--format {form} needs {', '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed",
            fix=f"Install it: pip install 'hybridpar[{extra}]'",
        )
    if fold and form == "safetensors":
        raise UsageError(
            "--fold-batch-norm with --format safetensors",
            "The file holds weights for the model's own code, which has BatchNorm layers.",
            "Leave out --fold-batch-norm, or choose another format.",
        )


def export_model(
    model: nn.Module,
    images: Tensor,
    form: Format,
    file: Path,
    *,
    fold: bool = False,
    facts: Mapping[str, Any] | None = None,
) -> Export:
    """Write a model into a file, read it back, and compare what it computes with the model.

    The file is there when it has been checked, and not before.

    Args:
        model: In evaluation mode, on the CPU.
        images: At least two, float32 of shape (n, channels, height, width), as the model takes them.
        form: Which kind of file.
        file: Where it is written; one that is there is replaced.
        fold: Fold BatchNorm layers into the layers in front of them.
        facts: What is to be kept in the file as JSON under the name `hybridpar.json`, or `hybridpar` in metadata.

    Returns:
        What was written.

    Raises:
        ExportError: The model cannot be written so, the file computes something else, or it cannot be written.
        UsageError: As of `check_format`.
    """
    check_format(form, fold=fold)
    text = json.dumps(dict(facts or {}))
    with torch.no_grad():
        scored = model if isinstance(model(images), Tensor) else _Scores(model)
        batches = tuple(sorted({len(images), len(images) - 1, 1}, reverse=True))
        expected = [scored(images[:size]) for size in batches]
    folded: Folded | None = None
    with _aside(file) as place:
        with _explained(form), _quiet():
            if fold:
                folded = fold_batch_norm(_traced(scored, images))
                scored = folded.module
            _WRITERS[form](model if form == "safetensors" else scored, images, place, text)
            loaded = _load_safetensors(model, place) if form == "safetensors" else _LOADERS[form](place)
            with torch.no_grad():
                found = [loaded(images[:size]) for size in batches]
        difference, scale = _compare(found, expected)
        if not _relative(difference, scale) <= TOLERANCE:  # also where it is no number
            raise ExportError(
                f"the file differs from the model by {difference:.3g}, where outputs are up to {scale:.3g}",
                f"It must not differ by more than {TOLERANCE:g} of that.",
                "Choose another format" + (", or leave out --fold-batch-norm." if fold else "."),
            )
        size = place.stat().st_size
    counts = None if folded is None else (folded.folded, folded.layers)
    return Export(file, size, batches, difference, scale, counts)


class _Scores(nn.Module):
    """A model that returns its scores alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = main_output(self.model(images))
        return scores


def _compare(found: Sequence[Tensor], expected: Sequence[Tensor]) -> tuple[float, float]:
    """The largest difference, and the largest absolute output of the model; NaN where there is one."""
    for one, own in zip(found, expected, strict=True):
        if one.shape != own.shape:
            raise ExportError(
                f"the file gives scores of shape {tuple(one.shape)} for a batch of {len(own)} images",
                f"The model gives {tuple(own.shape)}: its code takes the size of a batch for a constant.",
                "Have it ask for the size of its inputs, or export safetensors.",
            )
    differences = torch.cat([(one - own).abs().flatten() for one, own in zip(found, expected, strict=True)])
    return float(differences.max()), float(torch.cat([own.abs().flatten() for own in expected]).max())


def _relative(difference: float, scale: float) -> float:
    return difference / scale if scale else difference


def _traced(model: nn.Module, images: Tensor) -> torch.export.ExportedProgram:
    """The graph of a model for batches of any size."""
    with torch.no_grad():
        return torch.export.export(model, (images,), dynamic_shapes=({0: torch.export.Dim("batch")},))


def _write_program(model: nn.Module, images: Tensor, file: Path, facts: str) -> None:
    torch.export.save(_traced(model, images), file, extra_files={FACTS: facts})


def _write_torchscript(model: nn.Module, images: Tensor, file: Path, facts: str) -> None:
    with torch.no_grad():
        traced = torch.jit.trace(model, images, check_trace=False)  # type: ignore[no-untyped-call]
    torch.jit.save(traced, str(file), _extra_files={FACTS: facts})


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
    from safetensors.torch import save_file

    state: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, tensor in model.state_dict().items():
        # Each by itself: the format has no views, and tensors of tied layers are written twice.
        shares = storage_of(tensor) in storages
        storages.add(storage_of(tensor))
        state[name] = tensor.clone().contiguous() if shares else tensor.contiguous()
    save_file(state, file, metadata={"format": "pt", "hybridpar": facts})


_WRITERS: dict[str, Callable[[nn.Module, Tensor, Path, str], None]] = {
    "torch-export": _write_program,
    "torchscript": _write_torchscript,
    "onnx": _write_onnx,
    "safetensors": _write_safetensors,
}


def _load_program(file: Path) -> Callable[[Tensor], Tensor]:
    loaded: Callable[[Tensor], Tensor] = torch.export.load(file).module()
    return loaded


def _load_torchscript(file: Path) -> Callable[[Tensor], Tensor]:
    loaded: Callable[[Tensor], Tensor] = torch.jit.load(str(file))  # type: ignore[no-untyped-call]
    return loaded


def _load_onnx(file: Path) -> Callable[[Tensor], Tensor]:
    import onnxruntime

    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run(None, {"images": images.numpy()})[0])


def _load_safetensors(model: nn.Module, file: Path) -> Callable[[Tensor], Tensor]:
    """The model with the weights of the file, memory-mapped, and with none of its own."""
    state = map_safetensors(file)
    empty: dict[int, Any] = {id(one): like_tensor(one, one.detach().to("meta")) for one in saved_tensors(model)}
    other = copy.deepcopy(model, empty)
    other.load_state_dict(state, assign=True)
    if is_deferred(other):  # a module takes them in a way of its own
        other = copy.deepcopy(model)
        with torch.no_grad():
            for tensor in saved_tensors(other):
                tensor.zero_()
        other.load_state_dict(state)
    return lambda images: main_output(other(images))


_LOADERS: dict[str, Callable[[Path], Callable[[Tensor], Tensor]]] = {
    "torch-export": _load_program,
    "torchscript": _load_torchscript,
    "onnx": _load_onnx,
}


@contextlib.contextmanager
def _aside(file: Path) -> Iterator[Path]:
    """Another name in the same folder, for what becomes the file once it is whole."""
    place = file.with_name(f".{file.stem}.{os.getpid()}.tmp{file.suffix}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        yield place
        with open(place, "rb") as stream:
            os.fsync(stream.fileno())
        place.replace(file)
    except OSError as error:
        raise ExportError(cannot_write(file, error), fix="Name a file that you can write with --output.") from error
    finally:
        with contextlib.suppress(OSError):
            place.unlink(missing_ok=True)


@contextlib.contextmanager
def _explained(form: str) -> Iterator[None]:
    """Turn what torch raises of a model that it cannot write into one short error."""
    try:
        yield
    except (UsageError, ExportError, OSError):
        raise
    except Exception as error:
        told = " ".join(str(error).split()) or type(error).__name__
        raise ExportError(
            f"the model cannot be written as {form}: {shortened(told, 400)}",
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
