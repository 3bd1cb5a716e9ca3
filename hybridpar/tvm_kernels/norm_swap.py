"""Fuses the BatchNorm layers of a model with the activations behind them, in place, and undoes it.

BatchNorm layers, and the activations behind them, are found on the model's graph. A layer gets another class with the
same parameters, buffers and names, so `state_dict`, hooks and `isinstance` go on working; the activation that it now
does itself gets a class that passes its input on. That is done only where nothing else sees what lies between the two.
An activation that is called at several places (ResNet's `self.relu`) goes on working at the others: it is
skipped for tensors that the layer marked as activated, and to apply a rectifier twice changes nothing.

A fused layer runs on the kernels where these can compute it and its tensor is large enough to gain by that.

Copies and pickles are plain layers of the original classes.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from hybridpar.codegen.cache import wanted
from hybridpar.errors import UsageError
from hybridpar.tvm_kernels import norm_kernels
from hybridpar.tvm_kernels.batch_norm_act import STOCK, fused_batch_norm_act, kernels_fit, stock_batch_norm_act
from hybridpar.tvm_kernels.shapes import Layout, NormShape

#: Values of a tensor from which on the kernels are used; on smaller ones calls take most of the time.
LEAST_VALUES = 1 << 16

_KINDS: dict[type, str] = {nn.ReLU: "relu", nn.ReLU6: "relu6", nn.SiLU: "silu"}

#: Where a module keeps what others want to be called with.
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")

#: f(f(z)) = f(z).
_RECTIFIERS = ("relu", "relu6")


@dataclass(frozen=True)
class NormPair:
    """A BatchNorm layer and what follows it.

    Attributes:
        norm: The layer's name in the model.
        activation: The name of the activation that is to be done with it; None for none.
        act: What kind that is.
        shared: Whether the activation is also called elsewhere.
    """

    norm: str
    activation: str | None = None
    act: str = "none"
    shared: bool = False


def fuse_norms(model: nn.Module) -> list[NormPair]:
    """Let BatchNorm layers do the activations behind them, in place.

    Args:
        model: Any model. What cannot be traced is looked at where modules are called one after another.

    Returns:
        What was swapped; layers that are swapped already are left as they are.
    """
    pairs = find_norms(model)
    for pair in pairs:
        norm: Any = model.get_submodule(pair.norm)
        _swap(norm, _FusedForward, "_fused", _Fused(pair.act, pair.shared))
        if pair.activation is not None:
            activation: Any = model.get_submodule(pair.activation)
            if pair.shared:
                if not isinstance(activation, _SharedForward):
                    _swap(activation, _SharedForward, "_act", pair.act)
            else:
                _swap(activation, _PassedForward, "_norm", weakref.ref(norm))
    return pairs


def unfuse_norms(model: nn.Module) -> None:
    """Give all layers their own classes back. Safe to call twice.

    Args:
        model: What `fuse_norms` was given, or any model.

    Raises:
        UsageError: A layer was given yet another class since, and still has it; then nothing is changed.
    """
    swapped: list[Any] = [module for module in model.modules() if isinstance(module, _Swapped)]
    for module in swapped:
        if type(module) not in _classes.values():
            raise UsageError(
                f"{type(module).__name__} was given another class since its activation was fused",
                "Classes are given back in the reverse order.",
                "Let the pool of running statistics release its layers first.",
            )
    for module in swapped:
        del module.__dict__[module._key]
        module.__class__ = _original(type(module))


def fused_norms(model: nn.Module) -> dict[str, str]:
    """The activations that a model's swapped norms compute."""
    return {name: module._fused.act for name, module in model.named_modules() if isinstance(module, _FusedForward)}


def find_norms(model: nn.Module) -> list[NormPair]:
    """Find the BatchNorm2d layers of a model that can be fused, and the activations behind them."""
    if not any(_is_norm(module) for module in model.modules()):
        return []
    found = _on_graph(model)
    return _in_sequence(model) if found is None else found


# ------------------------------------------------------------------------------------------------------------ finding


def _on_graph(model: nn.Module) -> list[NormPair] | None:
    """What the graphs of training and of evaluation agree on; None where the model cannot be traced."""
    flags = [(module, module.training) for module in model.modules()]
    before = set(vars(model))
    graphs: list[fx.Graph] = []
    try:
        with _without_hooks(model):
            for training in (True, False):
                model.train(training)
                graphs.append(fx.Tracer().trace(model))
    except Exception:  # tracing runs the user's code, which may raise anything
        return None
    finally:
        for name in set(vars(model)) - before:  # the tracer leaves constants on the model
            delattr(model, name)
        for module, flag in flags:
            module.training = flag
    found = [_of_graph(graph, model) for graph in graphs]
    names = {**found[0], **found[1]}
    return [
        found[0].get(name, pair) if found[0].get(name, pair) == found[1].get(name, pair) else NormPair(name)
        for name, pair in names.items()
    ]


@contextmanager
def _without_hooks(model: nn.Module) -> Iterator[None]:
    """Context in which no hooks are called: they expect tensors."""
    kept = [(vars(module), key, vars(module)[key]) for module in model.modules() for key in _HOOKS]
    for own, key, hooks in kept:
        own[key] = type(hooks)()
    try:
        yield
    finally:
        for own, key, hooks in kept:
            own[key] = hooks


def _of_graph(graph: fx.Graph, model: nn.Module) -> dict[str, NormPair]:
    calls = Counter(str(node.target) for node in graph.nodes if node.op == "call_module")
    pairs = {}
    for node in graph.nodes:
        name = str(node.target)
        if node.op != "call_module" or not _is_norm(model.get_submodule(name)):
            continue
        after = next(iter(node.users)) if len(node.users) == 1 else None
        pair = NormPair(name)
        if calls[name] == 1 and after is not None and after.op == "call_module":
            target = str(after.target)
            kind, shared = _kind(model.get_submodule(target)), calls[target] > 1
            alone = not shared or kind in _RECTIFIERS
            if kind is not None and alone and _unseen(model, name, target):
                pair = NormPair(name, target, kind, shared)
        pairs[name] = pair
    return pairs


def _in_sequence(model: nn.Module) -> list[NormPair]:
    """Neighbours in `nn.Sequential`, of modules that have one place in the model."""
    places = Counter(id(module) for _, module in model.named_modules(remove_duplicate=False))
    pairs = {name: NormPair(name) for name, module in model.named_modules() if _is_norm(module)}
    for name, module in model.named_modules():
        if not isinstance(module, nn.Sequential) or type(module).forward is not nn.Sequential.forward:
            continue
        children = [(f"{name}.{key}".lstrip("."), child) for key, child in module.named_children()]
        for (own, first), (following, second) in pairwise(children):
            if not places[id(first)] == places[id(second)] == 1 or not _unseen(model, own, following):
                continue
            kind = _kind(second)
            if own in pairs and kind is not None:
                pairs[own] = NormPair(own, following, kind)
    return list(pairs.values())


def _is_norm(module: nn.Module) -> bool:
    return isinstance(module, nn.BatchNorm2d) and type(module).forward is _BatchNorm.forward


def _kind(module: nn.Module) -> str | None:
    if isinstance(module, _SharedForward):
        return str(module._act)
    return _KINDS.get(type(module))


def _unseen(model: nn.Module, first: str, second: str) -> bool:
    """Whether no hook looks at what lies between the two: of themselves, or of a module that holds one of them only."""
    around = _paths(first) ^ _paths(second)
    return not any(vars(model.get_submodule(path))[key] for path in around for key in _HOOKS)


def _paths(name: str) -> set[str]:
    """A module's name, and those of all that it is in."""
    parts = name.split(".")
    return {".".join(parts[:depth]) for depth in range(1, len(parts) + 1)}


# ----------------------------------------------------------------------------------------------------------- swapping


@dataclass(frozen=True)
class _Fused:
    act: str
    #: Whether results are marked as activated, for an activation that is also called elsewhere.
    marks: bool


class _Swapped:
    """Mixed in before a module's class; `_key` names what the module carries in addition."""

    _key: str

    @classmethod
    def reduce_state(cls, state: dict[str, Any]) -> tuple[Any, ...]:
        """The original class, and a state without what was added, for copies and pickles."""
        original = _original(cls)
        return (original.__new__, (original,), {key: value for key, value in state.items() if key != cls._key})

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return self.reduce_state(self.__dict__)


class _FusedForward(_Swapped):
    """A BatchNorm2d that also activates. `normalise` and `activate` are what pooling over micro-batches asks for."""

    _key = "_fused"
    _fused: _Fused

    @property
    def kernel_variant(self) -> str:
        """What times of this layer depend on besides torch."""
        return self._fused.act

    def forward(self: Any, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        momentum = 0.0 if self.momentum is None else self.momentum
        if self.training and self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                momentum = 1.0 / float(self.num_batches_tracked)
        mean, variance = self.running_mean, self.running_var
        by_batch = self.training or (mean is None and variance is None)
        if self.training and not self.track_running_stats:
            mean = variance = None
        result: Tensor = self.normalise(input, mean, variance, by_batch, momentum)
        return result

    def normalise(
        self: Any, input: Tensor, mean: Tensor | None, variance: Tensor | None, training: bool, momentum: float
    ) -> Tensor:
        fused: _Fused = self._fused
        six = (input, self.weight, self.bias, mean, variance, training)
        compute = fused_batch_norm_act if _runs_fused(six) else stock_batch_norm_act
        return self._marked(compute(*six, momentum, self.eps, fused.act))  # type: ignore[no-any-return]

    def activate(self: Any, output: Tensor) -> Tensor:
        fused: _Fused = self._fused
        return self._marked(STOCK[fused.act](output))  # type: ignore[no-any-return]

    def _marked(self, output: Tensor) -> Tensor:
        if self._fused.marks and not torch.compiler.is_compiling():
            output._activated = (self._fused.act, output._version)  # type: ignore[attr-defined]
        return output


def _runs_fused(six: tuple[Tensor, Any, Any, Any, Any, bool]) -> bool:
    """Whether kernels are to do it and can; compilers fuse torch's own operations."""
    x = six[0]
    if torch.compiler.is_compiling() or type(x) is not Tensor or x.numel() < LEAST_VALUES or not kernels_fit(*six):
        return False
    return not torch._C._are_functorch_transforms_active() and bool(norm_kernels.table())  # last, as loading takes time


def why_stock(shape: NormShape, layout: Layout, device: torch.device, dtype: str) -> str:
    """Why a fused norm runs on torch's operations, before it runs; loads the kernels where it does not."""
    if not wanted():
        return "HYBRIDPAR_KERNELS is off"
    if (device.type, layout, dtype) != ("cpu", Layout.CHANNELS_LAST, "float32"):
        return "there are kernels for float32 in channels_last on a CPU alone"
    if shape.rows * shape.channels < LEAST_VALUES:
        return f"kernels gain nothing below {LEAST_VALUES:,} values"
    return "" if norm_kernels.table() else "there are no kernels here; see the log for why"


class _PassedForward(_Swapped):
    """An activation that its norm computes. Where the norm was taken out of the model, it activates again."""

    _key = "_norm"
    _norm: weakref.ref[nn.Module]

    def forward(self: Any, input: Tensor) -> Tensor:
        if isinstance(self._norm(), _FusedForward):
            return input
        result: Tensor = super().forward(input)  # type: ignore[misc]
        return result


class _SharedForward(_Swapped):
    """A rectifier that skips tensors that are marked as activated and have not been changed since."""

    _key = "_act"
    _act: str

    def forward(self: Any, input: Tensor) -> Tensor:
        if not torch.compiler.is_compiling() and getattr(input, "_activated", None) == (self._act, input._version):
            return input
        result: Tensor = super().forward(input)  # type: ignore[misc]
        return result


_classes: dict[tuple[type, type], type] = {}


def _swap(module: Any, mixin: type[_Swapped], key: str, value: Any) -> None:
    original = type(module)
    if (mixin, original) not in _classes:
        made = type(original.__name__, (mixin, original), {})
        # Tracers tell leaves by their module.
        made.__qualname__, made.__module__ = original.__qualname__, original.__module__
        _classes[mixin, original] = made
    module.__dict__[key] = value
    module.__class__ = _classes[mixin, original]


def _original(swapped: type) -> type:
    return next(base for base in swapped.__mro__ if issubclass(base, nn.Module) and not issubclass(base, _Swapped))
