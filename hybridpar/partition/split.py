"""Splits a graph into stages that keep the model's parameter names.

`torch.fx.passes.split_module` renames what it splits and passes parameters between parts as inputs. Here every node
is copied into the graph of its stage and calls the model's own module; parameters are placed with the users of their
values, and are constants to a stage that asks for a type or shape only; numbers computed from shapes are computed again
where they are needed; containers cross tensor by tensor.

An operation that works in place keeps doing so inside a stage, where it saves memory. At a border it would change a
tensor that another stage still uses, or a received leaf, which autograd forbids: there it works on a copy.
"""

from __future__ import annotations

import itertools
import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from hybridpar.errors import PartitionError
from hybridpar.partition.graph_facts import GraphFacts, memory_of, resolve_attribute, state_users, tensors_of
from hybridpar.partition.nest import TensorFacts, rebuild
from hybridpar.partition.stage import Stage, StageGraph, targets_of
from hybridpar.partition.tracer import TracedModel
from hybridpar.partition.units import ModelUnits, aliases_under_change


def split_model(
    units: ModelUnits, stage_of: Sequence[int], *, relay: bool = False, in_place: bool = False
) -> list[Stage]:
    """Cut a model into stages.

    Args:
        units: The model and its units.
        stage_of: Stage of every unit, from 0 without gaps. No unit may be in an earlier stage than one it depends on.
        relay: Hand every tensor that skips stages through the stages between, so that each stage takes exactly what
            the one before returns. Runtimes that know only neighbours need this.
        in_place: Let operations change what other stages hold as well, as they do in the model. That is right where all
            stages run in order, and hand over tensors that autograd lets them change.

    Returns:
        The stages in order. They share modules and parameters with the model, under the same names; the union of
        their state dicts is the model's state dict.

    Raises:
        PartitionError: A stage is empty, or a unit runs before one it depends on.
    """
    count = check_assignment(units, stage_of)
    home = {node: stage_of[index] for index, nodes in enumerate(units.nodes) for node in nodes}
    train = _cut(units, units.train, home, count, relay, in_place)
    evaluate = None
    if units.evaluate is not None:
        evaluate = _cut(units, units.evaluate, _place_eval_nodes(units, home), count, relay, in_place)
    modes = [train] if evaluate is None else [train, evaluate]
    leftover = _leftover_state(units, list(zip(*modes, strict=True)))
    return [
        Stage(
            units.model,
            index,
            train[index],
            None if evaluate is None else evaluate[index],
            leftover[index],
            units.traced.constants,
            tuple(node.name for node in units.train.placeholders),
            frozenset(units.traced.changes.written),
            units.traced.taken,
        )
        for index in range(count)
    ]


def check_assignment(units: ModelUnits, stage_of: Sequence[int]) -> int:
    """Check that an assignment of units to stages can run; returns the number of stages."""
    if len(stage_of) != len(units.graph):
        raise PartitionError(
            f"{len(stage_of)} units are assigned to stages, the model has {len(units.graph)}",
            "Every unit belongs to exactly one stage.",
        )
    count = max(stage_of) + 1
    empty = sorted(set(range(count)) - set(stage_of))
    if empty or min(stage_of) < 0:
        raise PartitionError(f"stage {empty[0] if empty else min(stage_of)} is empty", "Every stage has a unit.")
    names = [unit.name for unit in units.graph.units]
    for before, after in units.graph.edges():
        if stage_of[before] > stage_of[after]:
            raise PartitionError(
                f"{names[after]} is in stage {stage_of[after]}, but needs {names[before]} of stage {stage_of[before]}",
                "Values flow forward only: a unit is never in an earlier stage than one it depends on.",
                "Move one of them.",
            )
    return count


def _cut(
    units: ModelUnits, facts: GraphFacts, home: Mapping[fx.Node, int], count: int, relay: bool, in_place: bool
) -> list[StageGraph]:
    last = count - 1
    wanted: list[set[fx.Node]] = [set() for _ in range(count)]
    for node in (*facts.compute, facts.output):
        index = home.get(node, last)
        wanted[index].update(source for source in facts.sources(node) if home.get(source, -1) != index)
    crossing = set[fx.Node]().union(*wanted)
    takes = [sorted(nodes, key=facts.position.__getitem__) for nodes in wanted]
    returns = [[node for node in facts.compute if home[node] == index and node in crossing] for index in range(last)]
    returns.append([])  # the last stage returns what the model does
    if relay:
        for index in range(last, 0, -1):
            # Whatever stage `index` takes, the stage before returns, and takes itself unless it makes it.
            returns[index - 1] = list(takes[index])
            passing = [node for node in takes[index] if home.get(node, -1) != index - 1]
            takes[index - 1] = sorted({*takes[index - 1], *passing}, key=facts.position.__getitem__)
        takes[0] = facts.placeholders
    builders = (_StageBuilder(units.traced, facts, home, index, in_place) for index in range(count))
    return [builder.build(takes[index], returns[index], last=index == last) for index, builder in enumerate(builders)]


@dataclass(eq=False)
class _StageBuilder:
    """Copies the nodes of a stage into a new graph."""

    traced: TracedModel
    facts: GraphFacts
    home: Mapping[fx.Node, int]
    index: int
    in_place: bool
    graph: fx.Graph = field(default_factory=fx.Graph)
    values: dict[fx.Node, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.nodes = [node for node in self.facts.compute if self.home[node] == self.index]
        self.held = {id(tensor) for node in self.nodes for tensor in tensors_of(self.traced, node)}

    def build(self, takes: Sequence[fx.Node], returns: Sequence[fx.Node], *, last: bool) -> StageGraph:
        inputs = [tensor for node in takes for tensor in self.facts.facts[node].tensors]
        for node in takes:
            self._receive(node)
        foreign = {number for node in (*takes, *returns) for number in self.facts.facts[node].storages}
        for node in self.nodes:
            self._copy(node, foreign, returns)
        outputs = [tensor for node in returns for tensor in self.facts.facts[node].tensors]
        parts = tuple(part for node in returns for part in self._parts(node))
        self.graph.output(fx.map_arg(self.facts.output.args[0], self._load) if last else parts)
        self.graph.lint()
        return StageGraph(self.graph, tuple(inputs), tuple(outputs))

    def _receive(self, node: fx.Node) -> None:
        def enter(tensor: TensorFacts) -> fx.Node:
            return self.graph.placeholder("_".join(str(part) for part in (node.name, *tensor.path)))

        self.values[node] = rebuild(self.facts.facts[node].shape, enter, self.graph)

    def _load(self, node: fx.Node) -> Any:
        if node not in self.values:
            # Attributes and numbers from shapes are made where they are first needed.
            if node.op != "get_attr" and node not in self.facts.derived:
                raise AssertionError(f"{node.name} is not in stage {self.index}")
            self.values[node] = self._number(node) if node.op != "get_attr" else self.graph.node_copy(node)
        return self.values[node]

    def _number(self, node: fx.Node) -> Any:
        """A number from shapes; a constant where it is asked of a parameter or buffer that is not in this stage."""
        given = {argument: self._asked(node, argument) for argument in node.all_input_nodes}
        nodes: list[fx.Node] = []
        fx.map_arg(tuple(given.values()), nodes.append)
        return self.graph.node_copy(node, given.__getitem__) if nodes else self.facts.facts[node].number

    def _asked(self, node: fx.Node, argument: fx.Node) -> Any:
        """What a stage computes a number from: for the device of another stage's tensor, from an input of its own."""
        if argument.op != "get_attr" or id(resolve_attribute(self.traced, str(argument.target))) in self.held:
            return self._load(argument)
        where = {"device", "is_cuda", "get_device"} & {node.target, *node.args}
        return next((value for value in self.graph.nodes if where and value.op == "placeholder"), None)

    def _copy(self, node: fx.Node, foreign: set[int], returns: Sequence[fx.Node]) -> None:
        guarded: dict[fx.Node, Any] = {}
        for target in self.facts.facts[node].changes:
            if target.op != "get_attr" and not self.in_place and self._is_shared(node, target, foreign, returns):
                guarded[target] = self.graph.call_method("clone", (self._load(target),))
        self.values[node] = self.graph.node_copy(
            node, lambda argument: guarded[argument] if argument in guarded else self._load(argument)
        )

    def _is_shared(self, node: fx.Node, target: fx.Node, foreign: set[int], returns: Sequence[fx.Node]) -> bool:
        """Whether another stage also holds the memory that a node is about to change."""
        touched = self.facts.facts[target].storages
        if not touched & foreign:
            return False
        position = self.facts.position
        received = [other for other in self.values if other.op != "get_attr" and self.home.get(other, -1) != self.index]
        # Other stages read a value before it is changed, or they would be this one; the output reads it afterwards.
        read = [item for item in returns if any(self.home.get(user, self.index) != self.index for user in item.users)]
        # A value that only exists because of the change is meant to show it.
        earlier = [other for other in (*received, *read) if position[other] < position[node]]
        return any(self.facts.facts[other].storages & touched for other in earlier)

    def _parts(self, node: fx.Node) -> list[fx.Node]:
        """The tensors of a value, one node each."""
        parts = []
        for tensor in self.facts.facts[node].tensors:
            value = self.values[node]
            for key in tensor.path:
                made = isinstance(value, fx.Node)
                value = self.graph.call_function(operator.getitem, (value, key)) if made else value[key]
            parts.append(value)
        return parts


def _place_eval_nodes(units: ModelUnits, home: Mapping[fx.Node, int]) -> dict[fx.Node, int]:
    """Stages for the nodes of an evaluation graph that differs from the training graph.

    Whatever is kept whole, or uses a parameter, or a buffer or Python attribute that changes, stays where training put
    it; the rest goes to the first stage where all that it needs is there.
    """
    assert units.evaluate is not None
    called = {(str(node.target), home[node]) for node in units.train.compute if node.op == "call_module"}
    uses = Counter(name for name, _ in called)
    paths = {*units.traced.changes.remembering, *units.traced.leaves}  # what is kept whole may make a buffer
    counting = {
        name: stage
        for name, stage in called
        if uses[name] == 1 and any(f"{path}.".startswith(f"{name}.") for path in paths)
    }
    owner = {memory: home[nodes[0]] for memory, nodes in state_users(units.traced, units.train, units.evaluate).items()}
    stages: dict[fx.Node, int] = {}
    for node in units.evaluate.compute:
        earliest = max((stages.get(source, 0) for source in units.evaluate.sources(node)), default=0)
        used = {memory_of(tensor) for tensor in tensors_of(units.traced, node)}
        fixed = {owner[memory] for memory in used & owner.keys()}
        if str(node.target) in counting:
            fixed.add(counting[str(node.target)])
        stages[node] = max((earliest, *fixed))
        if fixed and (len(fixed) > 1 or min(fixed) < earliest):
            raise PartitionError(
                f"{node.name} runs in stage {min(fixed)} in training, but evaluation needs it in stage {stages[node]}",
                "The graphs of training and evaluation use the model's modules in different orders.",
                "Ask for fewer stages.",
            )
    used_by = state_users(units.traced, units.evaluate, units.train).values()
    for group in (*used_by, *aliases_under_change(units.evaluate)):
        if len({stages[node] for node in group}) > 1:
            raise PartitionError(
                f"in evaluation {group[0].name} and {group[-1].name} share memory and would be in several stages",
                "A parameter, a buffer, and what is changed in place belong to one stage; training uses others.",
                "Ask for fewer stages.",
            )
    return stages


def _leftover_state(units: ModelUnits, stage_graphs: Sequence[Sequence[StageGraph]]) -> list[list[str]]:
    """Names of the model's state that no stage graph calls, for each stage.

    A second name of a tensor, and a tensor of which a graph has a view, go to the stage that holds the other; what
    nothing uses goes to the last stage, so that the union of the stages' state dicts is the model's.
    """
    called = [{name for graph in graphs for name in targets_of(graph)} for graphs in stage_graphs]
    held = units.model.state_dict(keep_vars=True).items()
    state = {name: tensor for name, tensor in held if isinstance(tensor, torch.Tensor)}
    stage_of: dict[str, int | None] = {}
    for name in state:
        parents = {*itertools.accumulate(name.split("."), "{}.{}".format)}
        stage_of[name] = next((index for index, names in enumerate(called) if names & parents), None)
    constants = units.traced.constants
    holder = {
        memory_of(constants[name]): index for index, names in enumerate(called) for name in names & constants.keys()
    }
    holder |= {memory_of(state[name]): index for name, index in stage_of.items() if index is not None}
    leftover: list[list[str]] = [[] for _ in stage_graphs]
    for name, tensor in state.items():
        if stage_of[name] is None:
            leftover[holder.get(memory_of(tensor), -1)].append(name)
    return leftover
