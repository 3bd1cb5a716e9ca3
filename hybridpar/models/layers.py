"""What is trained of a model, and how fast: frozen parameters by name, and learning rates layer by layer.

Layer-wise decay is that of BEiT (Bao et al. 2022) as timm has it: with n layers a parameter of layer i, counted from 0
at the inputs, gets decay^(n - 1 - i) of the learning rate. The head is the last layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from hybridpar.errors import UsageError, nearest, shortened

if TYPE_CHECKING:
    from torch import nn


def freeze(model: nn.Module, patterns: str | Sequence[str], *, batch_norm: bool = False) -> list[str]:
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
        batch_norm: Put all BatchNorm layers into evaluation mode. Their scale and shift are trained, unless they are
            named.

    Returns:
        Names of the parameters that are frozen by the patterns.

    Raises:
        UsageError: A pattern names nothing.
    """
    from torch.nn.modules.batchnorm import _BatchNorm

    words = patterns.split(",") if isinstance(patterns, str) else patterns
    frozen: set[nn.Parameter] = set()
    inside: set[nn.Module] = set()
    parameters = dict(model.named_parameters(remove_duplicate=False))
    modules = {name: module for name, module in model.named_modules() if name}
    for pattern in filter(None, (word.strip() for word in words)):
        named = [modules[name] for name in modules if fnmatchcase(name, pattern)]
        matching = [parameters[name] for name in parameters if fnmatchcase(name, pattern)]
        if not matching and not named:
            raise UsageError(
                f"--freeze {shortened(pattern)}: no parameter and no module has such a name",
                nearest(pattern, [*modules, *parameters]),
                "A pattern is the name of a module or of a parameter, in which * stands for any characters.",
            )
        frozen.update(matching, *(owner.parameters() for owner in named))
        inside.update(*(owner.modules() for owner in named))
    for parameter in frozen:
        parameter.requires_grad_(False)
    for layer in model.modules():
        direct = list(layer.parameters(recurse=False))
        is_frozen = batch_norm or (frozen.issuperset(direct) if direct else layer in inside)
        if isinstance(layer, _BatchNorm) and is_frozen:
            layer.eval()
    return [name for name, parameter in parameters.items() if parameter in frozen]


def learning_rate_scales(model: nn.Module, layer_decay: float = 1.0, head_scale: float = 1.0) -> dict[str, float]:
    """What the learning rate of each parameter is multiplied with.

    Args:
        model: The whole model, before it is cut into stages.
        layer_decay: Factor from a layer to the one before it.
        head_scale: Factor of the head.

    Returns:
        Factors by the names of all parameters.
    """
    numbers, head = layer_numbers(model), set(head_parameters(model))
    last = max(numbers.values(), default=0)
    return {
        name: layer_decay ** (last - numbers.get(name, last)) * (head_scale if name in head else 1.0)
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
    from torch import nn

    containers = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
    if names := [f"{prefix}{name}" for name, _ in module.named_parameters(recurse=False)]:
        yield names, False
    for name, child in module.named_children():
        parameters = dict(child.named_parameters(prefix=f"{prefix}{name}"))
        is_large = sum(parameter.numel() for parameter in parameters.values()) > half
        if parameters and (isinstance(child, containers) or (is_large and list(child.children()))):
            yield from _layers(child, f"{prefix}{name}.", half)
        elif parameters:
            yield list(parameters), any(parameter.ndim > 1 for parameter in parameters.values())


def head_parameters(model: nn.Module) -> list[str]:
    """Names of the parameters of the head: the layer that gives the scores.

    In models of timm it is what their configuration calls `classifier`; in others the last module with a matrix.
    """
    heads = (getattr(model, "pretrained_cfg", None) or {}).get("classifier")
    if not heads:
        named = model.named_parameters(remove_duplicate=False)  # the head may share its matrix with another layer
        matrices = [name for name, parameter in named if parameter.ndim > 1]
        heads = [name.rpartition(".")[0] for name in matrices[-1:]]
    owners = tuple(f"{head}." if head else "" for head in ([heads] if isinstance(heads, str) else heads))
    return [name for name, _ in model.named_parameters() if name.startswith(owners)]
