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

from dataclasses import dataclass
from typing import Annotated, Literal

from hybridpar.compress.agreed import GridsCoder
from hybridpar.compress.codec import CODECS, Coder, LargeTensorCodec, TensorSpec
from hybridpar.compress.levels import LevelQuantiser
from hybridpar.compress.noise import Noise
from hybridpar.compress.quantised import QuantisedCoder
from hybridpar.spec import AT_LEAST_1, between


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

    bits: Annotated[int, between(1, 8)] = 4
    meet: Literal["sum", "shard"] = "sum"
    rounding: Literal["random", "zero"] = "random"
    least: Annotated[int, AT_LEAST_1] = 1000
    kernels = ("cpu", "cuda")

    @property
    def biased(self) -> bool:  # type: ignore[override]
        """Rounding towards zero is a bias, drawing is none."""
        return self.rounding != "random"

    def bind(self, spec: TensorSpec) -> Coder:
        steps = 2**self.bits - 1
        if self.meet == "sum":
            return GridsCoder(spec, (steps,), self.rounding)
        return QuantisedCoder(spec, LevelQuantiser(steps, Noise(spec, self.rounding)), "shard")
