"""The passes of one stage for one micro-batch, whatever the schedule.

A `StageRun` cuts the autograd graph at the borders of its stage: what enters becomes a leaf, what leaves is handed on
detached, and the backward pass starts from the gradients that came back. Tensors change hands through a `Mailbox`, in
which every user of a tensor has an entry of its own, so that the last user frees it.

Random operations of stages, such as dropout, do not depend on the order in which lanes run.

All threads of a process draw from torch's one generator, so masks would depend on the interleaving of stages, and a
forward pass that is run again for its activations would draw others. Here every random operation of a stage is keyed
by the seed, the step, the micro-batch and the operation's own name in the model's graph: the masks are the same for
any number of stages, lanes and workers, any schedule, and any recomputation.

On a CPU such an operation draws from a generator of its own, because the host may draw from torch's one at the same
time, for instance to augment the next batch, and neither must change what the other gets.
"""

from __future__ import annotations

import functools
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves

from hybridpar.models.state import DispatchMode, HeldState, TensorCopies, held_state, put_state, storage_of
from hybridpar.pipeline.stage_module import StageModule, module_of
from hybridpar.sync.batchnorm import BatchNormPool, is_expanded

if TYPE_CHECKING:
    from hybridpar.pipeline.offload import Parked

_lock = threading.Lock()
_local = threading.local()


@dataclass(frozen=True)
class RandomKeys:
    """The key of the random operations of a replica.

    Attributes:
        seed: Equal on all workers.
        device: Whose generator is seeded.
        first: Number of the replica's first micro-batch among those of all replicas.
        compiled: Stages are compiled. Such code draws from torch's one generator, so the host should not meanwhile.
    """

    seed: int
    device: torch.device
    first: int = 0
    compiled: bool = False

    @contextmanager
    def of(self, step: int, micro_batch: int) -> Iterator[None]:
        """Inside, random operations of stages on this thread belong to a micro-batch of a step."""
        separate = self.device.type == "cpu" and not self.compiled
        _local.key = (self.device, f"{self.seed}:{step}:{self.first + micro_batch}", separate)
        _local.leave = None
        try:
            yield
        finally:
            if _local.leave is not None:  # the operation failed
                leave_random()
            _local.key = None


@contextmanager
def numbers_of_its_own(device: torch.device, compiled: bool = False) -> Iterator[None]:
    """Inside, this thread draws random numbers of its own; those of other threads do not change.

    For example runs. On a CPU another thread may draw meanwhile, so torch's one generator is not even saved and put
    back.
    """
    if device.type == "cuda" or compiled:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            yield
    else:
        with _OwnGenerator(0):
            yield


def key_random_operations(graph: fx.Graph, modules: nn.Module, *, compiled: bool = False) -> int:
    """Surround every random operation of a graph by calls that seed it by its name; the caller recompiles."""
    enter, leave = (torch.compiler.disable(hook) if compiled else hook for hook in (enter_random, leave_random))  # type: ignore[no-untyped-call]
    count = 0
    for node in list(graph.nodes):
        if not _is_random(node, modules):
            continue
        count += _draws_now(node, modules)
        if (before := node.prev).args == (node.name,):  # the stage has been in a pipeline before
            before.target, node.next.target = enter, leave
        else:
            with graph.inserting_before(node):
                graph.call_function(enter, (node.name,))
            with graph.inserting_after(node):
                graph.call_function(leave)
    return count


def enter_random(name: str) -> None:
    """Seed the generator for one operation. Does nothing where no micro-batch is known."""
    key = getattr(_local, "key", None)
    if key is None:
        return
    device, text, separate = key
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return  # only dropout of rate 0 is captured, see `why_not_captured`
    seed = zlib.crc32(f"{text}:{name}".encode())
    if separate:
        mode = _OwnGenerator(seed)
        mode.__enter__()  # type: ignore[no-untyped-call]
        _local.leave = partial(mode.__exit__, None, None, None)
    elif device.type == "cuda":
        # One thread issues everything to a GPU, and its generator is advanced at the time of issue.
        _local.leave = partial(torch.cuda.set_rng_state, torch.cuda.get_rng_state(device), device)
        torch.cuda.default_generators[device.index].manual_seed(seed)
    else:
        _lock.acquire()
        _local.leave = partial(_put_back, torch.get_rng_state())
        torch.default_generator.manual_seed(seed)


def leave_random() -> None:
    """End what `enter_random` began, if it did."""
    leave = getattr(_local, "leave", None)
    if leave is not None:
        _local.leave = None
        leave()


def _put_back(state: Tensor) -> None:
    torch.set_rng_state(state)
    _lock.release()


class _OwnGenerator(DispatchMode):
    """Random operators of this thread draw from a generator of their own."""

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags or kwargs.get("generator") is not None:
            return func(*args, **kwargs)  # what draws from a generator of the model's does so
        if "generator" in _arguments_of(func):
            return func(*args, **{**kwargs, "generator": self._generator})
        seed = int(torch.randint(1 << 62, (), generator=self._generator))
        if (other := _with_generator(func)) is not None:  # such as `rand_like`
            return other(*args, **{**kwargs, "generator": torch.Generator().manual_seed(seed)})
        # This operator knows no generator but torch's.
        with _lock, torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            return func(*args, **kwargs)


def _arguments_of(operator: Any) -> list[str]:
    return [argument.name for argument in operator._schema.arguments]


@functools.cache
def _with_generator(operator: Any) -> Any | None:
    """The form of an operator that takes a generator beside the same arguments; None where it has none."""
    packet = operator.overloadpacket
    forms = [getattr(packet, name) for name in packet.overloads()]
    wanted = sorted([*_arguments_of(operator), "generator"])
    return next((form for form in forms if sorted(_arguments_of(form)) == wanted), None)


def _is_random(node: fx.Node, modules: nn.Module) -> bool:
    if node.meta.get("random"):  # it drew some in an example run
        return True
    # What draws nothing in an example may draw later.
    return node.op == "call_module" and any(map(_draws, modules.get_submodule(str(node.target)).modules()))


def _draws_now(node: fx.Node, modules: nn.Module) -> bool:
    """Whether a random operation draws as it is: not a dropout layer of rate 0."""
    if node.op != "call_module":
        return True
    layer = modules.get_submodule(str(node.target))
    return not (isinstance(layer, nn.modules.dropout._DropoutNd) and layer.p == 0)


def _draws(module: Any) -> bool:
    """Whether a module's forward pass may draw random numbers: dropout, or something that holds a dropout rate."""
    if isinstance(module, nn.RReLU | nn.modules.dropout._DropoutNd | nn.FractionalMaxPool2d | nn.FractionalMaxPool3d):
        return True
    rate = getattr(module, "dropout", None)
    return isinstance(rate, float) and rate > 0


Keep = Callable[..., None]


#: (name of the value, micro-batch, stage that takes it)
_Address = tuple[str, int, int]


class Mailbox:
    """Tensors on their way between the stages of one worker, or between a stage and a transfer.

    Attributes:
        values: Activations, addressed to the stage that uses them.
        gradients: Gradients of activations, named after the activation, addressed by the stage that *used* it.
    """

    def __init__(self) -> None:
        self.values: dict[_Address, Tensor] = {}
        self.gradients: dict[_Address, Tensor] = {}

    def clear(self) -> None:
        """Forget everything: a step was given up."""
        self.values.clear()
        self.gradients.clear()


@dataclass
class _Flight:
    """What one micro-batch leaves in a stage between its forward and its backward pass."""

    leaves: dict[str, Tensor]
    outputs: dict[str, Tensor] = field(default_factory=dict)
    loss: Tensor | None = None
    share: Callable[[], float] = lambda: 1.0
    target: Any = None
    parked: Parked | None = None  # where what it saved is to move
    seen: HeldState | None = None  # the state that its forward pass saw, where that is run again


class StageRun:
    """Runs one stage on its lane."""

    def __init__(
        self,
        stage: StageModule,
        consumers: dict[int, list[str]],
        mailbox: Mailbox,
        *,
        forward: Callable[..., Any] | None = None,
        loss: Callable[[Any, Any], Tensor] | None = None,
        recompute: bool = False,
        overlaps: bool = True,
        keys: RandomKeys | None = None,
        context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self.module = module_of(stage)
        self.index = stage.index
        self._inputs, self._output_names = stage.inputs, [border.name for border in stage.outputs]
        self._consumers = consumers
        self._mailbox = mailbox
        self._call: Callable[..., Any] = self.module if forward is None else forward
        self._loss = loss
        self._recompute = recompute
        #: Whether other passes run between a forward pass and the backward pass that reads what it saved.
        self._overlaps = overlaps and not recompute
        self._keys = keys
        self._context = context
        #: What pools the statistics of BatchNorm, where something does.
        self.batch_norm: BatchNormPool | None = None
        #: Micro-batches whose activations are kept now.
        self.flights: dict[int, _Flight] = {}
        #: Buffers that a pass may write into, and autograd save for a backward pass.
        self._buffers = [module._buffers for module in self.module.modules()]
        # Writing through `.data`, and BatchNorm's writing, leaves no mark on a tensor, so what the trace saw, and the
        # statistics of layers that may be trained later, count as changed in every pass.
        self._written = {
            (id(module._buffers), name)
            for path, module in self.module.named_modules()
            for name in module._buffers
            if isinstance(module, _BatchNorm) or (f"{path}.{name}" if path else name) in stage.written
        }
        #: Of each: where it is held, the tensor of the step's first pass and of the last, its version and its address.
        self.seen: dict[tuple[int, str], tuple[dict[str, Tensor | None], Tensor, Tensor, int, int]] = {}
        self._step = 0
        #: Sum of the scaled losses of the step so far, float64; None before the first.
        self.loss_sum: Tensor | None = None
        #: What the loss is multiplied with for the backward pass alone, 0-d float32; None does not scale it.
        self.loss_scale: Tensor | None = None
        #: The most micro-batches whose activations were ever kept at a time.
        self.peak_in_flight = 0

    def pool_batch_norm(self, pool: BatchNormPool) -> None:
        """Let what pools the statistics of BatchNorm see each pass; a pass does not write into those."""
        self.batch_norm = pool
        pooled = set(pool.layers)
        self._buffers = [module._buffers for module in self.module.modules() if module not in pooled]

    def start_step(self, step: int) -> None:
        """Forget the losses of the step before, and whatever a step that was given up has left."""
        self._step = step
        self.loss_sum = None
        self.flights.clear()
        self.seen.clear()

    # ---------------------------------------------------------------- forward

    def forward(
        self,
        index: int,
        inputs: dict[str, Tensor],
        target: Any,
        share: Callable[[], float],
        keep: Keep,
        *,
        parks: bool = False,
    ) -> None:
        """Run the forward pass of a micro-batch."""
        leaves: dict[str, Tensor] = {}
        taken: list[Tensor] = []
        for border in self._inputs:
            given = inputs.get(border.name)
            value = self._mailbox.values.pop((border.name, index, self.index)) if given is None else given
            taken.append(value)
            leaf = value.detach()
            leaves[border.name] = leaf.requires_grad_() if border.requires_grad else leaf
        keep(*taken, *leaves.values())
        if self._overlaps and any(self._buffers):
            self._protect_buffers()
        flight = self.flights[index] = _Flight(leaves, share=share, target=target)
        self.peak_in_flight = max(self.peak_in_flight, len(self.flights))
        if parks:
            from hybridpar.pipeline.offload import Parked

            stays = (*leaves.values(), *tree_leaves(flight.target), *self.module.parameters(), *self.module.buffers())
            rooms = () if self.batch_norm is None else self.batch_norm.rooms
            flight.parked = Parked(value for value in (*stays, *rooms) if isinstance(value, Tensor))
        if self._recompute:
            # Pooled statistics are not read.
            flight.seen = held_state(self.module, () if self.batch_norm is None else self.batch_norm.layers)
        with (
            torch.set_grad_enabled(not self._recompute),
            nullcontext() if flight.parked is None else flight.parked.hooks(),
        ):
            self._run(flight, index)
        if self.batch_norm is not None:
            self.batch_norm.fold()
        if flight.loss is not None:
            scaled = flight.loss.detach().double()
            self.loss_sum = scaled if self.loss_sum is None else self.loss_sum + scaled
        for consumer, names in self._consumers.items():
            for name in names:
                self._mailbox.values[name, index, consumer] = flight.outputs[name].detach()
        if self._recompute:
            flight.outputs, flight.loss = {}, None

    def _protect_buffers(self) -> None:
        """Give buffers that change other memory where passes are in flight: autograd may have saved what they were."""
        present = [
            (held, name, buffer) for held in self._buffers for name, buffer in held.items() if buffer is not None
        ]
        changed = set()  # storages: what shares memory goes on sharing it
        for held, name, buffer in present:
            *_, last, version, address = self.seen.get((id(held), name), (None, 0, 0))
            same = last is buffer and (version, address) == (buffer._version, buffer.data_ptr())
            if not same or (id(held), name) in self._written:
                changed.add(storage_of(buffer))
        copies = TensorCopies()
        for held, name, buffer in present:
            _, first, last, *_ = self.seen.get((id(held), name), (held, buffer, None))
            first = first if last is buffer else buffer
            if self.flights and storage_of(buffer) in changed:
                held[name] = buffer = copies.of(buffer)
            self.seen[id(held), name] = held, first, buffer, buffer._version, buffer.data_ptr()

    @torch.no_grad()
    def put_back_buffers(self) -> None:
        """Write what was given other memory to where it was; but what forward has assigned since stays."""
        for (_, name), (held, first, last, *_) in self.seen.items():
            if first is not last is held.get(name) and (first.shape, first.dtype) == (last.shape, last.dtype):
                # Into what is expanded nothing can be written: it changes only where it is a view of what does.
                held[name] = first if is_expanded(first) else first.copy_(last)
        self.seen.clear()

    def _run(self, flight: _Flight, index: int) -> None:
        with self._context():
            with self._keys.of(self._step, index) if self._keys is not None else nullcontext():
                result = self._call(*flight.leaves.values())
            loss = self._loss(result, flight.target) if self._loss is not None else None
        if loss is not None:
            loss, share = loss if self.loss_scale is None else loss.float(), flight.share()
            flight.loss = loss if share == 1.0 else loss * share
        else:
            flight.outputs = dict(zip(self._output_names, result, strict=True))

    def park(self, index: int) -> None:
        """Start to copy what a forward pass has saved to the host; on a copy lane."""
        self.parked(index).park(self.flights[index].outputs.values())

    def parked(self, index: int) -> Parked:
        """What a forward pass has saved, of a micro-batch that moves."""
        parked = self.flights[index].parked
        assert parked is not None
        return parked

    @contextmanager
    def _seeing(self, state: HeldState | None) -> Iterator[None]:
        """Inside, the stage has the state that a forward pass saw, to run it again; what that does is dropped."""
        assert state is not None
        present = put_state(state)
        try:
            with nullcontext() if self.batch_norm is None else self.batch_norm.paused():
                yield
        finally:
            put_state(present)

    # --------------------------------------------------------------- backward

    def backward(self, index: int, keep: Keep) -> None:
        """Run the backward pass of a micro-batch: gradients of parameters are accumulated, those of
        inputs handed on.
        """
        flight = self.flights[index]
        roots = self._roots(flight, index, keep)
        if roots:
            outputs, gradients = zip(*roots, strict=True)
            torch.autograd.backward(outputs, gradients)
        for name, leaf in flight.leaves.items():
            if leaf.grad is not None:
                self._mailbox.gradients[name, index, self.index] = leaf.grad
                leaf.grad = None
        del self.flights[index]

    def _roots(self, flight: _Flight, index: int, keep: Keep) -> list[tuple[Tensor, Tensor | None]]:
        """Where the backward pass starts, with the gradients it starts from."""
        # The graph saved tensors that other lanes made; it needs them until this lane has passed the backward pass.
        taken = [*flight.leaves.values()]
        if self._recompute:
            with torch.enable_grad(), self._seeing(flight.seen):
                self._run(flight, index)
        if flight.loss is not None:
            keep(*taken)
            return [(flight.loss, self.loss_scale)] if flight.loss.requires_grad else []
        gradients: dict[str, Tensor] = {}
        # The latest user first, as autograd would come to them in a model that is in one piece.
        for consumer in sorted(self._consumers, reverse=True):
            for name in self._consumers[consumer]:
                gradient = self._mailbox.gradients.pop((name, index, consumer), None)
                if gradient is not None:
                    taken.append(gradient)
                    known = gradients.get(name)
                    gradients[name] = gradient if known is None else known + gradient
        keep(*taken)
        return [
            (output, gradients[name])
            for name, output in flight.outputs.items()
            if output.requires_grad and name in gradients
        ]
