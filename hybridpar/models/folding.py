"""Folds BatchNorm layers into the convolutions and linear layers in front of them, for a model that is only used.

In evaluation mode a BatchNorm is y = g (x - m) / sqrt(v + eps) + b with constants g, m, v and b per channel. Behind
x = W u + a it is a layer of weights W g / sqrt(v + eps) and bias (a - m) g / sqrt(v + eps) + b (Jacob et al. 2018,
"Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference", section 3.2).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

_ATEN = torch.ops.aten

#: Layers whose weights have the output channels as their first dimension.
_FOLDED = (_ATEN.conv1d.default, _ATEN.conv2d.default, _ATEN.conv3d.default, _ATEN.linear.default)


@dataclass(frozen=True)
class Folded:
    """A model without the BatchNorm layers that could be folded.

    Attributes:
        module: The model, which computes the same up to rounding.
        folded: Number of layers that were folded.
        layers: Number of BatchNorm layers that there were.
    """

    module: nn.Module
    folded: int
    layers: int


def fold_batch_norm(program: torch.export.ExportedProgram) -> Folded:
    """Fold BatchNorm layers into the layer in front of them, where nothing else uses that layer's result or weights.

    Args:
        program: A model in evaluation mode, as `torch.export.export` returns it; it is not changed.

    Returns:
        The model as a graph.
    """
    module = program.module(check_guards=False)
    graph = module.graph
    norms = [node for node in graph.nodes if node.target is _ATEN.batch_norm.default]
    folded = 0
    for number, norm in enumerate(norms):
        layer, *_ = norm.args
        if not _can_fold(norm, layer):
            continue
        weight, bias = _folded_values(module, norm, layer)
        arguments: list[Any] = [*layer.args, None][: max(3, len(layer.args))]
        with graph.inserting_before(layer):
            for place, (kind, value) in enumerate((("weight", weight), ("bias", bias)), start=1):
                module.register_parameter(f"folded_{number}_{kind}", nn.Parameter(value, requires_grad=False))
                arguments[place] = graph.get_attr(f"folded_{number}_{kind}")
        layer.args = tuple(arguments)
        norm.replace_all_uses_with(layer)
        graph.erase_node(norm)
        folded += 1
    for node in reversed(graph.nodes):
        if node.op == "get_attr" and not node.users:
            graph.erase_node(node)
    graph.lint()
    # A new module has the constants that are used, and not the checks of inputs, which cannot be traced.
    return Folded(fx.GraphModule(module, graph), folded, len(norms))


def _can_fold(norm: fx.Node, layer: Any) -> bool:
    if not isinstance(layer, fx.Node) or layer.target not in _FOLDED or layer.kwargs or norm.kwargs:
        return False
    if len(layer.users) > 1 or norm.args[5]:  # another reader wants the result as it is; statistics of the batch
        return False
    constants = [one for one in (*layer.args[1:3], *norm.args[1:5]) if one is not None]
    return all(isinstance(one, fx.Node) and one.op == "get_attr" for one in constants)


@torch.no_grad()
def _folded_values(module: nn.Module, norm: fx.Node, layer: fx.Node) -> tuple[Tensor, Tensor]:
    """Weights and bias of the layer with its norm, computed in float64."""
    gain, shift, mean, variance = (_value(module, node) for node in norm.args[1:5])
    weight, bias = (_value(module, node) for node in (*layer.args[1:3], None)[:2])
    assert weight is not None
    assert mean is not None
    assert variance is not None
    epsilon = norm.args[7]
    assert isinstance(epsilon, float)
    scale = (variance + epsilon).rsqrt() * (1.0 if gain is None else gain)
    offset = (0.0 if bias is None else bias) - mean
    dtype = module.get_parameter(str(layer.args[1].target)).dtype  # type: ignore[union-attr]
    folded = weight * scale.view(-1, *[1] * (weight.ndim - 1))
    return folded.to(dtype), (offset * scale + (0.0 if shift is None else shift)).to(dtype)


def _value(module: nn.Module, node: Any) -> Tensor | None:
    """The constant that a node stands for, in float64."""
    if node is None:
        return None
    owner, _, name = str(node.target).rpartition(".")
    value: Tensor = getattr(module.get_submodule(owner), name)
    return value.detach().double()
