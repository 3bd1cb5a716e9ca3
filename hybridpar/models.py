"""Builds a model from its name: a torchvision classification model, or a user's own as `package.module:factory`.

`check_model_name` imports neither torch nor torchvision. `model_fingerprint` identifies an architecture in plans,
profiles and checkpoints.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Literal

from hybridpar.errors import UsageError, nearest, shortened, user_error
from hybridpar.registry import names_in_source

if TYPE_CHECKING:
    import torch
    from torch import nn

Stem = Literal["imagenet", "cifar"]


def model_names() -> list[str]:
    """Names of all torchvision classification models."""
    spec = importlib.util.find_spec("torchvision")
    folder = Path(spec.origin).parent / "models" if spec is not None and spec.origin is not None else Path()
    if names := names_in_source(folder, "register_model"):
        return sorted(names)
    import torchvision

    return list(torchvision.models.list_models(module=torchvision.models))


def check_model_name(name: str) -> None:
    """Check what can be checked of a model's name without importing it.

    Args:
        name: What the user typed.

    Raises:
        UsageError: Torchvision has no such model, or Python does not find the package of the user's own.
    """
    if ":" not in name:
        names = model_names()
        if name not in names:
            raise UsageError(
                f"unknown model {shortened(repr(name))}",
                nearest(name, names),
                "Name a torchvision classification model, or your own as package.module:factory.",
            )
        return
    module_name = name.partition(":")[0]
    _search_here()
    package = module_name.partition(".")[0]
    if not package.isidentifier() or (package not in sys.modules and importlib.util.find_spec(package) is None):
        _user_module(module_name, name)  # raises


def build_model(name: str, classes: int, *, stem: Stem = "imagenet") -> nn.Module:
    """Build a model with fresh weights.

    Args:
        name: A torchvision classification model, or `package.module:factory`. A factory is called with
            `num_classes=` where it takes that argument or `**kwargs`, else without arguments. The current directory
            is searched.
        classes: Number of classes of the last layer.
        stem: `cifar` replaces a ResNet's 7x7 stride-2 convolution and max-pool by one 3x3 stride-1 convolution, as
            is usual for 32x32 images (He et al. 2016, section 4.2).

    Returns:
        The model, in training mode, on the CPU.

    Raises:
        UsageError: No such model, the factory cannot be imported or fails, or returns no module or one with lazy
            parameters, or the stem does not fit.
    """
    model = _user_model(name, classes) if ":" in name else _torchvision_model(name, classes)
    if stem == "cifar":
        _use_cifar_stem(model, name)
    return model


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
            "Call `requires_grad_(True)` on those that are to be trained.",
        )


def _torchvision_model(name: str, classes: int) -> nn.Module:
    check_model_name(name)
    import torchvision
    from torch import nn

    options: dict[str, object] = {"num_classes": classes}
    if name in ("googlenet", "inception_v3"):
        # Their auxiliary heads return a tuple in training, and their own initialisation takes a minute.
        options.update(aux_logits=False, init_weights=False)
    model = torchvision.models.get_model(name, weights=None, **options)
    assert isinstance(model, nn.Module)
    return model


def _user_model(name: str, classes: int) -> nn.Module:
    from torch import nn
    from torch.nn.parameter import is_lazy

    module_name, _, factory_name = name.partition(":")
    module = _user_module(module_name, name)
    factory = getattr(module, factory_name, None)
    if not callable(factory):
        callables = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise UsageError(
            f"module {module_name!r} has no factory {factory_name!r}",
            nearest(factory_name, callables) if callables else "The module defines nothing that can be called.",
        )
    model = _call_factory(factory, name, classes)
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"{name} returned {article(model)}",
            "A factory returns a torch.nn.Module.",
            "Return the model from it.",
        )
    lazy = [path for path, one in chain(model.named_parameters(), model.named_buffers()) if is_lazy(one)]
    if lazy:
        raise UsageError(
            f"{name} has parameters whose shape is not known yet, such as {lazy[0]}",
            "Lazy modules get their shapes in their first forward pass; training needs them before.",
            "Call the model once in the factory, on an example of its inputs: model(torch.zeros(1, 3, 32, 32)).",
        )
    return model


def _user_module(module_name: str, name: str) -> ModuleType:
    """Import the module that the name of a user's model begins with; the current directory is searched, too."""
    _search_here()
    try:
        if not all(part.isidentifier() for part in module_name.split(".")):
            raise ModuleNotFoundError(f"{module_name!r} is no absolute module name", name=module_name)
        return importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # a script that reads its command line when it is imported exits
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is None or not f"{module_name}.".startswith(f"{missing}."):
            raise user_error(f"importing {module_name!r} for the model {name!r} failed", error) from error
        raise UsageError(
            f"cannot import {module_name!r} for the model {name!r}: {error}",
            "The part before the colon is a module that Python finds in the current directory or the environment.",
            "Check the spelling, or run from the directory that holds it.",
        ) from error


def _search_here() -> None:
    """Have Python find modules in the current directory, too."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


def _call_factory(factory: Callable[..., object], name: str, classes: int) -> object:
    """Call a factory, with the number of classes where it takes that by name."""
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):  # some functions written in C have none
        signature = inspect.Signature()
    takes_any = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in signature.parameters.values())
    options = {"num_classes": classes} if takes_any or "num_classes" in signature.parameters else {}
    try:
        signature.bind(**options)
    except TypeError as error:
        raise UsageError(
            f"cannot call {name}{shortened(str(signature), 200)}: {error}",
            "A factory is called with num_classes= where it takes that argument or **kwargs, else without arguments.",
            "Give its other arguments defaults.",
        ) from error
    try:
        return factory(**options)
    except (Exception, SystemExit) as error:
        # Handed on through **kwargs to something that does not take it: the outputs are counted before training.
        if takes_any and isinstance(error, TypeError) and "unexpected keyword argument 'num_classes'" in str(error):
            try:
                return factory()
            except (Exception, SystemExit) as second:
                error = second
        raise user_error(f"the factory {name} failed", error) from error


def article(value: object) -> str:
    """The type of a value with its article: `a dict`, `an int`.

    Args:
        value: Any value.

    Returns:
        The text.
    """
    name = type(value).__name__
    return f"{'an' if name[:1].lower() in 'aeio' else 'a'} {name}"


def _use_cifar_stem(model: nn.Module, name: str) -> None:
    import torchvision
    from torch import nn

    stem, pool = getattr(model, "conv1", None), getattr(model, "maxpool", None)
    if not isinstance(model, torchvision.models.ResNet) or not isinstance(stem, nn.Conv2d) or pool is None:
        raise UsageError(
            f"--stem cifar does not fit {name}", "Only ResNets have the stem that it replaces.", "Leave --stem away."
        )
    model.conv1 = nn.Conv2d(3, stem.out_channels, kernel_size=3, stride=1, padding=1, bias=False)
    nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
    model.maxpool = nn.Identity()


def model_fingerprint(model: nn.Module) -> str:
    """Sixteen hex digits over names, shapes and dtypes of all parameters and persistent buffers, in order.

    Values do not count: the same architecture has the same fingerprint before and after training.

    Args:
        model: The model.

    Returns:
        The fingerprint.
    """
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(f"{name}:{tuple(tensor.shape)}:{tensor.dtype};".encode())
    return digest.hexdigest()[:16]


def parameter_count(model: nn.Module) -> int:
    """Number of elements in all parameters; a shared one counts once.

    Args:
        model: The model.

    Returns:
        The number.
    """
    return sum(parameter.numel() for parameter in model.parameters())


def seed_everything(seed: int) -> None:
    """Seed torch on all devices, so that a model built next is the same everywhere.

    Args:
        seed: The seed.
    """
    import torch

    torch.manual_seed(seed)


def autocast(amp: str, device: torch.device) -> AbstractContextManager[object]:
    """The context in which a model's forward pass runs.

    Args:
        amp: `none` or `bf16`, the option `--amp`.
        device: The model's device.

    Returns:
        Autocast to bfloat16, or a context that does nothing.
    """
    import torch

    return nullcontext() if amp == "none" else torch.autocast(device.type, dtype=torch.bfloat16)
