"""Why: measuring a model must leave it as it was.

Running a model in training mode moves BatchNorm statistics, draws random numbers and makes gradients. What is run
here is run inside `untouched`, which puts all of it back, also after an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def untouched(model: nn.Module, *, training: bool | None = None) -> Iterator[None]:
    """Restore buffers, gradients, training flags and random state on exit.

    Args:
        model: The model that runs inside the block.
        training: Mode to run in; None keeps the flags as they are.
    """
    flags = [(module, module.training) for module in model.modules()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    devices = sorted({tensor.device.index for tensor in model.parameters() if tensor.device.type == "cuda"})
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        with torch.random.fork_rng(devices=devices):
            if training is not None:
                model.train(training)
            yield
    finally:
        for module, flag in flags:
            module.training = flag
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        for parameter, gradient in gradients:
            parameter.grad = gradient
