"""Makes a graph from the order in which a model calls its modules, where it cannot be traced.

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
        model: The model; it runs in both modes, its state is put back.
        inputs: Example inputs; such a model has one.

    Returns:
        A graph of `call_module` nodes, or None where the model is not of this kind.
    """
    if len(inputs) != 1:
        return None
    with untouched(model, training=True), torch.no_grad():
        trained = _watch(model, inputs[0])  # its values are random; its order is not
    with untouched(model, training=False), torch.no_grad():
        names, output = _watch(model, inputs[0])
        if names is None or names != trained[0] or not _same_parameters(model, names):
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


def _watch(model: nn.Module, example: torch.Tensor) -> tuple[list[str] | None, Any]:
    """Run the model; return the outermost modules that it calls, if it does nothing else, and its output."""
    names: list[str] = []
    value: Any = example
    state = _state_of(model)
    depth, chained = 0, True

    def enter(module: nn.Module, arguments: Any) -> None:
        nonlocal depth, chained
        if depth == 0:
            chained &= len(arguments) == 1 and arguments[0] is value and _state_of(model) == state
        depth += 1

    def leave(name: str) -> Any:
        def note(module: nn.Module, arguments: Any, result: Any) -> None:
            nonlocal depth, value, state
            depth -= 1
            if depth == 0:
                names.append(name)
                value, state = result, _state_of(model)

        return note

    handles = []
    for name, module in model.named_modules():
        # A ModuleList is never called, so its items are the outermost calls.
        if name and not isinstance(module, torch.jit.ScriptModule):  # which takes no hooks
            handles += [module.register_forward_pre_hook(enter), module.register_forward_hook(leave(name))]
    try:
        output = model(example)
    finally:
        for handle in handles:
            handle.remove()
    chained &= output is value and _state_of(model) == state
    return names if names and chained else None, output


def _state_of(model: nn.Module) -> list[tuple[int, int | None]]:
    """Differs after a change of any buffer; one that the model itself makes is in no module's call."""
    return [(id(buffer), None if buffer.is_inference() else buffer._version) for buffer in model.buffers()]


def _same_parameters(model: nn.Module, names: list[str]) -> bool:
    """Whether the chain holds every parameter: one used outside the modules would be lost."""
    held = {id(parameter) for name in names for parameter in model.get_submodule(name).parameters()}
    return all(id(parameter) in held for parameter in model.parameters())


def _equal(left: Any, right: Any) -> bool:
    pairs = list(zip(tensor_leaves(left), tensor_leaves(right), strict=False))
    return bool(pairs) and all(a[0] == b[0] and torch.equal(a[1], b[1]) for a, b in pairs)
