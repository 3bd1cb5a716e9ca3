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
