"""Codec `demo`: the fast components of momentum that each worker keeps, found by a cosine transform.

Decoupled Momentum Optimization: Peng, Quesnelle, Kingma, "DeMo: Decoupled Momentum Optimization", 2024. On each worker,
for every parameter, cut into tiles of `chunk` x `chunk` elements in memory order:

    d <- m d + g        c = DCT(d)        the largest |c| of each tile are sent as q        d <- d - IDCT(q)

d takes the place of the optimizer's momentum. Everybody adds up the q of all workers and transforms the sum back. The
paper adds lr g to d, and steps by the sign of what comes back, with a learning rate of its own; here `level=mean`
multiplies signs with the mean magnitude, so that learning rates keep their meaning, `level=one` is the paper's, and
`level=off` leaves out the signs. The paper takes the mean over those workers alone that sent a component.

Vectors and small parameters are sent in full, and have no momentum. What comes back is a product of matrices: workers
with processors of different kinds may round it differently in the last bits.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridpar.compress.codec import (
    CODECS,
    NO_RESIDUAL,
    Kept,
    LargeTensorCodec,
    Residual,
    TensorSpec,
)
from hybridpar.compress.redivide import KeepingCoder
from hybridpar.compress.sparse import Picks, check_rate, share
from hybridpar.errors import check, check_choice

_LEVELS = ("mean", "one", "off")


@functools.cache
def dct_matrix(size: int, device: torch.device) -> Tensor:
    """The orthonormal discrete cosine transform (DCT-II): its product with a vector is the vector's transform.

    Args:
        size: Elements of the vector.
        device: Where it is wanted.

    Returns:
        Shape (size, size), float32, shared by all who ask.
    """
    places = torch.arange(size, dtype=torch.float64)
    matrix = torch.cos(math.pi / size * (places + 0.5) * places[:, None]) * math.sqrt(2 / size)
    matrix[0] /= math.sqrt(2)
    return matrix.float().to(device)


@CODECS.register("demo", "DeMo: the largest cosine components of momentum that each worker keeps")
@dataclass(frozen=True)
class DecoupledMomentum(LargeTensorCodec):
    """The largest cosine components of momentum.

    Attributes:
        rate: Share of a tile's components that is sent.
        momentum: m; the optimizer's own is 0.
        chunk: Elements of a tile's sides.
        level: What signs are multiplied with, see above: `mean`, `one`, or `off` for no signs.
        least: Parameters with fewer elements are sent in full; so are vectors.
    """

    rate: float = 0.0078125
    momentum: float = 0.999
    chunk: int = 64
    level: str = "mean"
    least: int = 1000
    name = "demo"
    biased = True
    stateful = True
    castable = True
    takes_feedback = False
    refuses_momentum = True

    def __post_init__(self) -> None:
        check_rate(self.rate, 0.0078125)
        check(0 <= self.momentum <= 1, f"momentum={self.momentum:g}", "It is at least 0 and at most 1.", "Use 0.999.")
        check(2 <= self.chunk <= 256, f"chunk={self.chunk}", "It is a number of elements from 2 to 256.", "Use 64.")
        check_choice("level", self.level, _LEVELS, "It says how large a step is.")
        super().__post_init__()

    def bind(self, spec: TensorSpec) -> ComponentCoder:
        return ComponentCoder(spec, self)


class ComponentCoder(KeepingCoder):
    """Accumulates momentum, and sends the largest of its components.

    Args:
        spec: The parameter.
        config: How.
    """

    def __init__(self, spec: TensorSpec, config: DecoupledMomentum) -> None:
        self._config = config
        self._tile = config.chunk**2
        tiles = -(-spec.count // self._tile)
        self._picked = share(config.rate, self._tile)
        self._picks = Picks(tiles * self._tile, tiles * self._picked, spec.wire, spec.workers)
        super().__init__(spec, [self._picks.round])
        #: d, and zeros, and what components left there, up to the end of the last tile.
        self._momentum = Kept(tiles * self._tile, spec.device)
        self.kept = {"momentum": self._momentum}

    def begin(self, gradient: Tensor, residuals: Mapping[str, Residual] = NO_RESIDUAL) -> None:
        torch.mul(self._momentum.now, self._config.momentum, out=self._momentum.next)
        self._momentum.next[: self.spec.count].add_(gradient)

    def write(self, index: int, parts: Sequence[Tensor]) -> None:
        components = self._transform(self._momentum.next)
        by_tile = components.view(-1, self._tile)
        largest = by_tile.abs().topk(self._picked, sorted=False).indices
        first = torch.arange(0, components.numel(), self._tile, device=components.device)
        places = (largest + first[:, None]).flatten().sort().values
        sent = self._picks.write(components.index_select(0, places), places, parts[0])
        kept = torch.zeros_like(components).index_copy_(0, places, sent)
        self._momentum.next.sub_(self._transform(kept, back=True))

    def finish(self, out: Tensor) -> None:
        components = torch.empty_like(self._momentum.now)
        self._picks.read(self._received, components, self.spec.divisor)
        found = self._transform(components, back=True)[: self.spec.count]
        if self._config.level == "off":
            out.copy_(found)
            return
        mean = found.abs().mean()
        if self._config.level == "one":  # but a number that is not finite stays
            mean = 0 * mean + self.spec.workers / self.spec.divisor
        torch.mul(found.sign(), mean, out=out)

    def _transform(self, values: Tensor, *, back: bool = False) -> Tensor:
        """The components of tiles, or tiles of components; 1-D."""
        matrix = dct_matrix(self._config.chunk, values.device)
        left = matrix.T if back else matrix
        return (left @ values.view(-1, self._config.chunk, self._config.chunk) @ left.T).flatten()
