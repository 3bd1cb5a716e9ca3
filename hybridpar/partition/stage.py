"""A pipeline stage as a module.

A `Stage` is an `fx.GraphModule` over the model's own modules and parameters, under their own names. Where the graphs
of training and evaluation differ it holds both and follows `train()` and `eval()`. Its inputs and outputs are plain
tensors, listed by name in its borders, so any loop can feed it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import fx, nn

if TYPE_CHECKING:
    from hybridpar.partition.nest import TensorFacts


@dataclass(frozen=True)
class StageGraph:
    """The graph of one stage in one mode.

    Attributes:
        graph: What to run.
        inputs: Tensors it takes, in order.
        outputs: Tensors it returns, in order; empty for the last stage, which returns the model's own output.
    """

    graph: fx.Graph
    inputs: tuple[TensorFacts, ...]
    outputs: tuple[TensorFacts, ...]


class Stage(fx.GraphModule):
    """One stage of a model. Call it with the tensors that `inputs` names.

    All stages but the last return a tuple of the tensors that `outputs` names; the last returns exactly what the
    model returns.

    Args:
        root: The model.
        index: Position of the stage.
        train_graph: What to run in training.
        eval_graph: What to run in evaluation; None where it is the same.
        attributes: Qualified names of what the stage holds beyond what its training graph calls.
        constants: Tensors that the trace made, by the name the graphs use for them.
        model_inputs: Names of the model's inputs.
        written: Names of what forward writes into in place, of any stage.
        taken: Names of attributes and tensors whose values the graphs have as they were, of any stage.
    """

    index: int
    model_inputs: tuple[str, ...]
    written: frozenset[str]
    taken: frozenset[str]

    def __init__(
        self,
        root: nn.Module,
        index: int,
        train_graph: StageGraph,
        eval_graph: StageGraph | None = None,
        attributes: Iterable[str] = (),
        constants: Mapping[str, torch.Tensor] | None = None,
        model_inputs: tuple[str, ...] = (),
        written: frozenset[str] = frozenset(),
        taken: frozenset[str] = frozenset(),
    ) -> None:
        super().__init__({}, fx.Graph(), f"Stage{index}")
        called = targets_of(train_graph) + (targets_of(eval_graph) if eval_graph is not None else [])
        for name in dict.fromkeys((*called, *attributes)):
            _place(root, self, name, constants or {})
        self.index = index
        self.model_inputs = model_inputs
        self.written = written
        self.taken = taken
        self._modes = {True: train_graph, False: eval_graph or train_graph}
        self.use_graph(root.training)

    @property
    def by_mode(self) -> bool:
        """Whether modes of the model's modules made a difference to the graphs."""
        return self._modes[True].graph is not self._modes[False].graph

    @property
    def inputs(self) -> tuple[TensorFacts, ...]:
        """Tensors that the stage takes in its present mode."""
        return self._modes[self.training].inputs

    @property
    def outputs(self) -> tuple[TensorFacts, ...]:
        """Tensors that the stage returns in its present mode; empty for the last stage."""
        return self._modes[self.training].outputs

    def train(self, mode: bool = True) -> Stage:
        """Set the mode of the stage, of its modules, and of its graph."""
        super().train(mode)
        self.use_graph(mode)
        return self

    def use_graph(self, training: bool) -> None:
        """Set the mode of the stage and of its graph; its modules, which are the model's, keep theirs."""
        self.training = training
        if self.graph is not self._modes[training].graph:
            self.graph = self._modes[training].graph

    def __deepcopy__(self, memo: dict[int, Any]) -> Stage:
        twin = cast(Stage, super().__deepcopy__(memo))
        twin.index = self.index
        twin.model_inputs = self.model_inputs
        twin.written = self.written
        twin.taken = self.taken
        twin.training = self.training
        current = self._modes[self.training]
        modes = {}
        for mode, graph in self._modes.items():
            inside = twin.graph if graph is current else copy.deepcopy(graph.graph)
            modes[mode] = StageGraph(inside, graph.inputs, graph.outputs)
        twin._modes = modes
        return twin


def run_stages(stages: Sequence[Stage], *inputs: torch.Tensor) -> Any:
    """Run all stages one after another in one autograd graph.

    Args:
        stages: The stages of one model, in order.
        inputs: What the model takes.

    Returns:
        What the model returns.
    """
    values = dict(zip(stages[0].model_inputs, inputs, strict=True))
    for stage in stages[:-1]:
        outputs = stage(*(values[tensor.name] for tensor in stage.inputs))
        values.update(zip((tensor.name for tensor in stage.outputs), outputs, strict=True))
    return stages[-1](*(values[tensor.name] for tensor in stages[-1].inputs))


def targets_of(stage_graph: StageGraph) -> list[str]:
    """Qualified names of what a graph calls or reads."""
    return [str(node.target) for node in stage_graph.graph.nodes if node.op in ("call_module", "get_attr")]


def _place(source: Any, tree: nn.Module, name: str, constants: Mapping[str, torch.Tensor]) -> None:
    """Put one attribute into a tree under its qualified name, with empty containers on the way."""
    *path, last = name.split(".")
    if name in constants:
        tree.register_buffer(name, constants[name], persistent=False)
        return
    for part in path:
        source = getattr(source, part)
        if part not in tree._modules:
            tree.add_module(part, nn.Module())
        if tree._modules[part] is source:
            return  # a parent is there already, and with it everything inside
        tree = tree.get_submodule(part)
    value = getattr(source, last)
    if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
        lasting = last in source._buffers and last not in source._non_persistent_buffers_set
        tree.register_buffer(last, value, persistent=lasting)
    else:
        setattr(tree, last, value)
