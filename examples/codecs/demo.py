"""A codec of your own: DeMo, the fast components of momentum that each worker keeps, found by a cosine transform.

    import demo  # registers it
    ddp = hybridpar.DataParallel(model, compress="demo")
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)  # the momentum is in the codec

Peng, Quesnelle, Kingma, "DeMo: Decoupled Momentum Optimization", 2024. On each worker, for every matrix and every
convolution, cut into tiles of `chunk` x `chunk` elements in memory order:

    d <- m d + g        c = DCT(d)        the largest |c| of each tile are sent as q        d <- d - IDCT(q)

Everybody adds up the q of all workers, transforms the sum back, and steps by its sign. The paper's sign is bare and
wants a learning rate of its own; here it is multiplied with the mean magnitude.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from hybridpar.compress import CODECS, Coder, TensorSpec
from hybridpar.compress.codec import LargeTensorCodec
from hybridpar.compress.codecs.topk import Picks, share
from hybridpar.spec import AT_MOST_1, between


@functools.cache
def dct_matrix(size: int, device: torch.device) -> Tensor:
    """The orthonormal cosine transform (DCT-II): its product with a vector is the vector's transform."""
    places = torch.arange(size, dtype=torch.float64)
    matrix = torch.cos(math.pi / size * (places + 0.5) * places[:, None]) * math.sqrt(2 / size)
    matrix[0] /= math.sqrt(2)
    return matrix.float().to(device)


@CODECS.register("demo", "DeMo: the largest cosine components of momentum that each worker keeps")
@dataclass(frozen=True, kw_only=True)
class DecoupledMomentum(LargeTensorCodec):
    """The largest cosine components of momentum. The fields are the options of `--compress demo:...`.

    Attributes:
        rate: Share of a tile's components that is sent.
        momentum: m.
        chunk: Elements of a tile's sides.
    """

    rate: Annotated[float, AT_MOST_1] = 0.0078125
    momentum: Annotated[float, between(0, 1)] = 0.999
    chunk: Annotated[int, between(2, 256)] = 64
    castable = True
    takes_feedback = False
    keeps_momentum = True

    def coder(self, spec: TensorSpec) -> ComponentCoder:
        """The coder of one parameter on one worker."""
        return ComponentCoder(spec, self)


class ComponentCoder(Coder):
    """Accumulates the momentum of one parameter, and sends the largest of its components."""

    def __init__(self, spec: TensorSpec, config: DecoupledMomentum) -> None:
        self._config = config
        self._tile = config.chunk**2
        tiles = -(-spec.count // self._tile)
        self._picked = share(config.rate, self._tile)
        self._picks = Picks(spec, tiles * self._tile, tiles * self._picked)
        super().__init__(spec, [self._picks.round])
        until_last_tile = torch.zeros(tiles * self._tile, device=spec.device)
        self._momentum = self.register_state("momentum", until_last_tile)

    def write(self, index: int, parts: Sequence[Tensor]) -> None:
        """Write the message of the only round."""
        torch.mul(self._momentum.now, self._config.momentum, out=self._momentum.next)
        self._momentum.next[: self.spec.count].add_(self.gradient)
        components = self._transform(self._momentum.next)
        top = components.view(-1, self._tile).abs().topk(self._picked, sorted=False).indices
        first = torch.arange(0, components.numel(), self._tile, device=components.device)
        indices = (top + first[:, None]).flatten().sort().values
        sent = self._picks.write(components.index_select(0, indices), indices, parts[0])
        taken = torch.zeros_like(components).index_copy_(0, indices, sent)
        self._momentum.next.sub_(self._transform(taken, back=True))

    def finish(self, out: Tensor) -> None:
        """Add up what all workers have sent, and transform it back."""
        components = torch.empty_like(self._momentum.now)
        self._picks.read(self.messages, components, self.spec.divisor)
        total = self._transform(components, back=True)[: self.spec.count]
        torch.mul(total.sign(), total.abs().mean(), out=out)

    def _transform(self, values: Tensor, *, back: bool = False) -> Tensor:
        """The components of tiles, or tiles of components; 1-D."""
        matrix = dct_matrix(self._config.chunk, values.device)
        left = matrix.T if back else matrix
        return (left @ values.view(-1, self._config.chunk, self._config.chunk) @ left.T).flatten()
