"""Codec `nuqsgd`: stochastic rounding to powers of two, in units of the Euclidean norm of each bucket.

NUQSGD: Ramezani-Kebrya, Faghri, Markov, Aksenov, Alistarh, Roy, "NUQSGD: Provably Communication-efficient
Data-parallel SGD via Nonuniform Quantization", Journal of Machine Learning Research 22, 2021. It is `qsgd` with other
levels, which are denser near zero, where most elements of a normalised bucket are:

    l_0 = 0        l_k = 2**(k - s), k = 1, ..., s        C(v)_i = |v| sign(v_i) l_k or l_{k + 1}

With r = |v_i| / |v| between l_k and l_{k + 1}, the upper one is drawn with probability (r - l_k) / (l_{k + 1} - l_k),
so it is unbiased. (The paper counts the levels between 0 and 1, so its s is one less than here.)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hybridpar.compress.codec import CODECS
from hybridpar.compress.codecs.qsgd import Qsgd
from hybridpar.compress.levels import LevelQuantiser

#: Bits of the fraction of a float32, and what its exponent is stored with.
_FRACTION, _BIAS = 23, 127


class PowerQuantiser(LevelQuantiser):
    """Levels 0, 2**(1 - s), ..., 1/2, 1."""

    def position(self, ratios: Tensor) -> Tensor:
        # The bits of a float32 (1 + f) 2**e, as a whole number, are 2**23 (e + 127 + f): linear between powers of two.
        magnitudes = ratios.abs()
        bits = magnitudes.view(torch.int32) - (_BIAS - self._steps << _FRACTION)
        positions = bits.to(torch.float32).mul_(2.0**-_FRACTION)
        positions = torch.where(positions >= 1, positions, magnitudes.mul_(2.0 ** (self._steps - 1)))
        return torch.copysign(positions, ratios, out=ratios)

    def level(self, codes: Tensor, divisor: int) -> Tensor:
        exponents = codes.abs().add_(_BIAS - self._steps).to(torch.int32)
        return codes.sign_().mul_(exponents.bitwise_left_shift_(_FRACTION).view(torch.float32)).div_(divisor)


@CODECS.register("nuqsgd", "NUQSGD: unbiased rounding to powers of two of the Euclidean norm of each bucket")
@dataclass(frozen=True)
class Nuqsgd(Qsgd):
    """Stochastic rounding to powers of two, with the options of `qsgd`."""

    quantiser = PowerQuantiser
