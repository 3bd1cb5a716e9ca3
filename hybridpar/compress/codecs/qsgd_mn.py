"""Codec `qsgd_mn`: stochastic rounding to a grid whose scale all workers share, so that codes can be summed.

QSGD-MaxNorm: Vineeth S, "Quantization for Distributed Optimization", arXiv 2109.12497; QSGD: Alistarh, Grubic, Li,
Tomioka, Vojnovic, "QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding", NeurIPS 2017. With b bits
and s = 2**b - 1 levels, and the scale w = max over workers and elements of |g_i|:

    q_i = floor(s g_i / w + u_i), u_i uniform in [0, 1)        mean gradient = w / (s K) * sum over workers of q_i

E[q_i] = s g_i / w, so it is unbiased and needs no error feedback; the variance of a worker's element is at most
(w / s)**2 / 4. Codes are whole numbers from -s to s. There are two ways for them to meet:

* `sum`: w is agreed first, 4 bytes. Codes are sent as q + s in fields so wide that the sum of K of them fits, which is
  log2(2 s K) bits rounded up, packed into words (`hybridpar.compress.packing`). No field ever carries into the next.
* `shard`: each stripe has a scale of its own and fields of b + 1 bits whatever K is; its owner adds in float32 and
  rounds again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridpar.compress import kernels
from hybridpar.compress.codec import (
    CODECS,
    Coder,
    Collective,
    LargeTensorCodec,
    Residual,
    Round,
    Scratch,
    TensorSpec,
)
from hybridpar.compress.noise import Noise
from hybridpar.compress.packing import Fields
from hybridpar.compress.quantised import Quantiser, put, quantised_coder
from hybridpar.compress.scaled import ScaledCoder, write_scale
from hybridpar.errors import UsageError, nearest

_WAYS = ("sum", "shard")

#: Bytes before the fields of a stripe: the scale, and what aligns words of 64 bits.
_HEAD = 8


@CODECS.register("qsgd_mn", "QSGD-MaxNorm: unbiased rounding to 2**bits - 1 levels of one agreed scale")
@dataclass(frozen=True)
class QsgdMaxNorm(LargeTensorCodec):
    """Stochastic rounding on a grid that all workers share.

    Attributes:
        bits: The grid has 2**bits - 1 steps from zero to the largest element.
        meet: `sum` or `shard`, see above.
        least: Parameters with fewer elements are sent in full precision, and so are vectors.
    """

    bits: int = 4
    meet: str = "sum"
    least: int = 1000
    name = "qsgd_mn"
    biased = False
    stateful = True
    kernels = ("cpu", "cuda")

    def __post_init__(self) -> None:
        if not 1 <= self.bits <= 8:
            raise UsageError(f"bits={self.bits}", "Codes have 1 to 8 bits.", "Use 4; for 16 bits there is bf16.")
        if self.meet not in _WAYS:
            raise UsageError(f"meet={self.meet}", "It says how codes meet.", nearest(self.meet, _WAYS))
        super().__post_init__()

    def bind(self, spec: TensorSpec) -> Coder:
        steps = 2**self.bits - 1
        if self.meet == "sum":
            return SummedLevels(spec, steps)
        noise = Noise(spec)
        return quantised_coder(spec, LevelQuantiser(_Grid(steps, noise)), self.meet, noise)


_Put = Callable[[int, int, Tensor], None]


@dataclass(frozen=True)
class _Grid:
    """Whole steps from -scale to scale.

    Where a gradient was not finite the scale is infinite: then codes may be anything, and no value decodes to a finite
    one.
    """

    steps: int
    noise: Noise

    def encode(self, values: Tensor, scale: Tensor, fields: Fields, out: Tensor, scratch: Scratch) -> None:
        """Round to codes and pack them as code + steps.

        Args:
            values: 1-D.
            scale: One element, at least as large as any value.
            fields: Where codes lie.
            out: The words.
            scratch: Memory to borrow.
        """
        self.noise.draw(fields.words, scratch)
        if kernels.qsgd_encode(values, scale, self.noise, self.steps, fields, out, scratch):
            return
        divisor = torch.where(scale > 0, scale, 1.0)

        def code(start: int, stop: int, into: Tensor) -> None:
            # Dividing first makes the largest value exactly 1, and a denormal scale harmless.
            torch.div(values[start:stop], divisor, out=into)
            into.mul_(self.steps).add_(self.noise.take(stop - start)).floor_().clamp_(max=self.steps)
            into.add_(self.steps)

        fields.pack(out, code, scratch)

    def decode(self, words: Tensor, fields: Fields, workers: int, divisor: int, put: _Put, scratch: Scratch) -> None:
        """Unpack codes, or sums of them.

        Args:
            words: The words.
            fields: Where codes lie.
            workers: How many workers' codes were added.
            divisor: What to divide the sum by.
            put: Given ranges of sums in units of the scale, which it may change.
            scratch: Memory to borrow.
        """

        def use(start: int, stop: int, values: Tensor) -> None:
            put(start, stop, values.sub_(workers * self.steps).div_(self.steps * divisor))

        fields.unpack(words, use, scratch)


class SummedLevels(ScaledCoder):
    """Agrees on a scale, then adds codes.

    Args:
        spec: The parameter.
        steps: s, the steps of the grid from zero to the scale.
    """

    def __init__(self, spec: TensorSpec, steps: int) -> None:
        self._fields = Fields.summable(spec.count, 2 * steps, spec.workers)
        super().__init__(spec, [Round(Collective.SUM, self._fields.word, (self._fields.words,))])
        self._grid = _Grid(steps, self._noise)

    def _write_codes(self, index: int, parts: Sequence[Tensor]) -> None:
        self._grid.encode(self._values, self._scale, self._fields, parts[0], self._scratch)

    def finish(self, out: Tensor) -> None:
        spec, steps, (words,) = self.spec, self._grid.steps, self._received
        zero, unit = spec.workers * steps, spec.divisor * steps
        if kernels.qsgd_read(words, self._scale, self._fields, zero, unit, out, self._scratch, add=False):
            return

        def put(start: int, stop: int, values: Tensor) -> None:
            torch.mul(values, self._scale, out=out[start:stop])

        self._grid.decode(words, self._fields, self.spec.workers, self.spec.divisor, put, self._scratch)


class LevelQuantiser(Quantiser):
    """A stripe as [its scale][codes].

    Args:
        grid: What it rounds to.
    """

    def __init__(self, grid: _Grid) -> None:
        self._grid = grid

    def view(self, flat: Tensor) -> Tensor:
        """As it is."""
        return flat

    def size(self, shape: Sequence[int]) -> int:
        """Scale and codes."""
        return _HEAD + self._fields(shape[0]).bytes

    def encode(self, values: Tensor, residual: Residual, out: Tensor, scratch: Scratch) -> None:
        """There is no error feedback, so the residual is not looked at."""
        fields = self._fields(values.numel())
        out[:_HEAD].zero_()
        scale = out[:4].view(torch.float32)
        write_scale(values, scale)
        self._grid.encode(values, scale, fields, out[_HEAD:].view(fields.word), scratch)

    def read(self, message: Tensor, out: Tensor, scratch: Scratch, divisor: int, *, add: bool) -> None:
        scale = message[:4].view(torch.float32)
        fields, steps = self._fields(out.numel()), self._grid.steps
        words = message[_HEAD:].view(fields.word)
        if kernels.qsgd_read(words, scale, fields, steps, steps * divisor, out, scratch, add=add):
            return

        def use(start: int, stop: int, values: Tensor) -> None:
            put(values.mul_(scale), out[start:stop], add=add)

        self._grid.decode(words, fields, 1, divisor, use, scratch)

    def _fields(self, count: int) -> Fields:
        return Fields.dense(count, 2 * self._grid.steps)
