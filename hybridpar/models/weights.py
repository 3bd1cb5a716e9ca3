"""Starts a model from weights that exist: published ones, a file, or a checkpoint.

Also learning rates that differ from layer to layer: lower near the inputs, and another one for the head.

Layer-wise decay is that of BEiT (Bao et al. 2022) as timm has it: with n layers a parameter of layer i, counted from 0
at the inputs, gets decay^(n - 1 - i) of the learning rate. The head is the last layer.
"""

from __future__ import annotations

import contextlib
import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridpar.errors import UsageError, shortened
from hybridpar.models.pretrained import published_weights
from hybridpar.models.weight_files import is_file, read_weights

if TYPE_CHECKING:
    from torch import Tensor, nn

    from hybridpar.models.deferred import DeferredModel


def learning_rate_scales(
    model: nn.Module, layer_decay: float | None = None, head_scale: float | None = None
) -> dict[str, float]:
    """What the learning rate of each parameter is multiplied with.

    Args:
        model: The whole model, before it is cut into stages.
        layer_decay: Factor from a layer to the one before it; None is 1.
        head_scale: Factor of the head; None is 1.

    Returns:
        Factors by the names of all parameters.
    """
    numbers = layer_numbers(model)
    last = max(numbers.values(), default=0)
    head = set(head_parameters(model))
    decay, of_head = (1.0 if factor is None else factor for factor in (layer_decay, head_scale))
    return {
        name: decay ** (last - numbers.get(name, last)) * (of_head if name in head else 1.0)
        for name, _ in model.named_parameters()
    }


def layer_numbers(model: nn.Module) -> dict[str, int]:
    """The layer that each parameter is in, from 0 at the inputs.

    In models of timm it is what their `group_matcher` says. In others layers follow each other as they are
    registered: a layer is a module in a `Sequential`, `ModuleList` or `ModuleDict`, a child of the model, or a child of
    a module with more than half of all parameters, which is the model in a wrapper. Layers without matrices (norms),
    and parameters outside of any layer, belong to the layer before them; those in front of the first belong to it.
    """
    if hasattr(model, "group_matcher"):
        from timm.models import group_parameters

        matcher: Any = model.group_matcher
        by_matcher: dict[str, int] = group_parameters(model, matcher(coarse=False), reverse=True)
        return by_matcher
    numbers: dict[str, int] = {}
    number = -1
    for names, starts in _layers(model, "", sum(parameter.numel() for parameter in model.parameters()) / 2):
        number += starts
        numbers |= dict.fromkeys(names, number)
    return {name: max(0, number) for name, number in numbers.items()}


def _layers(module: nn.Module, prefix: str, half: float) -> Iterator[tuple[list[str], bool]]:
    """Names of parameters that belong together, in order, and whether a new layer starts with them."""
    names = [f"{prefix}{name}" for name, _ in module.named_parameters(recurse=False)]
    if names:
        yield names, False
    for name, child in module.named_children():
        parameters = dict(child.named_parameters(prefix=f"{prefix}{name}"))
        if parameters and _is_container(child, half):
            yield from _layers(child, f"{prefix}{name}.", half)
        elif parameters:
            yield list(parameters), any(parameter.ndim > 1 for parameter in parameters.values())


def _is_container(module: nn.Module, half: float) -> bool:
    from torch import nn

    children = list(module.children())
    if isinstance(module, nn.Sequential):  # a subclass of leaves, as a convolution with its norm, is one layer
        return type(module) is nn.Sequential or any(any(True for _ in child.children()) for child in children)
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        return True
    return bool(children) and sum(parameter.numel() for parameter in module.parameters()) > half


def head_parameters(model: nn.Module) -> list[str]:
    """Names of the parameters of the head: the layer that gives the scores.

    In models of timm it is what their configuration calls `classifier`; in others the last module with a matrix.
    """
    named = (getattr(model, "pretrained_cfg", None) or {}).get("classifier")
    heads = (named,) if isinstance(named, str) else tuple(named or ())
    if not heads:
        last = [
            name
            for name, module in model.named_modules()
            if any(parameter.ndim > 1 for parameter in module.parameters(recurse=False))
        ]
        heads = tuple(last[-1:])
    owners = tuple(f"{head}." if head else "" for head in heads)
    return [name for name, _ in model.named_parameters() if owners and name.startswith(owners)]


#: Part of the tensors outside of the head that weights may lack.
_MAY_LACK = 0.1


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
        source: `default` or a name of published weights, see `hybridpar.models.pretrained`; or a file or directory, see
            `hybridpar.models.weight_files`.
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
                label, state = published_weights(text, name, module, args or {})
        return _put(module, _converted(module, state), label, name or type(module).__name__)

    return model.start_from(put) if isinstance(model, DeferredModel) else put(model)


def _converted(model: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors under the names that the model has, where they are in another form of the same architecture."""
    from hybridpar.models.state_dicts import tensors_of

    wanted = tensors_of(model)

    def fits(tensors: Mapping[str, Tensor]) -> int:
        return sum(name in tensors and tensors[name].shape == tensor.shape for name, tensor in wanted.items())

    best = fits(state)
    for prefix in sorted({f"{name.partition('.')[0]}." for name in state if "." in name}):  # as Lightning's `model.`
        stripped = {name.removeprefix(prefix): tensor for name, tensor in state.items()}
        if fits(stripped) > max(best, len(wanted) // 2):
            state, best = stripped, fits(stripped)
            break
    # timm knows the original names, and how position embeddings change their size.
    convert = getattr(sys.modules.get(type(model).__module__), "checkpoint_filter_fn", None)
    if convert is not None and hasattr(model, "pretrained_cfg") and best < len(wanted):
        with contextlib.suppress(Exception):  # it expects weights of the architecture
            converted: dict[str, Tensor] = convert(dict(state), model)
            if fits(converted) > best:
                return converted
    return state


def _put(model: nn.Module, state: dict[str, Tensor], source: str, name: str) -> WeightsReport:
    """Load what fits."""
    from hybridpar.models.state_dicts import copy_of, is_extra, tensors_of

    before = model.state_dict()
    wanted, values = tensors_of(model), copy_of(before)
    others = [key for key in wanted if key in state and wanted[key].shape != state[key].shape]
    classes, heads = _other_classes(model, wanted, state, others)
    fitting: Any = OrderedDict((key, tensor) for key, tensor in state.items() if key not in others)
    # The versions of modules, by which some convert former names.
    fitting._metadata = getattr(before if wanted.keys() <= state.keys() else state, "_metadata", None)
    try:
        missing, unknown = model.load_state_dict(fitting, strict=False)
        missing = [key for key in missing if not is_extra(key)]
    except (RuntimeError, ValueError):  # a module that converts names, or counts versions
        missing, unknown = [key for key in wanted if key not in fitting], [key for key in fitting if key not in wanted]
        heads = set()
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


def _other_classes(
    model: nn.Module, wanted: Mapping[str, Tensor], state: Mapping[str, Tensor], others: Sequence[str]
) -> tuple[tuple[int, int] | None, set[str]]:
    """The two numbers of classes where they differ, and the tensors that differ for that reason alone."""
    head = next((key for key in head_parameters(model) if key in others), None)
    if head is None:
        return None, set()
    numbers = len(state[head]), len(wanted[head])
    return numbers, {
        key
        for key in others
        if (len(state[key]), len(wanted[key])) == numbers and state[key].shape[1:] == wanted[key].shape[1:]
    }


def _first(names: Sequence[str]) -> str:
    """The first names of many, for a message."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
