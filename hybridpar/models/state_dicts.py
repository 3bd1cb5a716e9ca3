"""Copies of state dicts, and what a module puts into them beside tensors: its extra state, of `get_extra_state`."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from hybridpar.errors import UsageError
from hybridpar.formats.messages import pack, unpack

_EXTRA = "_extra_state"


def is_extra(name: str) -> bool:
    """Whether a name in a state dict is that of an extra state."""
    return name.rpartition(".")[2] == _EXTRA


def has_extra_state(module: nn.Module) -> bool:
    """Whether a module, without those in it, has an extra state."""
    return type(module).get_extra_state is not nn.Module.get_extra_state


def extra_states(model: nn.Module) -> dict[str, Any]:
    """The extra states in a model, by their names in its state dict, with tensors on the CPU."""
    return copy_of({name: value for name, value in model.state_dict().items() if is_extra(name)}, "cpu")


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """A module's state dict without extra states."""
    return {name: tensor for name, tensor in module.state_dict().items() if not is_extra(name)}


def copy_of(state: Mapping[str, Any], device: str | None = None) -> dict[str, Any]:
    """A state dict in new memory; tensors that share memory share it no longer."""
    copied: dict[str, Any] = tree_map_only(
        Tensor, lambda tensor: tensor.detach().to(device or tensor.device, copy=True), dict(state)
    )
    return copied


@torch.no_grad()
def load_values(module: nn.Module, state: Mapping[str, Any]) -> None:
    """Give a module what a state dict of it held; what has no value there stays. Buffers may have had other shapes."""
    for name, tensor in module.state_dict().items():
        owner, _, key = name.rpartition(".")
        if name not in state:
            continue
        if is_extra(name):
            module.get_submodule(owner).set_extra_state(state[name])
        elif tensor.shape == state[name].shape:
            tensor.copy_(state[name])
        else:
            module.get_submodule(owner)._buffers[key] = state[name].to(tensor, copy=True)


def require_saved(model: nn.Module) -> None:
    """Refuse extra states that no checkpoint, and no message to other workers, can hold."""
    for name, value in extra_states(model).items():
        file = io.BytesIO()
        try:
            torch.save(unpack(pack(value)), file)
            file.seek(0)
            torch.load(file, weights_only=True)
        except Exception as error:  # whatever the object's class raises
            raise UsageError(
                f"{name} is a {type(value).__name__} that a checkpoint cannot hold",
                "A checkpoint has tensors and plain values, so that reading it runs no code.",
                "Let get_extra_state return numbers, texts and tensors, or lists and dicts of these.",
            ) from error


def require_unwrapped(model: nn.Module) -> None:
    """Refuse what puts a prefix in front of names, or replicas behind them, or hides what it does and holds."""
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise UsageError(
                f"{path or 'the model'} is a scripted module",
                "Its operations, its modes and its tensors are hidden inside.",
                "Give the module before it was scripted, and compile=True (--compile).",
            )
        compiled = isinstance(getattr(module, "_orig_mod", None), nn.Module)
        if compiled or isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            inner = "_orig_mod" if compiled else "module"
            raise UsageError(
                f"{path or 'the model'} is wrapped in {type(module).__name__}",
                f"Checkpoints, --freeze and codecs use the names of the model itself; it adds {inner} to them.",
                f"Give the module inside, its attribute {inner}, and "
                + ("compile=True (--compile)." if compiled else "start a worker for each device (--nproc)."),
            )
