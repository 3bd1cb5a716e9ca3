"""Which tensors an operator reads and which it writes, for the checking lane.

An operator's schema says which arguments it writes and which it only makes views of. Where schemas leave something out
(collectives, the running statistics of batch normalisation, memory made outside of operators), this file knows it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch

#: What an operator does to an argument. `metadata`: it looks at shape and layout only, as views do.
Effect = Literal["metadata", "read", "write", "write in training"]


def operands(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[torch.Tensor, Effect]]:
    """All tensor arguments of a call, with what it does to them."""
    found: list[tuple[torch.Tensor, Effect]] = []
    named = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)} | dict(kwargs)
    for name, effect in _effects(func):
        if effect == "write in training":
            effect = "write" if named["training"] else "read"
        found += [(tensor, effect) for tensor in tensors_in(named.get(name))]
    return found


@functools.cache
def _effects(func: Any) -> list[tuple[str, Effect]]:
    """What an operator does to each of its arguments, by its schema where that says it all."""
    schema = func._schema
    space, _, name = schema.name.partition("::")
    parameters = {argument.name for argument in schema.arguments}
    effects: list[tuple[str, Effect]] = []
    for argument in schema.arguments:
        effect: Effect = "read"
        if space == "c10d":
            # These schemas declare no writes. A backend may use any buffer as scratch, except one it only sends.
            effect = "read" if name == "send" else "write"
        elif name == "lift_fresh":
            effect = "write"  # how torch.tensor() announces memory that it filled outside of operators
        elif argument.alias_info is not None:
            effect = "write" if argument.alias_info.is_write else "metadata"  # no write: the result is a view
        elif name.endswith("_like") or name.startswith("new_") or name == "is_same_size":
            effect = "metadata"
        elif argument.name in ("running_mean", "running_var") and "backward" not in name:
            # Batch normalisation updates these, which most of its schemas leave out.
            if "training" in parameters:
                effect = "write in training"
            elif name.startswith(("batch_norm_update_stats", "batch_norm_gather_stats")):
                effect = "write"
        effects.append((argument.name, effect))
    return effects


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """All tensors of an argument or result: itself, or those of nested lists."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from tensors_in(part)


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """The memory of a tensor; None if it has no single one."""
    try:
        return tensor.untyped_storage()
    except NotImplementedError:  # sparse and other tensors without one
        return None


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte and end of what a tensor may touch of its storage.

    Gaps between strides count as touched, so two columns of one matrix overlap.
    """
    if tensor.numel() == 0:
        return 0, 0
    last = sum((int(size) - 1) * int(stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    first = int(tensor.storage_offset()) * tensor.itemsize
    return first, first + (last + 1) * tensor.itemsize
