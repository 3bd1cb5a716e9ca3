"""Codec `qsgd`: stochastic rounding to even steps of the Euclidean norm of each bucket.

QSGD: Alistarh, Grubic, Li, Tomioka, Vojnovic, "QSGD: Communication-Efficient SGD via Gradient Quantization and
Encoding", NeurIPS 2017, section 3.1. A gradient is cut into buckets of d consecutive elements. With s levels above
zero, each element v_i of a bucket v becomes

    C(v)_i = |v| sign(v_i) k_i / s        k_i = floor(s |v_i| / |v| + u_i), u_i uniform in [0, 1)

E[C(v)] = v, so it is unbiased and needs no error feedback; E |C(v) - v|**2 <= min(d / s**2, sqrt(d) / s) |v|**2. Codes
are whole numbers from -s to s, here in fields of equal width; the paper's Elias coding would make the bytes of a
message depend on the gradient, and is left out. Beside the codes each bucket sends its norm in float32.

`nuqsgd` is the same with other levels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from hybridpar.compress.codec import CHUNK, CODECS, LargeTensorCodec, TensorSpec
from hybridpar.compress.levels import LevelQuantiser
from hybridpar.compress.noise import Noise
from hybridpar.compress.quantised import Meet, QuantisedCoder
from hybridpar.spec import AT_LEAST_1, between


@CODECS.register("qsgd", "QSGD: unbiased rounding to even steps of the Euclidean norm of each bucket")
@dataclass(frozen=True)
class Qsgd(LargeTensorCodec):
    """Stochastic rounding on the scale of a bucket's norm.

    Attributes:
        bits: Of a code, its sign included: 2**(bits - 1) - 1 levels above zero.
        bucket: Consecutive elements that share a norm.
        meet: How messages are reduced, as in `onebit`: `shard`, `gather` or `auto`. The paper's is `gather`.
        rounding: `random`, or `zero` for towards zero, which is biased. With `feedback=on` what is rounded off is sent
            later.
        least: Parameters with fewer elements are sent in full precision, and so are vectors.
    """

    bits: Annotated[int, between(2, 8)] = 4
    bucket: Annotated[int, between(1, CHUNK)] = 512
    meet: Meet = "auto"
    rounding: Literal["random", "zero"] = "random"
    least: Annotated[int, AT_LEAST_1] = 1000
    at_once = True
    quantiser: ClassVar[type[LevelQuantiser]] = LevelQuantiser

    @property
    def biased(self) -> bool:  # type: ignore[override]
        """Rounding towards zero is a bias, drawing is none."""
        return self.rounding != "random"

    def bind(self, spec: TensorSpec) -> QuantisedCoder:
        noise, steps = Noise(spec, self.rounding), 2 ** (self.bits - 1) - 1
        return QuantisedCoder(spec, self.quantiser(steps, noise, self.bucket), self.meet)
