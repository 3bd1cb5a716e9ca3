"""Builds a model from its name: of torchvision, of timm, or of the user's own.

Plans, profiles and checkpoints know a model by the fingerprint of its architecture, which is taken here too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

from hybridpar.errors import UsageError
from hybridpar.models.arguments import with_rates
from hybridpar.models.timm_models import PREFIX, build_timm_model, check_timm_name
from hybridpar.models.torchvision_models import build_torchvision_model, check_torchvision_name, use_channels
from hybridpar.models.user_models import build_user_model, check_user_name

if TYPE_CHECKING:
    from torch import nn


def check_model_name(name: str) -> None:
    """Check what can be checked of a model's name without importing torch.

    Args:
        name: What the user typed.

    Raises:
        UsageError: Torchvision or timm has no such model, timm is not installed, or Python does not find the package
            of the user's own.
    """
    if name.startswith(PREFIX):
        check_timm_name(name)
    elif ":" in name:
        check_user_name(name)
    else:
        check_torchvision_name(name)


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
        model = build_timm_model(name, classes, given if channels == 3 else {"in_chans": channels, **given})
    elif ":" in name:
        model = build_user_model(name, classes, given)
    else:
        model = build_torchvision_model(name, classes, given)
        if channels != 3:
            use_channels(model, channels)
    return model if model.training else model.train()


def require_trained(model: nn.Module, name: str) -> None:
    """Refuse a model of which nothing would be trained.

    Args:
        model: The model.
        name: What the user calls it.

    Raises:
        UsageError: No parameter of it requires a gradient.
    """
    if not any(one.requires_grad for one in model.parameters()):
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
