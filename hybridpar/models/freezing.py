"""Keeps parameters as they are in training, by patterns over names."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from hybridpar.errors import UsageError, nearest, shortened

if TYPE_CHECKING:
    from torch import nn


def freeze(model: nn.Module, patterns: str | Sequence[str], *, batch_norm: bool = True) -> list[str]:
    """Stop training of the parameters that patterns name.

    A pattern is compared with the names of parameters and of modules, all of whose parameters it then names:
    `layer1`, `layer[12].*`, `*.bias`, `features.0`. `*` also stands for dots.

    BatchNorm layers all of whose parameters are named, and those without parameters inside a module that is named, are
    put into evaluation mode: they normalise by their running statistics and do not move them, as is usual in
    fine-tuning. Else the features of a frozen layer would go on changing with every batch. A later `model.train()`
    ends that, as in any loop.

    Args:
        model: The model; changed in place.
        patterns: Patterns, or one text with commas between them.
        batch_norm: Put those BatchNorm layers into evaluation mode.

    Returns:
        Names of the parameters that are frozen by the patterns.

    Raises:
        UsageError: A pattern names nothing.
    """
    from torch.nn.modules.batchnorm import _BatchNorm

    words = patterns.split(",") if isinstance(patterns, str) else patterns
    frozen: set[str] = set()
    inside: set[nn.Module] = set()
    parameters = dict(model.named_parameters(remove_duplicate=False))
    modules = {name: module for name, module in model.named_modules() if name}
    for pattern in filter(None, (word.strip() for word in words)):
        named = [name for name in modules if fnmatchcase(name, pattern)]
        matching = {name for name in parameters if fnmatchcase(name, pattern)}
        matching |= {f"{owner}.{name}" for owner in named for name, _ in modules[owner].named_parameters()}
        if not matching and not named:
            raise UsageError(
                f"--freeze {shortened(pattern)}: no parameter and no module has such a name",
                nearest(pattern, [*modules, *parameters]),
                "A pattern is the name of a module or of a parameter, in which * stands for any characters.",
            )
        frozen |= matching
        inside.update(module for owner in named for module in modules[owner].modules())
    named_parameters = {parameters[name].requires_grad_(False) for name in frozen}
    for layer in model.modules() if batch_norm else ():
        direct = list(layer.parameters(recurse=False))
        if isinstance(layer, _BatchNorm) and (named_parameters.issuperset(direct) if direct else layer in inside):
            layer.eval()
    return sorted(frozen, key=list(parameters).index)


def freeze_batch_norm(model: nn.Module) -> None:
    """Put all BatchNorm layers into evaluation mode: they normalise by their running statistics, and keep them.

    Scale and shift are trained, unless they are frozen too.
    """
    from torch.nn.modules.batchnorm import _BatchNorm

    for layer in model.modules():
        if isinstance(layer, _BatchNorm):
            layer.eval()
