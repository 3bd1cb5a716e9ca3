"""Contexts that restore a model's state after it was measured.

Running a model in training mode moves BatchNorm statistics, draws random numbers, makes gradients, and does whatever
else `forward` does: it counts in Python numbers, appends to lists, fills caches. What is run here is run inside
`untouched`, which puts all of it back, also after an error. Tracing runs the model's Python as well, but what it runs
is not in the graph: `traceable_only` stops that before it happens.
"""

from __future__ import annotations

import copy
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.module import register_module_buffer_registration_hook
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode

#: What objects of these packages and of Python's own hold is left alone, but for tensors: `forward` does not count in
#: them.
_LIBRARIES = frozenset({"torch", "torchvision", "numpy", "hybridpar", *sys.stdlib_module_names})

#: What every module has.
MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))

#: Buffers and attributes of modules: where they are held, and what by which name.
HeldState = list[tuple[dict[str, Any], dict[str, Any]]]


class OutsideGraphError(Exception):
    """Tracing came to something that every forward pass must do, and that the graph would not have."""


def twin_of(model: nn.Module, memo: dict[int, Any] | None = None) -> nn.Module:
    """A deep copy of a model, also where hooks leave tensors with a history in it, as `nn.utils.weight_norm` does.

    `memo` has what stands for an object of the model, by its id, as for `copy.deepcopy`.
    """
    held = [value for module in model.modules() for value in vars(module).values() if isinstance(value, torch.Tensor)]
    return copy.deepcopy(model, {id(one): one.detach().clone() for one in held if not one.is_leaf} | (memo or {}))


@contextmanager
def untouched(model: nn.Module, *, training: bool | None = None) -> Iterator[None]:
    """Restore a model and all random states on exit.

    Restored are parameters, buffers, gradients, training flags, hooks, and Python attributes of the modules: numbers,
    tensors, arrays, random generators, and what lists, dicts, sets and objects of the user's own classes hold. Not
    restored is what Python cannot rewind: an iterator that `forward` advances, an open file, a global variable.

    With `training` the model is as it trains, which is as it is if it is in training mode, or in evaluation mode.
    """
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    devices = sorted({tensor.device.index for tensor in model.parameters() if tensor.device.type == "cuda"})
    with _restored(model, values=True), torch.random.fork_rng(devices=devices):
        for parameter, _ in gradients:
            parameter.grad = None
        if training is not None and not (training and model.training):
            model.train(training)
        try:
            yield
        finally:
            for parameter, gradient in gradients:
                parameter.grad = gradient


@contextmanager
def same_attributes(model: nn.Module) -> Iterator[None]:
    """Restore what `untouched` restores but for the values of tensors; for code that does not run on tensors."""
    with _restored(model, values=False):
        yield


@contextmanager
def _restored(model: nn.Module, values: bool) -> Iterator[None]:
    drawn, state = python_random_state(), _State(values)
    for module in model.modules():
        state.keep_module(module)
    try:
        yield
    finally:
        state.restore()
        _set_python_random_state(drawn)


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


def _set_python_random_state(state: tuple[Any, ...]) -> None:
    if state != python_random_state():
        random.setstate(state[0])
        name, keys, *rest = state[1]
        np.random.set_state((name, np.frombuffer(keys, dtype=np.uint32), *rest))


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
    found: dict[int, object] = {}
    for inside in module.modules():
        found[id(inside)] = inside
        for name, value in vars(inside).items():
            if name not in MODULE_ATTRIBUTES:
                _reach(value, 4, found)
    return found


def _reach(value: Any, depth: int, found: dict[int, object]) -> None:
    if isinstance(value, (dict, list, deque, set, nn.Module)) or _is_users_object(value):
        found[id(value)] = value
    if not depth:
        return
    if isinstance(value, (list, tuple, deque, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            _reach(item, depth - 1, found)
    elif _is_users_object(value):
        _reach(vars(value), depth - 1, found)


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


class _State:
    """Values of everything that can be reached from modules, and how to put them back."""

    def __init__(self, values: bool) -> None:
        self._values = values
        self._seen: dict[int, object] = {}
        self._undo: list[Callable[[], object]] = []

    def restore(self) -> None:
        """Put back what has changed, containers before what they hold."""
        for undo in self._undo:
            undo()

    def keep_module(self, module: nn.Module) -> None:
        """Remember a module, without its sub-modules."""
        if isinstance(module, (fx.GraphModule, torch.jit.ScriptModule)):
            # Its attributes describe the graph; forward changes at most its tensors.
            flag = module.training
            # A stage has a graph for each mode.
            self._undo.append(lambda: None if module.training == flag else module.train(flag))
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                self._keep(tensor)
            return
        held = vars(module)
        self._keep_items(held, lambda: list(held.items()), held.update)
        library = type(module).__module__.partition(".")[0] in _LIBRARIES
        empty = []
        for name, value in held.items():
            if name in MODULE_ATTRIBUTES and value == {}:
                empty.append(value)  # most of a module's dictionaries are
            elif not library or name in ("_parameters", "_buffers"):
                self._keep(value)

        def clear() -> None:
            for one in empty:
                if one:
                    one.clear()

        self._undo.append(clear)

    def _keep(self, value: Any) -> None:
        if value is None or isinstance(value, (bool, int, float, complex, str, bytes, type, nn.Module)):
            return
        if id(value) in self._seen:
            return
        self._seen[id(value)] = value  # alive, so that no other object gets its number
        if isinstance(value, torch.Tensor):
            self._keep_tensor(value)
        elif isinstance(value, dict):
            self._keep_items(value, lambda: list(value.items()), value.update)
            for item in list(value.values()):
                self._keep(item)
        elif isinstance(value, (list, deque)):
            self._keep_items(value, lambda: list(value), value.extend)
            for item in list(value):
                self._keep(item)
        elif isinstance(value, set):
            self._keep_items(value, lambda: list(value), value.update)
        elif isinstance(value, tuple):
            for item in value:
                self._keep(item)
        elif isinstance(value, np.ndarray):
            copied = value.copy()
            self._undo.append(lambda: None if np.array_equal(value, copied) else np.copyto(value, copied))
        elif (state := _generator_state(value)) is not None:
            self._undo.append(lambda: _set_generator_state(value, state))
        elif _is_users_object(value):
            self._keep(vars(value))

    def _keep_items(self, value: Any, read: Callable[[], list[Any]], fill: Callable[[list[Any]], None]) -> None:
        """A container keeps its identity: hooks' handles and other objects refer to it."""
        before = read()

        def undo() -> None:
            if not _same(read(), before):
                value.clear()
                fill(before)

        self._undo.append(undo)

    def _keep_tensor(self, tensor: torch.Tensor) -> None:
        if is_lazy(tensor) or tensor.is_meta or tensor.is_inference() or tensor.layout != torch.strided:
            return
        memory, was_leaf = tensor.data, tensor.is_leaf
        if isinstance(memory, FakeTensor):  # nothing is computed, so nothing changes
            return
        copied = memory.clone() if self._values else None

        def undo() -> None:
            with torch.no_grad():
                # Something that needs a gradient was written into it.
                if was_leaf and not tensor.is_leaf and not tensor._is_view():
                    tensor.detach_()
                if (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()) != (
                    memory.data_ptr(),
                    memory.dtype,
                    memory.shape,
                    memory.stride(),
                ):
                    tensor.data = memory
                if copied is not None and not torch.equal(memory, copied):
                    tensor.copy_(copied)

        self._undo.append(undo)


def _same(one: list[Any], other: list[Any]) -> bool:
    """Whether two lists hold the same objects; items of dicts are pairs of which both are compared."""
    if len(one) != len(other):
        return False
    return all(
        a is b or (type(a) is tuple and type(b) is tuple and len(a) == len(b) == 2 and a[0] is b[0] and a[1] is b[1])
        for a, b in zip(one, other, strict=True)
    )


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


def _set_generator_state(value: Any, state: Any) -> None:
    if isinstance(value, random.Random):
        value.setstate(state)
    elif isinstance(value, np.random.Generator):
        value.bit_generator.state = state
    else:
        value.set_state(state)


@contextmanager
def traceable_only(model: nn.Module) -> Iterator[None]:
    """Refuse what no node of a graph would do again: changes of the model's tensors, and random numbers.

    An operation on traced values becomes a node and does not run. One on tensors only, such as `self.steps.add_(1)`
    or `torch.rand(6)`, does run, once, and leaves at most a constant in the graph.
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


class _Writes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees what writes into the tensors of a model, also through views and `.data`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = {
            storage: _dotted(path, name)
            for path, module in reversed([*model.named_modules()])  # a tensor's first name counts
            for held in (vars(module), module._buffers, module._parameters)
            for name, value in reversed(held.items())
            if (storage := _storage(value)) is not None
        }

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for place, argument in enumerate(func._schema.arguments):
            if argument.is_write:
                given = args[place] if place < len(args) else kwargs.get(argument.name)
                for tensor in given if isinstance(given, (list, tuple)) else [given]:
                    name = self._names.get(storage) if (storage := _storage(tensor)) is not None else None
                    if name is not None:
                        self.note(name, func)
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


def _dotted(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _storage(value: object) -> int | None:
    """What tells one storage from another, also where it has no address: on the meta device, or empty."""
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return None
    return int(value.untyped_storage()._cdata)
