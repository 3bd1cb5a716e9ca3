"""Runs a list of stages one after the other: the reference of the pipeline.

`run_stages` is the unsplit forward pass. `StageRunner` does what a pipeline's worker does: it detaches what enters
a stage, runs forward, and later runs backward from the gradients of what left it.

Also measures whole stages as their workers will run them.

A stage is run as in a pipeline: received tensors are leaves, gradients exist and are accumulated into, the backward
pass comes after the forward passes of all stages. The result is what a schedule's simulator should be fed with, and
what a prediction is checked against.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hybridpar.errors import UsageError
from hybridpar.partition.nest import as_inputs, tensor_leaves
from hybridpar.partition.stage import Stage
from hybridpar.partition.state import untouched
from hybridpar.partition.unit_runner import Clock


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


class StageRunner:
    """Runs stages with a cut in the autograd graph at every border, as a pipeline does.

    Args:
        stages: The stages of one model, in order.
    """

    def __init__(self, stages: Sequence[Stage]) -> None:
        self.stages = list(stages)
        self._values: dict[str, torch.Tensor] = {}
        self._received: list[dict[str, torch.Tensor]] = [{} for _ in stages]
        self._sent: list[dict[str, torch.Tensor]] = [{} for _ in stages]
        self._gradients: dict[str, torch.Tensor] = {}
        self._result: Any = None

    def start(self, *inputs: torch.Tensor) -> None:
        """Begin a micro-batch.

        Args:
            inputs: What the model takes.
        """
        self._values = dict(zip(self.stages[0].model_inputs, inputs, strict=True))
        self._gradients = {}

    def forward(self, index: int) -> Any:
        """Run the forward pass of one stage; the last stage returns the model's output.

        Args:
            index: Number of the stage.

        Returns:
            What the stage returns.
        """
        stage = self.stages[index]
        borders = stage.inputs
        received = {
            tensor.name: self._values[tensor.name].detach().requires_grad_(tensor.requires_grad and stage.training)
            for tensor in borders
        }
        self._received[index] = received
        result = stage(*received.values())
        if stage is self.stages[-1]:
            self._result = result
            return result
        sent = dict(zip((tensor.name for tensor in stage.outputs), result, strict=True))
        self._sent[index] = sent
        self._values.update(sent)
        return result

    def backward(self, index: int, loss: torch.Tensor | None = None) -> None:
        """Run the backward pass of one stage; the last takes the loss, or ones for every output without it.

        Args:
            index: Number of the stage.
            loss: A scalar made from the model's output.
        """
        if index == len(self.stages) - 1:
            if loss is not None:
                torch.autograd.backward(loss)
            else:
                outputs = [tensor for _, tensor in tensor_leaves(self._result) if tensor.requires_grad]
                torch.autograd.backward(outputs, [torch.ones_like(tensor) for tensor in outputs])
            self._result = None
        else:
            pairs = [
                (tensor, self._gradients.pop(name))
                for name, tensor in self._sent[index].items()
                if name in self._gradients
            ]
            pairs = [(tensor, gradient) for tensor, gradient in pairs if tensor.requires_grad]
            if pairs:
                torch.autograd.backward([tensor for tensor, _ in pairs], [gradient for _, gradient in pairs])
        for name, leaf in self._received[index].items():
            if leaf.grad is not None:
                known = self._gradients.get(name)
                self._gradients[name] = leaf.grad if known is None else known + leaf.grad
        self._received[index], self._sent[index] = {}, {}


@dataclass(frozen=True)
class StageTimes:
    """What one stage took: minimum milliseconds over passes, and bytes it kept for backward.

    Attributes:
        forward_ms: Of the forward pass.
        backward_ms: Of the backward pass.
        saved_bytes: Kept for the backward pass, without parameters and buffers.
    """

    forward_ms: float
    backward_ms: float
    saved_bytes: int

    @property
    def ms(self) -> float:
        """Forward and backward together."""
        return self.forward_ms + self.backward_ms


def dry_run_stages(
    stages: Sequence[Stage],
    inputs: torch.Tensor | Sequence[torch.Tensor],
    *,
    passes: int = 5,
    own_time: bool = False,
) -> list[StageTimes]:
    """Measure stages one after another on one device, without any communication.

    Args:
        stages: All stages of one model; their state is put back afterwards.
        inputs: One micro-batch.
        passes: Passes over all stages; the minimum counts.
        own_time: As for `Clock`.

    Returns:
        Times and sizes of every stage.

    Raises:
        UsageError: There is no pass, or the inputs are no micro-batch.
    """
    return dry_run_partitions([stages], as_inputs(inputs), passes=passes, own_time=own_time)[0]


def dry_run_partitions(
    partitions: Sequence[Sequence[Stage]], inputs: Sequence[torch.Tensor], *, passes: int = 5, own_time: bool = False
) -> list[list[StageTimes]]:
    """Measure several partitions of one model in turns, so that whatever else the machine does hits all of them.

    Args:
        partitions: For every partition its stages; their state is put back afterwards.
        inputs: One micro-batch.
        passes: Passes over all stages of each; the minimum counts.
        own_time: As for `Clock`.

    Returns:
        For every partition times and sizes of its stages.

    Raises:
        UsageError: There is no pass.
    """
    if passes < 1:
        raise UsageError(f"{passes} passes", "What is measured runs at least once.", "Use passes=5.")
    clock = Clock(inputs[0].device, own_time=own_time)
    together = nn.ModuleList(stage for stages in partitions for stage in stages)
    rows: list[list[list[list[float]]]] = [[] for _ in partitions]
    with untouched(together, training=True):
        for parameter in together.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        saved = [_saved_bytes(stages, inputs) for stages in partitions]
        for _ in range(passes):
            for stages, times in zip(partitions, rows, strict=True):
                times.append(_one_pass(stages, inputs, clock))
    results = []
    for times, sizes in zip(rows, saved, strict=True):
        best = torch.tensor(times, dtype=torch.float64).amin(dim=0).tolist()
        results.append([StageTimes(ahead, back, size) for (ahead, back), size in zip(best, sizes, strict=True)])
    return results


def _one_pass(stages: Sequence[Stage], inputs: Sequence[torch.Tensor], clock: Clock) -> list[list[float]]:
    runner = StageRunner(stages)
    runner.start(*inputs)
    forward, backward = [], []
    for index in range(len(stages)):
        start = clock.mark()
        runner.forward(index)
        forward.append((start, clock.mark()))
    for index in reversed(range(len(stages))):
        start = clock.mark()
        runner.backward(index)
        backward.append((start, clock.mark()))
    clock.wait()
    return [
        [clock.between(*ahead), clock.between(*back)] for ahead, back in zip(forward, reversed(backward), strict=True)
    ]


def _saved_bytes(stages: Sequence[Stage], inputs: Sequence[torch.Tensor]) -> list[int]:
    """Bytes of distinct storages that each stage saves for backward, parameters and buffers left out."""
    runner = StageRunner(stages)
    runner.start(*inputs)
    sizes = []
    for index, stage in enumerate(stages):
        own = {tensor.untyped_storage().data_ptr() for tensor in (*stage.parameters(), *stage.buffers())}
        seen: dict[int, int] = {}

        def note(tensor: torch.Tensor, own: set[int] = own, seen: dict[int, int] = seen) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                seen[storage.data_ptr()] = storage.nbytes()
            return tensor.detach()

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            runner.forward(index)
        sizes.append(sum(seen.values()))
    for index in reversed(range(len(stages))):
        runner.backward(index)
    return sizes
