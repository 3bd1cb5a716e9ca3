"""Why: some models cannot be traced only because of a check or a loop around modules that run in plain order.

The last rung of the ladder watches one run: which modules are called, and whether each takes exactly what the one
before returned. Such a chain is a graph. It is then run against the model and must give the very same output.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx, nn

from hybridpar.partition.nest import tensor_leaves
from hybridpar.partition.state import untouched


def module_order_graph(model: nn.Module, inputs: Sequence[torch.Tensor]) -> fx.Graph | None:
    """The graph of a model that only calls its modules one after another.

    Args:
        model: The model; it runs twice in evaluation mode, its state is put back.
        inputs: Example inputs; such a model has one.

    Returns:
        A graph of `call_module` nodes, or None where the model is not of this kind.
    """
    if len(inputs) != 1:
        return None
    with untouched(model, training=False), torch.no_grad():
        calls, output = _watch(model, inputs[0])
        names = _chain(calls, inputs[0], output)
        if names is None or not _same_parameters(model, names):
            return None
        value: Any = inputs[0]
        for name in names:
            value = model.get_submodule(name)(value)
        if not _equal(value, output):
            return None
    graph = fx.Graph()
    node = graph.placeholder("x")
    for name in names:
        node = graph.call_module(name, (node,))
    graph.output(node)
    return graph


def _watch(model: nn.Module, example: torch.Tensor) -> tuple[list[tuple[str, Any, Any]], Any]:
    """Run the model and note the outermost module calls: name, input, output."""
    calls: list[tuple[str, Any, Any]] = []
    depth = 0

    def enter(module: nn.Module, arguments: Any) -> None:
        nonlocal depth
        depth += 1

    def leave(name: str) -> Any:
        def note(module: nn.Module, arguments: Any, result: Any) -> None:
            nonlocal depth
            depth -= 1
            if depth == 0:
                calls.append((name, arguments[0] if len(arguments) == 1 else arguments, result))

        return note

    handles = []
    for name, module in model.named_modules():
        # A ModuleList is never called, so its items are the outermost calls.
        if name and not isinstance(module, torch.jit.ScriptModule):  # which takes no hooks
            handles += [module.register_forward_pre_hook(enter), module.register_forward_hook(leave(name))]
    try:
        return calls, model(example)
    finally:
        for handle in handles:
            handle.remove()


def _chain(calls: list[tuple[str, Any, Any]], example: torch.Tensor, output: Any) -> list[str] | None:
    value: Any = example
    for _, argument, result in calls:
        if argument is not value:
            return None
        value = result
    return [name for name, _, _ in calls] if calls and value is output else None


def _same_parameters(model: nn.Module, names: list[str]) -> bool:
    """Whether the chain holds every parameter: one used outside the modules would be lost."""
    held = {id(parameter) for name in names for parameter in model.get_submodule(name).parameters()}
    return all(id(parameter) in held for parameter in model.parameters())


def _equal(left: Any, right: Any) -> bool:
    pairs = list(zip(tensor_leaves(left), tensor_leaves(right), strict=False))
    return bool(pairs) and all(a[0] == b[0] and torch.equal(a[1], b[1]) for a, b in pairs)
