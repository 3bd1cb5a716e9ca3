"""One graph of a model with what its example run showed.

A number computed from a shape is neither work nor a tensor to send: every stage computes it again from the tensor that
it comes from (rematerialisation), so such nodes are told apart here.
"""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import torch
from torch import fx, nn

from hybridpar.models.deferred import named_tensors
from hybridpar.models.state import storage_of
from hybridpar.partition.example import NodeFacts, run_example
from hybridpar.partition.tracer import METADATA_METHODS, TracedModel, is_number, stop_gradient

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
        sources: dict[fx.Node, None] = {}
        stack = list(node.all_input_nodes)[::-1]
        while stack:
            argument = stack.pop()
            if argument in self.derived:
                stack.extend(reversed(argument.all_input_nodes))
            elif argument.op != "get_attr":
                sources[argument] = None
        return list(sources)

    @cached_property
    def position(self) -> dict[fx.Node, int]:
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
    return traced.constants[name] if name in traced.constants else operator.attrgetter(name)(traced.model)


def state_of(traced: TracedModel, node: fx.Node) -> list[torch.Tensor]:
    """Parameters and buffers of the module that a node calls, and parameters that it is given."""
    state: list[torch.Tensor] = []
    if node.op == "call_module":
        module = resolve_attribute(traced, str(node.target))
        assert isinstance(module, nn.Module)
        state += [*module.parameters(), *module.buffers()]
    return state + [value for value in _given(traced, node) if isinstance(value, nn.Parameter)]


def tensors_of(traced: TracedModel, node: fx.Node) -> list[torch.Tensor]:
    """What `state_of` finds, with buffers and constants that a node is given."""
    return [*state_of(traced, node), *_given(traced, node)]


def _given(traced: TracedModel, node: fx.Node) -> list[torch.Tensor]:
    attributes = [source for source in node.all_input_nodes if source.op == "get_attr"]
    given = (resolve_attribute(traced, str(attribute.target)) for attribute in attributes)
    return [value for value in given if isinstance(value, torch.Tensor)]


def memory_of(tensor: torch.Tensor) -> tuple[int, int]:
    """What two tensors have in common where one shows a change of the other."""
    base = tensor if tensor._base is None else tensor._base
    return (storage_of(base), int(base.storage_offset())) if base.layout == torch.strided else (id(base), 0)


def state_users(
    traced: TracedModel, facts: GraphFacts, other: GraphFacts | None = None
) -> dict[tuple[int, int], list[fx.Node]]:
    """The nodes of a graph that use each parameter, and each buffer that changes, by its memory.

    A buffer may change where a module that is called has it, or where a node changes it in place, be it in the other
    graph of the model. One that is only read is a constant, which any number of stages may hold.
    """
    users: dict[tuple[int, int], list[fx.Node]] = defaultdict(list)
    for node in facts.compute:
        for tensor in tensors_of(traced, node):
            users[memory_of(tensor)].append(node)
    for node, memory in _changes(traced, facts):
        users[memory].append(node)
    graphs = [facts, other] if other is not None else [facts]
    state = {memory_of(tensor) for graph in graphs for node in graph.compute for tensor in state_of(traced, node)}
    state |= {memory for graph in graphs for _, memory in _changes(traced, graph)}
    state |= {memory_of(held[key]) for name, held, key in named_tensors(traced.model) if name in traced.changes.written}
    return {memory: nodes for memory, nodes in users.items() if memory in state}


def _changes(traced: TracedModel, facts: GraphFacts) -> Iterator[tuple[fx.Node, tuple[int, int]]]:
    """Nodes that change a buffer or parameter in place, with its memory."""
    attributes = [node for node in facts.graph.nodes if node.op == "get_attr"]
    for node in facts.compute:
        for changed in facts.facts[node].changes:
            for attribute in attributes:
                if facts.facts[attribute].storages & facts.facts[changed].storages:
                    yield node, memory_of(cast(torch.Tensor, resolve_attribute(traced, str(attribute.target))))


def examine_graph(
    traced: TracedModel, graph: fx.Graph, inputs: Sequence[torch.Tensor], *, training: bool
) -> GraphFacts:
    """Run one graph of a model on an example, and sort its nodes by what splitting does with them."""
    facts = run_example(traced.model, graph, traced.constants, inputs, training=training)
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
    if any(argument.op == "get_attr" for argument in node.all_input_nodes):
        # What training never changes: its type, shape or device. Else it stays with what else uses the attribute.
        sources = [source.op for source in node.all_input_nodes]
        return sources == ["get_attr"] and is_number(node) and "requires_grad" not in node.args
    if node.op == "call_method":
        return node.target in METADATA_METHODS or not facts[node.all_input_nodes[0]].tensors
    return node.op == "call_function" and node.target in _PURE


def _bind_in_place(graph: fx.Graph, facts: dict[fx.Node, NodeFacts]) -> None:
    """Let later users of a value that was changed in place use the result of the change.

    Both are the same tensor, but only the second tells when it is ready.
    """
    position = {node: index for index, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        if node.op == "output" or not facts[node].is_tensor:
            continue
        for target in facts[node].changes:
            if facts[target].storages == facts[node].storages and facts[target].bytes == facts[node].bytes:
                for user in [*target.users]:
                    if position[user] > position[node]:
                        user.replace_input_with(target, node)
                        if user in facts:  # where it changes the value once more, that is the one it changes now
                            changes = facts[user].changes
                            facts[user].changes = tuple(node if item is target else item for item in changes)
