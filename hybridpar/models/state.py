"""Contexts in which a model runs and is as before afterwards.

Running a model in training mode moves BatchNorm statistics, draws random numbers, makes gradients, and does whatever
else `forward` does: it counts in Python numbers, appends to lists, fills caches. Inside `untouched` all of that happens
to copies.
"""

from __future__ import annotations

import copy
import ctypes
import gc
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import MethodType
from typing import Any, TypeVar, cast

import numpy
import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

#: What every module has.
MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))

#: Where something cannot be copied, so many containers in each other are looked into for what can.
_MOST_DEPTH = 5

_CPU = torch.device("cpu")

#: Copies, or what else is to stand for them, by the ids of objects, as `copy.deepcopy` keeps them.
Memo = dict[int, Any]

#: Buffers and attributes of modules: where they are held, and what by which name.
HeldState = list[tuple[dict[str, Any], dict[str, Any]]]

_T = TypeVar("_T")


class DispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode of torch that does not import torch's compiler to be left out of it, which takes a second."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


# ---------------------------------------------------------------- modes, random numbers, memory


@contextmanager
def same_modes(model: nn.Module) -> Iterator[None]:
    """Give every module of a model its own mode back on exit, whatever `train()` of any of them does."""
    flags = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, flag in flags:
            module.training = flag


def random_state(device: torch.device = _CPU) -> dict[str, Any]:
    """State of every random number generator of this process: torch (CPU and GPU), numpy, Python."""
    name, keys, *rest = cast(tuple[Any, ...], numpy.random.get_state(legacy=True))
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": [name, torch.tensor(keys.tolist(), device="cpu"), *rest],
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def restore_random_state(state: dict[str, Any], device: torch.device = _CPU) -> None:
    """Put back what `random_state` returned."""
    torch.set_rng_state(state["torch"])
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, *rest = state["numpy"]
    numpy.random.set_state((name, keys.numpy(), *rest))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


@contextmanager
def same_random(devices: Sequence[int] = ()) -> Iterator[None]:
    """Restore the random states of Python, NumPy and torch on exit."""
    with torch.random.fork_rng(devices=devices), _same_random_of_python():
        yield


@contextmanager
def _same_random_of_python() -> Iterator[None]:
    drawn, drawn_by_numpy = random.getstate(), numpy.random.get_state()
    try:
        yield
    finally:
        random.setstate(drawn)
        numpy.random.set_state(drawn_by_numpy)


def give_back_memory() -> None:
    """Give what was freed back to the system, where the C library can; the next allocations get new pages."""
    gc.collect()
    with suppress(OSError, AttributeError):  # glibc has it
        ctypes.CDLL(None).malloc_trim(0)


# ---------------------------------------------------------------- buffers and attributes, to run a pass again


def storage_of(tensor: Tensor) -> int:
    """What tells the storage of a tensor from others that exist, also where it has no address."""
    return int(tensor.untyped_storage()._cdata) if tensor.layout == torch.strided else id(tensor)


class TensorCopies:
    """Copies of tensors, which share memory where the tensors do: a change of one shows in the same others."""

    def __init__(self) -> None:
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}  # by id, with the tensor, so that the id stays its own
        self._storages: dict[int, torch.UntypedStorage] = {}

    @torch.no_grad()
    def of(self, tensor: Tensor) -> Tensor:
        """The copy of a tensor."""
        if id(tensor) not in self._copies:
            self._copies[id(tensor)] = tensor, self._copy(tensor.detach())
        return self._copies[id(tensor)][1]

    def _copy(self, tensor: Tensor) -> Tensor:
        plain = type(tensor) is Tensor and tensor.layout == torch.strided and not tensor.is_quantized
        if not plain or tensor.is_conj() or tensor.is_neg():
            return tensor.clone()
        storage, key = tensor.untyped_storage(), storage_of(tensor)
        if key not in self._storages and tensor.is_contiguous() and tensor.nbytes == storage.nbytes():
            copy = tensor.clone()
            self._storages[key] = copy.untyped_storage()
            return copy
        if key not in self._storages:
            self._storages[key] = storage.clone()  # type: ignore[no-untyped-call]
        form = tensor.storage_offset(), tensor.shape, tensor.stride()
        return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(self._storages[key], *form)


def held_state(model: nn.Module, spared: Iterable[nn.Module] = ()) -> HeldState:
    """The buffers and attributes of a model's modules, of tensors and containers shallow copies; its buffers alone."""
    ignored, copies = set(spared), TensorCopies()

    def copied(value: Any) -> Any:
        if isinstance(value, Tensor):
            return copies.of(value)
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


# ---------------------------------------------------------------- copies of all that a model holds


def twin_of(model: nn.Module, memo: Memo | None = None) -> nn.Module:
    """A deep copy of a model, also where hooks leave tensors with a history in it, as `nn.utils.weight_norm` does.

    What Python cannot copy, such as a lock, is shared. `memo` has what stands for an object of the model, by its id, as
    for `copy.deepcopy`.
    """
    memo = dict(memo or {})
    graphs = [module for module in model.modules() if isinstance(module, fx.GraphModule)]  # these copy themselves
    inside = {part for graph in graphs for part in graph.modules()}
    modules = [module for module in model.modules() if module not in inside]
    memo |= {id(module): type(module).__new__(type(module)) for module in modules}
    for module, attributes in _copies(model, modules, memo, _copy_of):
        memo[id(module)].__dict__.update(attributes)
    with _TensorCopies(_copy_of):
        return copy.deepcopy(model, memo)


@contextmanager
def untouched(model: nn.Module, *, training: bool | None = None) -> Iterator[Callable[[_T], _T]]:
    """Let a model hold copies of all that it has; on exit, also after an error, they are thrown away.

    Parameters, buffers, gradients, Python attributes, hooks and modes are then what they were, and random generators go
    on from where they were. What Python cannot copy, such as an iterator or an open file, is used as it is, and so are
    global variables. Hooks of tensors do not run.

    With `training` the model is as it trains, which is as it is if it is in training mode, or in evaluation mode.

    Yields a function that copies something else, whose tensors share memory with the copies as they did with the model.
    """
    devices = sorted({tensor.device.index for tensor in model.parameters() if tensor.device.type == "cuda"})
    with same_random(devices), _holding_copies(model, _copy_of) as memo:

        def copied(value: _T) -> _T:
            with _TensorCopies(_copy_of):
                return _copied(value, memo)

        if training is not None and not (training and model.training):
            model.train(training)
        yield copied


@contextmanager
def same_attributes(model: nn.Module) -> Iterator[dict[int, Tensor]]:
    """As `untouched`, but copies of tensors share memory with the model's, and torch's generators go on.

    For tracing, and for forward passes after which buffers are put back. Trained tensors that are no parameters are
    not copied, so that gradients of what is computed from them flow to the model.

    Yields the model's tensors by the ids of their copies.
    """
    originals: dict[int, Tensor] = {}

    def shared(tensor: Tensor, memo: Memo) -> Tensor:
        if tensor.requires_grad and not isinstance(tensor, nn.Parameter):
            return tensor
        alias = like_tensor(tensor, tensor.detach())
        originals[id(alias)] = tensor
        return alias

    with _same_random_of_python(), _holding_copies(model, shared):
        yield originals


@contextmanager
def _holding_copies(model: nn.Module, copy_of: Callable[[Tensor, Memo], Tensor]) -> Iterator[Memo]:
    """Let a model's modules hold copies of their attributes, of tensors those of a function; yields all by id."""
    before = [(module, module.training, dict(vars(module))) for module in model.modules()]
    memo: Memo = {id(module): module for module, *_ in before}
    try:
        for module, attributes in _copies(model, [module for module, *_ in before], memo, copy_of):
            vars(module).update(attributes)
        yield memo
    finally:
        for module, flag, _ in before:
            if isinstance(module, fx.GraphModule) and module.training != flag:
                module.train(flag)  # a stage has a graph for each mode
        for module, _, held in before:
            vars(module).clear()
            vars(module).update(held)


def _copies(
    model: nn.Module, modules: Iterable[nn.Module], memo: Memo, copy_of: Callable[[Tensor, Memo], Tensor]
) -> list[tuple[nn.Module, dict[str, Any]]]:
    """Copies of the attributes of modules, for which the memo has what stands for them."""
    memo[id(memo)] = []  # where `copy.deepcopy` keeps temporary objects alive, whose ids are in the memo
    for parameter in model.parameters():  # which copy themselves else
        if id(parameter) not in memo:
            memo[id(parameter)] = copy_of(parameter, memo)
    with _TensorCopies(copy_of):
        return [
            (module, {name: _copied(value, memo) for name, value in _attributes(module).items()}) for module in modules
        ]


def _attributes(module: nn.Module) -> dict[str, Any]:
    """What a module holds that can be replaced; not what describes the graph of a stage."""
    has_graph = isinstance(module, fx.GraphModule)
    return {name: value for name, value in vars(module).items() if not has_graph or name in MODULE_ATTRIBUTES}


class _TensorCopies(TorchFunctionMode):
    """Inside, `copy.deepcopy` copies tensors by a function, wherever they are held."""

    def __init__(self, copy_of: Callable[[Tensor, Memo], Tensor]) -> None:
        super().__init__()
        self._copy_of = copy_of

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        function = self._copy_of if func is Tensor.__deepcopy__ else func
        return function(*args, **(kwargs or {}))


def _copied(value: _T, memo: Memo, depth: int = _MOST_DEPTH) -> _T:
    """A deep copy, which shares what cannot be copied: first at once, then with its parts one by one."""
    if type(value) in (dict, OrderedDict) and not value:  # as most of a module's are
        memo.setdefault(id(value), copy.copy(value))
    for parts in ((), _parts(value) if depth else ()):
        for part in parts:
            memo[id(part)] = _copied(part, memo, depth - 1)
        size = len(memo)
        try:
            return copy.deepcopy(value, memo)
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception:  # a copy is made by the user's code, which may raise anything
            while len(memo) > size:  # of what may be unfinished
                memo.popitem()
    return value


def _parts(value: Any) -> Iterable[Any]:
    """What a container, a bound method or an object holds."""
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, (list, tuple, deque)):
        return list(value)
    if isinstance(value, MethodType):
        return [value.__self__]
    return [] if isinstance(value, (type, nn.Module, Tensor)) else list(getattr(value, "__dict__", {}).values())


def _copy_of(tensor: Tensor, memo: Memo) -> Tensor:
    """A copy that shares memory with the copies of what the tensor shares memory with."""
    if type(tensor) not in (Tensor, nn.Parameter):
        return copy.deepcopy(tensor if tensor.is_leaf else tensor.detach(), memo)
    return like_tensor(tensor, copy.deepcopy(tensor.detach(), memo))


def like_tensor(tensor: Tensor, values: Tensor) -> Tensor:
    """Values as a parameter or trained, where another tensor is, and with its Python attributes; not its hooks."""
    if isinstance(tensor, nn.Parameter):
        values = nn.Parameter(values, tensor.requires_grad)
    elif tensor.is_leaf:
        values.requires_grad_(tensor.requires_grad)
    values.__dict__.update(vars(tensor))
    return values
