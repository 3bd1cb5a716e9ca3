"""Averages of parameters every H steps (local SGD, Stich 2019).

What is averaged are parameters. Momentum stays each worker's own, as in torch's post-local SGD, and so do the buffers
of a model until somebody asks for the model: then all that is a floating-point number in it is the mean over the
workers, and training goes on from where each worker was.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from hybridpar.comm.world import World, all_reduce_bytes
from hybridpar.sync.buckets import cut_buckets


@torch.no_grad()
def average_tensors(tensors: Iterable[Tensor], world: World, bucket_bytes: int = 8 << 20) -> int:
    """Replace tensors by their means over the workers, in place; a collective.

    Each worker divides by their number before they are added, as torch's averager does.

    Args:
        tensors: Floating-point tensors, the same in shape and order on all workers.
        world: The workers.
        bucket_bytes: Size at which a message is full.

    Returns:
        Bytes that this worker sent.

    Raises:
        SyncError: A worker died or did not answer in time.
    """
    kinds: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            kinds.setdefault(tensor.dtype, []).append(tensor)
    sent = 0
    if world.size == 1:
        return sent
    for members in kinds.values():
        sizes = [tensor.numel() * tensor.element_size() for tensor in members]
        for cut in cut_buckets(sizes, bucket_bytes):
            bucket = [members[index] for index in cut]
            flat = torch.cat([tensor.reshape(-1) for tensor in bucket]).div_(world.size)
            with world.named_errors("averaging parameters"):
                world.lane_sums[0].all_reduce(flat)
            for tensor, mean in zip(bucket, torch.split(flat, [one.numel() for one in bucket]), strict=True):
                tensor.copy_(mean.view(tensor.shape))
            sent += all_reduce_bytes(flat.numel() * flat.element_size(), world.size)
    return sent


def average_model(model: nn.Module, world: World) -> dict[str, Tensor]:
    """A model's state dict with all floating-point tensors averaged over the workers, in new memory; a collective.

    Args:
        model: The model, which stays as it is.
        world: The workers.

    Raises:
        SyncError: A worker died or did not answer in time.
    """
    state = copy_of(model.state_dict())
    average_tensors([tensor for tensor in state.values() if tensor.is_floating_point()], world)
    return state


def copy_of(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state dict in memory of its own; tensors that share memory share it no longer.

    Args:
        state: A state dict.
    """
    return {name: tensor.detach().clone() for name, tensor in state.items()}
