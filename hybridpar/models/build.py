"""Builds a model from its name: of torchvision, of timm, or of the user's own as `package.module:factory`.

Plans, profiles and checkpoints know a model by the fingerprint of its architecture, which is taken here too.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Mapping
from itertools import chain
from typing import TYPE_CHECKING

from hybridpar.errors import UsageError
from hybridpar.models.arguments import build_with, not_taken, with_rates
from hybridpar.models.libraries import (
    PREFIX,
    build_timm_model,
    build_torchvision_model,
    check_library_name,
    use_channels,
)
from hybridpar.registry import find_factory

if TYPE_CHECKING:
    from torch import nn


def check_model_name(name: str) -> None:
    """Check a model's name; imports the library or the module that it is of.

    Args:
        name: What the user typed.

    Raises:
        UsageError: Torchvision or timm has no such model, timm is not installed, or the user's own module or factory
            cannot be found.
    """
    if ":" in name and not name.startswith(PREFIX):
        find_factory(name, "model")
    else:
        check_library_name(name)


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
        drop_path_rate: Stochastic depth (Huang et al. 2016) of the last block; None leaves it to the model.
        channels: Of the images. For another number than 3 a model of torchvision gets another first convolution, and
            timm the argument `in_chans`; a factory of your own must know.

    Returns:
        The model, in training mode, on the CPU. One that comes in training mode keeps the modes of its parts.

    Raises:
        UsageError: No such model, an argument that it does not take, the factory cannot be imported or fails, or
            returns no module or one with lazy parameters.
    """
    given = with_rates(args, drop_rate, drop_path_rate)
    if name.startswith(PREFIX):
        options = {"num_classes": classes, **({} if channels == 3 else {"in_chans": channels}), **given}
        model = build_timm_model(name, options)
    elif ":" in name:
        model = _build_user_model(name, classes, given)
    else:
        model = build_torchvision_model(name, classes, given)
        if channels != 3:
            use_channels(model, channels)
    return model if model.training else model.train()


def _build_user_model(name: str, classes: int, args: Mapping[str, object]) -> nn.Module:
    """Call a user's factory, with the number of classes where it takes that by name."""
    from torch import nn
    from torch.nn.parameter import is_lazy

    factory = find_factory(name, "model")
    parameters = inspect.signature(factory).parameters
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    for key in args:
        if not takes_any and key not in parameters:
            raise not_taken(name, key, [parameter for parameter in parameters if parameter != "num_classes"])
    options = {"num_classes": classes, **args} if takes_any or "num_classes" in parameters else dict(args)
    model = build_with(name, args, lambda: factory(**options))  # type: ignore[arg-type, return-value]
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


def seed_everything(seed: int) -> None:
    """Seed torch on all devices, so that a model built next is the same everywhere.

    Args:
        seed: The seed.
    """
    import torch

    torch.manual_seed(seed)


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
