"""Codec `sparseloco`: the largest elements of each tile in two bits each, with short places and error feedback.

Made for outer gradients, the progress of many steps (`--sync outer:H`), as SparseLoCo (arXiv 2508.15706, 2025) has it.
With v = g + r, each worker sends the largest |v| of every tile of `chunk` elements. With m and s the mean and the
deviation of all that it sends of a parameter, a value lies in one of four bins,

    below m - 1.5 s        below m        below m + 1.5 s        the rest

and is decoded as the mean of its bin. What is lost, v - C(v), is kept by error feedback; with `decay=0.95` it fades as
in the paper. Everybody adds up what all workers have sent, and divides it by their number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridpar.compress.codec import (
    CODECS,
    NO_RESIDUAL,
    WORKER,
    Coder,
    Collective,
    LargeTensorCodec,
    Residual,
    Round,
    TensorSpec,
)
from hybridpar.compress.packing import Fields, aligned
from hybridpar.compress.sparse import check_rate, share
from hybridpar.errors import UsageError

#: Bytes before the codes: the four means.
_HEAD = 16

#: Where the outer bins begin, in standard deviations from the mean.
_APART = 1.5


@CODECS.register("sparseloco", "SparseLoCo: top-k of each tile in 2 bits with short places, error feedback")
@dataclass(frozen=True)
class SparseLoCo(LargeTensorCodec):
    """The largest elements of each tile in two bits.

    Attributes:
        rate: Share of a tile's elements that is sent.
        chunk: Elements of a tile.
        least: Parameters with fewer elements are sent in full precision, and so are vectors.
    """

    rate: float = 0.015625
    chunk: int = 4096
    least: int = 1000
    name = "sparseloco"
    biased = True
    feedback = True

    def __post_init__(self) -> None:
        check_rate(self.rate, 0.015625)
        if not 2 <= self.chunk <= 1 << 20:
            raise UsageError(f"chunk={self.chunk}", "It is a number of elements from 2 to 1048576.", "Use 4096.")
        super().__post_init__()

    def bind(self, spec: TensorSpec) -> TileCoder:
        return TileCoder(spec, self)


class TileCoder(Coder):
    """Sends the largest elements of each tile of v.

    Args:
        spec: The parameter.
        config: How.
    """

    def __init__(self, spec: TensorSpec, config: SparseLoCo) -> None:
        self._tile = max(1, min(config.chunk, spec.count))
        self._tiles = -(-spec.count // self._tile)
        picked = share(config.rate, self._tile)
        self._codes = Fields.dense(self._tiles * picked, 3)
        self._places = Fields.dense(self._tiles * picked, max(1, self._tile - 1))
        self._ends = _HEAD + aligned(self._codes.bytes)
        size = self._ends + aligned(self._places.bytes)
        super().__init__(spec, [Round(Collective.GATHER, torch.uint8, (size,))])
        self.residuals = {WORKER: spec.count}
        self._picked = picked
        self._values = torch.empty(0)

    def begin(self, gradient: Tensor, residuals: Mapping[str, Residual] = NO_RESIDUAL) -> None:
        super().begin(gradient, residuals)
        self._values = self._residual.take(gradient, 0)

    def write(self, index: int, parts: Sequence[Tensor]) -> None:
        values, message = self._values, parts[0]
        # What lies behind the last element is never among the largest, unless all of a tile is sent.
        magnitudes = values.new_full((self._tiles * self._tile,), -1.0)
        torch.abs(values, out=magnitudes[: values.numel()])
        places = magnitudes.view(-1, self._tile).topk(self._picked, sorted=False).indices.sort(1).values
        where = (places + self._firsts(places)).flatten()
        inside = where < values.numel()
        sent = torch.where(inside, values[where.clamp(max=values.numel() - 1)], 0.0).double()
        codes, means = _bins(sent, inside)
        message.zero_()
        message[:_HEAD].view(torch.float32).copy_(means)
        self._pack(self._codes, codes, message[_HEAD:])
        self._pack(self._places, places.flatten(), message[self._ends :])
        if self._residual.keeps:
            self._values.index_add_(0, where[inside], means.to(values)[codes[inside]], alpha=-1.0)

    def finish(self, out: Tensor) -> None:
        total = out.new_zeros(self._tiles * self._tile)
        for message in self._received:
            means = message[:_HEAD].view(torch.float32)
            codes = self._unpack(self._codes, message[_HEAD:])
            places = self._unpack(self._places, message[self._ends :]).view(-1, self._picked)
            where = (places + self._firsts(places)).flatten()
            total.index_add_(0, where, (means / self.spec.divisor)[codes])
        out.copy_(total[: out.numel()])

    def _firsts(self, like: Tensor) -> Tensor:
        return torch.arange(0, self._tiles * self._tile, self._tile, device=like.device).unsqueeze(1)

    def _pack(self, fields: Fields, values: Tensor, out: Tensor) -> None:
        def code(start: int, stop: int, into: Tensor) -> None:
            into.copy_(values[start:stop])

        fields.pack(out[: fields.bytes].view(fields.word), code, self._scratch)

    def _unpack(self, fields: Fields, packed: Tensor) -> Tensor:
        found = torch.empty(fields.count, dtype=torch.int64, device=packed.device)

        def use(start: int, stop: int, values: Tensor) -> None:
            found[start:stop] = values.to(torch.int64)

        fields.unpack(packed[: fields.bytes].view(fields.word), use, self._scratch)
        return found


def _bins(values: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """The bin of each value, int64, and the mean of each bin, float32; values that do not count are in no mean.

    Comparisons with NaN are false, so a value that is not finite spoils the mean of the first bin, and is seen.
    """
    known = values[counts]
    mean, deviation = known.mean(), known.std(correction=0)
    codes = sum((values >= mean + apart * deviation).long() for apart in (-_APART, 0.0, _APART))
    assert isinstance(codes, Tensor)
    sums, numbers = (torch.zeros(4, dtype=torch.float64, device=values.device) for _ in range(2))
    sums.index_add_(0, codes[counts], known)
    numbers.index_add_(0, codes[counts], torch.ones_like(known))
    return codes, (sums / numbers.clamp(min=1)).float()
