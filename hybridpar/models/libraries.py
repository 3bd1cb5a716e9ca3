"""Models of torchvision, by name, and of timm: `timm/NAME` or `timm/NAME.TAG`, where a tag says which weights."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, get_type_hints

from hybridpar.errors import UsageError, nearest, not_installed, shortened
from hybridpar.models.arguments import build_with, not_taken, refused_argument

if TYPE_CHECKING:
    from torch import nn

#: What names of timm's models begin with.
PREFIX = "timm/"

#: What names of repositories of the Hugging Face hub begin with, as in timm.
HUB = "hf-hub:"

#: What torchvision calls dropout and stochastic depth.
_RATES = {"drop_rate": ("dropout", "drop_rate"), "drop_path_rate": ("stochastic_depth_prob",)}


def model_names() -> list[str]:
    """Names of all torchvision classification models."""
    import torchvision

    return sorted(torchvision.models.list_models(module=torchvision.models))


def timm_module() -> Any:
    """The package timm."""
    try:
        import timm
    except ImportError as error:
        raise not_installed("models of timm need timm", "timm") from error
    return timm


def check_library_name(name: str) -> None:
    """Refuse a name that torchvision or timm has no classification model of, and a tag that timm does not know."""
    if not name.startswith(PREFIX):
        names = model_names()
        if name not in names:
            raise UsageError(
                f"unknown model {shortened(repr(name))}",
                nearest(name, names),
                "Name a torchvision classification model, timm/NAME, or your own as package.module:factory.",
            )
        return
    timm, (architecture, _, tag) = timm_module(), name.removeprefix(PREFIX).partition(".")
    if architecture.startswith(HUB):
        return
    if not timm.is_model(architecture):
        raise UsageError(
            f"timm has no model {shortened(repr(architecture))}",
            nearest(name, [PREFIX + known for known in timm.list_models()]),
            "timm.list_models('*vit*') lists the names that match a pattern.",
        )
    tags = [known.partition(".")[2] for known in timm.models.get_arch_pretrained_cfgs(architecture)]
    if tag and tag not in tags:
        raise UsageError(
            f"timm's {architecture} has no weights {shortened(repr(tag))}",
            nearest(tag, filter(None, tags)),
            f"Name the model alone, {PREFIX}{architecture}, or with a tag that there is.",
        )


def build_timm_model(name: str, args: Mapping[str, Any], *, pretrained: bool = False) -> nn.Module:
    """Build a model of timm, with fresh weights unless they are asked for."""
    check_library_name(name)
    timm, known = timm_module(), name.removeprefix(PREFIX)
    if pretrained or known.startswith(HUB):  # what is not to be had is for the caller to explain
        model: nn.Module = timm.create_model(known, pretrained=pretrained, **args)
        return model
    return build_with(name, args, lambda: timm.create_model(known, **args))


def build_torchvision_model(name: str, classes: int, args: Mapping[str, object]) -> nn.Module:
    """Build a torchvision model with fresh weights."""
    check_library_name(name)
    import torchvision

    arguments = dict(args)
    stem = arguments.pop("stem", "imagenet")
    if stem not in ("imagenet", "cifar"):
        raise UsageError(f"--model-arg stem={stem}", "It must be imagenet or cifar.")
    kind = get_type_hints(torchvision.models.get_model_builder(name))["return"]
    options = {"num_classes": classes, **_translated(name, kind, arguments)}
    if name in ("googlenet", "inception_v3"):
        # Auxiliary heads return a tuple in training; torchvision's own initialisation takes a minute.
        options = {"aux_logits": False, "init_weights": False, **options}
    path_rate: Any = None

    def build() -> nn.Module:
        nonlocal path_rate
        try:
            model: nn.Module = torchvision.models.get_model(name, weights=None, **options)
        except TypeError as error:  # Swin and MaxViT set it themselves
            if refused_argument(error, options) != "stochastic_depth_prob":
                raise
            path_rate = options.pop("stochastic_depth_prob")
            model = torchvision.models.get_model(name, weights=None, **options)
        return model

    model = build_with(name, args, build)
    if path_rate is not None:
        _set_path_rate(model, path_rate)
    if stem == "cifar":
        _use_cifar_stem(model, name)
    return model


def _translated(name: str, kind: type, args: Mapping[str, object]) -> dict[str, object]:
    """Arguments under the names that a class of torchvision gives them."""
    parameters = inspect.signature(kind).parameters
    swallows = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    translated: dict[str, object] = {}
    for key, value in args.items():
        taken = next((other for other in _RATES.get(key, (key,)) if other in parameters), None)
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

    if not isinstance(model, torchvision.models.ResNet):
        raise UsageError(f"--model-arg stem=cifar does not fit {name}", "Only ResNets have the stem that it replaces.")
    model.conv1 = nn.Conv2d(3, model.conv1.out_channels, kernel_size=3, stride=1, padding=1, bias=False)
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
