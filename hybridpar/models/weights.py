"""Starts a model from weights that exist: published ones, a file, or a checkpoint; no code in them runs."""

from __future__ import annotations

import contextlib
import re
import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from hybridpar.errors import UsageError, nearest, shortened
from hybridpar.formats.checkpoint_files import load_model_state, read_tensors, resolve_checkpoint
from hybridpar.formats.file_reader import Unreadable, read_torch
from hybridpar.models.layers import head_parameters
from hybridpar.models.pretrained import SUFFIXES, is_file, published_weights

if TYPE_CHECKING:
    from torch import Tensor, nn

    from hybridpar.models.deferred import DeferredModel

#: What the weights are called in a checkpoint with other things beside them, averaged ones first, as in timm.
_NESTED = ("state_dict_ema", "model_ema", "state_dict", "model")

#: What wrappers (DDP, torch.compile) put in front of names.
_WRAPPER = re.compile(r"^(module|_orig_mod)\.")

#: DenseNet files of torchvision have names such as norm.1, which its modules no longer have.
_DENSE = re.compile(r"(denselayer\d+\.(?:norm|conv))\.([12]\.)")

#: Part of the tensors outside of the head that weights may lack.
_MAY_LACK = 0.1


def read_weights(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a file of weights, or of a checkpoint."""
    check_file(path)
    if path.is_dir():
        return clean(load_model_state(resolve_checkpoint(path)), path)
    try:
        return clean(read_tensors(path) if path.suffix == ".safetensors" else read_torch(path), path)
    except (Unreadable, OSError) as error:
        raise UsageError(
            f"--weights {shortened(path)} cannot be read: {shortened(error)}",
            "It must be a file of torch.save with tensors and plain values alone, or one of safetensors.",
            "Copy or download it again, or save the weights alone: torch.save(model.state_dict(), file).",
        ) from error


def check_file(path: Path) -> None:
    """Refuse a file or directory that is not there; nothing is imported."""
    if not path.exists():
        there = [other.name for other in path.parent.glob("*") if other.suffix in SUFFIXES]
        raise UsageError(
            f"--weights {shortened(path)}: there is no such file",
            nearest(path.name, there) if there else f"No file of weights is in {shortened(path.parent.resolve())}.",
            "Name a .pt, .pth or .safetensors file, a checkpoint, a run directory, `default`, or weights by name.",
        )


def clean(loaded: Any, source: object) -> dict[str, Tensor]:
    """Tensors by name from what a file held."""
    import torch

    held = loaded
    if isinstance(held, Mapping):
        held = next((held[key] for key in _NESTED if isinstance(held.get(key), Mapping)), held)
    entries = held.items() if isinstance(held, Mapping) else ()
    state: Any = OrderedDict(
        (name, value) for name, value in entries if isinstance(name, str) and isinstance(value, torch.Tensor)
    )
    if not state:
        keys = ", ".join(map(repr, list(held)[:5])) if isinstance(held, Mapping) else type(held).__name__
        raise UsageError(
            f"--weights {shortened(source)} holds no weights",
            f"Tensors by name, or under {', '.join(_NESTED)}, are wanted; it has {shortened(keys) or 'nothing'}.",
            "Save them: torch.save(model.state_dict(), file).",
        )
    state._metadata = getattr(held, "_metadata", None)  # versions of the modules that the tensors are of
    return cast("dict[str, Tensor]", state)


@dataclass(frozen=True)
class WeightsReport:
    """What became of weights.

    Attributes:
        source: Where they are from.
        taken: Tensors of the model that have values from there.
        total: Tensors of the model, buffers included.
        new: Tensors that have the values that the model was built with.
        left_out: Tensors of the source that the model does not have.
        classes: Classes of the source and of the model, where they differ.
    """

    source: str
    taken: int
    total: int
    new: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    classes: tuple[int, int] | None = None

    def __str__(self) -> str:
        """The report as one line."""
        text = f"{self.source}: {self.taken} of {self.total} tensors taken"
        if self.new:
            text += f"; new: {_first(self.new)}"
            text += f" ({self.classes[0]} -> {self.classes[1]} classes)" if self.classes else ""
        return text + (f"; left out: {_first(self.left_out)}" if self.left_out else "")


def load_weights(
    model: nn.Module | DeferredModel,
    source: str | Path,
    *,
    name: str | None = None,
    args: Mapping[str, object] | None = None,
) -> WeightsReport:
    """Give a model weights. The head stays new where its number of classes differs.

    Args:
        model: The model; changed in place, and not at all where the weights do not fit. One without memory takes
            them whenever it is built.
        source: `default` or a name of published weights, see `hybridpar.models.pretrained`; or a file, a checkpoint, or
            a run directory.
        name: What the user calls the model; needed for published weights of torchvision.
        args: Arguments that the model was built with.

    Returns:
        What was taken, what is new, and what was left out.

    Raises:
        UsageError: The weights cannot be had, or are those of another architecture.

    Example:
        >>> model = build_model("resnet50", 10)                                     # doctest: +SKIP
        >>> print(load_weights(model, "default", name="resnet50"))                  # doctest: +SKIP
        ResNet50_Weights.IMAGENET1K_V2: 318 of 320 tensors taken; new: fc.weight, fc.bias (1000 -> 10 classes)
    """
    import torch

    from hybridpar.models.deferred import DeferredModel

    text = str(source)

    def put(module: nn.Module) -> WeightsReport:
        with torch.random.fork_rng(devices=[]):  # timm builds a model to read weights
            if is_file(text):
                label, state = text, read_weights(Path(text))
            else:
                label, loaded = published_weights(text, name, module, args or {})
                state = clean(loaded, label)
        return _put(module, _converted(module, state), label, name or type(module).__name__)

    return model.start_from(put) if isinstance(model, DeferredModel) else put(model)


def _converted(model: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors in the form in which most of them fit the model."""
    from hybridpar.models.state_dicts import tensors_of

    wanted = tensors_of(model)

    def fits(tensors: Mapping[str, Tensor]) -> int:
        return sum(name in tensors and tensors[name].shape == tensor.shape for name, tensor in wanted.items())

    return max(_forms(model, max(_without_prefixes(state), key=fits)), key=fits)


def _without_prefixes(state: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """Tensors under names without those of wrappers, then with ever more of these, then without one more prefix.

    A model may have a part that is called as a wrapper calls it. Where none fits, the first are most likely to be names
    that timm knows.
    """
    forms = [state]
    while any(map(_WRAPPER.match, forms[0])):
        forms.insert(0, {_WRAPPER.sub("", name): tensor for name, tensor in forms[0].items()})
    bare = forms[0]
    for prefix in sorted({f"{name.partition('.')[0]}." for name in bare}):  # as Lightning's `model.`
        forms.append({name.removeprefix(prefix): tensor for name, tensor in bare.items()})
    return forms


def _forms(model: nn.Module, state: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Tensors as they are, and under the other names that the same architecture may have for them."""
    yield state
    yield {_DENSE.sub(r"\1\2", name): tensor for name, tensor in state.items()}
    # timm knows the original names, and how position embeddings change their size.
    convert = getattr(sys.modules.get(type(model).__module__), "checkpoint_filter_fn", None)
    if convert is not None and hasattr(model, "pretrained_cfg"):
        with contextlib.suppress(Exception):  # it expects weights of the architecture
            yield convert(dict(state), model)


def _put(model: nn.Module, state: dict[str, Tensor], source: str, name: str) -> WeightsReport:
    """Load what fits."""
    from hybridpar.models.state_dicts import copy_of, is_extra, tensors_of

    before = model.state_dict()
    wanted, values = tensors_of(model), copy_of(before)
    others = [key for key in wanted if key in state and wanted[key].shape != state[key].shape]
    head = next((key for key in head_parameters(model) if key in others), None)
    classes = None if head is None else (len(state[head]), len(wanted[head]))
    # What differs because of the number of classes alone.
    heads = {
        key
        for key in others
        if (*state[key].shape[:1], *wanted[key].shape[:1]) == classes and state[key].shape[1:] == wanted[key].shape[1:]
    }
    fitting: Any = OrderedDict((key, tensor) for key, tensor in state.items() if key not in others)
    # The versions of modules, by which some convert former names.
    fitting._metadata = getattr(before if wanted.keys() <= state.keys() else state, "_metadata", None)
    try:
        missing, unknown = model.load_state_dict(fitting, strict=False)
        missing = [key for key in missing if not is_extra(key)]
    except (RuntimeError, ValueError):  # a module that converts names, or counts versions
        missing, unknown = [*wanted], []
    allowed = heads | set(head_parameters(model))
    lacking = [key for key in missing if key not in allowed]
    wrong = [key for key in others if key not in heads]
    if wrong or len(lacking) > _MAY_LACK * max(1, len(wanted) - len(allowed)) or len(missing) == len(wanted):
        model.load_state_dict(values)
        fit = sum(key in state and state[key].shape == wanted[key].shape for key in wanted)
        shapes = [f"{key} is {tuple(state[key].shape)} there, and {tuple(wanted[key].shape)} here" for key in wrong]
        kinds = (("of another shape", shapes), ("not in them", lacking), ("not in the model", unknown))
        raise UsageError(
            f"the weights {shortened(source)} are not of {name}: {fit} of the model's {len(wanted)} tensors fit",
            " ".join(f"{len(names)} {what}: {_first(names)}." for what, names in kinds if names),
            "Name the model that they are of, with the same --model-arg.",
        )
    return WeightsReport(source, len(wanted) - len(missing), len(wanted), tuple(missing), tuple(unknown), classes)


def _first(names: Sequence[str]) -> str:
    """The first names of many, for a message."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
