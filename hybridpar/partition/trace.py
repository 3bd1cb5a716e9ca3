"""Traces a model into a graph that computes what the model computes.

First by `torch.fx` with its usual leaves. Where a sub-module cannot be traced (its control flow depends on data, or it
changes state of its own), once more with that sub-module kept whole.

What comes out is compared with the model (`trace_check`). Where they differ, the sub-module whose code does what a
graph does not have is kept whole as well; where that is the model's own code, the model is refused. A model on the meta
device has no values to compare: there all code that does what a graph may not have counts as different.

`torch.fx` and not `torch.export`, because export burns the mode in: an exported stage keeps using batch statistics
after `eval()`. With fx, BatchNorm and dropout stay calls of the model's own modules. Where the *graphs* of training
and evaluation differ (auxiliary heads), both are traced.
"""

from __future__ import annotations

import inspect
import linecache
import os
import traceback
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn
from torch.fx.proxy import TraceError as FxTraceError
from torch.nn.parameter import is_lazy

from hybridpar.errors import TraceError, UsageError
from hybridpar.models.deferred import is_deferred
from hybridpar.models.state import same_attributes, same_modes, storage_of, untouched
from hybridpar.models.state_dicts import has_extra_state, require_unwrapped
from hybridpar.partition.changes import OutsideGraphError, attributes_of, traceable_only
from hybridpar.partition.trace_check import TraceCheck
from hybridpar.partition.tracer import SAVED, ModelTracer, TracedModel

_META = torch.device("meta")


def trace_model(model: nn.Module, inputs: Sequence[torch.Tensor]) -> TracedModel:
    """Trace a model for training and for evaluation, and compare the graphs with the model.

    A model in training mode trains as it is: parts of it may be in evaluation mode, and stay there.

    Args:
        model: Any module; it is as before afterwards.
        inputs: Example inputs. Arguments of `forward` beyond them keep their defaults.

    Returns:
        The model with its graphs, which compute what it computes.

    Raises:
        TraceError: The model cannot be traced, or its graph would compute something else. The message
            names the module and the operation.
        UsageError: The model refuses the inputs.
    """
    _require_plain(model)
    hidden = {path: part for path, part in model.named_modules() if path and (_hooks_of(part) or has_extra_state(part))}
    leaves = {path for path, part in hidden.items() if not _is_leaf(part, path)}
    check = TraceCheck(model, inputs)
    _require_constant(model, check.changes.written)
    _require_apart(model, check.changes.written)
    leaves |= _counting(model, check.changes.counters)
    traced = _trace_both_modes(model, inputs, frozenset(leaves))
    while (difference := check.difference(traced)) is not None:
        differing = {path for path in traced.suspects if path} or _differing(model, inputs, check, leaves)
        if not differing:
            raise _unlike(model, traced, difference)
        # A checkpoint is the reason only where everything else that may differ is a leaf.
        others = {path for path in differing if traced.suspects.get(path) != SAVED}
        if not others:
            others = _differing(model, inputs, check, leaves) - differing
        if not others:
            raise _checkpointed(model, min(differing))
        leaves |= others
        traced = _trace_both_modes(model, inputs, frozenset(leaves))
    if is_deferred(model):
        _require_values(traced, inputs[0].device)
    return replace(traced, changes=check.changes)


def _require_values(traced: TracedModel, device: torch.device) -> None:
    """Refuse constants that have no values on the meta device; a model that asks for its device means another."""
    empty = next((name for name, value in traced.constants.items() if value.is_meta), None)
    if empty is not None:
        raise TraceError(
            f"{type(traced.model).__name__} computes with values of its own while it is traced on the meta device",
            f"There it has none, and {empty} would be a constant of the graph.",
            "Move that part of forward into a sub-module of its own, whose class has fx_leaf = True: it is kept whole.",
        )
    for graph in (traced.graph, traced.eval_graph or traced.graph):
        for node in graph.nodes:
            node.args, node.kwargs = fx.node.map_aggregate(
                (node.args, node.kwargs), lambda value: device if value == _META else value
            )


def _counting(model: nn.Module, counters: Mapping[str, str]) -> set[str]:
    """Sub-modules that count in Python numbers; they do so only where they are called as modules."""
    if "" in counters:
        raise TraceError(
            f"{type(model).__name__} changes its attribute {counters['']!r} in every forward pass",
            "Stages are made of the model's sub-modules; they do not run forward of the model itself, so the attribute "
            "would keep its value.",
            "Move what uses it into a sub-module of its own, which is kept whole, or into the training loop, or keep "
            "the model in one piece (--stages 1).",
        )
    return {path for path in counters if not _is_leaf(model.get_submodule(path), path)}


def _is_leaf(module: nn.Module, path: str) -> bool:
    return ModelTracer(frozenset()).is_leaf_module(module, path)


def _differing(model: nn.Module, inputs: Sequence[torch.Tensor], check: TraceCheck, leaves: set[str]) -> set[str]:
    """Sub-modules of classes whose traced code computes something else; none if the model's code does."""
    classes: dict[type[nn.Module], set[str]] = {}
    for path, module in model.named_modules():
        if path and not _is_leaf(module, path):
            classes.setdefault(type(module), set()).add(path)

    def differs(closed: Iterable[type[nn.Module]]) -> bool:
        try:
            traced = _trace_both_modes(model, inputs, frozenset(leaves.union(*(classes[kind] for kind in closed))))
            return check.difference(traced) is not None
        except (TraceError, UsageError):
            return True

    closed = set(classes)
    if differs(closed):
        return set()
    for kind in classes:  # outer ones first: what they call is still whole
        if not differs(closed - {kind}):
            closed = closed - {kind}
    return set[str]().union(*(classes[kind] for kind in closed)) - leaves


def _unlike(model: nn.Module, traced: TracedModel, difference: str) -> TraceError:
    reason = traced.suspects.get("")
    because = f"forward of {type(model).__name__} itself {reason}" if reason else "something in its code is not in it"
    return TraceError(
        f"{type(model).__name__} cannot be cut into stages: they would not compute the same",
        f"Stages are cut from a graph of the model, and {because}: {difference}.",
        "Move that part of forward into a sub-module of its own, which is kept whole, or keep the model in one piece "
        "(--stages 1).",
    )


def _require_constant(model: nn.Module, written: Collection[str]) -> None:
    """Refuse a parameter that forward changes in a way that stages cannot follow."""
    name = next((name for name, _ in model.named_parameters() if name in written), None)
    if name is None:
        return
    path = name.rpartition(".")[0]
    raise TraceError(
        f"{type(model).__name__} cannot be cut into stages because of {name!r}, of {path or 'the model'} "
        f"({type(model.get_submodule(path)).__name__}): forward writes into it",
        "Each micro-batch in flight has buffers of its own, which are put back where a pass is measured or runs again; "
        "parameters are not.",
        "Change the parameter in the training loop, or keep the model in one piece (--stages 1).",
    )


def _require_apart(model: nn.Module, written: Collection[str]) -> None:
    """Refuse a buffer that forward writes into, and that an attribute has, too: the attribute would not follow it."""
    buffers = {storage_of(buffer): name for name, buffer in model.named_buffers() if name in written}
    values = attributes_of(model).seen.values() if buffers else ()
    tensors = (value for value in values if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter))
    name = next((buffers[storage_of(tensor)] for tensor in tensors if storage_of(tensor) in buffers), None)
    if name is not None:
        raise TraceError(
            f"{type(model).__name__} cannot be cut into stages because of {name!r}: forward writes into it, and an "
            "attribute of a module shares its memory",
            "Each micro-batch in flight has buffers of its own; the attribute would stay with those of another.",
            "Look the buffer up by its name wherever it is used, or keep the model in one piece (--stages 1).",
        )


def _checkpointed(model: nn.Module, path: str) -> TraceError:
    what = "computes something else without torch.utils.checkpoint than with it"
    if is_deferred(model):
        what = "uses torch.utils.checkpoint, and without values it cannot be compared with what it is without"
    return TraceError(
        f"module {path!r} ({type(model.get_submodule(path)).__name__}) {what}",
        "A graph has no checkpoint, whose second pass moves a buffer, or draws a mask, once more.",
        "Remove torch.utils.checkpoint from the model, and use --recompute, which does the same for a stage.",
    )


def _hooks_of(module: nn.Module) -> bool:
    hooks = (module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks)
    return any(hooks)


def _require_plain(model: nn.Module) -> None:
    """Refuse what wraps a model and hides it, and what has no shapes yet."""
    require_unwrapped(model)
    if _hooks_of(model) or has_extra_state(model):
        raise TraceError(
            f"{type(model).__name__} has {'a forward or backward hook' if _hooks_of(model) else 'an extra state'}",
            "Stages are made of the model's sub-modules; they do not call the model itself, and it would do nothing.",
            "Remove it, or put it on a sub-module, which is then kept whole.",
        )
    lazy = next((name for name, parameter in model.named_parameters() if is_lazy(parameter)), None)
    if lazy is not None:
        raise TraceError(
            f"{lazy} has no shape yet",
            "Lazy parameters get their shape when the model first runs.",
            "Run the model once on an example, then partition it.",
        )


def _trace_both_modes(model: nn.Module, inputs: Sequence[torch.Tensor], leaves: frozenset[str]) -> TracedModel:
    with same_modes(model):
        if not model.training:
            model.train()
        trained = _trace_one_mode(model, inputs, leaves)
        mixed = not all(module.training for module in model.modules())
        model.eval()
        # What training keeps whole stays whole, so that the graphs differ only where the model does.
        evaluated = _trace_one_mode(model, inputs, frozenset(trained.leaves))
        constants = {**trained.constants, **_apart(evaluated, trained.constants)}
        same = _canonical(trained.graph) == _canonical(evaluated.graph)
        if same and mixed:  # what is in evaluation mode now may not always be
            for module in model.modules():
                module.training = True
            try:
                other = _trace_one_mode(model, inputs, frozenset(trained.leaves))
                _apart(other, trained.constants)
                same = _canonical(trained.graph) == _canonical(other.graph)
            except UsageError:  # only what is in evaluation mode lets it be traced
                same = False
    return TracedModel(
        model,
        trained.graph,
        None if same else evaluated.graph,
        trained.constants if same else constants,
        tuple(sorted({*trained.leaves, *evaluated.leaves})),
        {**evaluated.suspects, **trained.suspects},
        taken=trained.taken,
    )


def _trace_one_mode(model: nn.Module, inputs: Sequence[torch.Tensor], leaves: frozenset[str]) -> TracedModel:
    first_error: tuple[Exception, str] | None = None
    while True:
        tracer = ModelTracer(leaves)
        before = set(vars(model))
        try:
            # The tracer stores constants on the model, and forward may store anything; the model must stay the user's.
            with same_attributes(model) as originals, traceable_only(model) as taken:
                graph = tracer.trace(model, _defaults_beyond(model, inputs))
                _drop_defaults(graph, len(inputs))
                used = {str(node.target) for node in graph.nodes if node.op == "get_attr"} - before
                constants = {
                    name: originals.get(id(value), value) for name, value in vars(model).items() if name in used
                }
            made = TracedModel(model, graph, None, constants, tuple(sorted(leaves)), tracer.suspects)
            return replace(made, taken=frozenset(taken))
        except UsageError:
            raise
        except Exception as error:  # tracing runs the user's code, which may raise anything
            first_error = first_error or (error, tracer.failed or "")
        if tracer.failed is None or tracer.failed in leaves:
            break
        leaves |= {tracer.failed}
    if not is_deferred(model):
        try:
            with untouched(model), torch.no_grad():
                model(*inputs)
        except Exception as error:  # the model does not run at all, whether traced or not
            shapes = ", ".join(str(tuple(item.shape)) for item in inputs)
            raise UsageError(
                f"{type(model).__name__} refuses its input of shape {shapes}{_line_of(error)}",
                f"{type(error).__name__}: {error}",
                "Give inputs that the model runs on by itself, or mend the model.",
            ) from error
    raise _explain(model, *first_error) from first_error[0]


def _defaults_beyond(model: nn.Module, inputs: Sequence[torch.Tensor]) -> dict[str, Any] | None:
    """Default values of the arguments that the caller does not give."""
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


def _equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    if first is second or first.is_meta or second.is_meta:
        return first is second
    return first.dtype == second.dtype and first.device == second.device and torch.equal(first, second)


def _canonical(graph: fx.Graph) -> list[str]:
    return [f"{node.op} {node.target} {node.args} {node.kwargs}" for node in graph.nodes]


def _explain(model: nn.Module, error: Exception, module: str) -> TraceError:
    """The error that names the module, the operation and what to do."""
    where = f"module {module!r} ({type(model.get_submodule(module)).__name__})" if module else type(model).__name__
    text = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    reason = f"torch.fx cannot follow it while the model is traced ({text})."
    if isinstance(error, OutsideGraphError):
        reason = f"The operation is not on what the model is given, so no graph would have it: {error}."
    elif isinstance(error, FxTraceError):
        reason = f"A graph has no branches and no loops ({error})."
    return TraceError(
        f"cannot trace {where}{_line_of(error)}",
        reason,
        "Trace the part that is a fixed graph (for a detector, its backbone), or move the "
        "operation into a sub-module of its own: a sub-module that cannot be traced is kept whole.",
    )


def _line_of(error: Exception) -> str:
    """Where the innermost frame is that belongs neither to torch nor to this package."""
    package = os.path.dirname(os.path.dirname(__file__))
    between = os.path.join(os.path.dirname(torch.__file__), ""), os.path.join(package, "")
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(between)]
    if not frames:
        return ""
    frame = frames[-1]
    source = (frame.line or linecache.getline(frame.filename, frame.lineno or 0)).strip()
    return f', line {frame.lineno} of {frame.filename}: "{source}"'
