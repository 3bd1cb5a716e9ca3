"""Splits the time of a training step into depthwise convolutions, norms with activation, and the rest.

Operations are timed where autograd hands them to torch's dispatcher, with everything that they do inside, and those
that run on kernels where they begin. Times are of the thread that runs them, so this is for one thread. The rest is not
measured separately, including Python between operations; the measurement itself adds time there.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hybridpar.tvm_kernels import norm_kernels, op

PARTS = ("depthwise", "norm+activation")

#: Functions that run kernels.
_KERNELS: tuple[tuple[Any, tuple[str, ...], str], ...] = (
    (norm_kernels, ("forward", "backward"), PARTS[1]),
    (op.Plan, ("compute", "gradients"), PARTS[0]),
)

#: What BatchNorm and the activations behind it consist of, with the copy that an activation in place asks for.
_NORMS = {
    *("native_batch_norm", "_native_batch_norm_legit", "native_batch_norm_backward"),
    *("batch_norm_backward", "_batch_norm_with_update", "cudnn_batch_norm"),
    *("relu", "relu_", "threshold_backward", "hardtanh", "hardtanh_", "hardtanh_backward"),
    *("silu", "silu_", "silu_backward", "clone"),
}


class Parts(TorchDispatchMode):
    """Adds up the milliseconds of a step's parts while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.ms: defaultdict[str, float] = defaultdict(float)
        self._inside = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with self.part(_part_of(func, args)):
            return func(*args, **(kwargs or {}))

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count what happens inside; what an operation calls is its own."""
        began = time.thread_time()
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1
            if not self._inside:
                self.ms[name] += 1e3 * (time.thread_time() - began)


def _part_of(func: Any, args: Sequence[Any]) -> str:
    name = func._schema.name.rpartition("::")[2]
    if name == "convolution":
        return "depthwise" if args[-1] == args[1].shape[0] > 1 else "rest"
    if name == "convolution_backward":
        return "depthwise" if args[-2] == args[2].shape[0] > 1 else "rest"
    return "norm+activation" if name in _NORMS else "rest"


def measure_parts(step: Callable[[], object], times: int) -> dict[str, float]:
    """Milliseconds of the parts of a step, medians over some steps.

    Args:
        step: A training step.
        times: How many of them are timed.
    """
    found: list[defaultdict[str, float]] = []
    for _ in range(times):
        parts = Parts()
        with ExitStack() as patches:
            for place, names, part in _KERNELS:
                for name in names:
                    timed = _timed(parts, getattr(place, name), part)
                    patches.enter_context(mock.patch.object(place, name, timed))
            # This mode has seen what it wants to see.
            patches.enter_context(mock.patch.object(op, "is_seen", return_value=False))
            with parts:
                step()
        found.append(parts.ms)
    return {part: statistics.median(one[part] for one in found) for part in PARTS}


def _timed(parts: Parts, inner: Callable[..., Any], name: str) -> Callable[..., Any]:
    def run(*given: Any) -> Any:
        with parts.part(name):
            return inner(*given)

    return run


def has_norms(model: torch.nn.Module) -> bool:
    """Whether there is a BatchNorm layer in a model."""
    return any(isinstance(module, torch.nn.BatchNorm2d) for module in model.modules())
