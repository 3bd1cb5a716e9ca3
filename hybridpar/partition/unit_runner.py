"""Times each unit of a model inside a whole step.

The whole graph runs forward, unit by unit, then the whole graph runs backward, unit by unit, with the true gradients.
Between units the autograd graph is cut, so that the backward pass of each can be timed, but no tensor is copied: the
cut is an autograd function that hands over the same memory, which also lets operations work in place as they do in
the model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import fx, nn

from hybridpar.partition.example import NodeFacts, node_call
from hybridpar.partition.graph_facts import resolve_attribute
from hybridpar.partition.nest import map_tensors, rebuild, tensor_leaves
from hybridpar.partition.units import ModelUnits


class _Border(torch.autograd.Function):
    """Identity that starts a new autograd graph on the same memory and keeps the gradient that arrives."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, box: list[torch.Tensor | None]) -> torch.Tensor:
        ctx.box = box
        value = box[0]
        assert value is not None
        box[0] = None
        return value.data  # not detach(): that would be a view, and views made here may not be changed in place

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, None]:
        ctx.box[0] = gradients[0]
        return None, None


class Clock:
    """Takes times on the device where the work runs: the host clock on CPU, events in the stream on CUDA."""

    def __init__(self, device: torch.device, *, own_time: bool = False) -> None:
        self.device = device
        self._now = time.thread_time if own_time else time.perf_counter

    def mark(self) -> float | torch.cuda.Event:
        """Now, in the order of the work that was issued."""
        if self.device.type != "cuda":
            return self._now() * 1e3
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    def between(self, start: float | torch.cuda.Event, end: float | torch.cuda.Event) -> float:
        """Milliseconds from one mark to another; call `wait` before."""
        if isinstance(start, torch.cuda.Event):
            assert isinstance(end, torch.cuda.Event)
            return float(start.elapsed_time(end))
        assert not isinstance(end, torch.cuda.Event)
        return end - start

    def wait(self) -> None:
        """Wait until all work is done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


@contextmanager
def intra_op_threads(count: int | None) -> Iterator[None]:
    """So many intra-op threads on a CPU inside of the block, and as many as before afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(before if count is None else count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


Arrival = tuple[fx.Node, list[list[torch.Tensor | None]]]


class UnitRunner:
    """Runs all units of a model in one training step."""

    def __init__(self, units: ModelUnits, inputs: Sequence[torch.Tensor]) -> None:
        self.units = units
        self.inputs = inputs
        facts = units.train
        self._fixed = {
            node: resolve_attribute(units.traced, str(node.target))
            for node in facts.graph.nodes
            if node.op == "get_attr"
        }
        self._steps = [[self._compile(node) for node in self._with_derived(nodes)] for nodes in units.nodes]
        home = {node: index for index, nodes in enumerate(units.nodes) for node in nodes}
        self._received = [
            list(dict.fromkeys(item for node in nodes for item in facts.sources(node) if home.get(item, -1) != index))
            for index, nodes in enumerate(units.nodes)
        ]
        self._returned = facts.sources(facts.output)
        self._sent: list[list[fx.Node]] = [[] for _ in units.nodes]
        for node in dict.fromkeys([*(node for nodes in self._received for node in nodes), *self._returned]):
            if node in home:
                self._sent[home[node]].append(node)
        self._last_use = {node: index for index, nodes in enumerate(self._received) for node in nodes}

    def _with_derived(self, nodes: Sequence[fx.Node]) -> list[fx.Node]:
        """The nodes of a unit, each after the numbers from shapes that it needs."""
        wanted: dict[fx.Node, None] = {}

        def want(node: fx.Node) -> None:
            for argument in node.all_input_nodes:
                if argument in self.units.train.derived:
                    want(argument)
            wanted[node] = None

        for node in nodes:
            want(node)
        return list(wanted)

    def _compile(self, node: fx.Node) -> tuple[fx.Node, Callable[[dict[fx.Node, Any]], Any]]:
        """A node as a function of the values so far; common argument patterns cost no tree walk."""
        call = node_call(node, lambda name: resolve_attribute(self.units.traced, name))
        args, kwargs = node.args, node.kwargs
        if not kwargs and len(args) == 1 and isinstance(args[0], fx.Node):
            only = args[0]
            return node, lambda values: call(values[only])
        if not kwargs and all(isinstance(item, (fx.Node, int, float, str, type(None))) for item in args):
            return node, lambda values: call(*(values[item] if isinstance(item, fx.Node) else item for item in args))
        return node, lambda values: call(
            *fx.map_arg(args, values.__getitem__), **fx.map_arg(kwargs, values.__getitem__)
        )

    def step(self, clock: Clock) -> list[tuple[float, float]]:
        """One forward and backward pass; the gradient of every output is ones."""
        values: dict[fx.Node, Any] = dict(zip(self.units.train.placeholders, self.inputs, strict=True))
        arrivals: list[list[Arrival]] = []
        outputs: list[list[tuple[fx.Node, list[torch.Tensor]]]] = []
        forward = []
        for index, steps in enumerate(self._steps):
            local: dict[fx.Node, Any] = dict(self._fixed)
            received: list[Arrival] = []
            for node in self._received[index]:
                local[node], cells = _enter(values[node])
                received.append((node, cells))
                if self._last_use[node] == index:
                    values[node] = None
            start = clock.mark()
            for node, run in steps:
                local[node] = run(local)
            forward.append((start, clock.mark()))
            arrivals.append(received)
            values.update((node, local[node]) for node in self._sent[index])
            outputs.append([(node, [leaf for _, leaf in tensor_leaves(local[node])]) for node in self._sent[index]])
        backward = self._backward(arrivals, outputs, clock)
        clock.wait()
        return [
            (clock.between(*ahead), clock.between(*back))
            for ahead, back in zip(forward, reversed(backward), strict=True)
        ]

    def alone(self, index: int, clock: Clock, passes: int) -> list[tuple[float, float]]:
        """Time a unit by itself, on inputs that are made up; its parameters have memory meanwhile, if they had none."""
        train, traced = self.units.train, self.units.traced
        given = dict(zip(train.placeholders, self.inputs, strict=True))
        like = self.inputs[0]
        values = {
            node: given[node] if node in given else _made_up(train.facts[node], like) for node in self._received[index]
        }
        times = []
        with _with_memory(traced.model, self.units.nodes[index], like.device):
            fixed = {node: resolve_attribute(traced, str(node.target)) for node in self._fixed}
            for _ in range(passes + 1):
                local: dict[fx.Node, Any] = dict(fixed)
                local.update((node, _enter(value)[0]) for node, value in values.items())
                start = clock.mark()
                for node, run in self._steps[index]:
                    local[node] = run(local)
                middle = clock.mark()
                leaves = [leaf for node in self._sent[index] for _, leaf in tensor_leaves(local[node])]
                leaves = [leaf for leaf in leaves if leaf.requires_grad]
                gradients = [torch.ones_like(leaf) for leaf in leaves]
                begin = clock.mark()
                if leaves:
                    torch.autograd.backward(leaves, gradients)
                end = clock.mark()
                clock.wait()
                times.append((clock.between(start, middle), clock.between(begin, end)))
        return times[1:]

    def _backward(
        self, arrivals: list[list[Arrival]], outputs: list[list[tuple[fx.Node, list[torch.Tensor]]]], clock: Clock
    ) -> list[Any]:
        marks = []
        gradients: dict[fx.Node, list[torch.Tensor | None]] = {}
        for node, leaves in (item for items in outputs for item in items):
            if node in self._returned:
                gradients[node] = [torch.ones_like(leaf) if leaf.requires_grad else None for leaf in leaves]
        for _ in range(len(self._steps)):
            pairs = [
                (leaf, gradient)
                for node, leaves in outputs.pop()
                for leaf, gradient in zip(leaves, gradients.pop(node, [None] * len(leaves)), strict=True)
                if gradient is not None and leaf.requires_grad
            ]
            start = clock.mark()
            if pairs:
                torch.autograd.backward([leaf for leaf, _ in pairs], [gradient for _, gradient in pairs])
            for node, cells in arrivals.pop():
                known = gradients.setdefault(node, [None] * len(cells))
                for place, cell in enumerate(cells):
                    before, new = known[place], cell[0]
                    if new is not None:
                        known[place] = new if before is None else before + new
            marks.append((start, clock.mark()))
            del pairs
        return marks


def _made_up(facts: NodeFacts, like: torch.Tensor) -> Any:
    """A value as an example run had it, of other numbers: random ones, and zeros where they are integers."""
    leaves = {}
    for one in facts.tensors:
        tensor = torch.zeros(one.shape, dtype=one.dtype, device=like.device)
        if one.dtype.is_floating_point:
            tensor.normal_()
        if tensor.dim() == 4 and like.dim() == 4 and like.is_contiguous(memory_format=torch.channels_last):
            tensor = tensor.contiguous(memory_format=torch.channels_last)
        leaves[one.path] = tensor.requires_grad_(one.requires_grad)
    return leaves[()] if facts.is_tensor else rebuild(facts.shape, leaves)


@contextmanager
def _with_memory(model: nn.Module, nodes: Sequence[fx.Node], device: torch.device) -> Iterator[None]:
    """Inside, what some nodes use of a model is no longer on the meta device; afterwards it is again.

    Parameters get small random values and gradients of zeros, buffers ones, or zeros where they are integers.
    """
    held: list[tuple[dict[str, Any], str, torch.Tensor]] = []

    def note(module: nn.Module, names: Collection[str] | None = None) -> None:
        for place in (module._parameters, module._buffers, vars(module)):
            for name, value in place.items():
                if isinstance(value, torch.Tensor) and value.is_meta and (names is None or name in names):
                    held.append((place, name, value))

    for node in nodes:
        if node.op == "call_module":
            for module in model.get_submodule(str(node.target)).modules():
                note(module)
        for one in (one for one in node.all_input_nodes if one.op == "get_attr"):
            path, _, name = str(one.target).rpartition(".")
            with suppress(AttributeError):  # a constant of the trace is on no module
                note(model.get_submodule(path), {name})
    made: dict[int, torch.Tensor] = {}
    for place, name, value in held:
        if id(value) not in made:
            tensor: torch.Tensor = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
            is_trained = isinstance(value, nn.Parameter)
            if is_trained and value.is_floating_point():
                tensor.uniform_(-0.05, 0.05)
            else:
                tensor.fill_(1 if value.is_floating_point() else 0)
            made[id(value)] = nn.Parameter(tensor, value.requires_grad) if is_trained else tensor
            if value.requires_grad:
                made[id(value)].grad = torch.zeros_like(tensor)
        place[name] = made[id(value)]
    try:
        yield
    finally:
        for place, name, value in held:
            place[name] = value


def _enter(value: Any) -> tuple[Any, list[list[torch.Tensor | None]]]:
    """A value as a unit receives it, and the cells that will hold the gradients of its tensors."""
    cells: list[list[torch.Tensor | None]] = []

    def cross(tensor: torch.Tensor) -> torch.Tensor:
        cell: list[torch.Tensor | None] = [None]
        cells.append(cell)
        if not tensor.requires_grad:
            return tensor
        cell[0] = tensor
        received: torch.Tensor = _Border.apply(torch.zeros((), requires_grad=True), cell)
        return received

    return map_tensors(value, cross), cells


def whole_step_ms(model: Callable[..., Any], inputs: Sequence[torch.Tensor], clock: Clock) -> float:
    """Time of a plain forward and backward pass of the unsplit model, without optimizer, in milliseconds."""
    start = clock.mark()
    leaves = [leaf for _, leaf in tensor_leaves(model(*inputs)) if leaf.requires_grad]
    torch.autograd.backward(leaves, [torch.ones_like(leaf) for leaf in leaves])
    end = clock.mark()
    clock.wait()
    return clock.between(start, end)
