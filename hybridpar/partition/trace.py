"""Why: a model is cut on its graph, and the graph must come from the model as the user wrote it.

Tracing goes down a ladder. First `torch.fx` with its usual leaves. Where a sub-module cannot be traced (its control
flow depends on data, or it changes state of its own), once more with that sub-module kept whole. Where the model itself
cannot be traced but only calls modules one after another, the order of these calls is the graph, and it is checked
against the model.

`torch.fx` and not `torch.export`, because export burns the mode in: an exported stage keeps using batch statistics
after `eval()`. With fx, BatchNorm and dropout stay calls of the model's own modules. Where the *graphs* of training
and evaluation differ (auxiliary heads), both are traced.
"""

from __future__ import annotations

import inspect
import linecache
import os
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import fx, nn
from torch.nn.parameter import is_lazy

from hybridpar.errors import TraceError, UsageError
from hybridpar.partition.chain import module_order_graph
from hybridpar.partition.state import OutsideGraphError, traceable_only

Method = Literal["fx", "fx with leaves", "module order"]


@dataclass(frozen=True)
class TracedModel:
    """A model and its graphs.

    Attributes:
        model: The model itself; stages are made of its modules and parameters.
        graph: The graph of a training step's forward pass.
        eval_graph: The graph of evaluation where it is another one, else None.
        constants: Tensors that the model made while it was traced, by the attribute name the graph uses for them.
        leaves: Sub-modules kept whole because their inside cannot be traced.
        method: Which rung of the ladder succeeded.
    """

    model: nn.Module
    graph: fx.Graph
    eval_graph: fx.Graph | None = None
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    leaves: tuple[str, ...] = ()
    method: Method = "fx"


class _LadderTracer(fx.Tracer):
    """An fx tracer with extra leaves that remembers where it failed."""

    def __init__(self, whole: frozenset[str]) -> None:
        super().__init__()
        self.whole = whole
        self.failed: str | None = None

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        # A class can say that it is one operation, as torch's own layers are.
        leaf = getattr(type(m), "fx_leaf", False) is True
        return leaf or module_qualified_name in self.whole or super().is_leaf_module(m, module_qualified_name)

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        try:
            return super().call_module(m, forward, args, kwargs)
        except Exception:
            if self.failed is None:
                self.failed = self.path_of_module(m)
            raise


def trace_model(model: nn.Module, inputs: Sequence[torch.Tensor] = ()) -> TracedModel:
    """Trace a model for training and for evaluation.

    Args:
        model: Any module; it is not changed.
        inputs: Example inputs. Arguments of `forward` beyond them keep their defaults. Needed for the last rung of
            the ladder, which runs the model.

    Raises:
        TraceError: No rung of the ladder can trace the model. The message names the module and the operation.
        UsageError: The model refuses the inputs.
    """
    _require_plain(model)
    flags = [(module, module.training) for module in model.modules()]
    try:
        model.train()
        trained = _trace_one_mode(model, inputs)
        if trained.method == "module order":
            return trained
        model.eval()
        # What training keeps whole stays whole, so that the graphs differ only where the model does.
        evaluated = _trace_one_mode(model, inputs, frozenset(trained.leaves))
    finally:
        for module, flag in flags:
            module.training = flag
    constants = {**trained.constants, **_apart(evaluated, trained.constants)}
    same = _canonical(trained.graph) == _canonical(evaluated.graph)
    return TracedModel(
        model,
        trained.graph,
        None if same else evaluated.graph,
        trained.constants if same else constants,
        tuple(sorted({*trained.leaves, *evaluated.leaves})),
        trained.method,
    )


def _require_plain(model: nn.Module) -> None:
    """Refuse what wraps a model and hides it, and what has no shapes yet."""
    inner = getattr(model, "_orig_mod", None)  # torch.compile
    if isinstance(inner, nn.Module) or isinstance(model, torch.jit.ScriptModule):
        kind = "compiled" if isinstance(inner, nn.Module) else "scripted"
        raise TraceError(
            f"{type(model).__name__} is a {kind} model",
            "Its operations are hidden inside; a graph is made from the model as it was written.",
            f"Give the model before it was {kind}; its stages can be compiled.",
        )
    lazy = next((name for name, parameter in model.named_parameters() if is_lazy(parameter)), None)
    if lazy is not None:
        raise TraceError(
            f"{lazy} has no shape yet",
            "Lazy parameters get their shape when the model first runs.",
            "Run the model once on an example, then partition it.",
        )


def _trace_one_mode(
    model: nn.Module, inputs: Sequence[torch.Tensor], whole: frozenset[str] = frozenset()
) -> TracedModel:
    first_error: tuple[Exception, str] | None = None
    while True:
        tracer = _LadderTracer(whole)
        before = set(vars(model))
        try:
            with traceable_only(model):
                graph = tracer.trace(model, _defaults_beyond(model, inputs))
        except UsageError:
            raise
        except Exception as error:  # tracing runs the user's code, which may raise anything
            if first_error is None:
                first_error = error, tracer.failed or ""
            failed = tracer.failed
            if failed is None and isinstance(error, OutsideGraphError):
                raise _explain(model, error, "") from error  # the order of its modules does not show it either
        else:
            _drop_defaults(graph, len(inputs))
            constants = {name: getattr(model, name) for name in set(vars(model)) - before}
            return TracedModel(
                model,
                graph,
                constants=constants,
                leaves=tuple(sorted(whole)),
                method="fx with leaves" if whole else "fx",
            )
        finally:
            # The tracer stores constants on the model; the model must stay the user's.
            for name in set(vars(model)) - before:
                delattr(model, name)
        if failed is None or failed in whole:
            break
        whole = whole | {failed}
    try:
        ordered = module_order_graph(model, inputs) if inputs else None
    except Exception as error:  # the model does not run at all, whether traced or not
        raise _refused(model, inputs, error) from error
    if ordered is not None:
        return TracedModel(model, ordered, method="module order")
    raise _explain(model, *first_error) from first_error[0]


def _defaults_beyond(model: nn.Module, inputs: Sequence[torch.Tensor]) -> dict[str, Any] | None:
    """Default values of the arguments that the caller does not give."""
    if not inputs:
        return None
    parameters = [
        parameter
        for parameter in inspect.signature(model.forward).parameters.values()
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    beyond = {parameter.name: parameter.default for parameter in parameters[len(inputs) :]}
    missing = [name for name, default in beyond.items() if default is inspect.Parameter.empty]
    if missing:
        raise TraceError(
            f"{type(model).__name__}.forward needs {missing[0]!r}, but only {len(inputs)} input(s) were given",
            "Every argument without a default is an input.",
            "Give one example tensor for each.",
        )
    return beyond or None


def _drop_defaults(graph: fx.Graph, count: int) -> None:
    """Remove the placeholders of arguments that keep their defaults, and fx's checks on them."""
    if not count:
        return
    spare = [node for node in graph.nodes if node.op == "placeholder"][count:]
    for node in spare:
        for user in [*node.users]:
            for check in [*user.users]:
                graph.erase_node(check)
            graph.erase_node(user)
        graph.erase_node(node)


def _apart(traced: TracedModel, others: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The constants of a trace; what another trace calls by the same name, and is not the same, gets another name."""
    names = {
        name: name if name not in others or _equal(value, others[name]) else f"{name}_eval"
        for name, value in traced.constants.items()
    }
    for node in traced.graph.nodes:
        if node.op == "get_attr":
            node.target = names.get(str(node.target), node.target)
    return {names[name]: value for name, value in traced.constants.items()}


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one is other or (one.dtype == other.dtype and one.device == other.device and torch.equal(one, other))


def _canonical(graph: fx.Graph) -> list[str]:
    return [f"{node.op} {node.target} {node.args} {node.kwargs}" for node in graph.nodes]


def _explain(model: nn.Module, error: Exception, module: str) -> TraceError:
    """The error that names the module, the operation and what to do."""
    where = f"module {module!r} ({type(model.get_submodule(module)).__name__})" if module else type(model).__name__
    reason = f"The operation depends on data that is known only when the model runs ({type(error).__name__}: {error})."
    if isinstance(error, OutsideGraphError):
        reason = f"The operation is not on what the model is given, so no graph would have it: {error}."
    return TraceError(
        f"cannot trace {where}{_line_of(error)}",
        reason,
        "Trace the part that is a fixed graph (for a detector, its backbone), or move the operation into a sub-module "
        "of its own: a sub-module that cannot be traced is kept whole.",
    )


def _refused(model: nn.Module, inputs: Sequence[torch.Tensor], error: Exception) -> UsageError:
    shapes = ", ".join(str(tuple(item.shape)) for item in inputs)
    return UsageError(
        f"{type(model).__name__} refuses its input of shape {shapes}{_line_of(error)}",
        f"{type(error).__name__}: {error}",
        "Give inputs that the model runs on by itself, or mend the model.",
    )


def _line_of(error: Exception) -> str:
    """Where the innermost frame is that belongs neither to torch nor to the tracing."""
    between = os.path.join(os.path.dirname(torch.__file__), ""), os.path.join(os.path.dirname(__file__), "")
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(between)]
    if not frames:
        return ""
    frame = frames[-1]
    source = (frame.line or linecache.getline(frame.filename, frame.lineno or 0)).strip()
    return f', line {frame.lineno} of {frame.filename}: "{source}"'
