"""One graph of a model with what its example run showed.

A number computed from a shape is neither work nor a tensor to send: every stage computes it again from the tensor that
it comes from (rematerialisation), so such nodes are told apart here.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import fx, nn

from hybridpar.partition.example import NodeFacts, run_example
from hybridpar.partition.trace import TracedModel
from hybridpar.partition.tracer import METADATA_METHODS, stop_gradient

#: Functions of shapes and numbers that are free to compute twice. Methods of tensors are listed by name.
_PURE = {
    getattr, len, int, float, bool, max, min, abs, sum, round, divmod, math.floor, math.ceil, math.sqrt,
    *(getattr(operator, name) for name in operator.__all__ if not name.startswith(("i", "set", "del"))),
    operator.index, operator.invert, stop_gradient,
}  # fmt: skip


@dataclass(frozen=True)
class GraphFacts:
    """One graph of a model with everything that splitting it needs.

    Attributes:
        graph: The graph; in-place results have been bound to their later uses.
        facts: What the example run showed of every node.
        compute: Nodes that do work, in execution order.
        derived: Nodes that compute numbers from shapes; every stage makes its own.
    """

    graph: fx.Graph
    facts: dict[fx.Node, NodeFacts]
    compute: tuple[fx.Node, ...]
    derived: frozenset[fx.Node]

    def sources(self, node: fx.Node) -> list[fx.Node]:
        """Nodes whose tensors a node needs, looking through derived numbers; attributes are not among them."""
        found: dict[fx.Node, None] = {}
        stack = list(node.all_input_nodes)[::-1]
        while stack:
            argument = stack.pop()
            if argument in self.derived:
                stack.extend(reversed(argument.all_input_nodes))
            elif argument.op != "get_attr":
                found[argument] = None
        return list(found)

    @cached_property
    def place(self) -> dict[fx.Node, int]:
        """Position of every node in execution order."""
        return {node: index for index, node in enumerate(self.graph.nodes)}

    @property
    def output(self) -> fx.Node:
        """The output node."""
        return self.graph.output_node()

    @property
    def placeholders(self) -> list[fx.Node]:
        """The inputs of the model."""
        return [node for node in self.graph.nodes if node.op == "placeholder"]


def resolve_attribute(traced: TracedModel, name: str) -> object:
    """The module, parameter, buffer or constant that a graph calls by this qualified name."""
    if name in traced.constants:
        return traced.constants[name]
    value: object = traced.model
    for part in name.split("."):
        value = getattr(value, part)
    return value


def state_of(traced: TracedModel, node: fx.Node) -> list[torch.Tensor]:
    """Parameters and buffers of the module that a node calls, and parameters that it is given."""
    found: list[torch.Tensor] = []
    if node.op == "call_module":
        module = resolve_attribute(traced, str(node.target))
        assert isinstance(module, nn.Module)
        found += [*module.parameters(), *module.buffers()]
    given = (resolve_attribute(traced, str(one.target)) for one in node.all_input_nodes if one.op == "get_attr")
    return found + [value for value in given if isinstance(value, nn.Parameter)]


def examine_graph(
    traced: TracedModel, graph: fx.Graph, inputs: Sequence[torch.Tensor], *, training: bool
) -> GraphFacts:
    """Run one graph of a model on an example, and sort its nodes by what splitting does with them."""
    facts = run_example(traced.model, graph, lambda name: resolve_attribute(traced, name), inputs, training=training)
    _bind_in_place(graph, facts)
    compute, derived = [], set()
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr", "output"):
            continue
        node.meta["random"] = facts[node].random  # a pipeline gives such operations random numbers of their own
        if _is_derived(node, facts):
            derived.add(node)
        else:
            compute.append(node)
    return GraphFacts(graph, facts, tuple(compute), frozenset(derived))


def _is_derived(node: fx.Node, facts: dict[fx.Node, NodeFacts]) -> bool:
    if facts[node].tensors or facts[node].random or facts[node].changes:
        return False
    if node.op == "call_method":
        return node.target in METADATA_METHODS or not facts[node.all_input_nodes[0]].tensors
    return node.op == "call_function" and node.target in _PURE


def _bind_in_place(graph: fx.Graph, facts: dict[fx.Node, NodeFacts]) -> None:
    """Let later users of a value that was changed in place use the result of the change.

    Both are the same tensor, but only the second tells when it is ready.
    """
    place = {node: index for index, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        if node.op == "output" or not facts[node].is_tensor:
            continue
        for target in facts[node].changes:
            if facts[target].storages == facts[node].storages and facts[target].bytes == facts[node].bytes:
                for user in [*target.users]:
                    if place[user] > place[node]:
                        user.replace_input_with(target, node)
                        if user in facts:  # where it changes the value once more, that is the one it changes now
                            facts[user].changes = tuple(node if one is target else one for one in facts[user].changes)
