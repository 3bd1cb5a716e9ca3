"""Why: measuring a model must leave it as it was.

Running a model in training mode moves BatchNorm statistics, draws random numbers and makes gradients. What is run
here is run inside `untouched`, which puts all of it back, also after an error. Tracing runs the model's Python as
well, but what it runs is not in the graph: `traceable_only` stops that before it happens.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_buffer_registration_hook
from torch.utils._python_dispatch import TorchDispatchMode


class OutsideGraphError(Exception):
    """Tracing came to something that every forward pass must do, and that the graph would not have."""


@contextmanager
def untouched(model: nn.Module, *, training: bool | None = None) -> Iterator[None]:
    """Restore buffers, gradients, training flags and random state on exit.

    Args:
        model: The model that runs inside the block.
        training: Mode to run in; None keeps the flags as they are.
    """
    flags = [(module, module.training) for module in model.modules()]
    buffers = [
        (module, name, buffer, buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False)
    ]
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
            for module, name, buffer, value in buffers:
                module._buffers[name] = buffer  # forward may have put another in its place
                buffer.copy_(value)
        for parameter, gradient in gradients:
            parameter.grad = gradient


@contextmanager
def traceable_only(model: nn.Module) -> Iterator[None]:
    """Refuse what no node of a graph would do again: changes of the model's tensors, and random numbers.

    An operation on traced values becomes a node and does not run. One on tensors only, such as `self.steps.add_(1)`
    or `torch.rand(6)`, does run, once, and leaves at most a constant in the graph.

    Args:
        model: The model that is traced inside the block.

    Raises:
        OutsideGraphError: In place of such an operation; nothing has happened yet.
    """
    modules = {module: path for path, module in model.named_modules()}

    def replaced(module: nn.Module, name: str, buffer: torch.Tensor | None) -> None:
        if module in modules:
            raise OutsideGraphError(f"it puts another tensor in the place of {_dotted(modules[module], name)}")

    hook = register_module_buffer_registration_hook(replaced)
    try:
        with _TraceableOnly(model):
            yield
    finally:
        hook.remove()


class _TraceableOnly(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = {
            storage: _dotted(path, name)
            for path, module in model.named_modules()
            for held in (vars(module), module._buffers, module._parameters)
            for name, value in held.items()
            if (storage := _storage(value)) is not None
        }

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise OutsideGraphError(f"it draws random numbers ({func}), which would be the same in every step")
        for place, argument in enumerate(func._schema.arguments):
            if argument.is_write:
                given = args[place] if place < len(args) else kwargs.get(argument.name)
                for tensor in given if isinstance(given, (list, tuple)) else [given]:
                    name = self._names.get(storage) if (storage := _storage(tensor)) is not None else None
                    if name is not None:
                        raise OutsideGraphError(f"it changes {name} in place ({func})")
        return func(*args, **kwargs)


def _dotted(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _storage(value: object) -> int | None:
    """What tells one storage from another, also where it has no address: on the meta device, or empty."""
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return None
    return int(value.untyped_storage()._cdata)
