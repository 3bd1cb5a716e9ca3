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

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridpar.compress.codec import CHUNK, CODECS, Coder, LargeTensorCodec, Residual, Scratch, TensorSpec
from hybridpar.compress.noise import Noise, check_rounding
from hybridpar.compress.packing import Fields, aligned
from hybridpar.compress.quantised import Quantiser, check_meet, put, quantised_coder
from hybridpar.errors import check


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

    bits: int = 4
    bucket: int = 512
    meet: str = "auto"
    rounding: str = "random"
    least: int = 1000
    name = "qsgd"
    at_once = True
    stateful = True

    @property
    def biased(self) -> bool:  # type: ignore[override]
        """Rounding towards zero is a bias, drawing is none."""
        return self.rounding != "random"

    def __post_init__(self) -> None:
        check(2 <= self.bits <= 8, f"bits={self.bits}", "A code has 2 to 8 bits, one of them its sign.", "Use 4.")
        check(1 <= self.bucket <= CHUNK, f"bucket={self.bucket}", f"1 to {CHUNK} elements share a norm.", "Use 512.")
        check_meet(self.meet)
        check_rounding(self.rounding)
        super().__post_init__()

    def bind(self, spec: TensorSpec) -> Coder:
        noise = Noise(spec, self.rounding)
        return quantised_coder(spec, self.quantiser(noise), self.meet, noise)

    def quantiser(self, noise: Noise) -> BucketQuantiser:
        """How a stripe becomes bytes."""
        return EvenLevels(2 ** (self.bits - 1) - 1, self.bucket, noise)


class BucketQuantiser(Quantiser):
    """A stripe as [norm of each bucket][codes]. Each code stands for a level, a fraction of its bucket's norm."""

    def __init__(self, steps: int, bucket: int, noise: Noise) -> None:
        self._steps = steps
        self._bucket = bucket
        self._noise = noise

    @abstractmethod
    def place(self, ratios: Tensor) -> None:
        """Replace fractions by their places among the levels: k at level k, and linear from there to the next."""

    @abstractmethod
    def level(self, codes: Tensor) -> None:
        """Replace codes by the levels that they stand for."""

    @property
    def unit(self) -> int:
        """Buckets are not cut."""
        return self._bucket

    def size(self, shape: Sequence[int]) -> int:
        """Norms and codes."""
        return self._head(shape[0]) + self._fields(shape[0]).bytes

    def encode(self, values: Tensor, residual: Residual, out: Tensor, scratch: Scratch) -> None:
        values = residual.take(values, 0)
        norms, words, fields = self._parts(out, values.numel())
        out[: self._head(values.numel())].zero_()
        self._write_norms(values, norms)
        divisors = torch.where(norms > 0, norms, 1.0)

        def code(start: int, stop: int, into: Tensor) -> None:
            # Dividing first makes the largest ratio at most 1, and a denormal norm harmless.
            torch.div(values[start:stop], self._each(divisors, start, stop, scratch), out=into)
            self.place(into.abs_())
            self._noise.round_(into)
            into.clamp_(max=self._steps).copysign_(values[start:stop])
            if residual.keeps:
                sent = into.clone()
                self.level(sent)
                values[start:stop].sub_(sent.mul_(self._each(norms, start, stop, scratch)))
            into.add_(self._steps)

        self._noise.draw(fields.words, scratch)
        fields.pack(words, code, scratch)

    def read(self, message: Tensor, out: Tensor, scratch: Scratch, divisor: int, *, add: bool) -> None:
        norms, words, fields = self._parts(message, out.numel())
        norms = norms / divisor

        def use(start: int, stop: int, values: Tensor) -> None:
            self.level(values.sub_(self._steps))
            put(values.mul_(self._each(norms, start, stop, scratch)), out[start:stop], add=add)

        fields.unpack(words, use, scratch)

    def _head(self, count: int) -> int:
        """Bytes of the norms of so many elements, and what aligns words of 64 bits."""
        return aligned(4 * self._buckets(count))

    def _buckets(self, count: int) -> int:
        return -(-count // self._bucket)

    def _fields(self, count: int) -> Fields:
        return Fields.dense(count, 2 * self._steps)

    def _parts(self, message: Tensor, count: int) -> tuple[Tensor, Tensor, Fields]:
        """Norms and words of a message, and how codes lie in the words."""
        head, fields = self._head(count), self._fields(count)
        return message[:head].view(torch.float32)[: self._buckets(count)], message[head:].view(fields.word), fields

    def _write_norms(self, values: Tensor, norms: Tensor) -> None:
        """Set the norms of all buckets, at least as large as any element; not finite where an element is not."""
        step = CHUNK // self._bucket * self._bucket
        for first in range(0, values.numel(), step):
            part = values[first : first + step]
            whole = part.numel() // self._bucket * self._bucket
            own = norms[first // self._bucket :]
            if whole:
                _norm(part[:whole].view(-1, self._bucket), own[: whole // self._bucket])
            if whole < part.numel():
                _norm(part[whole:].view(1, -1), own[-1:])

    def _each(self, norms: Tensor, start: int, stop: int, scratch: Scratch) -> Tensor:
        """The norm of the bucket of each element of a range."""
        first, last = start // self._bucket, self._buckets(stop)
        each = scratch.take("norms", (last - first) * self._bucket)
        each.view(-1, self._bucket).copy_(norms[first:last].unsqueeze(1))
        return each[start - first * self._bucket : stop - first * self._bucket]


class EvenLevels(BucketQuantiser):
    """Levels 0, 1 / s, ..., 1."""

    def place(self, ratios: Tensor) -> None:
        ratios.mul_(self._steps)

    def level(self, codes: Tensor) -> None:
        codes.div_(self._steps)


def _norm(rows: Tensor, out: Tensor) -> None:
    """Norms of rows. In float64, where no square overflows; finite where the elements are."""
    norms = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)
    out.copy_(torch.where(norms.isinf(), norms, norms.clamp(max=torch.finfo(torch.float32).max)))
