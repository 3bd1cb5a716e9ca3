"""Compares a traced graph with its model before it is used.

The model and its graphs run on two small random micro-batches, one after the other, in training and in evaluation, from
the same state and the same random numbers. Outputs, loss, all gradients, buffers and parameters must be equal. On the
CPU they nearly always are, to the bit; where they differ by little more than rounding, float64 decides.

A model without memory has no values to compare. There the operations of a forward and a backward pass must be the same,
in the same order, on the same tensors.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from torch import fx, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from hybridpar.models.deferred import imagined, places, storage_of
from hybridpar.partition.nest import tensor_leaves
from hybridpar.partition.stage import Stage, StageGraph
from hybridpar.partition.state import mutable_attributes, untouched

#: Samples of a micro-batch that is compared. BatchNorm over less of them has hardly any gradient.
SAMPLES = 4

#: How far two results of one dtype may be apart, relative to the largest of their elements. float64 is not asked where
#: they are farther apart than ROUNDING.
_TOLERANCE = {torch.float64: 1e-9, torch.complex128: 1e-9, torch.float32: 1e-5, torch.complex64: 1e-5}
ROUNDING = 0.1

_GRADIENT = "gradient of "

Inputs = tuple[torch.Tensor, ...]
Outcome = dict[str, Any]


@dataclass(frozen=True)
class Graphs:
    """What is compared with a model: its graphs, and the tensors that tracing made, by attribute name.

    Attributes:
        train: The graph of training.
        evaluate: The graph of evaluation; it may be the same.
        constants: Tensors by the name that the graphs use for them.
    """

    train: fx.Graph
    evaluate: fx.Graph
    constants: Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Difference:
    """Where a graph first differs from its model.

    Attributes:
        text: What differs, with both values.
        relative: The size of the difference over that of the value; infinite where they are of different kinds.
    """

    text: str
    relative: float


class TraceCheck:
    """Runs a model once, and compares any number of its graphs with that run.

    Args:
        model: The model; it is as before after every call.
        inputs: One micro-batch, for shapes and types.

    Attributes:
        counters: A Python attribute that changes in every forward pass, by the name of the module that has it.
    """

    def __init__(self, model: nn.Module, inputs: Sequence[torch.Tensor]) -> None:
        self.model = model
        self.counters: dict[str, str] = {}
        self._batches: tuple[Inputs, ...] = ()
        self._expected: dict[bool, list[Outcome]] = {}
        for batches in _two_batches(inputs):
            try:
                expected = {
                    training: _run(model, model, batches, training, self.counters) for training in (True, False)
                }
            except Exception:  # the model's own code; it may refuse random numbers, or another number of samples
                continue
            self._batches, self._expected = batches, expected
            break

    def difference(self, graphs: Graphs, *, exact: bool = False) -> Difference | None:
        """Where graphs first differ from the model; None where they do not, or where the model itself cannot run.

        Args:
            graphs: The graphs of both modes.
            exact: Do not ask float64: the graphs may lack an autocast, which leaves float64 as it is.
        """
        for training, expected in self._expected.items():
            found = self._differs(graphs, training, self._batches, expected)
            if found is None:
                continue
            if exact or found.relative > ROUNDING or self._differs_in_float64(graphs, training):
                mode = "training" if training else "evaluation"
                return replace(found, text=f"in {mode}, {found.text}")
        return None

    def _differs(
        self, graphs: Graphs, training: bool, batches: Sequence[Inputs], expected: list[Outcome]
    ) -> Difference | None:
        call = _graph_call(self.model, graphs, training)
        try:
            found = _run(self.model, call, batches, training)
        except Exception as error:  # the model's own code
            return Difference(f"the graph fails where the model does not ({type(error).__name__}: {error})", torch.inf)
        return next(filter(None, map(_first_difference, expected, found)), None)

    def _differs_in_float64(self, graphs: Graphs, training: bool) -> bool:
        batches = tuple(tuple(map(_double, batch)) for batch in self._batches)
        constants = {name: _double(value) for name, value in graphs.constants.items()}
        with untouched(self.model):
            for tensor in _all_tensors(self.model):
                tensor.data = _double(tensor.data)
            try:
                expected = _run(self.model, self.model, batches, training)
            except Exception:  # an operation without float64
                return True
            return self._differs(replace(graphs, constants=constants), training, batches, expected) is not None


class OperationCheck:
    """Runs a model without memory once, and compares the operations of any number of its graphs with that run's.

    Args:
        model: The model, on the meta device; it is as before after every call.
        inputs: One micro-batch.

    Attributes:
        counters: A Python attribute that changes in every forward pass, by the name of the module that has it.
    """

    def __init__(self, model: nn.Module, inputs: Sequence[torch.Tensor]) -> None:
        self.model = model
        self._inputs = inputs
        self.counters: dict[str, str] = {}
        self._expected = {training: self._record(lambda: model, training, True) for training in (True, False)}

    def difference(self, graphs: Graphs, *, exact: bool = False) -> Difference | None:
        """Where graphs first differ from the model; None where they do not.

        Args:
            graphs: The graphs of both modes.
            exact: Of no effect: operations are equal or not.
        """
        for training, expected in self._expected.items():
            mode = "training" if training else "evaluation"
            try:
                found = self._record(lambda mode=training: _graph_call(self.model, graphs, mode), training)  # type: ignore[misc]
            except Exception as error:  # the model's own code
                text = f"the graph fails where the model does not ({type(error).__name__}: {error})"
                return Difference(text, torch.inf)
            pairs = zip_longest(expected, found, fillvalue=("nothing",))
            differing = next(((one, other) for one, other in pairs if one != other), None)
            if differing is not None:
                names = [str(one[0]) for one in differing]
                what = "on other tensors" if names[0] == names[1] else f"{names[1]} in its stages"
                return Difference(f"in {mode}, an operation of the model is {names[0]}, and {what}", torch.inf)
        return None

    def _record(self, get: Callable[[], Callable[..., Any]], training: bool, count: bool = False) -> list[Any]:
        model = self.model
        with untouched(model, training=training), torch.set_grad_enabled(training):
            _seed(model, 0)
            with imagined(model, self._inputs[0].device) as mode:
                call = get()
                inputs = [mode.from_tensor(item.detach()) for item in self._inputs]
                known = {name: held[key] for name, held, key in places(model)}
                operations = _Operations(known | {f"input {index}": item for index, item in enumerate(inputs)})
                with operations:
                    output = call(*inputs)
                    before = {path: mutable_attributes(module) for path, module in model.named_modules()}
                    if training:
                        leaves = [leaf for _, leaf in tensor_leaves(output) if leaf.requires_grad]
                        torch.autograd.backward(leaves, [torch.ones_like(leaf) for leaf in leaves])
                ends = tuple(name for name, one in known.items() if one.grad is not None)
                if count:
                    call(*inputs)
                    for path, module in model.named_modules():
                        for name, value in mutable_attributes(module).items():
                            if before[path].get(name) != value:
                                self.counters.setdefault(path, name)
        return [*operations.found, ("gradients", ends), ("outputs", operations.describe(list(tensor_leaves(output))))]


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes operations on tensors that come from a model and its inputs; what is made of none of them is a constant.

    Tracing writes `x += y` as `x = x + y`. So one in place counts as the one that is not, and a storage is called by
    the operation that last wrote to it.

    Args:
        known: The tensors of the model and its inputs, by name.
    """

    def __init__(self, known: Mapping[str, torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[Any] = []
        # With the storage itself, so that no other one gets its place.
        self._labels = {storage_of(tensor): (name, tensor.untyped_storage()) for name, tensor in known.items()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        known = any(storage_of(tensor) in self._labels for tensor in _tensors_in((args, kwargs)))
        if not known or func.namespace == "prim":
            return func(*args, **kwargs)
        number, entry = len(self.found), (func._schema.name.rstrip("_"), self.describe((args, kwargs)))
        written = [
            tensor
            for place, argument in enumerate(func._schema.arguments)
            if argument.is_write
            for tensor in _tensors_in(args[place] if place < len(args) else kwargs.get(argument.name))
        ]
        result = func(*args, **kwargs)
        self._labels |= {
            storage_of(one): (f"{number}w{index}", one.untyped_storage()) for index, one in enumerate(written)
        }
        changed = {storage_of(one) for one in written}
        for index, one in enumerate(_tensors_in(result)):
            if storage_of(one) not in self._labels or storage_of(one) in changed:
                self._labels[storage_of(one)] = f"{number}.{index}", one.untyped_storage()
        self.found.append(entry)
        return result

    def describe(self, value: Any) -> Any:
        """A value with what can be compared in place of tensors.

        Args:
            value: Tensors, numbers and other leaves in containers.
        """
        return repr(tree_map(self._describe, value))

    def _describe(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        label, _ = self._labels.get(storage_of(leaf), ("constant", None))
        return label, tuple(leaf.shape), leaf.stride(), leaf.storage_offset(), str(leaf.dtype)


def _tensors_in(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _two_batches(inputs: Sequence[torch.Tensor]) -> Iterator[tuple[Inputs, ...]]:
    """Pairs of micro-batches to compare on, the best first: small random ones, random ones, the given one."""
    count = inputs[0].shape[0]
    small = [item[:SAMPLES] if item.dim() and item.shape[0] == count else item for item in inputs]
    generator = torch.Generator().manual_seed(0)
    for given in (small, inputs) if count > SAMPLES else (small,):
        yield tuple(tuple(_random_like(item, generator) for item in given) for _ in range(2))
    yield tuple(inputs), tuple(item.flip(0) if item.dim() else item for item in inputs)


def _random_like(item: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Normal numbers of the same mean and deviation; what counts or indexes keeps its values, in another order."""
    if not item.is_floating_point() or item.numel() == 0:
        order = torch.randperm(item.shape[0], generator=generator) if item.dim() else ...
        return item[order]
    flat = item.detach().double()
    deviation, mean = (float(flat.std()), float(flat.mean())) if item.numel() > 1 else (0.0, 0.0)
    drawn = torch.randn(item.shape, generator=generator, dtype=torch.float64)
    # An example may be constant, as the zeros of a plan are.
    values = drawn * deviation + mean if 0 < deviation < torch.inf else drawn
    return torch.empty_like(item).copy_(values)


def _run(
    model: nn.Module,
    call: Callable[..., Any],
    batches: Sequence[Inputs],
    training: bool,
    counters: dict[str, str] | None = None,
) -> list[Outcome]:
    """Results of a model, or of a graph in its place, on micro-batches one after the other."""
    outcomes, attributes = [], []
    with untouched(model, training=training), torch.set_grad_enabled(training):
        for seed, batch in enumerate(batches):
            _seed(model, seed)
            outcomes.append(_results(model, call(*(item.detach().clone() for item in batch))))
            if counters is not None:
                attributes.append({path: mutable_attributes(module) for path, module in model.named_modules()})
    if attributes:
        # What the first pass sets for good, such as a size or a mask, does not change in the second.
        for path, after in attributes[1].items():
            before = attributes[0].get(path, {})
            counters_here = [name for name, value in after.items() if before.get(name) != value]
            if counters_here and counters is not None:
                counters.setdefault(path, counters_here[0])
    return outcomes


def _results(model: nn.Module, output: Any) -> Outcome:
    found: Outcome = {}
    losses = []
    generator = torch.Generator().manual_seed(0)
    leaves = list(tensor_leaves(output))
    for path, leaf in leaves:
        found[_label("output", path)] = leaf.detach().clone()
        if leaf.requires_grad:
            real = torch.view_as_real(leaf) if leaf.is_complex() else leaf
            weights = torch.randn(real.shape, generator=generator).to(real)
            losses.append((real * weights).sum())
    for parameter in model.parameters():
        parameter.grad = None
    if losses:
        loss = torch.stack([one.to(losses[0]) for one in losses]).sum()
        found["loss"] = loss.detach()
        loss.backward()  # type: ignore[no-untyped-call]
    found |= {f"buffer {name}": buffer.detach().clone() for name, buffer in model.named_buffers()}
    # Forward may change parameters as well, though seldom: no copy of all of them for that.
    for name, parameter in model.named_parameters():
        values = parameter.detach()
        found[f"norm of {name}"] = (values if values.is_floating_point() else values.to(_wide(values))).norm()
    found |= {_GRADIENT + name: parameter.grad for name, parameter in model.named_parameters()}
    return found


def _first_difference(expected: Outcome, found: Outcome) -> Difference | None:
    if expected.keys() != found.keys():
        return Difference("the output has other parts than the model's", torch.inf)
    for name, wanted in expected.items():
        beside: Iterable[torch.Tensor | None] = ()
        if name.startswith(_GRADIENT):
            beside = (value for other, value in expected.items() if other.startswith(_GRADIENT))
        difference = _difference(name, wanted, found[name], beside)
        if difference is not None:
            return difference
    return None


def _difference(
    name: str, wanted: torch.Tensor | None, found: torch.Tensor | None, beside: Iterable[torch.Tensor | None]
) -> Difference | None:
    if wanted is None or found is None:
        if wanted is found:
            return None
        values = ("none" if one is None else f"up to {_size(one):.3g}" for one in (wanted, found))
        return Difference("{} is {} in the model and {} in its stages".format(name, *values), torch.inf)
    if wanted.shape != found.shape or wanted.dtype != found.dtype or wanted.layout != found.layout:
        kinds = (f"{tuple(one.shape)} {str(one.dtype).removeprefix('torch.')}" for one in (wanted, found))
        return Difference("{} is {} in the model and {} in its stages".format(name, *kinds), torch.inf)
    if wanted.layout != torch.strided or wanted.is_quantized:
        wanted, found = wanted.to_dense(), found.to_dense()
    if torch.equal(wanted, found):
        return None
    apart = (wanted.to(_wide(wanted)) - found.to(_wide(found))).abs()
    apart = torch.where(apart.isnan() & wanted.isnan() & found.isnan() | (wanted == found), 0.0, apart)
    most = float(apart.nan_to_num(nan=torch.inf).max())
    # Where nearly everything cancels, rounding is as large as that of the values that were added.
    size = max(_size(wanted), 1e-3 * max((_size(one) for one in beside if one is not None), default=0.0))
    relative = most / size if size > 0 and most < torch.inf else (torch.inf if most > 0 else 0.0)
    if relative <= _tolerance(wanted.dtype):
        return None
    place = int(apart.nan_to_num(nan=torch.inf).argmax())
    values = (f"{one.flatten()[place].item():.5g}" for one in (wanted, found))
    return Difference("{} is {} in the model and {} in its stages".format(name, *values), relative)


def _tolerance(dtype: torch.dtype) -> float:
    if not (dtype.is_floating_point or dtype.is_complex):
        return 0.0
    return _TOLERANCE.get(dtype) or 4 * torch.finfo(dtype).eps


def _wide(tensor: torch.Tensor) -> torch.dtype:
    return torch.complex128 if tensor.is_complex() else torch.float64


def _size(tensor: torch.Tensor) -> float:
    values = tensor.detach().to(_wide(tensor)).abs()
    values = values[values.isfinite()]
    return float(values.max()) if values.numel() else 0.0


def _label(kind: str, path: tuple[Any, ...]) -> str:
    return kind + "".join(f"[{key!r}]" for key in path)


def _double(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def _all_tensors(model: nn.Module) -> list[torch.Tensor]:
    held = (vars(module).values() for module in model.modules())
    plain = [value for values in held for value in values if isinstance(value, torch.Tensor)]
    return [*model.parameters(), *model.buffers(), *plain]


def _seed(model: nn.Module, seed: int) -> None:
    torch.default_generator.manual_seed(seed)
    for index in {one.device.index for one in model.parameters() if one.device.type == "cuda"}:
        torch.cuda.default_generators[index].manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def _graph_call(model: nn.Module, graphs: Graphs, training: bool) -> Callable[..., Any]:
    """A graph as a function; it holds the model's own tensors, as a stage does."""
    graph = StageGraph(graphs.train if training else graphs.evaluate, (), ())
    # Not called itself: fx would print where an error is.
    return Stage(model, 0, graph, constants=graphs.constants).forward
