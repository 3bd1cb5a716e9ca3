"""A model of which a worker holds some tensors only.

A model that is larger than a worker cannot be built there and cut afterwards. Here its constructor runs under a mode of
torch in which large new tensors are on the meta device: they have a shape and no memory. That is enough to trace the
model and to cut it. Once it is known which tensors the worker needs, the constructor runs again from the same state of
the random generators; now these tensors are real. What would have been drawn for any other one is drawn into scratch
memory, so that all generators give the numbers that they give to the whole model: initial weights are equal to the bit,
and the memory needed at most is the worker's own share and the largest single tensor. (Deferred initialisation, as
torchdistX had it; that recorded operations and replayed them, which does not know how to skip random numbers.)

Small tensors are real in both passes. A constructor may read them, for instance a list of drop rates made by
`torch.linspace`. One that reads the values of a large tensor cannot be deferred.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from hybridpar.errors import UsageError
from hybridpar.models.random_state import random_state, restore_random_state, same_random
from hybridpar.models.state_dicts import tensors_of

_T = TypeVar("_T")

#: Bytes of a model's parameters and buffers up to which a worker may hold it all, so that it can be measured.
MEASURED_BYTES = 128 << 20

#: Elements from which on a new tensor is on the meta device.
LARGE = 4096

_CPU, _META = torch.device("cpu"), torch.device("meta")

#: Operations that make a tensor from nothing. Others than these start from values, which are small or already large.
_FACTORIES = frozenset(
    f"aten::{name}"
    for stem in ("empty", "zeros", "ones", "full", "rand", "randn", "randint")
    for name in (stem, f"{stem}_like", f"new_{stem}")
) | {"aten::empty_strided", "aten::new_empty_strided"}

#: Random operations that draw as many numbers whatever the values of the tensor are.
_DRAWS = frozenset(
    f"aten::{name}_"
    for name in ("normal", "uniform", "random", "bernoulli", "exponential", "cauchy", "log_normal", "geometric")
)


class CannotDeferError(UsageError):
    """A model can only be built as a whole."""


#: Functions of `torch.nn.init` that draw until values are right, or read them; on the meta device they do nothing.
_LOOPS = ("_no_grad_trunc_normal_", "dirac_", "orthogonal_", "sparse_")

_IS_META: Any = vars(torch._C.TensorBase)["is_meta"].__get__


class _Deferring(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, large new tensors are on the meta device, and counted in the order in which they are made."""

    def __init__(self, real: Collection[int] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._real = real
        self._count = 0
        self._is_paused = False
        #: Large tensors that went into a storage, and the storage itself, so that its address is not used again.
        self._made_of: dict[int, tuple[set[int], Any]] = {}

    def made_of(self, tensor: Tensor) -> set[int]:
        """Numbers of the large tensors that a tensor was made of, itself included."""
        return self._made_of.get(storage_of(tensor), (set(), None))[0]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        if self._is_paused:
            return func(*args, **kwargs)
        if name in _FACTORIES and torch.device(kwargs.get("device") or _CPU).type == "cpu":
            return self._make(func, args, kwargs)
        given = _tensors_in((args, kwargs))
        if not any(map(_on_meta, given)):
            return func(*args, **kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags:
            return self._draw(func, name, args, kwargs)
        written = [
            tensor
            for place, argument in enumerate(func._schema.arguments)
            if argument.is_write
            for tensor in _tensors_in(args[place] if place < len(args) else kwargs.get(argument.name))
        ]
        if not all(map(_on_meta, written)):
            raise NotImplementedError(f"{func} writes values of a large tensor into a small one")
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": _META}
        result = func(*_to_meta(args), **_to_meta(kwargs))
        if self._real is None:
            numbers = set[int]().union(*map(self.made_of, given))
            for tensor in (*_tensors_in(result), *written):
                self._note(tensor, numbers)
        return result

    def _note(self, tensor: Tensor, numbers: set[int]) -> None:
        self._made_of[storage_of(tensor)] = self.made_of(tensor) | numbers, tensor.untyped_storage()

    def _make(self, func: Any, args: Any, kwargs: Any) -> Any:
        shape = func(*_to_meta(args), **{**kwargs, "device": _META})
        if shape.numel() < LARGE or not shape.is_floating_point():  # integers index, and may be read
            return func(*args, **{**kwargs, "device": _CPU})
        number, self._count = self._count, self._count + 1
        if self._real is None:
            self._note(shape, {number})
        elif number in self._real:
            return func(*args, **{**kwargs, "device": _CPU})
        elif torch.Tag.nondeterministic_seeded in func.tags:
            func(*args, **{**kwargs, "device": _CPU})
        return shape

    def _draw(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        if name not in _DRAWS:
            raise NotImplementedError(f"how much {func} draws depends on values")
        if self._real is not None:
            func(_scratch(args[0]), *args[1:], **kwargs)
        return args[0]

    @contextmanager
    def building(self) -> Iterator[None]:
        """Inside, a model is built: the mode is on, and functions of torch that leave a meta tensor as it is do not."""

        def patched(initialise: Callable[..., Tensor]) -> Callable[..., Tensor]:
            def run(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
                self._is_paused = True
                try:
                    if not _on_meta(tensor):
                        return initialise(tensor, *args, **kwargs)
                    if self._real is not None:
                        initialise(_scratch(tensor), *args, **kwargs)
                    return tensor
                finally:
                    self._is_paused = False

            return run

        before = {name: getattr(nn.init, name) for name in _LOOPS}
        try:
            for name, function in before.items():
                setattr(nn.init, name, patched(function))
            with _NotMeta(), self:
                yield
        finally:
            for name, function in before.items():
                setattr(nn.init, name, function)


class _NotMeta(TorchFunctionMode):
    """Inside, no tensor says that it is on the meta device: code that then skips it would draw nothing for it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return False if func == _IS_META else func(*args, **(kwargs or {}))


def _on_meta(tensor: Tensor) -> bool:
    return tensor.device.type == "meta"


def _scratch(tensor: Tensor) -> Tensor:
    """Memory of the form of a tensor that has none: how numbers are drawn depends on strides."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=_CPU)


def _tensors_in(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _to_meta(value: Any) -> Any:
    return tree_map_only(Tensor, lambda one: one if _on_meta(one) else torch.empty_like(one, device=_META), value)


class DeferredModel:
    """A model without memory, and how some of its tensors get their values.

    Args:
        factory: Builds the model, on the CPU, in the same way whenever it is called in the same state of the random
            generators; in the state that they have now.

    Attributes:
        module: The model, on the meta device but for what `fill` has made.

    Raises:
        CannotDeferError: The factory needs values of a large tensor, or it fails; or the model holds tensors where they
            would not be found, or parts of one tensor under two names.
    """

    def __init__(self, factory: Callable[[], nn.Module]) -> None:
        self._factory = factory
        self._state = random_state()
        mode = _Deferring()
        self.module = self._build(mode)
        _check_held(self.module)
        self._made_of = {name: mode.made_of(held[key]) for name, held, key in places(self.module)}
        self._put: Callable[[nn.Module], object] | None = None
        on_meta: dict[int, Tensor] = {}
        for _, held, key in places(self.module):
            held[key] = on_meta.setdefault(id(held[key]), like_tensor(held[key], held[key].detach().to(_META)))

    def fill(self, names: Iterable[str], device: torch.device = _CPU) -> None:
        """Give some tensors of the model their initial values; other tensors keep those that they have.

        Args:
            names: Of parameters, buffers, and tensors that are plain attributes, as `places` gives them.
            device: Where they are wanted.
        """
        wanted = set(names)
        starts = {} if self._put is None else self._starts(self._put)[1]
        drawn = {name for name, held, key in places(self.module) if name in wanted and id(held[key]) not in starts}
        made = self._build(_Deferring(set[int]().union(*(self._made_of[name] for name in drawn))))
        values = {name: held[key] for name, held, key in places(made)}
        filled: dict[int, Tensor] = {}
        for name, held, key in places(self.module):
            if name in wanted and id(held[key]) not in filled:
                start = starts.get(id(held[key]))
                filled[id(held[key])] = like_tensor(
                    held[key],
                    _placed(values[name], held[key], device) if start is None else _copied(start, held[key], device),
                )
        for _, held, key in places(self.module):  # under all of its names
            held[key] = filled.get(id(held[key]), held[key])

    def start_from(self, put: Callable[[nn.Module], _T]) -> _T:
        """Let `fill` give tensors the values of others than the constructor's.

        Args:
            put: Replaces tensors of the model that it is given, for instance by memory-mapped ones of a file. Called
                now, and whenever tensors are filled.

        Returns:
            What it returned.
        """
        found, _ = self._starts(put)
        self._put = put
        return found

    def started(self) -> nn.Module:
        """The model to be used and not trained: with the tensors of `start_from` themselves, the others as constructed.

        Memory-mapped tensors stay so, but for those of another dtype, layout or alignment, which are copied.

        Returns:
            The module; it is filled.

        Raises:
            CannotDeferError: A parameter or a saved buffer got no values: a module takes them in a way of its own.
        """
        starts = {} if self._put is None else self._starts(self._put)[1]
        if any(id(one) not in starts or starts[id(one)].is_meta for one in saved_tensors(self.module)):
            raise CannotDeferError(
                "the model cannot be built without memory: a module of it does not take the tensors of a state dict",
                "Its `_load_from_state_dict` copies them into tensors of its own.",
                "Let it call that of `nn.Module`, which knows `assign=True`.",
            )
        lacking = [name for name, held, key in places(self.module) if id(held[key]) not in starts]
        if lacking:
            self.fill(lacking)
        given: dict[int, Tensor] = {}
        for _, held, key in places(self.module):
            value = held[key]
            if (start := starts.get(id(value))) is not None:
                # Where memory is not aligned as torch allocates it, libraries round sums in another way.
                fits = (start.dtype, start.stride(), start.data_ptr() % 64) == (value.dtype, value.stride(), 0)
                given[id(value)] = like_tensor(value, start if fits else _copied(start, value, _CPU))
        for _, held, key in places(self.module):  # under all of its names
            held[key] = given.get(id(held[key]), held[key])
        return self.module

    def _starts(self, put: Callable[[nn.Module], _T]) -> tuple[_T, dict[int, Tensor]]:
        """What a function returns, and what it replaces tensors by, under the ids of these."""
        before = [(held, key, held[key]) for _, held, key in places(self.module)]
        try:
            found = put(self.module)
            return found, {id(value): held[key].detach() for held, key, value in before if held[key] is not value}
        finally:
            for held, key, value in before:
                held[key] = value

    @property
    def nbytes(self) -> int:
        """Bytes of all parameters and buffers."""
        return sum(tensor.nbytes for tensor in tensors_of(self.module).values())

    def whole(self) -> nn.Module:
        """The whole model with its initial values and the modes of `module`, to measure it; it shares nothing."""
        with same_random():
            restore_random_state(self._state)
            model = self._factory()
        for twin, module in zip(model.modules(), self.module.modules(), strict=True):
            twin.training = module.training
        return model

    def _build(self, mode: _Deferring) -> nn.Module:
        try:
            with same_random():
                restore_random_state(self._state)
                with mode.building():
                    return self._factory()
        except Exception as error:  # the constructor's own code, which may raise anything
            said = str(error).strip().partition("\n")[0]
            raise CannotDeferError(
                f"the model cannot be built without memory: {_constructor(error.__traceback__)} needs the values of a "
                f"large tensor ({type(error).__name__}: {said})",
                "A worker that holds its own stages only builds the model on the meta device first.",
                "Compute that from numbers or small tensors, or fill it in later.",
            ) from error


def places(module: nn.Module) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Where a module and those in it hold tensors."""
    for path, one in module.named_modules():
        for held in (one._parameters, one._buffers, vars(one)):
            for key, value in list(held.items()):
                if isinstance(value, Tensor):
                    yield f"{path}.{key}" if path else key, held, key


def saved_tensors(module: nn.Module) -> list[Tensor]:
    """Parameters and persistent buffers of a module and those in it; a tensor with two names comes twice."""
    return [
        one
        for part in module.modules()
        for one in (
            *part._parameters.values(),
            *(one for key, one in part._buffers.items() if key not in part._non_persistent_buffers_set),
        )
        if one is not None
    ]


def _check_held(module: nn.Module) -> None:
    """Refuse tensors that are not found when others are replaced, or that would no longer share memory then."""
    found = {storage_of(held[key]) for _, held, key in places(module)}
    saved = {storage_of(one): one for one in saved_tensors(module)}
    for path, one in module.named_modules():
        for key, value in vars(one).items():
            inside = [] if key in ("_parameters", "_buffers") or isinstance(value, Tensor) else _tensors_in(value)
            if any(_on_meta(each) or storage_of(each) in found for each in inside):
                raise _hidden(one, f"{path}.{key}" if path else key, "in a list or dictionary")
    for name, held, key in places(module):
        if saved.get(storage_of(held[key]), held[key]) is not held[key]:
            raise _hidden(module, name, "that shares memory with another")


def _hidden(module: nn.Module, name: str, problem: str) -> CannotDeferError:
    return CannotDeferError(
        f"the model cannot be built without memory: {type(module).__name__} holds a tensor {problem}, {name}",
        "Only parameters, buffers and attributes that are tensors are found when they get their values.",
        "Register each as a buffer or a parameter, or compute it in `forward`.",
    )


def storage_of(tensor: Tensor) -> int:
    """What tells the storage of a tensor from others that exist, also where it has no address."""
    return int(tensor.untyped_storage()._cdata)


def is_deferred(module: nn.Module) -> bool:
    """Whether a module holds tensors that have a shape only."""
    return any(held[key].is_meta for _, held, key in places(module))


@contextmanager
def imagined(module: nn.Module, device: torch.device) -> Iterator[Any]:
    """Inside, a module runs without memory and without computing: its tensors have a shape, a type and a device."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    before = [(held, key, held[key]) for _, held, key in places(module)]
    fakes: dict[int, Tensor] = {}
    with mode:
        for held, key, value in before:
            if id(value) not in fakes:
                empty = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
                fakes[id(value)] = like_tensor(value, empty)
            held[key] = fakes[id(value)]
        try:
            yield mode
        finally:
            for held, key, value in before:
                held[key] = value


def like_tensor(tensor: Tensor, values: Tensor) -> Tensor:
    """Values as a parameter or trained, where another tensor is, and with its Python attributes; not its hooks."""
    if isinstance(tensor, nn.Parameter):
        values = nn.Parameter(values, tensor.requires_grad)
    elif tensor.is_leaf:
        values.requires_grad_(tensor.requires_grad)
    values.__dict__.update(vars(tensor))
    return values


def _placed(values: Tensor, like: Tensor, device: torch.device) -> Tensor:
    """Values on a device, laid out as another tensor is."""
    return values.detach().to(device) if values.stride() == like.stride() else _copied(values, like, device)


def _copied(values: Tensor, like: Tensor, device: torch.device) -> Tensor:
    placed = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device)
    return placed.copy_(values.detach())


def _constructor(trace: TracebackType | None) -> str:
    """The class of the innermost module that was being built."""
    found = "its factory"
    while trace is not None:
        one = trace.tb_frame.f_locals.get("self")
        if isinstance(one, nn.Module):
            found = type(one).__name__
        trace = trace.tb_next
    return found
