"""Why: a model is cut on its graph, and the graph must come from the model as the user wrote it.

Tracing goes down a ladder. First `torch.fx` with its usual leaves. Where a sub-module cannot be traced (its control
flow depends on data), once more with that sub-module kept whole. Where the model itself cannot be traced but only
calls modules one after another, the order of these calls is the graph, and it is checked against the model.

`torch.fx` and not `torch.export`, because export burns the mode in: an exported stage keeps using batch statistics
after `eval()`. With fx, BatchNorm and dropout stay calls of the model's own modules. Where the *graphs* of training
and evaluation differ (auxiliary heads), both are traced.
"""

from __future__ import annotations

import inspect
import linecache
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import fx, nn
from torch.nn.parameter import is_lazy

from hybridpar.errors import TraceError, UsageError
from hybridpar.partition.chain import module_order_graph

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
        return module_qualified_name in self.whole or super().is_leaf_module(m, module_qualified_name)

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
        evaluated = _trace_one_mode(model, inputs)
    finally:
        for module, flag in flags:
            module.training = flag
    same = _canonical(trained.graph) == _canonical(evaluated.graph)
    return TracedModel(
        model,
        trained.graph,
        None if same else evaluated.graph,
        {**trained.constants, **({} if same else evaluated.constants)},
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


def _trace_one_mode(model: nn.Module, inputs: Sequence[torch.Tensor]) -> TracedModel:
    whole: frozenset[str] = frozenset()
    first_error: tuple[Exception, str] | None = None
    constants: dict[str, torch.Tensor] = {}
    while True:
        tracer = _LadderTracer(whole)
        before = set(vars(model))
        try:
            graph = tracer.trace(model, _defaults_beyond(model, inputs))
        except UsageError:
            raise
        except Exception as error:  # tracing runs the user's code, which may raise anything
            if first_error is None:
                first_error = error, tracer.failed or ""
            failed = tracer.failed
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


def _canonical(graph: fx.Graph) -> list[str]:
    return [f"{node.op} {node.target} {node.args} {node.kwargs}" for node in graph.nodes]


def _explain(model: nn.Module, error: Exception, module: str) -> TraceError:
    """The error that names the module, the operation and what to do."""
    where = f"module {module!r} ({type(model.get_submodule(module)).__name__})" if module else type(model).__name__
    frame = _user_frame(error)
    line = f', line {frame.lineno} of {frame.filename}: "{_source(frame)}"' if frame else ""
    return TraceError(
        f"cannot trace {where}{line}",
        f"The operation depends on data that is known only when the model runs ({type(error).__name__}: {error}).",
        "Trace the part that is a fixed graph (for a detector, its backbone), or move the operation into a sub-module "
        "of its own: a sub-module that cannot be traced is kept whole.",
    )


def _refused(model: nn.Module, inputs: Sequence[torch.Tensor], error: Exception) -> UsageError:
    frame = _user_frame(error)
    line = f', line {frame.lineno} of {frame.filename}: "{_source(frame)}"' if frame else ""
    shapes = ", ".join(str(tuple(item.shape)) for item in inputs)
    return UsageError(
        f"{type(model).__name__} refuses its input of shape {shapes}{line}",
        f"{type(error).__name__}: {error}",
        "Give inputs that the model runs on by itself, or mend the model.",
    )


def _user_frame(error: Exception) -> traceback.FrameSummary | None:
    """The innermost frame that is not torch's own tracer."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "torch/fx/" not in frame.filename
        and "torch/nn/modules/module.py" not in frame.filename
        and "hybridpar/partition/" not in frame.filename
    ]
    return frames[-1] if frames else None


def _source(frame: traceback.FrameSummary) -> str:
    return (frame.line or linecache.getline(frame.filename, frame.lineno or 0)).strip()
