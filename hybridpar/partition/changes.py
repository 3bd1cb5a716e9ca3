"""What a forward pass does beside its output, which a graph of it may not have.

It may write into the model's tensors, draw random numbers, count in Python attributes, and hand on values through
Python objects. Attributes are read as pickle reads them, so that what they held can be compared later.
"""

from __future__ import annotations

import io
import pickle
import random
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from torch.nn.modules.module import register_module_buffer_registration_hook
from torch.utils._pytree import tree_leaves

from hybridpar.models.deferred import named_tensors
from hybridpar.models.state import MODULE_ATTRIBUTES, DispatchMode, storage_of

#: Modules do not hand on values in objects of these packages, nor of Python's library.
_LIBRARIES = frozenset({"torch", "torchvision", "numpy", "hybridpar", *sys.stdlib_module_names})


@dataclass(frozen=True)
class Attributes:
    """What the attributes of a model's modules held, by path and name.

    What they named by its id is kept alive, so that an id is of one object only while readings are compared.
    """

    values: dict[str, dict[str, bytes]]
    seen: dict[int, object]


class OutsideGraphError(Exception):
    """Tracing came to something that every forward pass must do, and that the graph would not have."""


@dataclass
class Changes:
    """What a forward pass changes beside its output, as far as it was tried.

    Attributes:
        counters: Attributes that every pass changes, by the sub-module's name.
        unrepeatable: Of them those that `put_state` does not put back.
        remembering: Sub-modules whose attributes differ from pass to pass.
        draws: It draws random numbers of Python or NumPy.
        written: Names of the tensors that it writes into.
    """

    counters: dict[str, str] = field(default_factory=dict)
    unrepeatable: dict[str, str] = field(default_factory=dict)
    remembering: set[str] = field(default_factory=set)
    draws: bool = False
    written: set[str] = field(default_factory=set)


def python_random_state() -> tuple[Any, ...]:
    """The states of Python's and NumPy's global random generators, which can be compared."""
    name, keys, *rest = cast(tuple[Any, ...], np.random.get_state(legacy=True))
    return random.getstate(), (name, keys.tobytes(), *rest)


class Writes(DispatchMode):
    """Inside, `names` collects the tensors of a model that are written into, also through views and `.data`.

    With `refuse` that is an error, and so is a random operation; `read` has what something was computed from.
    """

    def __init__(self, model: nn.Module, *, refuse: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()
        self.read: set[str] = set()
        self._refuse = refuse
        self._trained = {_storage(parameter) for parameter in model.parameters() if parameter.requires_grad}
        # Of several names of a tensor the first counts.
        self._names = {_storage(held[key]): name for name, held, key in reversed([*named_tensors(model)])}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._refuse and torch.Tag.nondeterministic_seeded in func.tags:
            raise OutsideGraphError(f"it draws random numbers ({func}), which would be the same in every step")
        if self._refuse and not func.is_view and func is not torch.ops.aten.detach.default:
            storages = set(map(_storage, tree_leaves((args, kwargs)))) & self._names.keys()
            self.read |= {self._names[storage] for storage in storages}
            if trained := storages & self._trained:
                raise OutsideGraphError(f"it computes with values of {self._names[trained.pop()]}, which is trained")
        arguments = func._schema.arguments
        given = dict(zip((argument.name for argument in arguments), args, strict=False)) | kwargs
        written = [given.get(argument.name) for argument in arguments if argument.is_write]
        if given.get("training"):  # the schema of BatchNorm does not say that it writes into its statistics
            written += [given.get("running_mean"), given.get("running_var")]
        for value in written:
            for tensor in value if isinstance(value, (list, tuple)) else [value]:
                storage = _storage(tensor)
                if storage is not None and storage in self._names:
                    self.names.add(self._names[storage])
                    if self._refuse:
                        raise OutsideGraphError(f"it changes {self._names[storage]} in place ({func})")
        return func(*args, **kwargs)


def _storage(value: object) -> int | None:
    """The storage of a tensor, if it has one."""
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return None
    return storage_of(value)


@contextmanager
def traceable_only(model: nn.Module) -> Iterator[set[str]]:
    """Refuse what no node of a graph would do again: changes of the model's tensors, and random numbers.

    An operation on traced values becomes a node and does not run. One on tensors only, such as `self.steps.add_(1)`
    or `torch.rand(6)`, does run, once, and leaves at most a constant in the graph.

    Yields the names of the attributes and tensors whose values the code read, and which the graph has as they were.
    """
    modules = {module: path for path, module in model.named_modules()}

    def replaced(module: nn.Module, name: str, buffer: torch.Tensor | None) -> None:
        if module in modules:
            raise OutsideGraphError(f"it puts another tensor in the place of {f'{modules[module]}.{name}'.lstrip('.')}")

    hook = register_module_buffer_registration_hook(replaced)
    try:
        with Writes(model, refuse=True) as writes, _attributes_read(model) as taken:
            yield taken
        taken |= writes.read
    finally:
        hook.remove()


@contextmanager
def _attributes_read(model: nn.Module) -> Iterator[set[str]]:
    """Inside, what this yields collects the names of attributes whose values are read before forward assigns others."""
    taken: set[str] = set()
    before = {id(module): (path, dict(vars(module))) for path, module in model.named_modules()}

    def read(module: Any, name: str) -> Any:
        value = object.__getattribute__(module, name)
        if name not in MODULE_ATTRIBUTES and id(module) in before:
            path, held = before[id(module)]
            if name in held and held[name] is value:
                taken.add(f"{path}.{name}".lstrip("."))
        return value

    nn.Module.__getattribute__ = read  # type: ignore[method-assign]
    try:
        yield taken
    finally:
        del nn.Module.__getattribute__


def attributes_of(model: nn.Module) -> Attributes:
    """What the Python attributes of a model's modules hold, in a form that can be compared later."""
    reader = _Reader()
    values = {
        path: {name: reader.read(value) for name, value in vars(module).items() if name not in MODULE_ATTRIBUTES}
        for path, module in model.named_modules()
    }
    return Attributes(values, reader.seen)


def changed(first: Attributes, second: Attributes, alone: Attributes | None = None) -> dict[str, str]:
    """The first attribute of each module that changed again: a size or a mask of the first pass stays in the second.

    With `alone`, which is what the second pass leaves by itself, also not what depends on that pass only.
    """
    changes: dict[str, str] = {}
    for path, after in second.values.items():
        for name, value in after.items():
            before = [before.values.get(path, {}).get(name) for before in (first, alone) if before is not None]
            if all(other != value for other in before):
                changes.setdefault(path, name)
    return changes


def reachable(module: nn.Module) -> dict[int, object]:
    """What a module's forward can change without a global variable, by id: containers, objects, and other modules."""
    reader = _Reader()
    for inside in module.modules():
        reader.seen[id(inside)] = inside
        for name, value in vars(inside).items():
            if name not in MODULE_ATTRIBUTES:
                reader.read(value)
    return {key: value for key, value in reader.seen.items() if _is_changeable(value)}


def _is_changeable(value: object) -> bool:
    if isinstance(value, (dict, list, deque, set, nn.Module)):
        return True
    known = isinstance(value, (type, torch.Tensor)) or type(value).__module__.partition(".")[0] in _LIBRARIES
    return not known and hasattr(value, "__dict__")


class _Reader(pickle.Pickler):
    """Reads all that an object holds, as it would be pickled; of modules, parameters and functions which they are."""

    def __init__(self) -> None:
        self._file = io.BytesIO()
        super().__init__(self._file, protocol=4)
        self.seen: dict[int, object] = {}  # also keeps what is seen alive, so that ids are of one object each

    def read(self, value: object) -> bytes:
        """What a value holds; its type where that cannot be read."""
        self._file.seek(0)
        self._file.truncate()
        self.clear_memo()
        try:
            self.dump(value)
        except Exception:  # of the user's classes
            return repr(type(value)).encode()
        return self._file.getvalue()

    def persistent_id(self, value: Any) -> Any:
        """What stands for a value in what is read; None for all that is read like any other."""
        if value is None or isinstance(value, (bool, int, float, str, bytes)):
            return None
        self.seen[id(value)] = value
        if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
            held = value.detach()
            if type(held) is not torch.Tensor or value.is_meta or value.layout != torch.strided or value.is_quantized:
                return id(value)
            return str(value.shape), held.resolve_conj().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()
        if isinstance(value, (set, frozenset)):
            return len(value)
        return id(value) if isinstance(value, (nn.Module, nn.Parameter, type)) else None

    def reducer_override(self, value: Any) -> Any:
        """How an object is read; of one that cannot be, as a function, a lock or an open file, the type alone."""
        try:
            reduced = value.__reduce_ex__(4)
        except Exception:
            reduced = type(value).__name__
        return (str, (reduced,)) if isinstance(reduced, str) else reduced
