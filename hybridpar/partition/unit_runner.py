"""Times each unit of a model inside a whole step.

Each unit is a stage, which the splitter makes. All stages run forward, then all run backward with the true gradients.
Between stages the autograd graph is cut, so that the backward pass of each can be timed, but no tensor is copied: the
cut is an autograd function that hands over the same memory, which also lets operations work in place as they do in
the model.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from hybridpar.models.deferred import like_tensor
from hybridpar.models.state import with_copies
from hybridpar.partition.nest import tensor_leaves
from hybridpar.partition.stage import Stage


class _Border(torch.autograd.Function):
    """Identity that starts a new autograd graph on the same memory, and adds up the gradients that arrive, by name."""

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, box: list[torch.Tensor], name: str, gradients: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        ctx.name, ctx.gradients = name, gradients
        return box.pop().data  # not detach(): that would be a view, and views made here may not be changed in place

    @staticmethod
    def backward(ctx: Any, *given: torch.Tensor) -> tuple[None, None, None, None]:
        before = ctx.gradients.get(ctx.name)
        ctx.gradients[ctx.name] = given[0] if before is None else before + given[0]
        return None, None, None, None


class Clock:
    """Takes times on the device where the work runs: the host clock on CPU, events in the stream on CUDA."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def mark(self) -> Any:
        """Now, in the order of the work that was issued."""
        if self.device.type != "cuda":
            return time.perf_counter() * 1e3
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    def elapsed(self, spans: Sequence[tuple[Any, Any]]) -> list[float]:
        """Milliseconds from the first mark of each span to its second, once all work is done."""
        if self.device.type != "cuda":
            return [end - start for start, end in spans]
        torch.cuda.synchronize(self.device)
        return [float(start.elapsed_time(end)) for start, end in spans]


@contextmanager
def intra_op_threads(count: int | None) -> Iterator[None]:
    """So many intra-op threads on a CPU inside of the block, and as many as before afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(before if count is None else count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def step_times(stages: Sequence[Stage], inputs: Mapping[str, torch.Tensor], clock: Clock) -> list[tuple[float, float]]:
    """Milliseconds forward and backward of stages in one step; the gradient of what the last returns is ones."""
    values, gradients = dict(inputs), dict[str, torch.Tensor]()
    last_use = {tensor.name: stage for stage in stages for tensor in stage.inputs}

    def enter(name: str, stage: Stage) -> torch.Tensor:
        value = values.pop(name) if last_use[name] is stage else values[name]
        if not value.requires_grad:
            return value
        received: torch.Tensor = _Border.apply(torch.zeros((), requires_grad=True), [value], name, gradients)
        return received

    sent: list[dict[str, torch.Tensor]] = []
    forward, backward = [], []
    for stage in stages:
        given = [enter(tensor.name, stage) for tensor in stage.inputs]
        start = clock.mark()
        output = stage.forward(*given)
        forward.append((start, clock.mark()))
        del given
        leaves = [leaf for _, leaf in tensor_leaves(output)]
        names = [tensor.name for tensor in stage.outputs] or [f"output {index}" for index in range(len(leaves))]
        sent.append(dict(zip(names, leaves, strict=True)))
        values |= sent[-1]
    gradients |= {name: torch.ones_like(leaf) for name, leaf in sent[-1].items() if leaf.requires_grad}
    values.clear()
    del output, leaves
    while sent:
        roots = [(leaf, gradients.pop(name)) for name, leaf in sent.pop().items() if name in gradients]
        start = clock.mark()
        if roots:
            torch.autograd.backward([leaf for leaf, _ in roots], [gradient for _, gradient in roots])
        backward.append((start, clock.mark()))
        del roots
    return list(zip(clock.elapsed(forward), clock.elapsed(backward[::-1]), strict=True))


def times_without_memory(
    stage: Stage, inputs: Mapping[str, torch.Tensor], clock: Clock, passes: int
) -> list[tuple[float, float]]:
    """Times of a stage of a model on the meta device by itself, with memory and on inputs that are made up."""
    like = next(iter(inputs.values()))

    def memory(tensor: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
        """Small random values for parameters, ones for buffers, and zeros where they are integers."""
        if not tensor.is_meta:
            return copy.deepcopy(tensor, memo)
        values = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=like.device)
        is_trained = isinstance(tensor, nn.Parameter) and tensor.is_floating_point()
        values = values.uniform_(-0.05, 0.05) if is_trained else values.fill_(tensor.is_floating_point())
        return like_tensor(tensor, values)

    given = {}
    for border in stage.inputs:
        tensor = torch.zeros(border.shape, dtype=border.dtype, device=like.device)
        if border.dtype.is_floating_point:
            tensor.normal_()
        if tensor.dim() == like.dim() == 4 and like.is_contiguous(memory_format=torch.channels_last):
            tensor = tensor.contiguous(memory_format=torch.channels_last)
        given[border.name] = inputs.get(border.name, tensor.requires_grad_(border.requires_grad))
    with with_copies(stage, memory):
        expect_gradients(stage)
        return [time for _ in range(passes + 1) for time in step_times([stage], given, clock)][1:]


def expect_gradients(model: nn.Module) -> None:
    """Let gradients be there: so they are in all micro-batches but the first, and adding to them is the usual case."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None


def whole_step_ms(model: Callable[..., Any], inputs: Sequence[torch.Tensor], clock: Clock) -> float:
    """Time of a plain forward and backward pass of the unsplit model, without optimizer, in milliseconds."""
    start = clock.mark()
    leaves = [leaf for _, leaf in tensor_leaves(model(*inputs)) if leaf.requires_grad]
    torch.autograd.backward(leaves, [torch.ones_like(leaf) for leaf in leaves])
    return clock.elapsed([(start, clock.mark())])[0]
