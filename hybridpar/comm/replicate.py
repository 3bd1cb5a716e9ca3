"""Gives all replicas the same parameters and buffers."""

from __future__ import annotations

import hashlib
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hybridpar.comm.transport import flat_view, is_dense
from hybridpar.comm.world import World
from hybridpar.errors import SyncError
from hybridpar.models.state_dicts import tensors_of


def replicate(model: nn.Module, world: World, agree: object = None, *, compare_only: bool = False) -> None:
    """Give every worker rank 0's parameters and buffers, whatever its own seed gave it; a collective.

    Digests are compared first: workers that built the same model send nothing more.
    """
    if world.size == 1:
        return
    facts = [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in tensors_of(model).items()]
    answers: list[Any] = world.gather((facts, repr(agree), "" if compare_only else _digest(model)))
    for rank, (theirs, options, _) in enumerate(answers):
        if options != repr(agree):
            raise SyncError(
                f"worker {rank} was given other options than worker {world.rank}: {options} and {agree!r}",
                "How gradients are synchronised must be the same on all workers.",
                "Start all workers with the same command.",
            )
        if theirs != answers[0][0]:
            raise SyncError(
                f"worker {rank} built another model than worker 0",
                "Names, shapes and dtypes of all parameters and buffers must be equal on all workers.",
                "Build the model in the same way on every worker.",
            )
    if compare_only or all(answer[2] == answers[0][2] for answer in answers):
        return
    with world.named_errors("broadcasting the initial model"):
        broadcast_state(model, 0, world)


@torch.no_grad()
def _digest(module: nn.Module) -> str:
    """Equal where all parameters and buffers are."""
    digest = hashlib.blake2b()
    # Of buffers copies: a forward pass may resize them, which torch allows no more once NumPy has seen the memory.
    for tensor in chain(module.parameters(), map(torch.clone, module.buffers())):
        flat = flat_view(tensor.data) if is_dense(tensor) else tensor.data.contiguous().view(-1)
        digest.update(flat.view(torch.uint8).cpu().numpy().data)
    return digest.hexdigest()


@torch.no_grad()
def broadcast_state(module: nn.Module, source: int, world: World) -> None:
    """Overwrite a module's parameters and buffers with those of one worker; a collective.

    A buffer may have another shape or dtype there, or be there only: its forward pass made it.
    """
    assert world.control is not None
    held = [inside._buffers for inside in module.modules()]
    facts = [{name: _fact(buffer) for name, buffer in buffers.items()} for buffers in held]
    theirs: Any = world.gather(facts)[source]
    for buffers, mine, wanted in zip(held, facts, theirs, strict=True):
        for name, fact in wanted.items():
            if name not in mine or mine[name] != fact:
                dtype, *shape = fact or ("uint8",)
                made = torch.empty(shape, dtype=getattr(torch, dtype), device=world.device)
                buffers[name] = None if fact is None else made
    for tensor in [*module.parameters(), *module.buffers()]:
        if tensor.numel() == 0:
            continue
        # Dense memory is sent as it is, whatever its format; anything else through a copy.
        message = flat_view(tensor.data) if is_dense(tensor) else tensor.data.contiguous()
        dist.broadcast(message, group_src=source, group=world.control.group)
        if not is_dense(tensor):
            tensor.data.copy_(message)


def _fact(buffer: Tensor | None) -> list[Any] | None:
    return None if buffer is None else [str(buffer.dtype).removeprefix("torch."), *buffer.shape]
