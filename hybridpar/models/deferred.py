"""A model of which a worker holds some tensors only.

A model may be larger than a GPU, or leave no room beside it for gradients and the optimizer's state. A worker builds
the whole model in the host's memory, so initial weights are those of a model that is not divided. It is traced and cut
on the meta device; once it is known which tensors the worker needs, it keeps these, and frees the others before it
moves anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from hybridpar.errors import UsageError
from hybridpar.models.state import give_back_memory, like_tensor, same_random, twin_of
from hybridpar.models.state_dicts import tensors_of

_T = TypeVar("_T")

#: Bytes of a model's parameters and buffers up to which a worker may hold it all, so that it can be measured.
MEASURED_BYTES = 128 << 20

_CPU, _META = torch.device("cpu"), torch.device("meta")

#: Where a tensor is held: its name in the model, the dictionary, and the key there.
Slot = tuple[str, dict[str, Any], str]


class DeferredModel:
    """A model on the meta device, and the values that some of its tensors will have.

    Args:
        factory: Builds the model, on the CPU.

    Attributes:
        module: The model, on the meta device but for what `fill` has made.

    Raises:
        UsageError: The model holds tensors where they would not be found, or parts of one tensor under two names.
    """

    def __init__(self, factory: Callable[[], nn.Module]) -> None:
        with same_random():
            self.module = factory()
        _check_held(self.module)
        self._values = self._take_values()

    def fill(self, names: Iterable[str], device: torch.device = _CPU) -> None:
        """Give some tensors of the model their values, and free those of the others; to be called once.

        Args:
            names: Of parameters, buffers, and tensors that are plain attributes, as `named_tensors` gives them.
            device: Where they are wanted.
        """
        wanted = {id(self._values[name]) for name in names}
        values = {name: value.detach() for name, value in self._values.items() if id(value) in wanted}
        self._values = {}
        give_back_memory()
        replace_tensors(
            self.module, lambda name, tensor: _placed(values[name], tensor, device) if name in values else None
        )

    def with_values(self, act: Callable[[nn.Module], _T]) -> _T:
        """What a function returns of the whole model with its values, which it may change."""
        replace_tensors(self.module, lambda name, _: self._values[name].detach())
        try:
            return act(self.module)
        finally:
            self._values = self._take_values()

    @property
    def nbytes(self) -> int:
        """Bytes of all parameters and buffers."""
        return sum(tensor.nbytes for tensor in tensors_of(self.module).values())

    def _take_values(self) -> dict[str, Tensor]:
        before = replace_tensors(self.module, lambda _, tensor: tensor.detach().to(_META))
        return {name: tensor for (name, _, _), tensor in before}


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


def storage_of(tensor: Tensor) -> int:
    """What tells the storage of a tensor from others that exist, also where it has no address."""
    return int(tensor.untyped_storage()._cdata)


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
