"""Compares a traced graph with its model before it is used.

The model and its graphs run on two small random micro-batches, one after the other, in training and in evaluation, from
the same state and the same random numbers. Outputs, loss, all gradients, buffers and parameters must be equal. On the
CPU they nearly always are, to the bit; where they differ by little more than rounding, float64 decides.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from hybridpar.models.deferred import imagined, is_deferred, named_tensors
from hybridpar.models.state import held_state, put_state, untouched
from hybridpar.partition.changes import Changes, Writes, attributes_of, changed, python_random_state
from hybridpar.partition.nest import tensor_leaves
from hybridpar.partition.stage import Stage, StageGraph
from hybridpar.partition.tracer import AUTOCAST, TracedModel

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
class Difference:
    """Where a graph first differs from its model.

    Attributes:
        text: What differs, with both values.
        relative: The size of the difference over that of the value; infinite where they are of different kinds.
    """

    text: str
    relative: float


class TraceCheck:
    """Runs a model once, and compares any number of its graphs with that run."""

    def __init__(self, model: nn.Module, inputs: Sequence[torch.Tensor]) -> None:
        self.model, self.changes = model, Changes()
        self._batches: tuple[Inputs, ...] = ()
        self._expected: dict[bool, list[Outcome]] = {}
        self._is_deferred = is_deferred(model)
        if self._is_deferred:
            self._imagine(inputs)
            return
        for batches in _two_batches(inputs):
            try:
                self._expected = {training: self._run_model(batches, training) for training in (True, False)}
            except Exception:  # the model's code; it may refuse random numbers, or another number of samples
                continue
            self._batches = batches
            break

    def _run_model(self, batches: Sequence[Inputs], training: bool) -> list[Outcome]:
        """Results of the model; notes what its forward pass changes."""
        model, outcomes, states, attributes = self.model, [], [], []

        def watched(*batch: torch.Tensor) -> Any:
            drawn = python_random_state()
            with Writes(model) as writes:
                output = model(*batch)
            self.changes.draws |= drawn != python_random_state()
            if training:
                self.changes.written = writes.names
            return output

        with untouched(model, training=training), torch.set_grad_enabled(training):
            for seed, batch in enumerate(batches):
                outcomes.append(_pass(model, watched, batch, seed))
                attributes.append(attributes_of(model))
                states.append(held_state(model))
            put_state(states[0])
            again = attributes_of(model)
        first, second = attributes
        if differing := changed(first, second):
            with untouched(model, training=training), torch.set_grad_enabled(training):
                _pass(model, model, batches[1], 1)
                alone = attributes_of(model)
            self.changes.remembering |= differing.keys()
            self.changes.counters |= changed(first, second, alone)
            self.changes.unrepeatable |= changed(first, again, alone)
        return outcomes

    def _imagine(self, inputs: Sequence[torch.Tensor]) -> None:
        """Note what the forward pass of a model on the meta device changes."""
        with untouched(self.model, training=True), torch.no_grad(), imagined(self.model, inputs[0].device) as mode:
            _seed(self.model, 0)
            given, attributes = [mode.from_tensor(item.detach()) for item in inputs], []
            for _ in range(2):
                with Writes(self.model) as writes:
                    self.model(*given)
                attributes.append(attributes_of(self.model))
        counters = changed(*attributes)
        self.changes = Changes(counters, counters, set(counters), written=writes.names)

    def difference(self, traced: TracedModel) -> str | None:
        """Where the graphs first differ from the model; None where they do not, or it cannot run."""
        if self._is_deferred:
            return "there are no values to compare" if traced.suspects else None
        for training, expected in self._expected.items():
            first = self._differs(traced, training, expected)
            if first is None:
                continue
            certain = AUTOCAST in traced.suspects.values() or first.relative > ROUNDING
            if certain or self._differs(traced, training, None) is not None:
                return f"in {'training' if training else 'evaluation'}, {first.text}"
        return None

    def _differs(self, traced: TracedModel, training: bool, expected: list[Outcome] | None) -> Difference | None:
        """Where the graph of a mode first differs from what the model gave; if that is None, both run in float64."""
        graph = traced.graph if training else traced.eval_graph or traced.graph
        wide = expected is None
        batches = [tuple(map(_double, batch)) for batch in self._batches] if wide else self._batches

        def run(call_of: Callable[[Mapping[str, torch.Tensor]], Callable[..., Any]]) -> list[Outcome]:
            with untouched(self.model, training=training) as copied, torch.set_grad_enabled(training):
                values = copied(dict(traced.constants))
                if wide:
                    for tensor in (*(held[name] for _, held, name in named_tensors(self.model)), *values.values()):
                        tensor.data = _double(tensor.data)
                call = call_of(values)
                return [_pass(self.model, call, batch, seed) for seed, batch in enumerate(batches)]

        if expected is None:
            try:
                expected = run(lambda _: self.model)
            except Exception:  # an operation without float64
                return Difference("float64", torch.inf)
        try:
            # Not called itself: fx would print where an error is.
            outcomes = run(lambda values: Stage(self.model, 0, StageGraph(graph, (), ()), constants=values).forward)
        except Exception as error:  # the model's code
            return Difference(f"the graph fails where the model does not ({type(error).__name__}: {error})", torch.inf)
        return next(filter(None, map(_first_difference, expected, outcomes)), None)


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


def _pass(model: nn.Module, call: Callable[..., Any], batch: Inputs, seed: int) -> Outcome:
    """Results of a model, or of a graph instead of it, on a micro-batch."""
    _seed(model, seed)
    return _results(model, call(*(item.detach().clone() for item in batch)))


def _results(model: nn.Module, output: Any) -> Outcome:
    outcome: Outcome = {f"output{[*path] or ''}": leaf.detach().clone() for path, leaf in tensor_leaves(output)}
    for parameter in model.parameters():
        parameter.grad = None
    losses = []
    generator = torch.Generator().manual_seed(0)
    for _, leaf in tensor_leaves(output):
        if leaf.requires_grad:
            real = torch.view_as_real(leaf) if leaf.is_complex() else leaf
            losses.append((real * torch.randn(real.shape, generator=generator).to(real)).sum())
    if losses:
        loss = torch.stack([part.to(losses[0]) for part in losses]).sum()
        outcome["loss"] = loss.detach()
        loss.backward()  # type: ignore[no-untyped-call]
    outcome |= {f"buffer {name}": buffer.detach().clone() for name, buffer in model.named_buffers()}
    # Forward may change parameters as well, though seldom: no copy of all of them for that.
    for name, parameter in model.named_parameters():
        values = parameter.detach()
        outcome[f"norm of {name}"] = (values if values.is_floating_point() else values.to(_wide(values))).norm()
    outcome |= {_GRADIENT + name: parameter.grad for name, parameter in model.named_parameters()}
    return outcome


def _first_difference(expected: Outcome, outcome: Outcome) -> Difference | None:
    if expected.keys() != outcome.keys():
        return Difference("the output has other parts than the model's", torch.inf)
    gradients = [value for name, value in expected.items() if name.startswith(_GRADIENT) and value is not None]
    for name, wanted in expected.items():
        difference = _difference(name, wanted, outcome[name], gradients if name.startswith(_GRADIENT) else [])
        if difference is not None:
            return difference
    return None


def _difference(
    name: str, wanted: torch.Tensor | None, result: torch.Tensor | None, beside: Sequence[torch.Tensor]
) -> Difference | None:
    kinds = [_kind(value) for value in (wanted, result)]
    if kinds[0] != kinds[1]:
        return Difference("{} is {} in the model and {} in its stages".format(name, *kinds), torch.inf)
    if wanted is None or result is None:
        return None
    if wanted.layout != torch.strided or wanted.is_quantized:
        wanted, result = wanted.to_dense(), result.to_dense()
    if torch.equal(wanted, result):
        return None
    apart = (wanted.to(_wide(wanted)) - result.to(_wide(result))).abs()
    apart = torch.where(apart.isnan() & wanted.isnan() & result.isnan() | (wanted == result), 0.0, apart)
    most = float(apart.nan_to_num(nan=torch.inf).max())
    # Where nearly everything cancels, rounding is as large as that of the values that were added.
    size = max(_size(wanted), 1e-3 * max(map(_size, beside), default=0.0))
    relative = most / size if size > 0 and most < torch.inf else (torch.inf if most > 0 else 0.0)
    if relative <= _tolerance(wanted.dtype):
        return None
    index = int(apart.nan_to_num(nan=torch.inf).argmax())
    values = (f"{value.flatten()[index].item():.5g}" for value in (wanted, result))
    return Difference("{} is {} in the model and {} in its stages".format(name, *values), relative)


def _kind(value: torch.Tensor | None) -> str:
    """What must be equal before values are compared."""
    return "none" if value is None else f"{tuple(value.shape)} {value.dtype} {value.layout}".replace("torch.", "")


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


def _double(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def _seed(model: nn.Module, seed: int) -> None:
    torch.default_generator.manual_seed(seed)
    for index in {param.device.index for param in model.parameters() if param.device.type == "cuda"}:
        torch.cuda.default_generators[index].manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
