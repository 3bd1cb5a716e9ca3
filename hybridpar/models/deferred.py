"""A model of which a worker holds some tensors only.

A model may be larger than a GPU, or than a worker's share of the host's memory. A worker builds it in the host's memory
and keeps the shapes of its tensors: that is enough to trace the model and to cut it. Once it is known which tensors the
worker needs, it builds the model again from the same state of the random generators, keeps these, and frees the rest
before it moves anything. So initial weights are those of the whole model, bit for bit. Of the workers of a host one at
a time has a whole model.
"""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from hybridpar.errors import UsageError
from hybridpar.formats.cache import locked
from hybridpar.models.state import (
    give_back_memory,
    like_tensor,
    random_state,
    restore_random_state,
    same_random,
    storage_of,
    twin_of,
)
from hybridpar.models.state_dicts import tensors_of

_T = TypeVar("_T")

#: Bytes of a model's parameters and buffers up to which a worker may hold it all, so that it can be measured.
MEASURED_BYTES = 128 << 20

_CPU, _META = torch.device("cpu"), torch.device("meta")

#: Where a tensor is held: its name in the model, the dictionary, and the key there.
Slot = tuple[str, dict[str, Any], str]


class DeferredModel:
    """A model on the meta device, and how some of its tensors get their values.

    Args:
        factory: Builds the model, on the CPU, in the same way whenever it is called in the same state of the random
            generators; in the state that they have now.

    Attributes:
        module: The model, on the meta device but for what `fill` has made.

    Raises:
        UsageError: The model holds tensors where they would not be found, or parts of one tensor under two names.
    """

    def __init__(self, factory: Callable[[], nn.Module]) -> None:
        self._factory = factory
        self._state = random_state()
        self._start: Callable[[nn.Module], object] | None = None
        with locked(_building_file()):
            self.module = self.build()
            _check_held(self.module)
            replace_tensors(self.module, lambda _, tensor: tensor.detach().to(_META))
            give_back_memory()

    def fill(self, names: Iterable[str], device: torch.device = _CPU) -> None:
        """Give some tensors of the model their initial values; other tensors keep those that they have.

        Args:
            names: Of parameters, buffers, and tensors that are plain attributes, as `named_tensors` gives them.
            device: Where they are wanted.
        """
        named, values = set(names), dict[str, Tensor]()
        slots = [(name, id(held[key])) for name, held, key in named_tensors(self.module)]
        first = {key: name for name, key in reversed(slots)}  # of several names of a tensor
        wanted = {first[key] for name, key in slots if name in named}
        with locked(_building_file()):
            for name, held, key in named_tensors(self.build()):
                tensor = held.pop(key)
                if name in wanted:
                    values[name] = tensor.detach()
                del tensor
            give_back_memory()
        replace_tensors(
            self.module, lambda name, tensor: _placed(values.pop(name), tensor, device) if name in values else None
        )

    def start_from(self, give: Callable[[nn.Module], _T]) -> _T:
        """Let `fill` give tensors other values than the constructor's; returns what `give` does.

        `give` gives a model its values, for instance those of a file. It is called now with the model without memory,
        and with each that is built from now on.
        """
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that nothing is copied where there is no memory
            result = give(self.module)
        self._start = give
        return result

    @property
    def nbytes(self) -> int:
        """Bytes of all parameters and buffers."""
        return sum(tensor.nbytes for tensor in tensors_of(self.module).values())

    def build(self) -> nn.Module:
        """The whole model with its initial values; it shares nothing."""
        with same_random():
            restore_random_state(self._state)
            model = self._factory()
        if self._start is not None:
            self._start(model)
        return model


def module_of(model: nn.Module | DeferredModel) -> nn.Module:
    """A model itself; of a deferred one what is on the meta device."""
    return model.module if isinstance(model, DeferredModel) else model


def _building_file() -> Path:
    """A file that one process of this user on this host locks while it has a whole model."""
    return Path(tempfile.gettempdir()) / f"hybridpar-{os.getuid()}-building.lock"


def named_tensors(module: nn.Module) -> Iterator[Slot]:
    """Where a module and those in it hold tensors."""
    for path, part in module.named_modules():
        for held in (part._parameters, part._buffers, vars(part)):
            for key, value in list(held.items()):
                if isinstance(value, Tensor):
                    yield f"{path}.{key}" if path else key, held, key


def replace_tensors(module: nn.Module, values_of: Callable[[str, Tensor], Tensor | None]) -> list[tuple[Slot, Tensor]]:
    """Let a module hold tensors with other values, each under all of its names; returns what was where.

    `values_of` gets the first name of a tensor, and returns None where it stays.
    """
    before = [(slot, slot[1][slot[2]]) for slot in named_tensors(module)]
    made: dict[int, Tensor] = {}
    for (name, held, key), tensor in before:
        if id(tensor) not in made:
            values = values_of(name, tensor)
            made[id(tensor)] = tensor if values is None else like_tensor(tensor, values)
        held[key] = made[id(tensor)]
    return before


def _check_held(module: nn.Module) -> None:
    """Refuse tensors that are not found when others are replaced, or that would no longer share memory then."""
    storages = {storage_of(held[key]) for _, held, key in named_tensors(module)}
    state = module.state_dict(keep_vars=True).values()
    saved = {storage_of(tensor): tensor for tensor in state if isinstance(tensor, Tensor)}
    for path, part in module.named_modules():
        for key, value in vars(part).items():
            if key not in ("_parameters", "_buffers") and not isinstance(value, Tensor):
                inside = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
                if any(storage_of(tensor) in storages for tensor in inside):
                    raise _hidden(part, f"{path}.{key}" if path else key, "in a list or dictionary, too")
    for name, held, key in named_tensors(module):
        if saved.get(storage_of(held[key]), held[key]) is not held[key]:
            raise _hidden(module, name, "that shares memory with another")


def _hidden(module: nn.Module, name: str, problem: str) -> UsageError:
    return UsageError(
        f"the model cannot be held in parts: {type(module).__name__} holds a tensor {problem}, {name}",
        "Only parameters, buffers and attributes that are tensors are found when they get their values.",
        "Register each as a buffer or a parameter, or compute it in `forward`.",
    )


def is_deferred(module: nn.Module) -> bool:
    """Whether a module holds tensors that have a shape only."""
    return any(held[key].is_meta for _, held, key in named_tensors(module))


def without_values(model: nn.Module) -> nn.Module:
    """A copy of a model whose parameters and buffers have a shape only."""
    tensors = (*model.parameters(), *model.buffers())
    return twin_of(model, {id(tensor): like_tensor(tensor, tensor.detach().to(_META)) for tensor in tensors})


@contextmanager
def imagined(module: nn.Module, device: torch.device) -> Iterator[Any]:
    """Inside, a module runs without memory and without computing: its tensors have a shape, a type and a device."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        before = replace_tensors(
            module, lambda _, real: torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device=device)
        )
        try:
            yield mode
        finally:
            for (_, held, key), tensor in before:
                held[key] = tensor


def _placed(values: Tensor, like: Tensor, device: torch.device) -> Tensor:
    """Values on a device, laid out as another tensor is."""
    if values.stride() == like.stride():
        return values.to(device)
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device).copy_(values)
