"""Cuts the parameters of a model into the stripes that shards hold.

The parameters lie one behind the other in the model's order, shard k of K has the k-th of K nearly equal ranges
(CaffeOnSpark's rule: [k size / K, (k + 1) size / K)), and a border within a parameter is moved to the nearest border of
two of its rows, what belongs to an index of its first dimension. So a large layer does not decide how even shards are,
and a codec still sees whole filters and whole output units. For optimizers that are not elementwise borders lie between
parameters.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn

from hybridpar.comm.transport import flat_view, is_dense
from hybridpar.compress.coders import has_rows
from hybridpar.config import OptimizerConfig
from hybridpar.config.optimizer import TIMM, Groups
from hybridpar.errors import UsageError
from hybridpar.optim.build import parameter_groups


@dataclass(frozen=True)
class Piece:
    """Some rows of a parameter.

    Attributes:
        name: The parameter's name.
        start: First element of the parameter in memory order.
        shape: Of the piece; the whole parameter's but for the first dimension.
        decays: Whether weight decay applies.
        uncut: Whether it is all of the parameter.
        scale: What the learning rate is multiplied with.
    """

    name: str
    start: int
    shape: tuple[int, ...]
    decays: bool
    uncut: bool
    scale: float = 1.0

    @property
    def count(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def label(self) -> str:
        """The parameter's name, with the range where the piece is not all of it."""
        return self.name if self.uncut else f"{self.name}[{self.start}:{self.start + self.count}]"


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
    def ranges(self) -> list[tuple[int, int]]:
        """Begin and end of each piece in the stripe."""
        return list(pairwise(accumulate((piece.count for piece in self.pieces), initial=0)))

    @property
    def fingerprint(self) -> str:
        """Equal for stripes of the same pieces."""
        return hashlib.sha256(repr([astuple(piece) for piece in self.pieces]).encode()).hexdigest()[:16]


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that servers hold, by name: those that are trained."""
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    for name, parameter in trained.items():
        if parameter.dtype != torch.float32 or not is_dense(parameter) or not has_rows(parameter):
            raise UsageError(
                f"parameter {name!r} is {parameter.dtype} with strides {tuple(parameter.stride())}",
                "Parameter servers hold dense float32 parameters, whose rows lie one behind the other in memory.",
                "Keep the model in float32 and its parameters contiguous; --amp bf16 computes in fewer bits.",
            )
    return trained


def running_buffers(model: nn.Module) -> list[Tensor]:
    """The buffers that are averaged over the workers, as the running statistics of BatchNorm: floating-point numbers.

    Each worker normalises by its minibatch, as in a run without servers, and pushes what they are after its step.
    """
    return [buffer for buffer in model.buffers() if buffer.is_floating_point()]


def flat_buffers(model: nn.Module) -> Tensor:
    """All of them, 1-D float32 on the CPU, new."""
    parts = [buffer.detach().to(torch.float32).reshape(-1) for buffer in running_buffers(model)]
    return torch.cat(parts).cpu() if parts else torch.empty(0)


@torch.no_grad()
def put_buffers(model: nn.Module, values: Tensor) -> None:
    """Overwrite them with what `flat_buffers` returned."""
    buffers = running_buffers(model)
    for buffer, part in zip(buffers, torch.split(values, [buffer.numel() for buffer in buffers]), strict=True):
        buffer.copy_(part.view(buffer.shape))


def described_parameters(model: nn.Module, groups: Groups) -> list[tuple[str, tuple[int, ...], bool]]:
    """Name, shape, and whether weight decay applies, of each trained parameter; see `cut_model`.

    Args:
        model: The model.
        groups: Which of them have weight decay.
    """
    made = parameter_groups(model, 1.0, groups)
    decaying = {id(parameter) for group in made if group["weight_decay"] > 0 for parameter in group["params"]}
    trained = trained_parameters(model).items()
    return [(name, tuple(parameter.shape), id(parameter) in decaying) for name, parameter in trained]


def needs_whole_parameters(config: OptimizerConfig) -> bool:
    """Whether a part of a parameter cannot be updated without the rest of it.

    Torch's optimizers are elementwise but for two. Many of timm's scale by norms of a parameter, as adaptive clipping
    does, or take it as a matrix.
    """
    adaptive = config.clipping is not None and config.clipping.mode == "agc"
    name = config.optim.name
    return adaptive or name in ("adafactor", "muon") or name.startswith(TIMM)


def cut_model(
    parameters: Sequence[tuple[str, tuple[int, ...], bool]],
    shards: int,
    scales: Mapping[str, float] | None = None,
    *,
    uncut: bool = False,
) -> list[Stripe]:
    """Cut parameters into stripes.

    Args:
        parameters: Name, shape, and whether weight decay applies, in the model's order.
        shards: Number of stripes.
        scales: What the learning rate of a parameter is multiplied with, by name; 1 for those that are not named.
        uncut: Cut between parameters only.

    Returns:
        The stripes, one for each shard.

    Raises:
        UsageError: There are more shards than parameters.
    """
    filled = [known for known in parameters if math.prod(known[1])]
    if not 1 <= shards <= len(filled):
        raise UsageError(
            f"{shards} shards for a model with {len(filled)} trained parameter tensors",
            "Every shard must have something to hold, so there are at most as many as parameters.",
            f"Use servers={max(1, len(filled))} or fewer.",
        )
    begins = list(accumulate((math.prod(shape) for _, shape, _ in filled), initial=0))
    borders = set(begins)
    for begin, (_, shape, _) in zip(begins, filled, strict=False):
        if shape and not uncut:
            borders.update(range(begin, begin + math.prod(shape), math.prod(shape[1:])))
    total = begins[-1]
    cuts = _nearest(sorted(borders)[1:-1], [total * number // shards for number in range(1, shards)])
    return [Stripe(tuple(_pieces(filled, begins, *ends, scales or {}))) for ends in pairwise([0, *cuts, total])]


def _nearest(borders: Sequence[int], wanted: Sequence[int]) -> list[int]:
    """For each wanted cut the nearest border, of which each is used once."""
    cuts: list[int] = []
    for number, cut in enumerate(wanted):
        first = bisect_right(borders, cuts[-1]) if cuts else 0
        last = len(borders) - len(wanted) + number  # others are to have a border, too
        cuts.append(min(borders[first : last + 1], key=lambda border, cut=cut: abs(border - cut)))  # type: ignore[misc]
    return cuts


def _pieces(
    parameters: Sequence[tuple[str, tuple[int, ...], bool]],
    begins: Sequence[int],
    first: int,
    last: int,
    scales: Mapping[str, float],
) -> Iterator[Piece]:
    """What lies between two cuts, in the reverse of the model's order."""
    for (name, shape, decays), begin, end in reversed(list(zip(parameters, begins, begins[1:], strict=False))):
        start, stop = max(begin, first), min(end, last)
        if start < stop:
            rows = ((stop - start) // math.prod(shape[1:]), *shape[1:]) if shape else ()
            is_whole = stop - start == end - begin
            yield Piece(name, start - begin, rows, decays, is_whole, scales.get(name, 1.0))


def piece_views(stripe: Stripe, tensors: Mapping[str, Tensor]) -> list[Tensor]:
    """Views of the pieces of a stripe in the tensors of a model, 1-D, in memory order."""
    return [flat_view(tensors[piece.name])[piece.start : piece.start + piece.count] for piece in stripe.pieces]
