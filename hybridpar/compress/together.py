"""Runs the exchange of K workers in one process, for tests and simulations.

All workers take one step together, collective by collective, so that tests of any K are fast and say the same every
time, and the loss that a codec costs can be looked at on a laptop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hybridpar.comm.group import Reduction, split
from hybridpar.compress.exchange import AllGather, AllReduce, AllToAll, Exchange, Request

_COMBINE: dict[Reduction, Callable[[Tensor, Tensor], Tensor]] = {
    Reduction.SUM: Tensor.add_,
    # NaN loses against a number here and may win elsewhere: codecs must not rely on either.
    Reduction.MAX: lambda left, right: left.copy_(torch.fmax(left, right)),
    Reduction.AND: Tensor.bitwise_and_,
}


def run_together(
    exchanges: Sequence[Exchange], gradients: Sequence[Sequence[Tensor]], outs: Sequence[Sequence[Tensor]]
) -> None:
    """One step of all workers in one process.

    Args:
        exchanges: One per worker, by rank.
        gradients: For each worker what `Exchange.requests` wants.
        outs: For each worker where the results go.

    Raises:
        ValueError: The workers do not ask for the same collectives.
    """
    steps = [exchange.requests(*tensors) for exchange, *tensors in zip(exchanges, gradients, outs, strict=True)]
    for requests in zip(*steps, strict=True):
        meet(requests)


def meet(requests: Sequence[Request]) -> None:
    """Carry out one collective, as each worker asks for it, by rank."""
    first = requests[0]
    if isinstance(first, AllReduce):
        tensors = [request.tensor for request in requests if isinstance(request, AllReduce)]
        if len({(len(tensor), tensor.dtype) for tensor in tensors}) != 1 or len(tensors) != len(requests):
            raise ValueError("the workers want to reduce different tensors")
        total = tensors[0].clone()
        for tensor in tensors[1:]:
            _COMBINE[first.reduction](total, tensor)
        for tensor in tensors:
            tensor.copy_(total)
    elif isinstance(first, AllToAll):
        shuffles = [request for request in requests if isinstance(request, AllToAll)]
        for rank, receiver in enumerate(shuffles):
            for source, piece in zip(shuffles, split(receiver.out, receiver.out_sizes), strict=True):
                piece.copy_(split(source.inp, source.in_sizes)[rank])
    else:
        gathers = [request for request in requests if isinstance(request, AllGather)]
        for gather in gathers:
            torch.cat([source.inp for source in gathers], out=gather.out)
