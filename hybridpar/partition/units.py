"""Units: nodes of a graph that stay together, with what they cost.

Nodes that are pinned together are merged, and so is what lies on a path that leaves them and comes back; what is left
is an acyclic graph of units. Attributes of the model are placed with their users.

Nodes are pinned together where a cut would be wrong or would need something sent that is not a tensor: users of the
values of one parameter, or of one buffer that changes, values that alias each other while one of them is changed in
place, containers and the nodes that unpack them, an assertion with a user of what it looks at, and modules that hand
each other values through Python objects.
"""

from __future__ import annotations

import itertools
import operator
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx, nn

from hybridpar.errors import TraceError
from hybridpar.partition.changes import reachable
from hybridpar.partition.example import describe_target, module_path
from hybridpar.partition.graph import Saved, Unit, UnitGraph, Value
from hybridpar.partition.graph_facts import GraphFacts, examine_graph, resolve_attribute, state_of, state_users
from hybridpar.partition.tracer import TracedModel


def _rememberers(traced: TracedModel, facts: GraphFacts) -> Iterable[list[fx.Node]]:
    """Modules that hand on values through a Python object that both can reach: a list, or a module's attribute."""
    reached = [reachable(traced.model.get_submodule(path)) for path in sorted(traced.changes.remembering)]
    shared: dict[int, list[fx.Node]] = {key: [] for objects in reached for key in objects}
    for node in facts.compute if shared else ():
        if node.op == "call_module":
            reached.append(reachable(traced.model.get_submodule(str(node.target))))  # alive: ids are of one object each
            for key in reached[-1].keys() & shared.keys():
                shared[key].append(node)
    return shared.values()


def _unpackers(facts: GraphFacts) -> Iterable[list[fx.Node]]:
    for node in facts.compute:
        known = facts.facts[node]
        if known.is_tensor:
            continue
        if known.shape is not None:
            unpackers = (user for user in node.users if user.target is operator.getitem)
            yield [node, *(user for user in unpackers if user not in facts.derived)]
        else:
            yield [node, *_users(facts, node)]  # what cannot be sent, as a number that is not free to compute twice


def _users(facts: GraphFacts, node: fx.Node) -> Iterable[fx.Node]:
    """Who needs a value, also by numbers made of it."""
    for user in node.users:
        if user in facts.derived:
            yield from _users(facts, user)
        elif user.op != "output":
            yield user


def aliases_under_change(facts: GraphFacts) -> Iterable[list[fx.Node]]:
    """A change in place shows in every alias; unless only the result lives on, all who see it stay together.

    Those who read before the change as well: in another stage they would need the memory as it was, while the ones
    after it need it as it is now.
    """
    position = facts.position
    by_storage: dict[int, list[fx.Node]] = defaultdict(list)
    for node in facts.graph.nodes:
        if node.op not in ("output", "get_attr"):
            for number in facts.facts[node].storages:
                by_storage[number].append(node)
    members = set(facts.compute)
    for node in facts.compute:
        for target in facts.facts[node].changes:
            aliases = {alias for number in facts.facts[target].storages for alias in by_storage[number]}
            earlier = {alias for alias in aliases if position[alias] < position[node]}
            users = {user for alias in earlier for user in alias.users}
            if not any(position[user] > position[node] for user in users):  # the output counts, though it is in no unit
                continue
            given = next((alias for alias in earlier if alias.op == "placeholder"), None)
            if given is not None:
                raise TraceError(
                    f"the model changes its input {given.name!r} in place ({describe_target(node)}) through a view of "
                    "it, and uses the input again afterwards",
                    "A stage does not change what it was given, which other stages may hold as well.",
                    "Work on a copy: begin forward with x = x.clone().",
                )
            yield [node, *sorted((earlier | users) & members, key=position.__getitem__)]


def _checks(facts: GraphFacts) -> Iterable[list[fx.Node]]:
    """An assertion has no users; it stays with the first user of its tensor."""
    members = set(facts.compute)
    for node in facts.compute:
        if facts.facts[node].tensors or node.users:
            continue
        for source in facts.sources(node):
            if source in members:
                yield [node, source]
                break
            others = [user for user in source.users if user in members and facts.facts[user].tensors]
            if others:
                yield [node, others[0]]
                break


@dataclass(frozen=True)
class ModelUnits:
    """A traced model, its units, and the graph of their costs (times still zero).

    Attributes:
        traced: The model and its graphs.
        train: Facts of the training graph; the units are made from it.
        evaluate: Facts of the evaluation graph where it is another one.
        nodes: The nodes of every unit, in execution order.
        graph: Units in topological order, without times.
    """

    traced: TracedModel
    train: GraphFacts
    evaluate: GraphFacts | None
    nodes: tuple[tuple[fx.Node, ...], ...]
    graph: UnitGraph

    @property
    def model(self) -> nn.Module:
        """The model itself."""
        return self.traced.model


def find_units(traced: TracedModel, inputs: Sequence[torch.Tensor]) -> ModelUnits:
    """Find the units of a traced model by one example run of each of its graphs.

    Args:
        traced: The traced model.
        inputs: Example inputs at the true micro-batch, dtype and memory format.

    Returns:
        The units, without times.

    Raises:
        UsageError: The model refuses the inputs.
        TraceError: The model computes nothing, or changes its input through a view and uses it again.
    """
    train = examine_graph(traced, traced.graph, inputs, training=True)
    evaluate = (
        examine_graph(traced, traced.eval_graph, inputs, training=False) if traced.eval_graph is not None else None
    )
    if not train.compute:
        raise TraceError(
            f"{type(traced.model).__name__} computes nothing that can be placed",
            "A model that is cut into stages has at least one operation on a tensor.",
            "Give a model that does.",
        )
    pinned = [  # groups that must share a unit; they may overlap
        *_unpackers(train),
        *state_users(traced, train, evaluate).values(),
        *aliases_under_change(train),
        *_checks(train),
        *_rememberers(traced, train),
    ]
    groups = _ordered_groups(train, pinned)
    return ModelUnits(traced, train, evaluate, groups, _unit_graph(traced, train, groups))


def _ordered_groups(facts: GraphFacts, pinned: list[list[fx.Node]]) -> tuple[tuple[fx.Node, ...], ...]:
    """Merge pinned groups, close them under paths that leave and come back, and order them as the model runs."""
    import networkx as nx

    index_of = {node: index for index, node in enumerate(facts.compute)}
    graph = nx.DiGraph()
    graph.add_nodes_from(index_of.values())
    for node, index in index_of.items():
        graph.add_edges_from((index_of[source], index) for source in facts.sources(node) if source in index_of)
    nx.add_path(graph, [index for node, index in index_of.items() if facts.facts[node].random])
    for group in pinned:
        nx.add_cycle(graph, [index_of[node] for node in group])
    condensed = nx.condensation(graph)
    members = {unit: sorted(indices) for unit, indices in condensed.nodes(data="members")}
    order = nx.lexicographical_topological_sort(condensed, key=members.__getitem__)
    return tuple(tuple(facts.compute[index] for index in members[unit]) for unit in order)


def _unit_graph(traced: TracedModel, facts: GraphFacts, groups: tuple[tuple[fx.Node, ...], ...]) -> UnitGraph:
    unit_of = {node: index for index, nodes in enumerate(groups) for node in nodes}
    returned = set(facts.sources(facts.output))
    consumers: dict[fx.Node, set[int]] = defaultdict(set)
    for node, index in unit_of.items():
        for source in facts.sources(node):
            consumers[source].add(index)
    values = []
    for node in facts.graph.nodes:
        home = unit_of.get(node, -1)
        users = tuple(sorted(consumers[node] - {home}))
        if (users or node in returned) and (node in unit_of or node.op == "placeholder"):
            known = facts.facts[node]
            values.append(Value(node.name, home, users, known.bytes, known.gradient_bytes, node in returned))
    sent = {value.name for value in values}
    units = tuple(
        Unit(
            name=nodes[0].name,
            module=module_path(nodes[0]),
            operation=_operation(traced, nodes),
            output_bytes=sum(facts.facts[node].bytes for node in nodes if node.name in sent),
            parameter_bytes=_parameter_bytes(traced, nodes),
            flops=sum(facts.facts[node].flops for node in nodes),
        )
        for nodes in groups
    )
    random = [index for index, nodes in enumerate(groups) if any(facts.facts[node].random for node in nodes)]
    return UnitGraph(units, tuple(values), _saved(facts, unit_of), tuple(itertools.pairwise(random)))


def _saved(facts: GraphFacts, unit_of: Mapping[fx.Node, int]) -> tuple[Saved, ...]:
    sizes: dict[int, int] = {}
    savers: dict[int, set[int]] = defaultdict(set)
    for node, index in unit_of.items():
        for number, size in facts.facts[node].saved.items():
            sizes[number] = size
            savers[number].add(index)
    return tuple(Saved(sizes[number], tuple(sorted(savers[number]))) for number in sorted(sizes))


def _parameter_bytes(traced: TracedModel, nodes: tuple[fx.Node, ...]) -> int:
    state = [tensor for node in nodes for tensor in state_of(traced, node)]
    held = {id(tensor): tensor for tensor in state if isinstance(tensor, nn.Parameter)}
    return sum(parameter.numel() * parameter.element_size() for parameter in held.values())


def _operation(traced: TracedModel, nodes: tuple[fx.Node, ...]) -> str:
    node = nodes[0]
    if node.op == "call_module":
        label = type(resolve_attribute(traced, str(node.target))).__name__
    else:
        label = describe_target(node).rpartition(": ")[2]
    return label if len(nodes) == 1 else f"{label} +{len(nodes) - 1}"
