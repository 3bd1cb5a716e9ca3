"""Contexts in which a model runs and is as before afterwards.

Running a model in training mode moves BatchNorm statistics, draws random numbers, makes gradients, and does whatever
else `forward` does: it counts in Python numbers, appends to lists, fills caches. Inside `untouched` all of that happens
to copies. Tracing runs the model's Python as well, but what it runs is not in the graph: `traceable_only` stops that
before it happens.
"""

from __future__ import annotations

import copy
import random
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import MethodType
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import fx, nn
from torch.nn.modules.module import register_module_buffer_registration_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from hybridpar.models.deferred import like_tensor, places, storage_of
from hybridpar.models.random_state import same_random

#: `forward` does not count in objects of these packages, nor of Python's library.
_LIBRARIES = frozenset({"torch", "torchvision", "numpy", "hybridpar", *sys.stdlib_module_names})

#: What every module has.
MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))

#: So many containers in each other are looked into; the rest is not copied.
_MOST_DEPTH = 5

#: Values that are never changed, as most attributes are.
_ATOMS = frozenset({type(None), bool, int, float, str})

#: Buffers and attributes of modules: where they are held, and what by which name.
HeldState = list[tuple[dict[str, Any], dict[str, Any]]]


_T = TypeVar("_T")


class OutsideGraphError(Exception):
    """Tracing came to something that every forward pass must do, and that the graph would not have."""


def twin_of(model: nn.Module, memo: dict[int, Any] | None = None) -> nn.Module:
    """A deep copy of a model, also where hooks leave tensors with a history in it, as `nn.utils.weight_norm` does.

    What Python cannot copy, such as a lock, is shared. `memo` has what stands for an object of the model, by its id, as
    for `copy.deepcopy`.
    """
    memo = dict(memo or {})
    copies = _TensorCopies(_detached_copy)
    copies.collect(_reached_from(map(_attributes, model.modules())), memo)
    twin = copies.copied(model, memo)
    for parameter, copied in zip(model.parameters(), twin.parameters(), strict=True):
        copied.__dict__.update(vars(parameter))
    return twin


def without_values(model: nn.Module) -> nn.Module:
    """A copy of a model whose parameters and buffers have a shape only."""
    tensors = (*model.parameters(), *model.buffers())
    return twin_of(model, {id(tensor): like_tensor(tensor, tensor.detach().to("meta")) for tensor in tensors})


@contextmanager
def untouched(model: nn.Module, *, training: bool | None = None) -> Iterator[Callable[[_T], _T]]:
    """Let a model hold copies of all that it has; on exit, also after an error, they are thrown away.

    Parameters, buffers, gradients, Python attributes, hooks and modes are then what they were, and random generators go
    on from where they were. What Python cannot copy, such as an iterator or an open file, is used as it is, and so are
    modules that are not in the model, and global variables. Hooks of tensors do not run.

    With `training` the model is as it trains, which is as it is if it is in training mode, or in evaluation mode.

    Yields a function that copies something else, whose tensors share memory with the copies as they did with the model.
    """
    scripted = [module for module in model.modules() if isinstance(module, torch.jit.ScriptModule)]
    tensors = [tensor for module in scripted for tensor in (*module.parameters(False), *module.buffers(False))]
    values = [(tensor, tensor.detach().clone(), tensor.grad) for tensor in tensors]
    devices = sorted({tensor.device.index for tensor in model.parameters() if tensor.device.type == "cuda"})
    with same_random(devices), with_copies(model, _copy_of) as copied:
        if training is not None and not (training and model.training):
            model.train(training)
        try:
            yield copied
        finally:
            for tensor, value, gradient in values:  # a scripted module cannot hold other tensors
                tensor.detach().copy_(value)
                tensor.grad = gradient


@contextmanager
def same_attributes(model: nn.Module) -> Iterator[dict[int, torch.Tensor]]:
    """As `untouched`, but copies of tensors share memory with the model's, and torch's generators go on.

    For tracing, and for forward passes after which buffers are put back. Trained tensors that are no parameters are
    not copied, so that gradients of what is computed from them flow to the model.

    Yields the model's tensors by the ids of their copies.
    """
    originals: dict[int, torch.Tensor] = {}

    def shared(tensor: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
        if tensor.requires_grad and not isinstance(tensor, nn.Parameter):
            return tensor
        alias = like_tensor(tensor, tensor.detach())
        originals[id(alias)] = tensor
        return alias

    drawn = random.getstate(), np.random.get_state()
    with with_copies(model, shared):
        try:
            yield originals
        finally:
            random.setstate(drawn[0])
            np.random.set_state(drawn[1])


@contextmanager
def with_copies(
    model: nn.Module, copy_of: Callable[[torch.Tensor, dict[int, Any]], torch.Tensor]
) -> Iterator[Callable[[_T], _T]]:
    """Let a model hold copies of its attributes, of tensors made by a function; yields what copies something else."""
    before = [(module, module.training, dict(vars(module))) for module in model.modules()]
    attributes = [_attributes(module) for module, *_ in before]
    reached = _reached_from(attributes)
    memo: dict[int, Any] = {id(value): value for value in (model, *reached) if isinstance(value, nn.Module)}
    copies = _TensorCopies(copy_of)
    try:
        copies.collect(reached, memo)
        for (module, *_), held in zip(before, attributes, strict=True):
            vars(module).update({name: memo.get(id(value), value) for name, value in held.items()})
        yield lambda value: copies.copied(value, memo)
    finally:
        for module, flag, _ in before:
            if isinstance(module, (fx.GraphModule, torch.jit.ScriptModule)) and module.training != flag:
                module.train(flag)  # a stage has a graph for each mode
        for module, _, held in before:
            vars(module).clear()
            vars(module).update(held)


def _attributes(module: nn.Module) -> dict[str, Any]:
    """What a module holds that can be replaced; not what describes the graph of a stage."""
    if isinstance(module, torch.jit.ScriptModule):
        return {}
    has_graph = isinstance(module, fx.GraphModule)
    return {name: value for name, value in vars(module).items() if not has_graph or name in MODULE_ATTRIBUTES}


class _TensorCopies(TorchFunctionMode):
    """Inside, `copy.deepcopy` copies tensors by a function, wherever they are held; parameters copy themselves."""

    def __init__(self, copy_of: Callable[[torch.Tensor, dict[int, Any]], torch.Tensor]) -> None:
        super().__init__()
        self._copy_of = copy_of

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        function = self._copy_of if func is torch.Tensor.__deepcopy__ else func
        return function(*args, **(kwargs or {}))

    def copied(self, value: _T, memo: dict[int, Any]) -> _T:
        """A deep copy."""
        with self:
            return copy.deepcopy(value, memo)

    def collect(self, values: list[Any], memo: dict[int, Any]) -> None:
        """Put copies of values, which come the inner before the outer, into a memo; what cannot be copied as it is."""
        for value in values:
            if isinstance(value, nn.Parameter) and id(value) not in memo:
                memo[id(value)] = self._copy_of(value, memo)
        with self:
            for value in values:
                if id(value) in memo or isinstance(value, nn.Module):
                    continue
                size = len(memo)
                try:
                    is_empty = type(value) in (dict, OrderedDict) and not value  # as most of a module's are
                    memo[id(value)] = value.copy() if is_empty else copy.deepcopy(value, memo)
                except (MemoryError, torch.OutOfMemoryError):
                    raise
                except Exception:  # a copy is made by the user's code, which may raise anything
                    while len(memo) > size:  # parts, which may be unfinished
                        memo.popitem()
                    memo[id(value)] = value


def _detached_copy(tensor: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
    return copy.deepcopy(tensor if tensor.is_leaf else tensor.detach(), memo)


def _copy_of(tensor: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
    """A copy that shares memory with the copies of what the tensor shares memory with."""
    if type(tensor) not in (torch.Tensor, nn.Parameter):
        return _detached_copy(tensor, memo)
    return like_tensor(tensor, copy.deepcopy(tensor.detach(), memo))


def held_state(model: nn.Module, spared: Iterable[nn.Module] = ()) -> HeldState:
    """The buffers and attributes of a model's modules, of tensors and containers shallow copies; its buffers alone."""
    ignored, copies = set(spared), dict[int, torch.Tensor]()

    def copied(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return copies.setdefault(id(value), value.detach().clone())
        return copy.copy(value) if type(value) in (list, dict, set, deque) else value

    return [
        (held, {name: copied(value) for name, value in held.items() if name not in MODULE_ATTRIBUTES})
        for module in model.modules()
        if module not in ignored
        for held in ((module._buffers,) if module is model else (module._buffers, vars(module)))
    ]


def put_state(state: HeldState) -> HeldState:
    """Put back what `held_state` returned, and return what was there, which is not copied."""
    present = []
    for held, values in state:
        present.append((held, {name: value for name, value in held.items() if name not in MODULE_ATTRIBUTES}))
        for name in present[-1][1].keys() - values.keys():
            del held[name]
        held.update(values)
    return present


def python_random_state() -> tuple[Any, ...]:
    """The states of Python's and NumPy's global random generators, which can be compared."""
    name, keys, *rest = cast(tuple[Any, ...], np.random.get_state(legacy=True))
    return random.getstate(), (name, keys.tobytes(), *rest)


def attributes_of(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Values of the Python attributes of a model's modules, by path and name, in a form that can be compared later."""
    return {
        path: {name: _frozen(value, 4) for name, value in vars(module).items() if name not in MODULE_ATTRIBUTES}
        for path, module in model.named_modules()
    }


class _Same:
    """A tensor without values is equal to itself alone."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._tensor is other._tensor


def reachable(module: nn.Module) -> dict[int, object]:
    """What a module's forward can change without a global variable, by id: containers, objects, and other modules."""
    modules = list(module.modules())
    reached = _reached_from(
        {name: value for name, value in vars(inside).items() if name not in MODULE_ATTRIBUTES} for inside in modules
    )
    changeable = (
        value for value in reached if isinstance(value, (dict, list, deque, set, nn.Module)) or _is_users_object(value)
    )
    return {id(value): value for value in (*modules, *changeable)}


def _reached_from(attributes: Iterable[Mapping[str, Any]]) -> list[Any]:
    """Values of attributes and what is in them, each once: first those that hold nothing, then the inner ones."""
    seen: set[int] = set()
    holding_nothing: list[Any] = []
    containers: list[Any] = []
    level = [value for held in attributes for value in held.values()]
    for _ in range(_MOST_DEPTH):
        inside: list[Any] = []
        for value in level:
            if type(value) in _ATOMS or id(value) in seen:
                continue
            seen.add(id(value))
            items = value.values() if type(value) in (dict, OrderedDict) else _items(value)
            if items is None:
                holding_nothing.append(value)
            else:
                containers.append(value)
                inside += items
        level = inside
    return holding_nothing + containers[::-1]


def _items(value: Any) -> Iterable[Any] | None:
    """What a bound method, a container or an object of a user's class holds; None for everything else."""
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, (list, tuple, deque)):
        return value
    if isinstance(value, MethodType):
        return (value.__self__,)
    return vars(value).values() if _is_users_object(value) else None


def _frozen(value: Any, depth: int) -> Any:
    """Numbers and texts as they are, containers and objects of the user's classes by what they hold."""
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        return repr(value)  # nan is not equal to itself
    if isinstance(value, np.ndarray):
        return value.tobytes() if value.dtype != object else value.shape
    if (state := _generator_state(value)) is not None:
        return repr(state.tolist() if isinstance(state, torch.Tensor) else state)
    if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
        held = value.detach()
        if type(held) is not torch.Tensor or value.is_meta or value.layout != torch.strided or value.is_quantized:
            return _Same(value)
        return value.shape, held.resolve_conj().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()
    if depth and isinstance(value, dict):
        return [(repr(key), _frozen(item, depth - 1)) for key, item in value.items()]
    if depth and isinstance(value, (list, tuple, deque)):
        return [_frozen(item, depth - 1) for item in value]
    if isinstance(value, (set, frozenset)):
        return len(value)
    if depth and _is_users_object(value):
        return _frozen(vars(value), depth - 1)
    return type(value).__name__


def _is_users_object(value: Any) -> bool:
    kind = type(value)
    known = isinstance(value, (type, nn.Module, torch.Tensor)) or kind.__module__.partition(".")[0] in _LIBRARIES
    return not known and hasattr(value, "__dict__")


def _generator_state(value: Any) -> Any:
    """The state of a random generator that a model has of its own; None where it is none."""
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, np.random.RandomState):
        return value.get_state(legacy=False)
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    return None


@contextmanager
def traceable_only(model: nn.Module) -> Iterator[None]:
    """Refuse what no node of a graph would do again: changes of the model's tensors, and random numbers.

    An operation on traced values becomes a node and does not run. One on tensors only, such as `self.steps.add_(1)`
    or `torch.rand(6)`, does run, once, and leaves at most a constant in the graph.
    """
    modules = {module: path for path, module in model.named_modules()}

    def replaced(module: nn.Module, name: str, buffer: torch.Tensor | None) -> None:
        if module in modules:
            raise OutsideGraphError(f"it puts another tensor in the place of {f'{modules[module]}.{name}'.lstrip('.')}")

    hook = register_module_buffer_registration_hook(replaced)
    try:
        with _TraceableOnly(model):
            yield
    finally:
        hook.remove()


class _Writes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees what writes into the tensors of a model, also through views and `.data`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # Of several names of a tensor the first counts.
        self._names = {_storage(held[key]): name for name, held, key in reversed([*places(model)])}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for position, argument in enumerate(func._schema.arguments):
            if argument.is_write:
                given = args[position] if position < len(args) else kwargs.get(argument.name)
                for tensor in given if isinstance(given, (list, tuple)) else [given]:
                    storage = _storage(tensor)
                    if storage is not None and storage in self._names:
                        self.note(self._names[storage], func)
        return func(*args, **kwargs)

    def note(self, name: str, func: Any) -> None:
        """Take note of an operation that is about to write into a tensor."""
        raise NotImplementedError


class _TraceableOnly(_Writes):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise OutsideGraphError(f"it draws random numbers ({func}), which would be the same in every step")
        return super().__torch_dispatch__(func, types, args, kwargs)

    def note(self, name: str, func: Any) -> None:
        """Refuse it."""
        raise OutsideGraphError(f"it changes {name} in place ({func})")


class WrittenState(_Writes):  # type: ignore[no-untyped-call]
    """Inside, `names` collects what is written into."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.names: set[str] = set()

    def note(self, name: str, func: Any) -> None:
        """Take note of the name."""
        self.names.add(name)


def _storage(value: object) -> int | None:
    """The storage of a tensor, if it has one."""
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return None
    return storage_of(value)
