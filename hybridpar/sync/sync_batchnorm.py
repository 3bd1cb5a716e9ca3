"""BatchNorm that normalises over replicas, for micro-batches whose own moments are too noisy.

With `batch_norm="sync"` a layer normalises each micro-batch by the moments over all replicas' micro-batches of the same
number (Peng et al. 2018, "MegDet", section 3.3), so R replicas of b samples train as one replica of R b samples does.
It costs one small message per layer in each direction, which cannot overlap with the computation around it. Torch's own
`SyncBatchNorm` needs a GPU; this one runs wherever gradients can be summed.

Every compute lane needs a group of its own to add on, because lanes run beside each other and the sums of one group
must come in one order on all replicas. Within a lane the schedule is that order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hybridpar.comm.group import Group


def normalise_over_replicas(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, group: Group
) -> tuple[Tensor, Tensor, Tensor]:
    """Batch normalisation in training, by the moments over all replicas; a collective in both directions."""
    output, mean, variance = _Normalise.apply(input, weight, bias, eps, group)
    return output, mean, variance


class _Normalise(torch.autograd.Function):
    """Ioffe and Szegedy 2015, algorithm 1 and its gradients, with sums over replicas.

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
