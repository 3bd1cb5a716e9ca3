"""Learning rates that differ from layer to layer: lower near the inputs, and another one for the head.

Layer-wise decay is that of BEiT (Bao et al. 2022) as timm has it: with n layers a parameter of layer i, counted from 0
at the inputs, gets decay^(n - 1 - i) of the learning rate. The head is the last layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn


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

    Args:
        model: The whole model.

    Returns:
        Numbers by the names of parameters.
    """
    if hasattr(model, "group_matcher"):
        from timm.models import group_parameters

        matcher: Any = model.group_matcher
        found: dict[str, int] = group_parameters(model, matcher(coarse=False), reverse=True)
        return found
    numbers: dict[str, int] = {}
    number = -1
    for names, starts in _layers(model, "", sum(one.numel() for one in model.parameters()) / 2):
        number += starts
        numbers |= dict.fromkeys(names, number)
    return {name: max(0, number) for name, number in numbers.items()}


def _layers(module: nn.Module, prefix: str, half: float) -> Iterator[tuple[list[str], bool]]:
    """Names of parameters that belong together, in order, and whether a new layer starts with them."""
    own = [f"{prefix}{name}" for name, _ in module.named_parameters(recurse=False)]
    if own:
        yield own, False
    for name, child in module.named_children():
        parameters = dict(child.named_parameters(prefix=f"{prefix}{name}"))
        if parameters and _is_container(child, half):
            yield from _layers(child, f"{prefix}{name}.", half)
        elif parameters:
            yield list(parameters), any(one.ndim > 1 for one in parameters.values())


def _is_container(module: nn.Module, half: float) -> bool:
    from torch import nn

    children = list(module.children())
    if isinstance(module, nn.Sequential):  # a subclass of leaves, as a convolution with its norm, is one layer
        return type(module) is nn.Sequential or any(any(True for _ in child.children()) for child in children)
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        return True
    return bool(children) and sum(one.numel() for one in module.parameters()) > half


def head_parameters(model: nn.Module) -> list[str]:
    """Names of the parameters of the head: the layer that gives the scores.

    In models of timm it is what their configuration calls `classifier`; in others the last module with a matrix.

    Args:
        model: The whole model.

    Returns:
        The names; empty where the model has no parameters.
    """
    named = (getattr(model, "pretrained_cfg", None) or {}).get("classifier")
    heads = (named,) if isinstance(named, str) else tuple(named or ())
    if not heads:
        last = [
            name
            for name, module in model.named_modules()
            if any(one.ndim > 1 for one in module.parameters(recurse=False))
        ]
        heads = tuple(last[-1:])
    owners = tuple(f"{head}." if head else "" for head in heads)
    return [name for name, _ in model.named_parameters() if owners and name.startswith(owners)]
