"""Runs stages of one process with a cut in the autograd graph at every border.

Received tensors are leaves, gradients exist and are accumulated into, and the backward pass comes after the forward
passes of all stages, as in a pipeline, but without lanes, messages and micro-batches: the reference for a cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hybridpar.partition.nest import tensor_leaves
from hybridpar.partition.stage import Stage


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


def measured_saved_bytes(stages: Sequence[Stage], *inputs: torch.Tensor) -> list[int]:
    """Bytes of distinct storages that each stage saves for backward, parameters and buffers left out."""
    runner = StageRunner(stages)
    runner.start(*inputs)
    sizes = []
    for index, stage in enumerate(stages):
        seen: dict[int, int] = {}

        def note(tensor: torch.Tensor, seen: dict[int, int] = seen) -> torch.Tensor:
            seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor.detach()

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            runner.forward(index)
        state = {tensor.untyped_storage().data_ptr() for tensor in (*stage.parameters(), *stage.buffers())}
        sizes.append(sum(size for storage, size in seen.items() if storage not in state))
    for index in reversed(range(len(stages))):
        runner.backward(index)
    return sizes
