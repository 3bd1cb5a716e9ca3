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

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridpar.compress import kernels
from hybridpar.compress.codec import CODECS, Coder, LargeTensorCodec, Residual, Scratch, TensorSpec
from hybridpar.compress.codecs.qsgd_mn_ms import GridsCoder
from hybridpar.compress.noise import Noise, check_rounding
from hybridpar.compress.packing import Fields
from hybridpar.compress.quantised import Quantiser, put, quantised_coder
from hybridpar.compress.scaled import write_scale
from hybridpar.errors import check, check_choice

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
        rounding: `random`, or `zero` for towards zero, which is biased: the paper's comparison. With `feedback=on` what
            is rounded off is sent later.
        least: Parameters with fewer elements are sent in full precision, and so are vectors.
    """

    bits: int = 4
    meet: str = "sum"
    rounding: str = "random"
    least: int = 1000
    name = "qsgd_mn"
    stateful = True
    kernels = ("cpu", "cuda")

    @property
    def biased(self) -> bool:  # type: ignore[override]
        """Rounding towards zero is a bias, drawing is none."""
        return self.rounding != "random"

    def __post_init__(self) -> None:
        check(1 <= self.bits <= 8, f"bits={self.bits}", "Codes have 1 to 8 bits.", "Use 4; for 16 bits there is bf16.")
        check_choice("meet", self.meet, _WAYS, "It says how codes meet.")
        check_rounding(self.rounding)
        super().__post_init__()

    def bind(self, spec: TensorSpec) -> Coder:
        steps = 2**self.bits - 1
        if self.meet == "sum":
            return GridsCoder(spec, (steps,), self.rounding)
        noise = Noise(spec, self.rounding)
        return quantised_coder(spec, LevelQuantiser(steps, noise), self.meet, noise)


class LevelQuantiser(Quantiser):
    """A stripe as [its scale][codes].

    Where a gradient was not finite the scale is infinite: then codes may be anything, and no value decodes to a finite
    one.
    """

    def __init__(self, steps: int, noise: Noise) -> None:
        self._steps, self._noise = steps, noise

    def size(self, shape: Sequence[int]) -> int:
        """Scale and codes."""
        return _HEAD + self._fields(shape[0]).bytes

    def encode(self, values: Tensor, residual: Residual, out: Tensor, scratch: Scratch) -> None:
        values, fields = residual.take(values, 0), self._fields(values.numel())
        out[:_HEAD].zero_()
        scale, words = out[:4].view(torch.float32), out[_HEAD:].view(fields.word)
        write_scale(values, scale)
        self._noise.draw(fields.words, scratch)
        plain = self._noise.random and not residual.keeps
        if plain and kernels.qsgd_encode(values, scale, self._noise, self._steps, fields, words, scratch):
            return
        divisor = torch.where(scale > 0, scale, 1.0)

        def code(start: int, stop: int, into: Tensor) -> None:
            # Dividing first makes the largest value exactly 1, and a denormal scale harmless.
            torch.div(values[start:stop], divisor, out=into)
            self._noise.round_(into.mul_(self._steps))
            into.clamp_(max=self._steps)
            if residual.keeps:
                values[start:stop].sub_(into / self._steps * scale)
            into.add_(self._steps)

        fields.pack(words, code, scratch)

    def read(self, message: Tensor, out: Tensor, scratch: Scratch, divisor: int, *, add: bool) -> None:
        scale = message[:4].view(torch.float32)
        fields, steps = self._fields(out.numel()), self._steps
        words = message[_HEAD:].view(fields.word)
        if kernels.qsgd_read(words, scale, fields, steps, steps * divisor, out, scratch, add=add):
            return

        def use(start: int, stop: int, values: Tensor) -> None:
            put(values.sub_(steps).div_(steps * divisor).mul_(scale), out[start:stop], add=add)

        fields.unpack(words, use, scratch)

    def _fields(self, count: int) -> Fields:
        return Fields.dense(count, 2 * self._steps)
