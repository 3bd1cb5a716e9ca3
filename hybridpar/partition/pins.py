"""Rules of what must stay together in one stage.

Nodes are pinned together where a cut would be wrong or would need something sent that is not a tensor: users of one
trained parameter, calls of one module that has state, values that alias each other while one of them is changed in
place, containers and the nodes that unpack them, and an assertion with a user of what it looks at.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterable

from torch import fx

from hybridpar.errors import TraceError
from hybridpar.partition.example import describe_target
from hybridpar.partition.graph_facts import GraphFacts, resolve_attribute, state_of
from hybridpar.partition.trace import TracedModel


def pinned_groups(traced: TracedModel, facts: GraphFacts) -> list[list[fx.Node]]:
    """Groups of nodes that must share a unit; they may overlap.

    Args:
        traced: The traced model.
        facts: Of its training graph.

    Raises:
        TraceError: The model changes its input through a view and uses it again.
    """
    return [
        *_unpackers(facts),
        *_users_of_state(traced, facts),
        *aliases_under_change(facts),
        *_checks(facts),
    ]


def _unpackers(facts: GraphFacts) -> Iterable[list[fx.Node]]:
    for node in facts.compute:
        known = facts.facts[node]
        users = [user for user in node.users if user.op != "output" and user not in facts.derived]
        if known.tensors and not known.is_tensor:
            unpack = [user for user in users if user.target is operator.getitem]
            yield [node, *(unpack if known.crosses else users)]
        elif not known.tensors:
            yield [node, *users]  # a number that is not free to compute twice


def _users_of_state(traced: TracedModel, facts: GraphFacts) -> Iterable[list[fx.Node]]:
    users: dict[int, list[fx.Node]] = defaultdict(list)
    for node in facts.compute:
        for tensor in state_of(traced, node):
            users[id(tensor)].append(node)
    # A buffer changed in place is state as well; a constant buffer is not.
    for node in facts.compute:
        for argument in facts.facts[node].changes:
            if argument.op == "get_attr":
                users[id(resolve_attribute(traced, str(argument.target)))] += [node, *_compute_users(facts, argument)]
    return [nodes for nodes in users.values() if len(nodes) > 1]


def _compute_users(facts: GraphFacts, node: fx.Node) -> list[fx.Node]:
    members = set(facts.compute)
    return [user for user in node.users if user in members]


def aliases_under_change(facts: GraphFacts) -> Iterable[list[fx.Node]]:
    """A change in place shows in every alias; unless only the result lives on, all who see it stay together.

    Those who read before the change as well: in another stage they would need the memory as it was, while the ones
    after it need it as it is now.

    Args:
        facts: Of one graph.

    Returns:
        Groups of nodes that must share a unit.

    Raises:
        TraceError: An input is changed through a view and used again.
    """
    place = facts.place
    by_storage: dict[int, list[fx.Node]] = defaultdict(list)
    for node in facts.graph.nodes:
        if node.op not in ("output", "get_attr"):
            for number in facts.facts[node].storages:
                by_storage[number].append(node)
    members = set(facts.compute)
    for node in facts.compute:
        for target in facts.facts[node].changes:
            aliases = {alias for number in facts.facts[target].storages for alias in by_storage[number]}
            earlier = {alias for alias in aliases if place[alias] < place[node]}
            users = {user for alias in earlier for user in alias.users}
            if not any(place[user] > place[node] for user in users):  # the output counts, though it is in no unit
                continue
            given = next((alias for alias in earlier if alias.op == "placeholder"), None)
            if given is not None:
                raise TraceError(
                    f"the model changes its input {given.name!r} in place ({describe_target(node)}) through a view of "
                    "it, and uses the input again afterwards",
                    "A stage does not change what it was given, which other stages may hold as well.",
                    "Work on a copy: begin forward with x = x.clone().",
                )
            yield [node, *sorted((earlier | users) & members, key=place.__getitem__)]


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
