"""Classification models of torchvision, by name."""

from __future__ import annotations

import importlib.util
import inspect
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, get_type_hints

from hybridpar.errors import UsageError, nearest, shortened
from hybridpar.models.arguments import not_built, not_taken, refused_argument

if TYPE_CHECKING:
    from torch import nn

#: How its source files enter a model under the name of its function, or another one.
_REGISTERED = re.compile(r'^@register_model\((?:name=)?(?:"(\w+)")?\)\n(?:@[^\n]*\n)*def (\w+)', re.MULTILINE)

#: What torchvision calls dropout and stochastic depth.
_RATES = {"drop_rate": ("dropout", "drop_rate"), "drop_path_rate": ("stochastic_depth_prob",)}


def model_names() -> list[str]:
    """Names of all torchvision classification models."""
    imported = "torchvision.models" in sys.modules  # else reading its source takes less than importing it
    spec = importlib.util.find_spec("torchvision")
    if not imported and spec is not None and spec.origin is not None:
        found = [_REGISTERED.findall(path.read_text("utf-8")) for path in Path(spec.origin).parent.glob("models/*.py")]
        return sorted(name or function for names in found for name, function in names)
    import torchvision

    return sorted(torchvision.models.list_models(module=torchvision.models))


def check_torchvision_name(name: str) -> None:
    """Refuse a name that torchvision has no classification model of; nothing is imported."""
    names = model_names()
    if name not in names:
        raise UsageError(
            f"unknown model {shortened(repr(name))}",
            nearest(name, names),
            "Name a torchvision classification model, timm/NAME, or your own as package.module:factory.",
        )


def build_torchvision_model(name: str, classes: int, args: Mapping[str, object]) -> nn.Module:
    """Build a torchvision model with fresh weights."""
    check_torchvision_name(name)
    import torchvision
    from torch import nn

    kind = get_type_hints(torchvision.models.get_model_builder(name))["return"]
    options: dict[str, object] = {"num_classes": classes}
    if name in ("googlenet", "inception_v3"):
        # Auxiliary heads return a tuple in training; torchvision's own initialisation takes a minute.
        options.update(aux_logits=False, init_weights=False)
    arguments = dict(args)
    stem = arguments.pop("stem", "imagenet")
    if stem not in ("imagenet", "cifar"):
        raise UsageError(f"--model-arg stem={stem}", "It must be imagenet or cifar.")
    options |= _translated(name, kind, arguments)
    path_rate: object = None
    try:
        model = torchvision.models.get_model(name, weights=None, **options)
    except Exception as error:
        if refused_argument(error, options) == "stochastic_depth_prob":
            # Swin and MaxViT set it themselves.
            path_rate = options.pop("stochastic_depth_prob")
            model = torchvision.models.get_model(name, weights=None, **options)
        elif (key := refused_argument(error, args)) is not None:
            raise not_taken(name, key) from error
        else:
            raise not_built(name, args, error) from error
    if path_rate is not None:
        _set_path_rate(model, float(str(path_rate)))
    assert isinstance(model, nn.Module)
    if stem == "cifar":
        _use_cifar_stem(model, name)
    return model


def _translated(name: str, kind: type, args: Mapping[str, object]) -> dict[str, object]:
    """Arguments under the names that a class of torchvision gives them."""
    parameters = inspect.signature(kind).parameters
    swallows = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())
    translated: dict[str, object] = {}
    for key, value in args.items():
        taken = next((own for own in _RATES.get(key, (key,)) if own in parameters), None)
        if taken is None and (key in _RATES or swallows):  # ConvNeXt drops what it does not know
            raise not_taken(name, key)
        translated[taken or key] = value
    return translated


def _set_path_rate(model: nn.Module, rate: float) -> None:
    """Scale the rates of stochastic depth, which grow with depth, so that the largest is `rate`."""
    from torchvision.ops import StochasticDepth

    layers = [layer for layer in model.modules() if isinstance(layer, StochasticDepth)]
    largest = max(layer.p for layer in layers)
    for layer in layers:
        layer.p *= rate / largest


def _use_cifar_stem(model: nn.Module, name: str) -> None:
    """Replace a ResNet's 7x7 stride-2 convolution and max-pool by one 3x3 stride-1 convolution."""
    import torchvision
    from torch import nn

    stem, pool = getattr(model, "conv1", None), getattr(model, "maxpool", None)
    if not isinstance(model, torchvision.models.ResNet) or not isinstance(stem, nn.Conv2d) or pool is None:
        raise UsageError(
            f"--model-arg stem=cifar does not fit {name}",
            "Only ResNets have the stem that it replaces.",
            "Leave it out.",
        )
    model.conv1 = nn.Conv2d(3, stem.out_channels, kernel_size=3, stride=1, padding=1, bias=False)
    nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
    model.maxpool = nn.Identity()


def use_channels(model: nn.Module, channels: int) -> None:
    """Replace the first convolution by one for images of another number of channels."""
    from torch import nn

    path, first = next((path, layer) for path, layer in model.named_modules() if isinstance(layer, nn.Conv2d))
    parent, _, name = path.rpartition(".")
    options = {key: getattr(first, key) for key in ("out_channels", "kernel_size", "stride", "padding", "dilation")}
    changed = nn.Conv2d(channels, **options, bias=first.bias is not None)
    setattr(model.get_submodule(parent), name, changed)
