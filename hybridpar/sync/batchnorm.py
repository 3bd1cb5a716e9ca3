"""BatchNorm statistics that do not depend on how a batch was divided over micro-batches and replicas; a model's other
buffers, which a step rolls back, and which all replicas take from the first.

Stock BatchNorm updates its running statistics once per forward call. With M micro-batches that is M updates per step
(an effective momentum of 1 - (1 - m)^M), and with replicas each keeps the statistics of its own shard. Here the sums
and squared sums of the batch are pooled over micro-batches and replicas and committed once per step: one step on R
workers with M micro-batches leaves the statistics of the whole batch, as one step on one worker would.

What is not pooled, unless asked for (`group`), is the normalisation: each micro-batch is normalised by its own moments.
Training with M micro-batches of b is the same function as data parallelism over M replicas with b samples each.

A module gets another class with the same parameters, buffers and names, so `state_dict`, pickling and `isinstance` go
on working; `release` gives it its class back.

A layer with a forward of its own is pooled too where it has two methods: `normalise(input, mean, variance, training,
momentum)`, which is `batch_norm` and whatever the layer does behind it, and `activate(output)`, that alone. Its class
says in `reduce_state(state)` what copies and pickles are made of.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from hybridpar.comm.group import Group
from hybridpar.comm.world import World
from hybridpar.errors import SyncError
from hybridpar.lanes.base import Constants
from hybridpar.sync.sync_batchnorm import normalise_over_replicas


class BatchNormPool:
    """Pools the statistics of all BatchNorm layers of a model over one step.

    The batch's moments come from the stock kernel itself: it is given scratch buffers to update with momentum 1, so
    pooling reads no activation a second time. All sums are float64: a sum of squares loses too much in float32 where
    the mean is large.
    """

    def __init__(self, model: nn.Module, group: Group | None = None, device: torch.device | None = None) -> None:
        self.group = group
        # The kernel writes moments in the dtype of a layer's statistics, so layers of one dtype lie together.
        self.layers: list[Any] = sorted(filter(_can_pool, model.modules()), key=_dtype_name)
        self._widths = [layer.num_features for layer in self.layers]
        channels = self._channels = sum(self._widths)
        self._originals = [type(layer) for layer in self.layers]
        device = self.layers[0].running_mean.device if self.layers else device or torch.device("cpu")
        self._constants = Constants(device)
        self._counts = [0] * len(self.layers)
        numbers = torch.arange(len(self.layers))
        self._paused = False
        self._layer_of_channel = torch.repeat_interleave(numbers, torch.tensor(self._widths, dtype=torch.int64)).to(
            device
        )
        #: Per channel: sum and squared sum; then per layer the number of values behind them.
        self.sums = torch.zeros(2 * channels + len(self.layers), dtype=torch.float64, device=device)
        #: For each dtype, mean and variance of every channel in the present micro-batch, which the next overwrites.
        self.scratch: list[Tensor] = []
        index = 0
        for _, same in groupby(self.layers, _dtype_name):
            layers = list(same)
            widths = [layer.num_features for layer in layers]
            moments = torch.zeros(2, sum(widths), dtype=layers[0].running_mean.dtype, device=device)
            self.scratch.append(moments)
            for layer, (mean, variance) in zip(layers, torch.split(moments, widths, 1), strict=True):
                layer.__class__ = _pooled_class(type(layer))
                layer._pool = _LayerScratch(self, index, mean, variance)
                index += 1

    def fold(self) -> None:
        """Add the moments of the micro-batch whose forward pass has just ended to the sums of the step."""
        if not self.layers:
            return
        counts = self._constants.of(*self._counts)
        values = counts[self._layer_of_channel]
        moments = [one.double() for one in self.scratch]
        mean, variance = moments[0] if len(moments) == 1 else torch.cat(moments, 1)
        # The kernel's running variance is unbiased: (n - 1) v is the sum of squared deviations.
        squares = (values - 1).clamp_(min=0) * variance + values * mean * mean
        # A layer that did not run has count 0 and scratch 0.
        self.sums += torch.cat((values * mean, squares, counts))
        self._clear()

    def commit(self, sums: Tensor, where: Tensor | None = None) -> None:
        """Move the running statistics by the pooled moments, once.

        running = (1 - m) running + m pooled, with the unbiased variance, as stock BatchNorm defines it; a layer with
        `momentum=None` averages over all steps. A layer that ran nowhere keeps its statistics.
        """
        if not self.layers:
            return
        channels = self._channels
        counts = sums[2 * channels :]
        values = counts[self._layer_of_channel]
        mean = sums[:channels] / values.clamp(min=1)
        deviations = (sums[channels : 2 * channels] - values * mean * mean).clamp_(min=0)
        variance = deviations / (values - 1).clamp(min=1)
        ran = counts > 0 if where is None else (counts > 0) & (where > 0)
        torch._foreach_add_([layer.num_batches_tracked for layer in self.layers], list(ran.to(torch.int64).unbind()))
        factor = self._factors()
        moves = ran[self._layer_of_channel]
        for kind, pooled in (("running_mean", mean), ("running_var", variance)):
            buffers: list[Tensor] = [getattr(layer, kind) for layer in self.layers]
            old = torch.cat(buffers).double()
            # `where` and not a product: a rolled-back step may have left an inf in the pooled moments.
            new = torch.where(moves, old + factor * (pooled - old), old)
            torch._foreach_copy_(buffers, list(torch.split(new, self._widths)))
        self.discard()

    def _factors(self) -> Tensor:
        """Each channel's exponential factor: the layer's momentum, or one over the steps seen so far."""
        if all(layer.momentum is not None for layer in self.layers):
            return self._constants.of(*(float(layer.momentum) for layer in self.layers))[self._layer_of_channel]
        each = [
            self._constants.of(float(layer.momentum))[0]
            if layer.momentum is not None
            else 1.0 / layer.num_batches_tracked.clamp(min=1).double()
            for layer in self.layers
        ]
        return torch.stack(each)[self._layer_of_channel]

    def discard(self) -> None:
        """Forget the sums of this step: it was rolled back, or they were committed."""
        self.sums.zero_()
        self._clear()

    def _clear(self) -> None:
        # Momentum 1 computes 0 * old + new, so an inf left in the scratch would become a nan for ever.
        for moments in self.scratch:
            moments.zero_()
        self._counts = [0] * len(self.layers)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, training forwards leave no trace: activations are computed a second time."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def release(self) -> None:
        """Give every layer its own class back. Safe to call twice."""
        for layer, original in zip(self.layers, self._originals, strict=True):
            layer.__class__ = original
            del layer._pool
        self.layers, self._originals = [], []


class BufferRollback:
    """Puts the buffers of a model back to what they were at the beginning of a step, which is rolled back.

    Stock BatchNorm moves its running statistics in every forward call, and one NaN in them would stay for ever. So
    the buffers that a forward pass may change are copied at the beginning of a step; they are small. What is pooled
    needs no copy. A pass may write into a buffer, resize it, or assign another tensor: buffers are looked up by name.
    """

    def __init__(self, model: nn.Module, spared: Iterable[nn.Module] = ()) -> None:
        ignored = set(spared)  # but not what is in them, as observers are
        self._held = [module._buffers for module in model.modules() if module not in ignored]
        self._places: list[tuple[dict[str, Any], str]] = []
        self._before: list[Any] = []  # tensors, and None
        self._shapes: list[Any] = []
        self._kinds: list[_Kept] = []
        self.keep()

    @torch.no_grad()
    def keep(self) -> None:
        """Remember the buffers; called before the first forward pass of a step."""
        self._places = [(held, name) for held in self._held for name in held]
        present = self._present()
        shapes = [None if one is None else one.shape for one in present]
        if not self._kinds or shapes != self._shapes or not all(map(operator.is_, present, self._before)):
            self._before, self._shapes = present, shapes
            kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
            for place, buffer in enumerate(present):
                if buffer is not None:
                    kinds.setdefault((buffer.device, buffer.dtype), []).append(place)
            self._kinds = [_Kept(places, present) for places in kinds.values()]
        for kind in self._kinds:
            torch._foreach_copy_(kind.parts_saved, kind.buffers)

    @torch.no_grad()
    def restore(self, unless: Tensor | None = None) -> None:
        """Put back what `keep` saw, the tensors and their values; where `unless` is not 0, the tensors only."""
        present = self._present()
        assigned = not all(map(operator.is_, present, self._before))
        pairs = enumerate(zip(self._before, self._shapes, strict=True))
        resized = [place for place, (one, shape) in pairs if one is not None and one.shape != shape]
        made = sum(map(len, self._held)) != len(self._places)  # by `register_buffer` in forward
        if unless is not None and (made or resized or (assigned and not self._can_choose(present))):
            if bool(unless):
                return
            unless = None
        for place in resized:
            self._before[place].data = self._before[place].new_empty(self._shapes[place])
        for kind in self._kinds:
            # `.data`: another stage may have saved a constant of both for a backward pass of the next step.
            written = [one.data for one in kind.buffers]
            if unless is None:
                torch._foreach_copy_(written, kind.parts_saved)
            else:
                # A few kernels for all buffers: to launch some for each takes a GPU's host longer than they run.
                now = [present[place] for place in kind.places] if assigned else kind.buffers
                torch._foreach_copy_(kind.parts_chosen, now)
                torch.where(unless != 0, kind.chosen, kind.saved, out=kind.chosen)
                torch._foreach_copy_(written, kind.parts_chosen)
        if assigned or made:
            for held in self._held:
                held.clear()
            for (held, name), buffer in zip(self._places, self._before, strict=True):
                held[name] = buffer

    def _present(self) -> list[Any]:
        return [buffers.get(name) for buffers, name in self._places]

    def _can_choose(self, present: Sequence[Any]) -> bool:
        """Whether what was assigned can be written into the tensors from before."""
        pairs = [(one, other) for one, other in zip(present, self._before, strict=True) if one is not other]
        same = all(
            one is not None
            and other is not None
            and (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
            for one, other in pairs
        )
        names = Counter(map(id, self._before))  # a tensor with two names may now be two tensors
        return same and all(names[id(other)] == 1 for _, other in pairs)


class ReplicaBuffers:
    """Gives all replicas of a stage the first one's buffers, once per step.

    DistributedDataParallel broadcasts all buffers before the first forward pass of a step. Here it is done behind the
    last one, beside the backward passes; the values are taken over with the update of the parameters. On CPUs that is
    left out where no replica's buffers have changed, as those of tables and masks.
    """

    def __init__(self, module: nn.Module, replicas: World, pool: BatchNormPool | None) -> None:
        norms = {one for one in module.modules() if isinstance(one, _BatchNorm)} if pool is None else set(pool.layers)
        self._modules = [inside for inside in module.modules() if inside not in norms]
        self._replicas, self._device = replicas, replicas.device
        self._common: Tensor | None = None  # what all had after the last exchange
        self._latest: Tensor | None = None
        #: Whether there are other replicas, and buffers that are no statistics of BatchNorm; all know the same.
        self.shared = replicas.size > 1 and any(inside._buffers for inside in self._modules)

    def share(self, *, new: bool = False) -> None:
        """Give all replicas the first one's values between two steps; a collective. With `new`, where none had any."""
        if self.shared or (new and self._replicas.size > 1):
            self.look()
            self.exchange()
            self.shared = self.shared or self._latest is not None
            self.take()

    def look(self) -> None:
        """Note what this replica has; called behind the last forward pass of a step."""
        self._latest = self._packed()

    def exchange(self) -> None:
        """Receive the first replica's values, on a lane of control messages; a collective."""
        latest, group = self._latest, self._replicas.control_group
        assert latest is not None
        assert group is not None
        with self._replicas.named_errors("exchanging buffers"):
            if latest.device.type == "cpu" or not self.shared:
                size = latest.numel()
                changed = self._common is None or not torch.equal(self._common, latest)
                facts = torch.tensor([changed, size, size * size], dtype=torch.float64, device=latest.device)
                group.all_reduce(facts)
                anywhere, total, squares = facts.tolist()
                if not (anywhere and total):
                    self._latest = None
                    return
                if self._replicas.size * squares != total**2:
                    raise SyncError(
                        "the buffers of the model do not have the same sizes on all workers",
                        "All take worker 0's; on a worker without samples a buffer does not change its size.",
                        "Give every worker samples in the first steps.",
                    )
            if self._replicas.rank:
                latest.zero_()
            group.all_reduce(latest)
            self._common = latest

    @torch.no_grad()
    def take(self) -> None:
        """Write what was received into the buffers."""
        latest, self._latest = self._latest, None
        if latest is None or not self._replicas.rank:
            return
        buffers = self._present()
        for view, buffer in zip(self._views(latest, buffers), buffers, strict=True):
            buffer.data.copy_(view)  # see `BufferRollback.restore`

    def _present(self) -> list[Tensor]:
        return [buffer for module in self._modules for buffer in module._buffers.values() if buffer is not None]

    @torch.no_grad()
    def _packed(self) -> Tensor:
        """The bytes of all buffers in one tensor; sums of them with zeros are exact, whatever the dtype."""
        buffers = self._present()
        packed = torch.zeros(sum(map(_aligned, buffers)) // 8, dtype=torch.int64, device=self._device)
        for view, buffer in zip(self._views(packed, buffers), buffers, strict=True):
            view.copy_(buffer)
        return packed

    def _views(self, packed: Tensor, buffers: Sequence[Tensor]) -> list[Tensor]:
        parts = torch.split(packed.view(torch.uint8), [_aligned(one) for one in buffers])
        return [part[: one.nbytes].view(one.dtype).view(one.shape) for part, one in zip(parts, buffers, strict=True)]


def _aligned(tensor: Tensor) -> int:
    return -(-tensor.nbytes // 16) * 16


class _Kept:
    """Buffers of one device and dtype, with room for copies of them, each in one piece."""

    def __init__(self, places: Sequence[int], present: Sequence[Any]) -> None:
        self.places = places
        self.buffers: list[Tensor] = [present[place] for place in places]
        self.saved = torch.cat([one.detach().flatten() for one in self.buffers])
        self.parts_saved = self._parts(self.saved)

    @cached_property
    def chosen(self) -> Tensor:
        """Room for what a device chooses; made in the first step that needs it, which is never captured."""
        return torch.empty_like(self.saved)

    @cached_property
    def parts_chosen(self) -> list[Tensor]:
        """Its parts."""
        return self._parts(self.chosen)

    def _parts(self, flat: Tensor) -> list[Tensor]:
        parts = torch.split(flat, [one.numel() for one in self.buffers])
        return [part.view(one.shape) for part, one in zip(parts, self.buffers, strict=True)]


@contextmanager
def without_replicas(module: nn.Module) -> Iterator[None]:
    """Inside, layers of a module normalise by their own moments and leave no trace, whatever they do in training."""
    pools = {scratch.pool for layer in module.modules() if (scratch := getattr(layer, "_pool", None)) is not None}
    groups = [(pool, pool.group, pool._paused) for pool in pools]
    for pool in pools:
        pool.group, pool._paused = None, True
    try:
        yield
    finally:
        for pool, group, paused in groups:
            pool.group, pool._paused = group, paused


class _LayerScratch:
    """What a pooled layer needs in its forward; copies and pickles of the layer get none of it."""

    def __init__(self, pool: BatchNormPool, index: int, mean: Tensor, variance: Tensor) -> None:
        self.pool = pool
        self.index = index
        self.mean = mean
        self.variance = variance

    def enter(self, values: int) -> None:
        if self.pool._counts[self.index] > 0:
            # The layer runs twice in one forward: bank the first call before its scratch is overwritten.
            self.pool.fold()
        self.pool._counts[self.index] = values

    def __deepcopy__(self, memo: object) -> None:
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return (_no_scratch, ())


def _no_scratch() -> None:
    return None


class _PooledForward:
    """Mixed in before a BatchNorm class: training forwards update the pool's scratch, not the running statistics."""

    _pool: _LayerScratch | None
    training: bool

    def forward(self: Any, input: Tensor) -> Tensor:
        scratch = self._pool
        if not self.training or scratch is None:
            result: Tensor = super().forward(input)  # type: ignore[misc]
            return result
        self._check_input_dim(input)
        # In a backward pass torch.utils.checkpoint runs a forward pass that has been counted.
        group, paused = scratch.pool.group, scratch.pool._paused or torch._C._current_graph_task_id() != -1
        if group is not None:
            output, mean, variance = normalise_over_replicas(input, self.weight, self.bias, self.eps, group)
            if not paused:
                scratch.enter(input.numel() // input.shape[1])
                scratch.mean.copy_(mean)
                scratch.variance.copy_(variance)
            return self.activate(output) if hasattr(self, "activate") else output
        # The kernel keeps its running statistics for an eval-mode backward that never comes here. `.data` gives them
        # a version counter of their own, so that clearing the scratch is not taken for an edit of a saved tensor.
        mean, variance = scratch.mean.data, scratch.variance.data
        if paused:
            mean, variance = torch.empty_like(mean), torch.empty_like(variance)
        else:
            scratch.enter(input.numel() // input.shape[1])
        return _normalise(self, input, mean, variance, 1.0)


def _normalise(layer: Any, input: Tensor, mean: Tensor | None, variance: Tensor | None, momentum: float) -> Tensor:
    """Normalise by the batch, and move statistics, as the layer does it."""
    if hasattr(layer, "normalise"):
        result: Tensor = layer.normalise(input, mean, variance, True, momentum)
        return result
    return functional.batch_norm(input, mean, variance, layer.weight, layer.bias, True, momentum, layer.eps)


_classes: dict[type, type] = {}


def _pooled_class(original: type) -> type:
    if original not in _classes:
        made = type(original.__name__, (_PooledForward, original), {"__reduce_ex__": _reduce_to_original})
        made.__qualname__, made.__module__ = original.__qualname__, original.__module__
        _classes[original] = made
    return _classes[original]


def _reduce_to_original(self: Any, protocol: int) -> tuple[Any, ...]:
    """Copies and pickles are plain layers of the original class."""
    original = next(base for base in type(self).__mro__[1:] if base is not _PooledForward)
    state = {key: value for key, value in self.__dict__.items() if key != "_pool"}
    if hasattr(original, "reduce_state"):
        reduced: tuple[Any, ...] = original.reduce_state(state)
        return reduced
    return (original.__new__, (original,), state)


def _dtype_name(layer: Any) -> str:
    return str(layer.running_mean.dtype)


def _can_pool(layer: nn.Module) -> bool:
    return (
        isinstance(layer, _BatchNorm)
        and not isinstance(layer, nn.SyncBatchNorm)
        and layer.track_running_stats
        and layer.running_mean is not None
        and (type(layer).forward is _BatchNorm.forward or hasattr(layer, "normalise"))
    )
