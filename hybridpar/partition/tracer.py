"""The tracer, and what it makes: `torch.fx` with checks for what it does not record.

Kept in the graph, as nodes of their own: calls of custom `autograd.Function`s, whose backward pass fx would replace by
that of their forward pass, and `no_grad` blocks, whose results are detached.

Noted, for the comparison with the model to decide on: blocks under `autocast`, and under hooks for saved tensors, which
is how `torch.utils.checkpoint` works. A graph has neither.

Refused: random numbers of Python and NumPy, new memory for a parameter, and a number or tensor of a module's that is
computed anew in each pass. The graph would have what the trace had.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.autograd.function import FunctionCtx
from torch.fx.proxy import TraceError as FxTraceError
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import CheckpointFunction

from hybridpar.partition.changes import Changes, OutsideGraphError, python_random_state

#: What the code of a module may do that a graph does not have.
AUTOCAST = "runs under autocast"
SAVED = "uses torch.utils.checkpoint, or other hooks for saved tensors"

#: Methods that ask about a tensor, not for its values.
METADATA_METHODS = frozenset(
    {"size", "dim", "numel", "ndimension", "stride", "get_device", "is_floating_point", "element_size"}
)
METADATA = frozenset({"shape", "ndim", "dtype", "device", "layout", "requires_grad", "is_cuda", "itemsize", "nbytes"})
_NUMBERS = METADATA_METHODS | {"item", "tolist"}


@dataclass(frozen=True)
class TracedModel:
    """A model and its graphs.

    Attributes:
        model: The model itself; stages are made of its modules and parameters.
        graph: The graph of a training step's forward pass.
        eval_graph: The graph of evaluation where the modes of modules make a difference to it, else None.
        constants: Tensors that the model made while it was traced, by the attribute name the graph uses for them.
        leaves: Sub-modules kept whole because their inside cannot be traced, or is not all in a graph.
        suspects: What the graphs may lack, by the name of the module whose code does it.
        changes: What forward changes beside its output.
        taken: Names of attributes and tensors whose values the graph of training has as they were.
    """

    model: nn.Module
    graph: fx.Graph
    eval_graph: fx.Graph | None = None
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    leaves: tuple[str, ...] = ()
    suspects: Mapping[str, str] = field(default_factory=dict)
    changes: Changes = field(default_factory=Changes)
    taken: frozenset[str] = frozenset()


def stop_gradient(value: Any) -> Any:
    """What a `no_grad` block makes of the result of an operation: its tensors, detached."""
    return tree_map_only(torch.Tensor, torch.Tensor.detach, value)


class FunctionCall:
    """`apply` of an autograd function, under the function's own name."""

    def __init__(self, function: type[torch.autograd.Function]) -> None:
        self.function = function
        self.__name__, self.__module__ = function.__name__, function.__module__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Apply it."""
        return self.function.apply(*args, **kwargs)

    def __repr__(self) -> str:
        return f"{self.__module__}.{self.function.__qualname__}"


class ModelTracer(fx.Tracer):
    """An fx tracer that keeps more of a model than fx does, and remembers where it failed."""

    def __init__(self, leaves: frozenset[str]) -> None:
        super().__init__()
        self.leaves = leaves
        self.failed: str | None = None
        self.suspects: dict[str, str] = {}
        self._outside = _context()
        self._entered = [("", self._outside)]

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Whether a module is one node; a class can say that it is one operation, as torch's own layers are."""
        leaf = getattr(type(m), "fx_leaf", False) is True
        return leaf or module_qualified_name in self.leaves or super().is_leaf_module(m, module_qualified_name)

    def trace(self, root: Any, concrete_args: dict[str, Any] | None = None) -> fx.Graph:
        """Trace a module; see `torch.fx.Tracer.trace`."""
        with torch.enable_grad(), _functions_as_nodes(self), self._nothing_outside(root):
            return super().trace(root, concrete_args)

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Enter a module, or make a node of it."""
        path = self.path_of_module(m)
        self._entered.append((path, _context()))
        try:
            if self.is_leaf_module(m, path):
                return super().call_module(m, forward, args, kwargs)
            with self._nothing_outside(m):
                return super().call_module(m, forward, args, kwargs)
        except Exception:
            if self.failed is None:
                self.failed = path
            raise
        finally:
            self._entered.pop()

    def create_proxy(self, kind: str, target: Any, args: Any, kwargs: Any, *more: Any, **named: Any) -> fx.Proxy:
        """Record an operation together with the context that it runs in."""
        proxy = super().create_proxy(kind, target, args, kwargs, *more, **named)
        if not kind.startswith("call_"):
            return proxy
        for reason in _context() - self._outside:
            self.suspect(reason)
        if not torch.is_grad_enabled() and not is_number(proxy.node, _NUMBERS):
            return super().create_proxy("call_function", stop_gradient, (proxy,), {})
        return proxy

    def suspect(self, reason: str) -> None:
        """Note that the code of the innermost module that was entered without it does this."""
        owner = next((path for path, entry in reversed(self._entered) if reason not in entry), "")
        self.suspects.setdefault(owner, reason)

    def to_bool(self, obj: fx.Proxy) -> bool:
        """Refuse a branch on what is not known yet."""
        raise FxTraceError(f"a branch or a loop condition depends on {_kind(obj.node)}")

    def iter(self, obj: fx.Proxy) -> Iterator[Any]:
        """Refuse a loop over what is not known yet."""
        raise FxTraceError(f"a loop, or *arguments, cannot be iterated: they depend on {_kind(obj.node)}")

    @contextmanager
    def _nothing_outside(self, module: nn.Module) -> Iterator[None]:
        drawn, memory, before = python_random_state(), _memory(module), dict(vars(module))
        yield
        for name, value in vars(module).items() if module is not self.root else ():
            if isinstance(value, fx.Proxy) and isinstance(before.get(name), (torch.Tensor, int, float)):
                raise OutsideGraphError(f"it computes its attribute {name!r} anew")
        if python_random_state() != drawn:
            raise OutsideGraphError("it draws random numbers of Python or NumPy, which would be the same in every step")
        moved = [name for name, address in _memory(module).items() if memory.get(name) != address]
        if moved:
            raise OutsideGraphError(f"it puts other memory in the place of {moved[0]}.data")


def _memory(module: nn.Module) -> dict[str, int]:
    params = module._parameters.items()
    return {name: param.data_ptr() for name, param in params if param is not None and not param.is_meta}


def _context() -> frozenset[str]:
    """What is switched on around an operation and changes it."""
    contexts = set()
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        contexts.add(AUTOCAST)
    if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
        contexts.add(SAVED)
    return frozenset(contexts)


def _kind(node: fx.Node) -> str:
    """What a value is, for a message: known from the shape of the input, or only from its numbers."""
    if is_number(node):
        return "a tensor's shape or type, which the graph leaves open"
    return "data that is known only when the model runs"


def is_number(node: fx.Node, asked: frozenset[str] = METADATA_METHODS) -> bool:
    """Whether a value is a number or a type: what one of these methods returns, or an attribute, or made of such."""
    if node.op == "call_method":
        return node.target in asked
    if node.op != "call_function":
        return False
    if node.target is getattr:
        return node.args[1] in METADATA
    if getattr(node.target, "__module__", None) not in ("_operator", "builtins", "math"):
        return False
    return all(is_number(source, asked) for source in node.all_input_nodes)


@contextmanager
def _functions_as_nodes(tracer: ModelTracer) -> Iterator[None]:
    """Record calls of custom autograd functions as nodes.

    `apply` of a function is torch's C code, which users keep under names of their own (`reverse = Reverse.apply`). It
    calls `forward` of the class, and that is where the call is seen here.
    """
    replaced: list[tuple[type, Any]] = []
    try:
        for function in _subclasses(torch.autograd.Function):
            known = vars(function).get("forward")
            if isinstance(known, staticmethod):
                replaced.append((function, known))
                function.forward = staticmethod(_recording(tracer, function, known.__func__))  # type: ignore[attr-defined]
        yield
    finally:
        for function, known in replaced:
            function.forward = known  # type: ignore[attr-defined]


def _subclasses(kind: type) -> Iterator[type]:
    subclass: type
    for subclass in type.__subclasses__(kind):
        yield subclass
        yield from _subclasses(subclass)


def _recording(tracer: ModelTracer, function: Any, forward: Callable[..., Any]) -> Callable[..., Any]:
    call = FunctionCall(function)

    def record(*args: Any, **kwargs: Any) -> Any:
        given = args[1:] if args and isinstance(args[0], FunctionCtx) else args
        if not any(isinstance(item, fx.Proxy) for item in (*given, *kwargs.values())):
            return forward(*args, **kwargs)
        with torch.enable_grad():  # apply has switched it off
            if issubclass(function, CheckpointFunction):
                tracer.suspect(SAVED)
                called, _, *rest = given
                return called(*rest)
            return tracer.create_proxy("call_function", call, given, kwargs)

    return record
