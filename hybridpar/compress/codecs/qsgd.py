"""Codecs `qsgd` and `nuqsgd`: stochastic rounding to levels in units of the Euclidean norm of each bucket.

QSGD: Alistarh, Grubic, Li, Tomioka, Vojnovic, "QSGD: Communication-Efficient SGD via Gradient Quantization and
Encoding", NeurIPS 2017, section 3.1. A gradient is cut into buckets of d consecutive elements. With s levels above
zero, each element v_i of a bucket v becomes

    C(v)_i = |v| sign(v_i) k_i / s        k_i = floor(s |v_i| / |v| + u_i), u_i uniform in [0, 1)

E[C(v)] = v, so it is unbiased and needs no error feedback; E |C(v) - v|**2 <= min(d / s**2, sqrt(d) / s) |v|**2. Codes
are whole numbers from -s to s, here in fields of equal width; the paper's Elias coding would make the bytes of a
message depend on the gradient, and is left out. Beside the codes each bucket sends its norm in float32.

NUQSGD: Ramezani-Kebrya, Faghri, Markov, Aksenov, Alistarh, Roy, "NUQSGD: Provably Communication-efficient
Data-parallel SGD via Nonuniform Quantization", Journal of Machine Learning Research 22, 2021. Its levels are denser
near zero, where most elements of a normalised bucket are:

    l_0 = 0        l_k = 2**(k - s), k = 1, ..., s        C(v)_i = |v| sign(v_i) l_k or l_{k + 1}

With r = |v_i| / |v| between l_k and l_{k + 1}, the upper one is drawn with probability (r - l_k) / (l_{k + 1} - l_k),
so it is unbiased. (The paper counts the levels between 0 and 1, so its s is one less than here.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from hybridpar.compress import kernels
from hybridpar.compress.codec import CHUNK, CODECS, LargeTensorCodec, TensorSpec
from hybridpar.compress.memory import Memory, Scratch
from hybridpar.compress.packing import Fields, Noise, aligned, magnitude
from hybridpar.compress.quantised import Meet, QuantisedCoder, Quantiser, put
from hybridpar.spec import between

#: Bits of the fraction of a float32, and what its exponent is stored with.
_FRACTION, _BIAS = 23, 127


def scale_of(values: Tensor) -> Tensor:
    """Largest magnitude, 0-d; infinite where a value is not finite, as NaN has no part in a maximum."""
    return magnitude(values).nan_to_num(nan=torch.inf, posinf=torch.inf)


def write_scale(values: Tensor, out: Tensor) -> None:
    """Set `out`, of one element, to `scale_of` the values."""
    if not kernels.largest(values, out):
        out.copy_(scale_of(values))


class LevelQuantiser(Quantiser):
    """A stripe as [scale of each bucket][codes]. Each code stands for a level: k / s of its bucket's scale.

    The scale of a bucket is its Euclidean norm. Without buckets a stripe has a single scale, its largest magnitude:
    infinite where a value is not finite, so that no value decodes to a finite number.

    Args:
        steps: s.
        noise: What values are rounded with.
        bucket: Consecutive elements that share a scale; None for all of a stripe.
    """

    def __init__(self, steps: int, noise: Noise, bucket: int | None = None) -> None:
        self._steps, self._noise, self._bucket = steps, noise, bucket
        #: Buckets are not cut.
        self.unit = bucket or 1

    draws = True

    def begin(self, step: int) -> None:
        self._noise.begin(step)

    def position(self, ratios: Tensor) -> Tensor:
        """Where fractions of the scale lie among the levels: k at level k, and linear from there to the next.

        Args:
            ratios: -1 to 1; overwritten.
        """
        return ratios.mul_(self._steps)

    def level(self, codes: Tensor, divisor: int) -> Tensor:
        """The fractions of the scale that codes stand for.

        Args:
            codes: Whole numbers from -s to s; overwritten.
            divisor: What the fractions are divided by.
        """
        return codes.div_(self._steps * divisor)

    def size(self, shape: Sequence[int]) -> int:
        """Scales and codes."""
        return self._head(shape[0]) + self._fields(shape[0]).bytes

    def encode(self, values: Tensor, memory: Memory, out: Tensor, scratch: Scratch) -> None:
        values = memory.take(values)
        scales, words, fields = self._parts(out, values.numel())
        out[: self._head(values.numel())].zero_()
        self._write_scales(values, scales)
        self._noise.draw(fields.words, scratch)
        by_kernel = self._noise.random and not memory.keeps and self._bucket is None
        if by_kernel and kernels.qsgd_encode(values, scales, self._noise, self._steps, fields, words):
            return
        divisors = torch.where(scales > 0, scales, 1.0)

        def code(start: int, stop: int, into: Tensor) -> None:
            # Dividing first makes the largest ratio at most 1, and a denormal scale harmless.
            torch.div(values[start:stop], self._each(divisors, start, stop), out=into)
            self._noise.round_(self.position(into))
            into.clamp_(max=self._steps)
            if memory.keeps:
                values[start:stop].sub_(self.level(into.clone(), 1).mul_(self._each(scales, start, stop)))
            into.add_(self._steps)

        fields.pack(words, code, scratch)

    def read(self, message: Tensor, out: Tensor, scratch: Scratch, divisor: int, *, add: bool) -> None:
        scales, words, fields = self._parts(message, out.numel())
        numbers = fields, self._steps, self._steps * divisor
        if self._bucket is None and kernels.qsgd_read(words, scales, *numbers, out, add=add):
            return

        def use(start: int, stop: int, values: Tensor) -> None:
            decoded = self.level(values.sub_(self._steps), divisor).mul_(self._each(scales, start, stop))
            put(decoded, out[start:stop], add=add)

        fields.unpack(words, use, scratch)

    def _buckets(self, count: int) -> int:
        return -(-count // (self._bucket or count))

    def _head(self, count: int) -> int:
        """Bytes of the scales of so many elements, and what aligns words of 64 bits."""
        return aligned(4 * self._buckets(count))

    def _fields(self, count: int) -> Fields:
        return Fields.of(count, (2 * self._steps).bit_length())

    def _parts(self, message: Tensor, count: int) -> tuple[Tensor, Tensor, Fields]:
        """Scales and words of a message, and how codes lie in the words."""
        head, fields = self._head(count), self._fields(count)
        return message[:head].view(torch.float32)[: self._buckets(count)], message[head:].view(fields.word), fields

    def _write_scales(self, values: Tensor, scales: Tensor) -> None:
        """Set the scales of all buckets; not finite where an element is not."""
        if self._bucket is None:
            write_scale(values, scales)
            return
        full = values.numel() // self._bucket
        cut = full * self._bucket
        _write_norms(values[:cut].view(full, self._bucket), scales[:full])
        if cut < values.numel():
            _write_norms(values[cut:].view(1, -1), scales[full:])

    def _each(self, scales: Tensor, start: int, stop: int) -> Tensor:
        """The scale of each element of a range."""
        if self._bucket is None:
            return scales
        first, last = start // self._bucket, self._buckets(stop)
        each = scales[first:last].unsqueeze(1).expand(-1, self._bucket).reshape(-1)
        return each[start - first * self._bucket : stop - first * self._bucket]


def _write_norms(rows: Tensor, out: Tensor) -> None:
    """Norms of rows. In float64, where no square overflows; finite where the elements are."""
    norms = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)
    out.copy_(torch.where(norms.isinf(), norms, norms.clamp(max=torch.finfo(torch.float32).max)))


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


@dataclass(frozen=True, kw_only=True)
class RoundingCodec(LargeTensorCodec):
    """A codec that rounds values up or down.

    Attributes:
        rounding: `random`, or `zero` for towards zero, which is biased: the papers' comparison. With `feedback=on` what
            is rounded off is sent later.
    """

    rounding: Literal["random", "zero"] = "random"

    @property
    def biased(self) -> bool:  # type: ignore[override]
        """Rounding towards zero is a bias, drawing is none."""
        return self.rounding != "random"


@CODECS.register("qsgd", "QSGD: unbiased rounding to even steps of the Euclidean norm of each bucket")
@dataclass(frozen=True, kw_only=True)
class Qsgd(RoundingCodec):
    """Stochastic rounding on the scale of a bucket's norm.

    Attributes:
        bits: Of a code, its sign included: 2**(bits - 1) - 1 levels above zero.
        bucket: Consecutive elements that share a norm.
        meet: How messages are reduced, as in `onebit`: `shard`, `gather` or `auto`. The paper's is `gather`.
    """

    bits: Annotated[int, between(2, 8)] = 4
    bucket: Annotated[int, between(1, CHUNK)] = 512
    meet: Meet = "auto"
    at_once = True
    quantiser: ClassVar[type[LevelQuantiser]] = LevelQuantiser

    def coder(self, spec: TensorSpec) -> QuantisedCoder:
        noise, steps = Noise(spec, self.rounding), 2 ** (self.bits - 1) - 1
        return QuantisedCoder(spec, self.quantiser(steps, noise, self.bucket), self.meet)


@CODECS.register("nuqsgd", "NUQSGD: unbiased rounding to powers of two of the Euclidean norm of each bucket")
@dataclass(frozen=True, kw_only=True)
class Nuqsgd(Qsgd):
    """Stochastic rounding to powers of two, with the options of `qsgd`."""

    quantiser = PowerQuantiser
