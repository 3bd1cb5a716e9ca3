"""Fuses the BatchNorm layers of a model with the activations behind them, in place, and undoes it.

BatchNorm layers, and the activations behind them, are found on the model's graph. A layer gets another class with the
same parameters, buffers and names, so `state_dict`, hooks and `isinstance` go on working; the activation that it now
does itself gets a class that passes its input on. That is done only where nothing else sees what lies between the two,
and where the activation is called there alone; otherwise, and in a model that cannot be traced, the norm is alone.

A fused layer runs on the kernels where these can compute it and its tensor is large enough to gain by that.

Copies and pickles are plain layers of the original classes.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from hybridpar.codegen.cache import wanted
from hybridpar.errors import UsageError
from hybridpar.tvm_kernels import norm_kernels
from hybridpar.tvm_kernels.batch_norm_act import STOCK, fused_batch_norm_act, kernels_fit, stock_batch_norm_act
from hybridpar.tvm_kernels.shapes import Layout, NormShape

#: Values of a tensor from which on the kernels are used on one thread; on smaller ones calls take most of the time.
LEAST_VALUES = 1 << 16
#: How many times as many it takes where threads share the work, who are woken for each of its parts.
SHARED = 8

_KINDS: dict[type, str] = {nn.ReLU: "relu", nn.ReLU6: "relu6", nn.SiLU: "silu"}

#: Where a module keeps what others want to be called with.
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


@dataclass(frozen=True)
class NormPair:
    """A BatchNorm layer and what follows it.

    Attributes:
        norm: The layer's name in the model.
        activation: The name of the activation that is to be done with it; None for none.
        act: What kind that is.
    """

    norm: str
    activation: str | None = None
    act: str = "none"


def fuse_norms(model: nn.Module) -> list[NormPair]:
    """Let BatchNorm layers do the activations behind them, in place.

    Args:
        model: Any model.

    Returns:
        What was swapped; layers that are swapped already are left as they are.
    """
    pairs = find_norms(model)
    for pair in pairs:
        norm: Any = model.get_submodule(pair.norm)
        _swap(norm, _FusedForward, "_fused", pair.act)
        if pair.activation is not None:
            _swap(model.get_submodule(pair.activation), _PassedForward, "_norm", weakref.ref(norm))
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
    return {name: module._fused for name, module in model.named_modules() if isinstance(module, _FusedForward)}


def find_norms(model: nn.Module) -> list[NormPair]:
    """Find the BatchNorm2d layers of a model that can be fused, and the activations behind them."""
    norms = [NormPair(name) for name, module in model.named_modules() if _is_norm(module)]
    traced = _on_graph(model) if norms else None
    return norms if traced is None else traced


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
    trained, evaluated = (_of_graph(graph, model) for graph in graphs)
    pairs = (trained | evaluated).items()
    return [pair if trained.get(name, pair) == pair else NormPair(name) for name, pair in pairs]


@contextmanager
def _without_hooks(model: nn.Module) -> Iterator[None]:
    """Context in which no hooks are called: they expect tensors."""
    registered = [(vars(module), key, vars(module)[key]) for module in model.modules() for key in _HOOKS]
    for attributes, key, hooks in registered:
        attributes[key] = type(hooks)()
    try:
        yield
    finally:
        for attributes, key, hooks in registered:
            attributes[key] = hooks


def _of_graph(graph: fx.Graph, model: nn.Module) -> dict[str, NormPair]:
    calls = Counter(str(node.target) for node in graph.nodes if node.op == "call_module")
    pairs = {}
    for node in graph.nodes:
        name = str(node.target)
        if node.op != "call_module" or not _is_norm(model.get_submodule(name)):
            continue
        after = next(iter(node.users)) if len(node.users) == 1 else None
        pairs[name] = NormPair(name)
        if calls[name] == 1 and after is not None and after.op == "call_module":
            target = str(after.target)
            kind = _KINDS.get(type(model.get_submodule(target)))
            if kind is not None and calls[target] == 1 and _unseen(model, name, target):
                pairs[name] = NormPair(name, target, kind)
    return pairs


def _is_norm(module: nn.Module) -> bool:
    return isinstance(module, nn.BatchNorm2d) and type(module).forward is _BatchNorm.forward


def _unseen(model: nn.Module, first: str, second: str) -> bool:
    """Whether no hook looks at what lies between the two: of themselves, or of a module that holds one of them only."""
    around = _paths(first) ^ _paths(second)
    return not any(vars(model.get_submodule(path))[key] for path in around for key in _HOOKS)


def _paths(name: str) -> set[str]:
    """A module's name, and those of all that it is in."""
    parts = name.split(".")
    return {".".join(parts[:depth]) for depth in range(1, len(parts) + 1)}


# ----------------------------------------------------------------------------------------------------------- swapping


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
    _fused: str

    @property
    def kernel_variant(self) -> str:
        """What times of this layer depend on besides torch."""
        return self._fused

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
        six = (input, self.weight, self.bias, mean, variance, training)
        compute = fused_batch_norm_act if _runs_fused(six) else stock_batch_norm_act
        return compute(*six, momentum, self.eps, self._fused)

    def activate(self: Any, output: Tensor) -> Tensor:
        return STOCK[self._fused](output)


def least_values() -> int:
    """Values of a tensor from which on the kernels are used, with the threads that torch has now."""
    return LEAST_VALUES * (1 if torch.get_num_threads() == 1 else SHARED)


def _runs_fused(six: tuple[Tensor, Any, Any, Any, Any, bool]) -> bool:
    """Whether kernels are to do it and can; compilers fuse torch's own operations."""
    x = six[0]
    if torch.compiler.is_compiling() or type(x) is not Tensor or x.numel() < least_values() or not kernels_fit(*six):
        return False
    return not torch._C._are_functorch_transforms_active() and bool(norm_kernels.table())  # last, as loading takes time


def why_stock(shape: NormShape, layout: Layout, device: torch.device, dtype: str) -> str:
    """Why a fused norm runs on torch's operations, before it runs; loads the kernels where it does not."""
    if not wanted():
        return "HYBRIDPAR_KERNELS is off"
    if (device.type, layout, dtype) != ("cpu", Layout.CHANNELS_LAST, "float32"):
        return "there are kernels for float32 in channels_last on a CPU alone"
    if shape.rows * shape.channels < (least := least_values()):
        return f"kernels gain nothing below {least:,} values"
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
