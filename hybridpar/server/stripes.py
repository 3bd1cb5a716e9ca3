"""Cuts the parameters of a model into the stripes that shards hold.

The parameters lie one behind the other in the model's order, shard k of K has the k-th of K nearly equal ranges
(CaffeOnSpark's rule: [k size / K, (k + 1) size / K)), and a border within a parameter is moved to the nearest border of
two of its rows, what belongs to an index of its first dimension. So a large layer does not decide how even shards are,
and a codec still sees whole filters and whole output units. For optimizers that are not elementwise borders lie between
parameters.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor, nn

from hybridpar.comm.transport import flat_view, is_dense
from hybridpar.errors import UsageError

#: With more, little would be gained: of n parts all but 1 / n of the way back is hidden.
MOST_PARTS = 6

#: Elements of a shard that is one of several of a process: 1 MiB.
_LEAST_PART = 1 << 18


@dataclass(frozen=True)
class Piece:
    """Some rows of a parameter.

    Attributes:
        name: The parameter's name.
        start: First element of the parameter in memory order.
        shape: Of the piece; the whole parameter's but for the first dimension.
        decays: Whether weight decay applies.
        whole: Whether it is all of the parameter.
        scale: What the learning rate is multiplied with.
    """

    name: str
    start: int
    shape: tuple[int, ...]
    decays: bool
    whole: bool
    scale: float = 1.0

    @property
    def count(self) -> int:
        """Number of elements."""
        total = 1
        for size in self.shape:
            total *= size
        return total

    @property
    def label(self) -> str:
        """The parameter's name, with the range where the piece is not all of it."""
        return self.name if self.whole else f"{self.name}[{self.start}:{self.start + self.count}]"


@dataclass(frozen=True)
class Stripe:
    """What one shard holds: pieces, one behind the other.

    Attributes:
        pieces: In the reverse of the model's order, as backward passes make gradients.
    """

    pieces: tuple[Piece, ...]

    @property
    def count(self) -> int:
        """Number of elements."""
        return sum(piece.count for piece in self.pieces)

    @property
    def offsets(self) -> list[int]:
        """Where each piece begins in the stripe, and where the last one ends."""
        ends = [0]
        for piece in self.pieces:
            ends.append(ends[-1] + piece.count)
        return ends

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """Begin and end of each piece in the stripe."""
        return list(pairwise(self.offsets))

    @property
    def fingerprint(self) -> str:
        """Equal for stripes of the same pieces."""
        return hashlib.sha256(repr([astuple(piece) for piece in self.pieces]).encode()).hexdigest()[:16]


def parts_of_a_host(parameters: Sequence[tuple[str, tuple[int, ...], bool]], hosts: int) -> int:
    """How many shards a process is to hold.

    Several are served one after the other: while one still takes gradients in, the one before gives weights back, and a
    link carries both ways at a time. Where there is little to send a shard more costs more than it hides.

    Args:
        parameters: As for `cut_model`.
        hosts: Processes that hold shards.
    """
    elements = sum(_count(shape) for _, shape, _ in parameters)
    return max(1, min(MOST_PARTS, len(parameters) // hosts, elements // hosts // _LEAST_PART))


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that servers hold, by name: those that are trained.

    Args:
        model: The model.

    Raises:
        UsageError: One is of a type or in a layout that servers do not hold.
    """
    found = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    for name, parameter in found.items():
        if parameter.dtype != torch.float32 or not is_dense(parameter):
            raise UsageError(
                f"parameter {name!r} is {parameter.dtype} with strides {tuple(parameter.stride())}",
                "Parameter servers hold dense float32 parameters.",
                "Keep the model in float32, and use --amp bf16 to compute in fewer bits.",
            )
    return found


def cut_model(
    parameters: Sequence[tuple[str, tuple[int, ...], bool]],
    shards: int,
    scales: Mapping[str, float] | None = None,
    *,
    whole: bool = False,
) -> list[Stripe]:
    """Cut parameters into stripes.

    Args:
        parameters: Name, shape, and whether weight decay applies, in the model's order.
        shards: Number of stripes.
        scales: What the learning rate of a parameter is multiplied with, by name; 1 for those that are not named.
        whole: Cut between parameters only.

    Returns:
        The stripes, one for each shard.

    Raises:
        UsageError: There are more shards than parameters.
    """
    if not 1 <= shards <= len(parameters):
        raise UsageError(
            f"{shards} shards for a model with {len(parameters)} trained parameter tensors",
            "Every shard must have something to hold, so there are at most as many as parameters.",
            f"Use --servers {max(1, len(parameters))} or fewer.",
        )
    sizes = [_count(shape) for _, shape, _ in parameters]
    total = sum(sizes)
    cuts = [total * number // shards for number in range(1, shards)]
    stripes: list[list[Piece]] = [[] for _ in range(shards)]
    begin, number = 0, 0
    for (name, shape, decays), size in zip(parameters, sizes, strict=True):
        row = size // shape[0] if shape and shape[0] else max(1, size)
        done = 0
        while done < size:
            take = size - done
            if number < shards - 1 and begin + size > cuts[number]:
                wanted = round((cuts[number] - begin) / row) * row if shape else size
                take = min(max(wanted, 0), size) - done
            if take > 0:
                piece_shape = (take // row, *shape[1:]) if shape else ()
                stripes[number].append(Piece(name, done, piece_shape, decays, take == size))
                done += take
            if done < size or (number < shards - 1 and begin + done >= cuts[number]):
                number += 1
        begin += size
    if whole or not all(stripes):  # the model is too small to be cut evenly
        stripes = _by_parameters(parameters, sizes, shards)
    factors = scales or {}
    return [
        Stripe(tuple(replace(piece, scale=factors.get(piece.name, 1.0)) for piece in reversed(pieces)))
        for pieces in stripes
    ]


def cut_stages(
    parameters: Sequence[tuple[str, tuple[int, ...], bool]],
    stages: Sequence[Collection[str]],
    hosts: int,
    scales: Mapping[str, float] | None = None,
    *,
    whole: bool = False,
) -> list[list[Stripe]]:
    """Cut the parameters of each worker of a replica into stripes of its own, as many for each.

    Args:
        parameters: As for `cut_model`, of the whole model.
        stages: Names of the parameters that each worker of a replica trains; of a single one, all.
        hosts: Processes that hold shards for one of them.
        scales: As for `cut_model`.
        whole: As for `cut_model`.

    Returns:
        For each worker its stripes.

    Raises:
        UsageError: There are more shards than parameters.
    """
    own = [[one for one in parameters if one[0] in names] for names in stages]
    fewest = min(map(len, own))
    if fewest < hosts and len(own) > 1:
        raise UsageError(
            f"{hosts} process(es) with shards for a stage with {fewest} trained parameter tensors",
            "Every shard must have something to hold, so a stage has at most as many as parameters.",
            "Use fewer --servers, or fewer --stages.",
        )
    parts = min(parts_of_a_host(one, hosts) for one in own)
    return [cut_model(one, hosts * parts, scales, whole=whole) for one in own]


def _by_parameters(
    parameters: Sequence[tuple[str, tuple[int, ...], bool]], sizes: Sequence[int], shards: int
) -> list[list[Piece]]:
    """Whole parameters only, at least one for each shard."""
    stripes: list[list[Piece]] = [[] for _ in range(shards)]
    total, begin, number = sum(sizes), 0, 0
    for index, ((name, shape, decays), size) in enumerate(zip(parameters, sizes, strict=True)):
        left, open_shards = len(parameters) - index, shards - number - 1
        full = begin >= total * (number + 1) // shards or left <= open_shards
        if stripes[number] and open_shards and full:
            number += 1
        stripes[number].append(Piece(name, 0, shape, decays, True))
        begin += size
    return stripes


def _count(shape: Sequence[int]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


def piece_views(stripe: Stripe, tensors: dict[str, Tensor]) -> list[Tensor]:
    """Views of the pieces of a stripe in the tensors of a model, 1-D, in memory order.

    Args:
        stripe: The stripe.
        tensors: Dense tensors by name, shaped as the parameters.
    """
    return [flat_view(tensors[piece.name])[piece.start : piece.start + piece.count] for piece in stripe.pieces]
