"""Compares a training step of a model split into stages with the unsplit model, for the sweep and the tests.

The split runs as a pipeline does: every stage's backward pass alone, from the gradients of what it sent. Loss weights
are random, because a plain sum has a gradient that BatchNorm cancels to rounding noise.
"""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from benchmarks.partition.dry_run import StageRunner
from hybridpar.partition.graph import UnitGraph
from hybridpar.partition.nest import tensor_leaves
from hybridpar.partition.split import split_model
from hybridpar.partition.stage import run_stages
from hybridpar.partition.units import ModelUnits


def random_convex_stages(graph: UnitGraph, stages: int, generator: random.Random) -> list[int]:
    """A random topological order, cut at random places: every stage is convex, and every convex cut can come up."""
    needs, feeds = [0] * len(graph), [[] for _ in graph.units]  # type: tuple[list[int], list[list[int]]]
    for before, after in graph.edges():
        needs[after] += 1
        feeds[before].append(after)
    ready = [unit for unit in range(len(graph)) if not needs[unit]]
    order = []
    while ready:
        unit = ready.pop(generator.randrange(len(ready)))
        order.append(unit)
        for after in feeds[unit]:
            needs[after] -= 1
            if not needs[after]:
                ready.append(after)
    cuts = sorted(generator.sample(range(1, len(graph)), stages - 1))
    stage_of = [0] * len(graph)
    for position, unit in enumerate(order):
        stage_of[unit] = sum(cut <= position for cut in cuts)
    return stage_of


@dataclass
class Reference:
    """What the unsplit model does in one training step, and in evaluation after it."""

    outputs: list[torch.Tensor]
    weights: list[torch.Tensor]
    gradients: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    evaluated: list[torch.Tensor]
    keys: list[str]


def _leaves(value: Any) -> list[torch.Tensor]:
    return [tensor for _, tensor in tensor_leaves(value)]


def reference_step(model: nn.Module, example: torch.Tensor, seed: int = 1) -> Reference:
    """Run a copy of the model."""
    twin = copy.deepcopy(model).train()
    torch.manual_seed(seed)
    outputs = _leaves(twin(example))
    weights = [torch.randn_like(output) for output in outputs]
    torch.autograd.backward(outputs, weights)
    gradients = {name: value.grad for name, value in twin.named_parameters() if value.grad is not None}
    twin.eval()
    with torch.no_grad():
        evaluated = _leaves(twin(example))
    buffers = dict(twin.named_buffers())
    return Reference(
        [item.detach() for item in outputs], weights, gradients, buffers, evaluated, list(twin.state_dict())
    )


@dataclass(frozen=True)
class Difference:
    """How a split differs from the unsplit model; all zeros and True where it does not.

    `gradient` is the largest difference of any element of a gradient, relative to the largest element of that
    parameter's gradient (see `_largest_difference`).
    """

    forward: bool
    gradient: float
    buffers: bool
    evaluation: bool
    state: bool

    @property
    def is_equal(self) -> bool:
        """Equal, gradients to 1e-5."""
        return self.forward and self.gradient <= 1e-5 and self.buffers and self.evaluation and self.state


def compare_split(
    units: ModelUnits,
    stage_of: list[int],
    example: torch.Tensor,
    reference: Reference,
    *,
    load: bool = True,
    seed: int = 1,
) -> Difference:
    """Split, run one training step and one evaluation, compare, and put the model back.

    With `load`, the stages load the model's state and the model loads theirs before the step.
    """
    model = units.model
    before = {name: value.clone() for name, value in model.named_buffers()}
    stages = split_model(units, stage_of)
    union: dict[str, torch.Tensor] = {}
    for stage in stages:
        stage.train()
        union.update(stage.state_dict())
    of_model = model.state_dict()
    state = sorted(union) == sorted(reference.keys)
    if load and state:
        saved = {name: value.clone() for name, value in of_model.items()}
        for stage in stages:
            stage.load_state_dict({name: saved[name] for name in stage.state_dict()})
        merged = copy.deepcopy(of_model)  # some models want the metadata that only a whole state dict carries
        merged.update((name, value.clone()) for name, value in union.items())
        model.load_state_dict(merged)
        state = all(torch.equal(value, saved[name]) for name, value in model.state_dict().items())
    model.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    runner = StageRunner(stages)
    runner.start(example)
    result: Any = None
    for index in range(len(stages)):
        result = runner.forward(index)
    outputs = _leaves(result)
    loss = sum((output * weight).sum() for output, weight in zip(outputs, reference.weights, strict=True))
    for index in reversed(range(len(stages))):
        runner.backward(index, loss if index == len(stages) - 1 and isinstance(loss, torch.Tensor) else None)
    gradients = {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
    buffers = all(torch.equal(value, reference.buffers[name]) for name, value in model.named_buffers())
    for stage in stages:
        stage.eval()
    with torch.no_grad():
        evaluated = _leaves(run_stages(stages, example))
    difference = Difference(
        all(torch.equal(left, right) for left, right in zip(outputs, reference.outputs, strict=True)),
        _largest_difference(gradients, reference.gradients),
        buffers,
        all(torch.equal(left, right) for left, right in zip(evaluated, reference.evaluated, strict=True)),
        state,
    )
    model.train()
    with torch.no_grad():
        for name, value in model.named_buffers():
            value.copy_(before[name])
    model.zero_grad(set_to_none=True)
    return difference


def _largest_difference(gradients: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Largest difference of any parameter's gradient, relative to that gradient's largest element.

    Where a gradient is zero but for rounding (the bias of a BatchNorm whose output only another BatchNorm sees), it
    is compared with a millionth of the model's largest gradient instead.
    """
    if sorted(gradients) != sorted(expected):
        return float("inf")
    if not expected:
        return 0.0
    largest = {name: float(gradient.abs().max()) for name, gradient in expected.items()}
    floor = max(*largest.values(), 1e-6) * 1e-6
    return max(float((gradients[name] - expected[name]).abs().max()) / max(largest[name], floor) for name in expected)
