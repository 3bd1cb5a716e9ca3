"""Runs a graph on example inputs and records sizes, sharing and mutation of its values.

One example run of the graph notes for every node what it returned, which storages it shares, which argument it
changed in place, whether it drew random numbers, what it saved for the backward pass, and its FLOPs. Everything that
decides where a cut is legal, and what it costs in bytes, comes from this run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_map_only

from hybridpar.errors import UsageError
from hybridpar.models.deferred import imagined, is_deferred
from hybridpar.models.state import DispatchMode, storage_of, untouched
from hybridpar.partition.changes import python_random_state
from hybridpar.partition.nest import TensorFacts, can_cross, tensor_leaves

_NUMBERS = (int, float, tuple, torch.dtype, torch.device, torch.layout)


@dataclass
class NodeFacts:
    """What the example run showed of one node.

    Attributes:
        tensors: Every tensor in the node's value.
        shape: The value with facts for its tensors, if it may be sent to another stage: if it is made of tensors and
            plain containers. Else None.
        number: The value where it is a number, a type, or a tuple of such.
        storages: Numbers of the storages that the value lives in.
        changes: Arguments that the node changed in place.
        random: The node drew random numbers.
        saved: Bytes that the node saved for backward, by storage number.
        flops: FLOPs of the forward pass; a multiplication and an addition count as two.
    """

    tensors: tuple[TensorFacts, ...] = ()
    shape: Any = None
    number: Any = None
    storages: frozenset[int] = frozenset()
    changes: tuple[fx.Node, ...] = ()
    random: bool = False
    saved: dict[int, int] = field(default_factory=dict)
    flops: int = 0

    @property
    def is_tensor(self) -> bool:
        """Whether the value is a tensor, not a container."""
        return isinstance(self.shape, TensorFacts)

    @property
    def bytes(self) -> int:
        """Size of the value."""
        return sum(tensor.bytes for tensor in self.tensors)

    @property
    def gradient_bytes(self) -> int:
        """Size of the gradient that comes back for the value."""
        return sum(tensor.bytes for tensor in self.tensors if tensor.requires_grad)


def run_example(
    model: nn.Module,
    graph: fx.Graph,
    constants: Mapping[str, torch.Tensor],
    inputs: Sequence[torch.Tensor],
    *,
    training: bool = True,
) -> dict[fx.Node, NodeFacts]:
    """Run a graph once and note the facts of every node."""
    placeholders = [node.name for node in graph.nodes if node.op == "placeholder"]
    if len(placeholders) != len(inputs):
        raise UsageError(
            f"the model takes {len(placeholders)} input(s), {len(inputs)} given",
            f"Its inputs are {', '.join(placeholders)}.",
            "Give one tensor for each.",
        )
    with untouched(model, training=training) as copied, torch.set_grad_enabled(training):
        if not is_deferred(model):
            return _Example(model, graph, copied(dict(constants))).facts_of(inputs)
        with imagined(model, inputs[0].device) as mode:
            return _Example(model, graph, constants, imagined=True).facts_of(
                [mode.from_tensor(item) for item in inputs]
            )


class _Operations(DispatchMode):
    """Counts FLOPs by torch's formulas, and notices random operations, which draw nothing where nothing is computed."""

    def __init__(self, formulas: Mapping[Any, Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._formulas = formulas
        self.flops, self.draws = 0, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.draws = self.draws or torch.Tag.nondeterministic_seeded in func.tags
        out = func(*args, **kwargs)
        if (formula := self._formulas.get(getattr(func, "overloadpacket", None))) is not None:
            self.flops += formula(*args, **kwargs, out_val=out)
        return out


class _Example(fx.Interpreter):
    """Runs a graph node by node, and notes the facts of each."""

    def __init__(
        self, model: nn.Module, graph: fx.Graph, constants: Mapping[str, torch.Tensor], *, imagined: bool = False
    ) -> None:
        super().__init__(model, graph=graph)
        self.extra_traceback = False
        self.constants = constants
        self.imagined = imagined
        self.facts: dict[fx.Node, NodeFacts] = {}
        #: Numbers of storages. A weak reference leaves the memory free to go, and its address to no other storage.
        self.numbers: dict[StorageWeakRef, int] = {}
        state = (*model.parameters(), *model.buffers())
        self.permanent = {storage_of(tensor) for tensor in state}
        self.cuda = next((tensor.device for tensor in state if tensor.device.type == "cuda"), None)

    def facts_of(self, inputs: Sequence[torch.Tensor]) -> dict[fx.Node, NodeFacts]:
        """Run the graph."""
        from torch.utils.flop_counter import flop_registry  # which imports triton

        self._formulas = flop_registry
        try:
            self.run(*inputs)
        finally:
            self.env.clear()  # values whose hooks on saved tensors hold this object: a cycle that gc does not see
        return self.facts

    def fetch_attr(self, target: str) -> Any:
        """What a graph calls by this name; constants are not on the model."""
        return self.constants[target] if target in self.constants else super().fetch_attr(target)

    def run_node(self, n: fx.Node) -> Any:
        """Run a node."""
        if n.op == "output":
            return super().run_node(n)
        facts = self.facts[n] = NodeFacts()
        drawn, versions = self._random_state(), self._versions(n)
        operations = _Operations(self._formulas)
        try:
            with self._watch_saved(facts), operations:
                value = super().run_node(n)
        except Exception as error:  # the model's code, which may raise anything
            values = {argument.name: self.env[argument] for argument in n.all_input_nodes}
            tensors = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
            shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in tensors.items())
            raise UsageError(
                f"the model refuses its input at {n.name} ({describe_target(n)}), which got {shapes or 'no tensor'}",
                f"{type(error).__name__}: {error}",
                "Give samples of a shape that the model takes, as by --image-size 224, and a larger --batch-size.",
            ) from error
        facts.flops = operations.flops
        facts.random = operations.draws or drawn != self._random_state()
        facts.changes = tuple(item for item, version in self._versions(n).items() if versions[item] != version)
        leaves = list(tensor_leaves(value))
        facts.tensors = tuple(
            TensorFacts(
                ".".join(map(str, (n.name, *path))),
                *(path, tuple(tensor.shape), tensor.dtype, tensor.nbytes, tensor.requires_grad),
            )
            for path, tensor in leaves
        )
        if leaves and can_cross(value):
            in_order = iter(facts.tensors)
            facts.shape = tree_map_only(torch.Tensor, lambda _: next(in_order), value)
        facts.number = value if isinstance(value, _NUMBERS) and not leaves else None
        numbers = (self._number(tensor) for _, tensor in leaves)
        facts.storages = frozenset(number for number in numbers if number is not None)
        return value

    def _number(self, tensor: torch.Tensor) -> int | None:
        """The number of the storage that a tensor lives in; None where it has none."""
        if tensor.layout != torch.strided or not tensor.untyped_storage().nbytes():
            return None
        storage = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        return self.numbers.setdefault(storage, len(self.numbers))

    def _versions(self, node: fx.Node) -> dict[fx.Node, int]:
        return {
            argument: value._version
            for argument in node.all_input_nodes
            if isinstance(value := self.env[argument], torch.Tensor) and not value.is_inference()
        }

    def _random_state(self) -> tuple[Any, ...]:
        if self.imagined:  # nothing is drawn, and no state could be read
            return python_random_state()
        state = torch.cuda.get_rng_state(self.cuda) if self.cuda else torch.get_rng_state()
        return state.numpy().tobytes(), *python_random_state()

    @contextmanager
    def _watch_saved(self, facts: NodeFacts) -> Iterator[None]:
        if not torch.is_grad_enabled():
            yield
            return

        def note(tensor: torch.Tensor) -> torch.Tensor:
            if storage_of(tensor) not in self.permanent and (number := self._number(tensor)) is not None:
                facts.saved.setdefault(number, tensor.untyped_storage().nbytes())
            return tensor.detach()

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            yield


def describe_target(node: fx.Node) -> str:
    """The module path or the function of a node, for messages and tables."""
    if node.op in ("call_module", "get_attr"):
        return str(node.target)
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    where = module_path(node)
    return f"{where}: {name}" if where else str(name)


def module_path(node: fx.Node) -> str:
    """Path of the module whose code made the node; empty for the model itself."""
    stack = node.meta.get("nn_module_stack") or {}
    return str(next(reversed(stack))) if stack else ""
