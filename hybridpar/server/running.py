"""The running statistics of BatchNorm in a run with parameter servers.

Each worker normalises by its own minibatch, as in a run without servers. What it pushes are its running statistics
after the step; shard 0 has their mean. With a barrier that is the mean over the workers. Without a barrier each arrival
replaces 1 / lambda of it: a convex combination, which stays between what workers really saw however stale it is (adding
differences would not).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hybridpar.server.rules import Rules


def running_buffers(model: nn.Module) -> list[Tensor]:
    """The buffers of a model that are averaged: those of floating-point numbers."""
    return [buffer for buffer in model.buffers() if buffer.is_floating_point()]


def flat_buffers(model: nn.Module) -> Tensor:
    """All of them, 1-D float32 on the CPU, new."""
    parts = [buffer.detach().to(torch.float32).reshape(-1) for buffer in running_buffers(model)]
    return torch.cat(parts).cpu() if parts else torch.empty(0)


@torch.no_grad()
def put_buffers(model: nn.Module, values: Tensor) -> None:
    """Overwrite them with what `flat_buffers` returned."""
    begin = 0
    for buffer in running_buffers(model):
        buffer.copy_(values[begin : begin + buffer.numel()].view(buffer.shape))
        begin += buffer.numel()


class RunningBuffers:
    """The running statistics that a shard has; a tensor of them is replaced, and never written to."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self.values = torch.empty(0)
        self._arrived: dict[int, Tensor] = {}

    def take(self, worker: int, values: Tensor) -> None:
        """Take in a worker's statistics."""
        if values.shape != self.values.shape:
            raise ValueError(f"{tuple(values.shape)} running statistics, where there are {tuple(self.values.shape)}")
        if self._rules.barrier:
            self._arrived[worker] = values
        else:
            self.values = torch.lerp(self.values, values, 1 / self._rules.learners)

    def meet(self, sound: bool) -> None:
        """All workers of an update have pushed: take their mean, unless the update did not happen."""
        if sound and self._arrived:
            total = torch.zeros_like(self.values)
            for worker in sorted(self._arrived):
                total += self._arrived[worker]
            self.values = total / len(self._arrived)
        self._arrived.clear()
