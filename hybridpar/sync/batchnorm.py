"""BatchNorm statistics that do not depend on how a batch was divided over micro-batches and replicas.

Stock BatchNorm updates its running statistics once per forward call. With M micro-batches that is M updates per step
(an effective momentum of 1 - (1 - m)^M), and with replicas each keeps the statistics of its own shard. Here the sums
and squared sums of the batch are pooled over micro-batches and replicas and committed once per step: one step on R
workers with M micro-batches leaves the statistics of the whole batch, as one step on one worker would.

What is not pooled, unless asked for (`group`), is the normalisation: each micro-batch is normalised by its own moments.
Training with M micro-batches of b is the same function as data parallelism over M replicas with b samples each.

With `batch_norm="sync"` a layer normalises each micro-batch by the moments over all replicas' micro-batches of the same
number (Peng et al. 2018, "MegDet", section 3.3), for micro-batches whose own moments are too noisy. It costs one small
message per layer in each direction, which cannot overlap with the computation around it. Torch's own `SyncBatchNorm`
needs a GPU; this one runs wherever gradients can be summed. Every compute lane needs a group of its own to add on,
because lanes run beside each other and the sums of one group must come in one order on all replicas.

A module gets another class with the same parameters, buffers and names, so `state_dict`, pickling and `isinstance` go
on working; `release` gives it its class back.

A layer with a forward of its own is pooled too where it has two methods: `normalise(input, mean, variance, training,
momentum)`, which is `batch_norm` and whatever the layer does behind it, and `activate(output)`, that alone. Its class
says in `reduce_state(state)` what copies and pickles are made of.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from hybridpar.comm.group import Group
from hybridpar.lanes.base import Constants


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
        #: Per channel: sum and squared sum; then per layer the number of values behind them.
        self.sums = torch.zeros(2 * channels + len(self.layers), dtype=torch.float64, device=device)
        self._unmoved = [layer.running_mean.new_zeros(2, layer.num_features) for layer in self.layers]
        #: Inside `paused` training forwards leave no trace.
        self.is_paused = False
        self._clear()
        for index, layer in enumerate(self.layers):
            stock: Any = type(layer)
            layer.__class__ = _pooled_class(stock)
            layer._pool = self, index

    def fold(self) -> None:
        """Add the moments of the micro-batch whose forward pass has just ended to the sums of the step."""
        if not self.layers:
            return
        counts = self._constants.of(*self.counts)
        values = counts[self._layer_of_channel]
        mean, variance = torch.cat(self.moments, 1).double()
        # The kernel's running variance is unbiased: (n - 1) v is the sum of squared deviations.
        squares = (values - 1).clamp_(min=0) * variance + values * mean * mean
        self.sums += torch.cat((values * mean, squares, counts))
        self._clear()

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
        variance = (squares - values * mean * mean).clamp_(min=0) / (values - 1).clamp(min=1)
        ran = counts > 0 if where is None else (counts > 0) & (where > 0)
        steps = [layer.num_batches_tracked for layer in self.layers]
        torch._foreach_add_(steps, list(ran.to(torch.int64).unbind()))
        momenta = [layer.momentum for layer in self.layers]
        factors = self._constants.of(*[0.0 if momentum is None else float(momentum) for momentum in momenta])
        if None in momenta:
            averages = self._constants.of(*[float(momentum is None) for momentum in momenta]) > 0
            factors = torch.where(averages, 1.0 / torch.stack(steps).clamp(min=1).double(), factors)
        factors, moves = factors[self._layer_of_channel], ran[self._layer_of_channel]
        for kind, pooled in (("running_mean", mean), ("running_var", variance)):
            buffers: list[Tensor] = [getattr(layer, kind) for layer in self.layers]
            old = torch.cat(buffers).double()
            # `where` and not a product: a rolled-back step may have left an inf in the pooled moments.
            new = torch.where(moves, old + factors * (pooled - old), old)
            torch._foreach_copy_(buffers, list(torch.split(new, self._widths)))
        self.discard()

    def discard(self) -> None:
        """Forget the sums of this step: it was rolled back, or they were committed."""
        self.sums.zero_()
        self._clear()

    def _clear(self) -> None:
        #: By layer, of the micro-batch under way: mean and variance of each channel, and how many values they are of.
        self.moments, self.counts = list(self._unmoved), [0] * len(self.layers)

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
        pool, index = self._pool
        if pool.group is not None:
            output, *each = normalise_over_replicas(input, self.weight, self.bias, self.eps, pool.group)
            output = self.activate(output) if hasattr(self, "activate") else output
            moments = torch.stack(each).to(self.running_mean.dtype)
        else:
            moments = mean, variance = self.running_mean.new_zeros(2, self.num_features)
            if hasattr(self, "normalise"):
                output = self.normalise(input, mean, variance, True, 1.0)
            else:
                output = functional.batch_norm(input, mean, variance, self.weight, self.bias, True, 1.0, self.eps)
        # In a backward pass torch.utils.checkpoint runs a forward pass that has been counted.
        if not pool.is_paused and torch._C._current_graph_task_id() == -1:
            if pool.counts[index]:  # the layer runs twice in a forward pass
                pool.fold()
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


def normalise_over_replicas(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, group: Group
) -> tuple[Tensor, Tensor, Tensor]:
    """Batch normalisation in training, by the moments over all replicas; a collective in both directions.

    Beside the output it gives this replica's own means and unbiased variances. Gradients of weight and bias stay local:
    they are summed over the replicas with all others.
    """
    dims, shape = [0, *range(2, input.ndim)], [1, -1, *[1] * (input.ndim - 2)]
    exact = input if input.dtype == torch.float64 else input.float()
    channels, count = input.shape[1], input.numel() // input.shape[1]
    # First about the own mean, which loses nothing in float32; sums over replicas are float64.
    own_mean = exact.detach().mean(dims)
    centred = exact - own_mean.view(shape)
    deviations = centred.square().sum(dims)
    about, rest, number = own_mean.double(), centred.sum(dims).double(), own_mean.new_full((1,), count).double()
    sums = torch.cat((rest + count * about, deviations.double() + about * (2 * rest + count * about), number))
    total = _SumOverReplicas.apply(sums, group)
    mean = total[:channels] / total[-1:]
    variance = (total[channels:-1] / total[-1:] - mean.square()).clamp(min=0)
    scale = (variance + eps).rsqrt().to(exact.dtype)
    output = (centred - (mean - about).to(exact.dtype).view(shape)) * scale.view(shape)
    if weight is not None:
        output = output * weight.to(exact.dtype).view(shape)
    if bias is not None:
        output = output + bias.to(exact.dtype).view(shape)
    return output.to(input.dtype), own_mean, deviations.detach() / max(1, count - 1)


class _SumOverReplicas(torch.autograd.Function):
    """A sum that all replicas use, so that its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: Group) -> Tensor:
        ctx.group, total = group, values.clone()
        group.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        total = gradients[0].clone()
        ctx.group.all_reduce(total)
        return total, None
