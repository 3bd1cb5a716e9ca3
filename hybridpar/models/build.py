"""Builds a model from its name: of torchvision, of timm (`timm/NAME` or `timm/NAME.TAG`), or `package.module:factory`.

Plans, profiles and checkpoints know a model by the fingerprint of its architecture, which is taken here too.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, get_type_hints

from hybridpar.errors import UsageError, check, nearest, not_installed, refuse, shortened, user_error
from hybridpar.registry import find_factory
from hybridpar.spec import read_literal

if TYPE_CHECKING:
    from torch import nn

#: What names of timm's models begin with.
PREFIX = "timm/"

#: What names of repositories of the Hugging Face hub begin with, as in timm.
HUB = "hf-hub:"

#: What torchvision calls dropout and stochastic depth.
_RATES = {"drop_rate": ("dropout", "drop_rate"), "drop_path_rate": ("stochastic_depth_prob",)}


def parse_arguments(texts: Sequence[str]) -> dict[str, object]:
    """Read arguments of a model's factory as they are typed.

    Args:
        texts: `key=value` each. A value is a Python literal (`0.1`, `None`, `[1, 2]`; also `true` and `false`), else
            the text as it is.

    Returns:
        Values by key.

    Raises:
        UsageError: A text is no `key=value`, or a key comes twice.
    """
    arguments: dict[str, object] = {}
    for text in texts:
        key, equals, value = (part.strip() for part in text.partition("="))
        rule = "It must be key=value, where key is an argument of the model's factory."
        valid = bool(equals) and key.isidentifier()
        check(valid, f"--model-arg {shortened(text)}", rule, "Write for example --model-arg width=64.")
        check(key not in arguments, f"--model-arg {key} is given twice", fix="Leave out one of them.")
        arguments[key] = read_literal(value)
        check(
            value[:1] not in ("[", "(", "{") or not isinstance(arguments[key], str),
            f"--model-arg {shortened(text)}",
            "A list, tuple or dict is written as in Python.",
            "Write for example --model-arg flags=[True,False].",
        )
    return arguments


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


def check_model_name(name: str) -> None:
    """Check a model's name, and the tag of weights in it; imports the library or the module that it is of.

    Args:
        name: What the user typed.

    Raises:
        UsageError: Torchvision or timm has no such model, timm is not installed, or the user's own module or factory
            cannot be found.
    """
    if not name.startswith(PREFIX):
        if ":" in name:
            find_factory(name, "model")
        elif name not in (names := model_names()):
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


def build_model(
    name: str,
    classes: int,
    *,
    args: Mapping[str, object] | None = None,
    drop_rate: float | None = None,
    drop_path_rate: float | None = None,
    channels: int = 3,
) -> nn.Module:
    """Build a model with fresh weights.

    Args:
        name: A torchvision classification model, `timm/NAME`, or `package.module:factory`. A factory is called with
            `num_classes=` where it takes that argument or `**kwargs`, else without. The current directory is searched.
        classes: Number of classes of the last layer.
        args: More arguments of the model's builder, of `timm.create_model`, or of the factory. A ResNet of torchvision
            also takes `stem`: `cifar` replaces its 7x7 stride-2 convolution and max-pool by one 3x3 stride-1
            convolution, as is usual for 32x32 images (He et al. 2016, section 4.2).
        drop_rate: Dropout before the last layer; None leaves it to the model. In torchvision it is called `dropout`,
            and some models have it elsewhere, too.
        drop_path_rate: Stochastic depth (Huang et al. 2016) of the last block; None leaves it to the model. Swin and
            MaxViT of torchvision do not take it.
        channels: Of the images. For another number than 3 a model of torchvision gets another first convolution, and
            timm the argument `in_chans`; a factory of your own must know.

    Returns:
        The model, in training mode, on the CPU. One that comes in training mode keeps the modes of its parts.

    Raises:
        UsageError: No such model, an argument that it does not take, the factory cannot be imported or fails, or
            returns no module or one with lazy parameters.
    """
    from torch import nn

    check_model_name(name)
    given = dict(args or {})
    for key, rate in (("drop_rate", drop_rate), ("drop_path_rate", drop_path_rate)):
        if rate is not None and key in given:
            raise refuse("--drop", f"--model-arg {key}", "They say the same.")
        given |= {} if rate is None else {key: rate}
    if name.startswith(PREFIX):
        options = {"num_classes": classes, **({} if channels == 3 else {"in_chans": channels}), **given}
        model = _build(name, given, lambda: create_timm_model(name, options))
    elif ":" in name:
        model = _build_user_model(name, classes, given)
    else:
        model = _build_torchvision_model(name, classes, given)
        if channels != 3:
            first = next(path for path, layer in model.named_modules() if isinstance(layer, nn.Conv2d))
            _use_convolution(model, first, in_channels=channels)
    return model if model.training else model.train()


def create_timm_model(name: str, args: Mapping[str, Any], *, pretrained: bool = False) -> nn.Module:
    """Build a model of timm, with fresh weights unless others are asked for."""
    model: nn.Module = timm_module().create_model(name.removeprefix(PREFIX), pretrained=pretrained, **args)
    return model


def _build(name: str, args: Mapping[str, object], build: Callable[[], nn.Module]) -> nn.Module:
    """What a builder builds; its failure, and an argument of the user's that it does not take, are an error."""
    try:
        return build()
    except (Exception, SystemExit) as error:  # whatever a constructor, or a script that is imported, raises
        given = ", ".join(f"{key}={shortened(repr(value))}" for key, value in args.items())
        fix = "Mend it there, or leave out --model-arg and --drop that it does not take; --debug shows more."
        what = f"building {name}{given and f' with {given}'} failed"
        raise user_error(what, error, fix=fix if args else "") from error


def _build_user_model(name: str, classes: int, args: Mapping[str, object]) -> nn.Module:
    """Call a user's factory, with the number of classes where it takes that by name."""
    from torch import nn
    from torch.nn.parameter import is_lazy

    factory = find_factory(name, "model")
    takes_classes = "num_classes" in inspect.signature(factory).parameters or _takes_any(factory)
    options = {"num_classes": classes, **args} if takes_classes else dict(args)
    model = _build(name, args, lambda: factory(**options))  # type: ignore[arg-type, return-value]
    if not isinstance(model, nn.Module):
        raise UsageError(f"{name} returned {article(model)}", "A factory returns a torch.nn.Module.")
    lazy = [path for path, tensor in chain(model.named_parameters(), model.named_buffers()) if is_lazy(tensor)]
    if lazy:
        raise UsageError(
            f"{name} has parameters whose shape is not known yet, such as {lazy[0]}",
            "Lazy modules get their shapes in their first forward pass; training needs them before.",
            "Call the model once in the factory, on an example of its inputs: model(torch.zeros(1, 3, 32, 32)).",
        )
    return model


def _takes_any(function: Callable[..., object]) -> bool:
    """Whether a function takes arguments of any name."""
    return any(taken.kind is taken.VAR_KEYWORD for taken in inspect.signature(function).parameters.values())


def _build_torchvision_model(name: str, classes: int, args: Mapping[str, object]) -> nn.Module:
    """Build a torchvision model with fresh weights."""
    import torchvision

    arguments = dict(args)
    stem = arguments.pop("stem", "imagenet")
    check(stem in ("imagenet", "cifar"), f"--model-arg stem={stem}", "It must be imagenet or cifar.")
    kind = get_type_hints(torchvision.models.get_model_builder(name))["return"]
    taken = inspect.signature(kind).parameters
    options: dict[str, Any] = {"num_classes": classes}
    if name in ("googlenet", "inception_v3"):
        # Auxiliary heads return a tuple in training; torchvision's own initialisation takes a minute.
        options |= {"aux_logits": False, "init_weights": False}
    for key, value in arguments.items():
        known = next((other for other in _RATES.get(key, (key,)) if other in taken), None)
        if known is None and (key in _RATES or _takes_any(kind)):  # ConvNeXt drops what it does not know
            raise UsageError(f"{name} takes no argument {key!r}", fix="Leave it out of --model-arg and --drop.")
        options[known or key] = value
    model = _build(name, args, lambda: torchvision.models.get_model(name, weights=None, **options))
    if stem == "cifar":
        _use_cifar_stem(model, name)
    return model


def _use_cifar_stem(model: nn.Module, name: str) -> None:
    """Replace a ResNet's 7x7 stride-2 convolution and max-pool by one 3x3 stride-1 convolution."""
    import torchvision
    from torch import nn

    if not isinstance(model, torchvision.models.ResNet):
        raise UsageError(f"--model-arg stem=cifar does not fit {name}", "Only ResNets have the stem that it replaces.")
    _use_convolution(model, "conv1", kernel_size=3, stride=1, padding=1)
    nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
    model.maxpool = nn.Identity()


def _use_convolution(model: nn.Module, path: str, **options: int) -> None:
    """Replace a convolution by one with other options."""
    from torch import nn

    former: Any = model.get_submodule(path)
    same = ("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation")
    known = {key: getattr(former, key) for key in same} | {"bias": former.bias is not None}
    model.set_submodule(path, nn.Conv2d(**{**known, **options}))


def article(value: object) -> str:
    """The type of a value with its article: `a dict`, `an int`.

    Args:
        value: Any value.

    Returns:
        The text.
    """
    name = type(value).__name__
    return f"{'an' if name[:1].lower() in 'aeio' else 'a'} {name}"


def require_trained(model: nn.Module, name: str) -> None:
    """Refuse a model of which nothing would be trained.

    Args:
        model: The model.
        name: What the user calls it.

    Raises:
        UsageError: No parameter of it requires a gradient.
    """
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UsageError(
            f"{name} has no parameter that is trained",
            "Training changes the parameters that require a gradient.",
            "Call `requires_grad_(True)` on those that are to be trained, or leave them out of --freeze.",
        )


def model_fingerprint(model: nn.Module) -> str:
    """Sixteen hex digits over names, shapes and dtypes of all parameters and persistent buffers, in order.

    Values do not count, and of extra states names alone: the same architecture has the same fingerprint before and
    after training.

    Args:
        model: The model.

    Returns:
        The fingerprint.
    """
    from hybridpar.models.state_dicts import is_extra

    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        facts = "" if is_extra(name) else f"{tuple(tensor.shape)}:{tensor.dtype}"
        digest.update(f"{name}:{facts};".encode())
    return digest.hexdigest()[:16]


def parameter_count(model: nn.Module) -> int:
    """Number of elements in all parameters; a shared one counts once.

    Args:
        model: The model.

    Returns:
        The number.
    """
    return sum(parameter.numel() for parameter in model.parameters())
