"""BatchNorm statistics that do not depend on how a batch was divided over micro-batches and replicas; a model's other
buffers, which a step rolls back, and which all replicas take from the first.

Stock BatchNorm updates its running statistics once per forward call. With M micro-batches that is M updates per step
(an effective momentum of 1 - (1 - m)^M), and with replicas each keeps the statistics of its own shard. Here the sums
and squared sums of the batch are pooled over micro-batches and replicas and committed once per step: one step on R
workers with M micro-batches leaves the statistics of the whole batch, as one step on one worker would.

What is not pooled, unless asked for (`group`), is the normalisation: each micro-batch is normalised by its own moments.
Training with M micro-batches of b is the same function as data parallelism over M replicas with b samples each.

Where micro-batches are too small for that, `batch_norm="sync"` normalises each by the moments over all replicas'
micro-batches of the same number (Peng et al. 2018, "MegDet", section 3.3), so R replicas of b samples train as one
replica of R b samples does. It costs one small message per layer in each direction, which cannot overlap with the
computation around it. Torch's own `SyncBatchNorm` needs a GPU; this runs wherever gradients can be summed. Every
compute lane needs a group of its own for it, because lanes run beside each other and the sums of one group must come in
one order on all replicas. Within a lane the schedule is that order.

A module gets another class with the same parameters, buffers and names, so `state_dict`, pickling and `isinstance` go
on working; `release` gives it its class back.

A layer with a forward of its own is pooled too where it has two methods: `normalise(input, mean, variance, training,
momentum)`, which is `batch_norm` and whatever the layer does behind it, and `activate(output)`, that alone. Its class
says in `reduce_state(state)` what copies and pickles are made of.
"""

from __future__ import annotations

import operator
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from hybridpar.comm.world import World
from hybridpar.errors import SyncError, UsageError
from hybridpar.lanes.base import Constants

if TYPE_CHECKING:
    from hybridpar.comm.group import Group


class BatchNormPool:
    """Pools the statistics of all BatchNorm layers of a model over one step.

    The batch's moments come from the stock kernel itself: it is given other buffers to update with momentum 1, so
    pooling reads no activation a second time. All sums are float64: a sum of squares loses too much in float32 where
    the mean is large.
    """

    def __init__(self, model: nn.Module, group: Group | None = None, device: torch.device | None = None) -> None:
        self.group = group
        self.layers: list[Any] = [layer for layer in model.modules() if _can_pool(layer)]
        device = self.layers[0].running_mean.device if self.layers else device or torch.device("cpu")
        self._constants = Constants(device)
        self._widths = [layer.num_features for layer in self.layers]
        channels = self._channels = sum(self._widths)
        layer_of_channel = [index for index, width in enumerate(self._widths) for _ in range(width)]
        self._layer_of_channel = torch.tensor(layer_of_channel, dtype=torch.int64, device=device)
        self._nothing = torch.zeros(2 * channels + len(self.layers), dtype=torch.float64, device=device)
        self._folded: list[tuple[Tensor, tuple[int, ...]]] = []
        #: By layer: where its kernel writes mean and variance, over what a pass before has left.
        self.rooms = [layer.running_mean.new_zeros(2, layer.num_features) for layer in self.layers]
        #: Inside `paused` training forwards leave no trace.
        self.is_paused = False
        self._clear()
        for index, layer in enumerate(self.layers):
            stock: Any = type(layer)
            layer.__class__ = _pooled_class(stock)
            layer._pool = self, index

    def fold(self) -> None:
        """Add the moments of the micro-batch whose forward pass has just ended to those of the step."""
        if self.layers:
            self._folded.append((torch.cat(self.moments, 1), tuple(self.counts)))
        self._clear()

    @property
    def sums(self) -> Tensor:
        """Of the step so far, per channel: sum and squared sum; then per layer the number of values behind them."""
        if not self._folded:
            return self._nothing
        moments, counts = zip(*self._folded, strict=True)
        each = self._constants.of(*chain.from_iterable(counts)).view(len(counts), -1)
        values = each[:, self._layer_of_channel]
        mean, variance = torch.stack(moments, 1).double()
        total = values * mean
        # The kernel's running variance is unbiased: (n - 1) v is the sum of squared deviations.
        squares = (values - 1).clamp_(min=0) * variance + total * mean
        return torch.cat((total, squares, each), 1).sum(0)

    def commit(self, sums: Tensor, where: Tensor | None = None) -> None:
        """Move the running statistics by the pooled moments, once.

        running = (1 - m) running + m pooled, with the unbiased variance, as stock BatchNorm defines it; a layer with
        `momentum=None` averages over all steps. A layer that ran nowhere keeps its statistics.
        """
        if not self.layers:
            return
        total, squares, counts = torch.split(sums, [self._channels, self._channels, len(self.layers)])
        values = counts[self._layer_of_channel]
        mean = total / values.clamp(min=1)
        variance = (squares - total * mean).clamp_(min=0) / (values - 1).clamp(min=1)
        ran = counts > 0 if where is None else (counts > 0) & where
        steps = [layer.num_batches_tracked for layer in self.layers]
        torch._foreach_add_(steps, list(ran.to(torch.int64).unbind()))
        momenta = [layer.momentum for layer in self.layers]
        factors = self._constants.of(*[0.0 if momentum is None else float(momentum) for momentum in momenta])
        if None in momenta:
            averages = self._constants.of(*[float(momentum is None) for momentum in momenta]) > 0
            factors = torch.where(averages, 1.0 / torch.stack(steps).clamp(min=1).double(), factors)
        factors, moves = factors[self._layer_of_channel], ran[self._layer_of_channel]
        buffers: list[Tensor] = [layer.running_mean for layer in self.layers]
        buffers += [layer.running_var for layer in self.layers]
        old = torch.cat(buffers).double().view(2, -1)
        # `where` and not a product: a rolled-back step may have left an inf in the pooled moments.
        new = torch.where(moves, old.lerp(torch.stack((mean, variance)), factors.expand_as(old)), old)
        torch._foreach_copy_(buffers, torch.split(new.view(-1), 2 * self._widths))
        self.discard()

    def discard(self) -> None:
        """Forget the sums of this step: it was rolled back, or they were committed."""
        if self._folded or any(self.counts):
            torch._foreach_zero_(self.rooms)  # what is not finite would stay
        self._folded.clear()
        self._clear()

    def _clear(self) -> None:
        #: By layer, of the micro-batch under way: mean and variance of each channel, and how many values they are of.
        self.moments, self.counts = list(self.rooms), [0] * len(self.layers)

    @contextmanager
    def paused(self, *, alone: bool = False) -> Iterator[None]:
        """Inside, training forwards leave no trace, and if `alone` layers ask no other replicas for moments."""
        before = self.group, self.is_paused
        self.group, self.is_paused = None if alone else self.group, True
        try:
            yield
        finally:
            self.group, self.is_paused = before

    def release(self) -> None:
        """Give every layer its own class back. Safe to call twice."""
        for layer in self.layers:
            layer.__class__ = layer._stock
            del layer._pool
        self.layers = []


@contextmanager
def without_replicas(module: nn.Module) -> Iterator[None]:
    """Inside, layers of a module normalise by their own moments and leave no trace, whatever they do in training."""
    with ExitStack() as stack:
        for pool in {layer._pool[0] for layer in module.modules() if isinstance(layer, _Pooled)}:
            stack.enter_context(pool.paused(alone=True))
        yield


class _Pooled:
    """Mixed in before a BatchNorm class: training forwards update the pool, not the running statistics."""

    _pool: tuple[BatchNormPool, int]
    _stock: type

    def forward(self: Any, input: Tensor) -> Tensor:
        if not self.training:
            result: Tensor = super().forward(input)  # type: ignore[misc]
            return result
        self._check_input_dim(input)
        output: Tensor
        pool, index = self._pool
        # In a backward pass torch.utils.checkpoint runs a forward pass that has been counted.
        counts = not pool.is_paused and torch._C._current_graph_task_id() == -1
        if counts and pool.counts[index]:  # the layer runs twice in a forward pass
            pool.fold()
        if pool.group is not None:
            output, *each = NormaliseOverReplicas.apply(input, self.weight, self.bias, self.eps, pool.group)
            output = self.activate(output) if hasattr(self, "activate") else output
            moments = torch.stack(each).to(self.running_mean.dtype)
        else:
            moments = mean, variance = pool.rooms[index]
            if hasattr(self, "normalise"):
                output = self.normalise(input, mean, variance, True, 1.0)
            else:
                output = functional.batch_norm(input, mean, variance, self.weight, self.bias, True, 1.0, self.eps)
        if counts:
            pool.moments[index], pool.counts[index] = moments, input.numel() // self.num_features
        return output

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Copies and pickles are plain layers of the original class."""
        stock: Any = self._stock
        state = {key: value for key, value in self.__dict__.items() if key != "_pool"}
        if hasattr(stock, "reduce_state"):
            reduced: tuple[Any, ...] = stock.reduce_state(state)
            return reduced
        return (stock.__new__, (stock,), state)


@cache
def _pooled_class(stock: type) -> type:
    names = {"_stock": stock, "__qualname__": stock.__qualname__, "__module__": stock.__module__}
    return type(stock.__name__, (_Pooled, stock), names)


def _can_pool(layer: nn.Module) -> bool:
    return (
        isinstance(layer, _BatchNorm)
        and not isinstance(layer, nn.SyncBatchNorm)
        and layer.track_running_stats
        and layer.running_mean is not None
        and (type(layer).forward is _BatchNorm.forward or hasattr(layer, "normalise"))
    )


def require_separate_statistics(model: nn.Module) -> None:
    """Refuse layers that are pooled and share a buffer: each would move it from where it was before the step."""
    users: dict[int, str] = {}
    for path, layer in model.named_modules():
        for buffer in (layer.running_mean, layer.running_var, layer.num_batches_tracked) if _can_pool(layer) else ():
            first = users.setdefault(id(buffer), path)
            if first != path:
                raise UsageError(
                    f"the BatchNorm layers {first!r} and {path!r} share running statistics",
                    "Statistics move once per step, by all micro-batches and replicas, and each layer's by themselves.",
                    "Give each layer buffers of its own, use one layer twice, or --batch-norm local.",
                )


class BufferRollback:
    """Puts the buffers of a model back to what they were at the beginning of a step, which is rolled back.

    Stock BatchNorm moves its running statistics in every forward call, and one NaN in them would stay for ever. So
    the buffers that a forward pass may change are copied at the beginning of a step; they are small. What is pooled
    needs no copy. A pass may write into a buffer, resize it, or assign another tensor: buffers are looked up by name.
    """

    def __init__(self, model: nn.Module, spared: Iterable[nn.Module] = ()) -> None:
        ignored = set(spared)  # but not what is in them, as observers are
        self._held = [module._buffers for module in model.modules() if module not in ignored]
        self._names: list[tuple[dict[str, Any], str]] = []
        self._before: list[Any] = []  # tensors, and None
        self._forms: list[Any] = []
        self._copies: list[_Copies] = []
        self.keep()

    @torch.no_grad()
    def keep(self) -> None:
        """Remember the buffers; called before the first forward pass of a step."""
        self._names, present = [], []
        for held in self._held:
            for name, buffer in held.items():
                self._names.append((held, name))
                present.append(buffer)
        forms = _forms(present)
        if forms != self._forms or not all(map(operator.is_, present, self._before)):
            self._before, self._forms = present, forms
            kinds: dict[tuple[torch.device, torch.dtype], list[int]] = defaultdict(list)
            for index, buffer in enumerate(present):
                # Nothing can be written into an expanded buffer.
                if buffer is not None and (buffer.is_contiguous() or not is_expanded(buffer)):
                    kinds[buffer.device, _plain(buffer).dtype].append(index)
            self._copies = [_Copies(indices, present) for indices in kinds.values()]
        for copies in self._copies:
            torch._foreach_copy_(copies.parts, copies.plain)

    @torch.no_grad()
    def restore(self, unless: Tensor | None = None) -> None:
        """Put back what `keep` saw, the tensors and their values; where `unless` is true, the tensors only."""
        present, before = self._present(), self._before
        assigned = [index for index, buffer in enumerate(present) if buffer is not before[index]]
        resized = [index for index, form in enumerate(_forms(before)) if form != self._forms[index]]
        made = sum(map(len, self._held)) != len(self._names)  # by `register_buffer` in forward
        if unless is not None and (made or resized or not self._can_choose(present, assigned)):
            if bool(unless):
                return
            unless = None
        for index in resized:
            shape, dtype, device, stride, _ = self._forms[index]
            before[index].data = torch.empty_strided(shape, stride, dtype=dtype, device=device)
        for copies in self._copies:
            parts = copies.parts
            plain = [_plain(before[index]) for index in copies.indices] if resized else copies.plain
            if unless is not None:
                # A few kernels for all buffers: to launch some for each takes a GPU's host longer than they run.
                now = plain
                if assigned:  # perhaps contiguous where the buffer was not, or the other way round
                    tensors = [present[index].data.contiguous().view(-1) for index in copies.indices]
                    now = [tensor.view(like.dtype) for tensor, like in zip(tensors, plain, strict=True)]
                flat = torch.cat([tensor.flatten() for tensor in now])
                parts = _parts(torch.where(unless, flat, copies.saved), plain)
            torch._foreach_copy_(plain, parts)
        if assigned or made:
            for held in self._held:
                held.clear()
            for (held, name), buffer in zip(self._names, before, strict=True):
                held[name] = buffer

    def _present(self) -> list[Any]:
        return [held.get(name) for held, name in self._names]

    def _can_choose(self, present: Sequence[Any], assigned: Sequence[int]) -> bool:
        """Whether what was assigned can be written into the tensors from before."""
        names = Counter(map(id, self._before))  # a tensor with two names may now be two tensors
        forms = _forms([present[index] for index in assigned])
        before = [self._forms[index] for index in assigned]
        alike = [a and b and a[:3] == b[:3] for a, b in zip(forms, before, strict=True)]
        return all(alike) and all(names[id(self._before[index])] == 1 for index in assigned)


def is_expanded(tensor: Tensor) -> bool:
    """Whether elements of a tensor share memory, as in what `expand` returns."""
    strides = tensor.stride() if tensor.layout == torch.strided else ()
    return any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, strides, strict=False))


class _Copies:
    """Buffers of one device and kind, with copies of them in one piece of memory."""

    def __init__(self, indices: Sequence[int], present: Sequence[Any]) -> None:
        self.indices = indices
        self.plain = [_plain(present[index]) for index in indices]
        self.saved = torch.cat([tensor.flatten() for tensor in self.plain])
        self.parts = _parts(self.saved, self.plain)


def _plain(buffer: Tensor) -> Tensor:
    """The memory of a buffer, as words of 32 bits where it is of such: so that statistics and counters are one kind.

    Another stage may have saved a constant of both for a backward pass of the next step, hence `.data`.
    """
    data = buffer.data
    words = data.is_contiguous() and data.itemsize % 4 == 0 and not data.is_conj() and not data.is_neg()
    return data.view(-1).view(torch.int32) if words else data


def _parts(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """A flat tensor as tensors of other sizes, one after the other."""
    parts = torch.split(flat, [tensor.numel() for tensor in like])
    return [part.view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]


def _forms(tensors: Sequence[Any]) -> list[Any]:
    """Shapes, dtypes, devices, strides, and where they lie."""
    return [
        None if tensor is None else (tensor.shape, tensor.dtype, tensor.device, tensor.stride(), tensor.data_ptr())
        for tensor in tensors
    ]


class ReplicaBuffers:
    """Gives all replicas of a stage the first one's buffers, once per step.

    DistributedDataParallel broadcasts all buffers before the first forward pass of a step. Here it is done behind the
    last one, beside the backward passes; the values are taken over with the update of the parameters. On CPUs that is
    left out where no replica's buffers have changed, as those of tables and masks.
    """

    def __init__(self, module: nn.Module, replicas: World, pool: BatchNormPool | None) -> None:
        norms = (
            {inside for inside in module.modules() if isinstance(inside, _BatchNorm)}
            if pool is None
            else set(pool.layers)
        )
        self._modules = [inside for inside in module.modules() if inside not in norms]
        self._replicas = replicas
        self._common: Tensor | None = None  # what all had after the last exchange
        self._latest: Tensor | None = None
        #: Whether there are other replicas, and buffers that are no statistics of BatchNorm; all know the same.
        self.shared = replicas.size > 1 and any(inside._buffers for inside in self._modules)

    def unshared(self) -> str | None:
        """The first buffer, where there were none when replicas agreed on that."""
        names = (name for inside in self._modules for name in inside._buffers)
        return next(names, None) if self._replicas.size > 1 and not self.shared else None

    def share(self, *, new: bool = False) -> None:
        """Give all replicas the first one's values between two steps; a collective. With `new`, where none had any."""
        if self.shared or (new and self._replicas.size > 1):
            self.look()
            self.exchange()
            self.shared = self.shared or self._latest is not None
            self.take()

    @torch.no_grad()
    def look(self) -> None:
        """Note what this replica has, as bytes: of them sums with zeros are exact, whatever the dtype."""
        device, nothing = self._replicas.device, torch.empty(0, dtype=torch.uint8)
        parts = [buffer.contiguous().view(-1).view(torch.uint8) for buffer in self._present()]
        flat = torch.cat([part.to(device) for part in (nothing, *parts)])
        self._latest = functional.pad(flat, (0, -len(flat) % 8)).view(torch.int64)

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
        sizes = [buffer.nbytes for buffer in buffers]
        for part, buffer in zip(torch.split(latest.view(torch.uint8)[: sum(sizes)], sizes), buffers, strict=True):
            # A copy begins where every dtype may; for `.data` see `BufferRollback.restore`.
            buffer.data.copy_(part.clone().view(buffer.dtype).view(buffer.shape))

    def _present(self) -> list[Tensor]:
        return [buffer for module in self._modules for buffer in module._buffers.values() if buffer is not None]


class NormaliseOverReplicas(torch.autograd.Function):
    """Batch normalisation in training, by the moments over all replicas; a collective in both directions.

    Ioffe and Szegedy 2015, algorithm 1 and its gradients, with sums over replicas.
    Forward, per channel: the sums of x and x^2 and the count are added over the replicas. Backward: so are the sums of
    dy and dy z, where z = (x - mean) s and s = 1 / sqrt(var + eps). With n values,
    dx = w s (dy - sum(dy) / n - z sum(dy z) / n).
    Gradients of weight and bias stay local: they are summed over the replicas with all others.
    """

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, group: Group
    ) -> tuple[Tensor, Tensor, Tensor]:
        dims = [0, *range(2, input.ndim)]
        channels, shape = input.shape[1], [1, -1, *[1] * (input.ndim - 2)]
        exact = input if input.dtype == torch.float64 else input.float()
        count = input.numel() // channels
        # First about the own mean, which loses nothing in float32; sums over replicas are float64.
        own_mean = exact.mean(dims)
        centred = exact - own_mean.view(shape)
        deviations = centred.square().sum(dims)
        local = own_mean.double()
        number = torch.full((1,), float(count), dtype=torch.float64, device=input.device)
        sums = torch.cat((local * count, deviations.double() + local.square() * count, number))
        group.all_reduce(sums)
        total = sums[-1:]
        mean = sums[:channels] / total
        variance = (sums[channels:-1] / total - mean.square()).clamp_(min=0)
        scale = (variance + eps).rsqrt().to(exact.dtype)
        normal = centred.add_((local - mean).to(exact.dtype).view(shape)).mul_(scale.view(shape))
        output = normal if weight is None else normal * weight.to(exact.dtype).view(shape)
        if bias is not None:
            output = output + bias.to(exact.dtype).view(shape)
        ctx.save_for_backward(normal, weight, scale, total)
        ctx.group, ctx.dims, ctx.shape, ctx.has_bias = group, dims, shape, bias is not None
        unbiased = deviations / max(1, count - 1)
        ctx.mark_non_differentiable(own_mean, unbiased)
        # A copy where nothing was computed: autograd may not be handed what is saved.
        return (output.clone() if output is normal else output).to(input.dtype), own_mean, unbiased

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        normal, weight, scale, total = ctx.saved_tensors
        given = gradients[0].to(normal.dtype)
        dims, shape, channels = ctx.dims, ctx.shape, normal.shape[1]
        of_bias = given.sum(dims)
        of_weight = (given * normal).sum(dims)
        result = None
        if ctx.needs_input_grad[0]:
            sums = torch.cat((of_bias, of_weight)).double()
            ctx.group.all_reduce(sums)
            means = (sums / total).to(normal.dtype)
            factor = scale if weight is None else weight.to(normal.dtype) * scale
            result = given - means[:channels].view(shape) - normal * means[channels:].view(shape)
            result = (result * factor.view(shape)).to(gradients[0].dtype)
        return (
            result,
            of_weight.to(weight.dtype) if weight is not None else None,
            of_bias.to(weight.dtype if weight is not None else of_bias.dtype) if ctx.has_bias else None,
            None,
            None,
        )
