"""Codec `twobit`: minus, nothing or plus for each value, by a threshold.

The coding of MXNet's 2-bit gradient compression (apache/mxnet, PR 8662), with v = g + r and a threshold t:

    v >= t: send plus, decoded as t      v <= -t: send minus, decoded as -t      else: send nothing, decoded as 0

so what is not sent is v - C(v), which is error feedback. MXNet's t is fixed by the user. With t > max |v| nothing is
sent at all, and a gradient of 1e-3 takes 500 steps to reach 0.5. By default t follows v instead:

    t = min(factor * mean |v|, cap * max |v|)

With `factor` 1.1 to 1.5 that is close to the least squared error for normal and for Laplace distributed values. The cap
means that something is always sent, and it stops what a larger factor would start: a threshold that grows with the
residual that it causes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridpar.compress import kernels
from hybridpar.compress.codec import CHUNK, CODECS, Coder, LargeTensorCodec, Residual, Scratch, TensorSpec
from hybridpar.compress.packing import magnitude, pack_pairs, pair_table, pairs_size, unpack_pairs
from hybridpar.compress.quantised import Quantiser, ShardedCoder, check_meet, quantised_coder
from hybridpar.errors import UsageError, check, check_choice

_PULLS = ("codes", "full")

#: Bytes before the codes of a stripe: the level.
_HEAD = 4


@dataclass(frozen=True)
class Threshold:
    """When a value is large enough to be sent, and as what.

    Attributes:
        fixed: The threshold, or None for one that follows the values.
        factor: Of the mean magnitude.
        cap: Of the largest magnitude.
    """

    fixed: float | None = None
    factor: float = 1.5
    cap: float = 0.5

    def __post_init__(self) -> None:
        if self.fixed is not None and not 0 < self.fixed < math.inf:
            raise UsageError(f"threshold={self.fixed:g}", "It is above 0.", "Leave it out, so that it is adapted.")
        check(0 < self.factor < math.inf, f"factor={self.factor:g}", "It is above 0.", "Use 1.5.")
        check(0 < self.cap <= 1, f"cap={self.cap:g}", "Above 1 nothing might be sent.", "Use 0.5.")


@CODECS.register("twobit", "2-bit thresholds as in MXNet, fixed or adapted, error feedback, sharded exchange")
@dataclass(frozen=True)
class TwoBit(LargeTensorCodec):
    """Minus, nothing or plus.

    Attributes:
        threshold: What a value must reach, or `auto`. MXNet's default is 0.5 for gradients summed over the local
            batch; for averages, as here, that is 0.5 / batch size.
        factor: See above.
        cap: See above.
        pull: `codes`: the owner of a stripe encodes the sum, too. `full`: it sends the sum in float32, as MXNet's
            server does, and little more than half of all bytes is saved.
        least: Parameters with fewer elements are sent in full precision, and so are vectors.
        meet: As that of `onebit`. `pull=full` needs owners, so it is always `shard`.
    """

    threshold: float | None = None
    factor: float = 1.5
    cap: float = 0.5
    pull: str = "codes"
    least: int = 1000
    meet: str = "auto"
    name = "twobit"
    biased = True
    at_once = True
    feedback = True
    kernels = ("cpu", "cuda")

    def __post_init__(self) -> None:
        check_choice("pull", self.pull, _PULLS, "No such way.")
        super().__post_init__()
        check_meet(self.meet)
        if self.pull == "full" and self.meet == "gather":
            raise UsageError("pull=full with meet=gather", "Where all send to all nobody owns a sum.", "Leave one out.")
        self._rule()

    def bind(self, spec: TensorSpec) -> Coder:
        quantiser = TernaryQuantiser(self._rule(), spec.device)
        if self.pull == "full":
            return ShardedCoder(spec, quantiser, requantise=False)
        return quantised_coder(spec, quantiser, self.meet)

    def _rule(self) -> Threshold:
        return Threshold(self.threshold, self.factor, self.cap)


class TernaryQuantiser(Quantiser):
    """A stripe as [level][codes]."""

    def __init__(self, rule: Threshold, device: torch.device) -> None:
        self._rule = rule
        self._table = pair_table(device)

    @property
    def unit(self) -> int:
        """What fills a word of 32 bits."""
        return 16

    def size(self, shape: Sequence[int]) -> int:
        """Level and codes."""
        return _HEAD + pairs_size(shape[0])

    def encode(self, values: Tensor, residual: Residual, out: Tensor, scratch: Scratch) -> None:
        """Where a value is not finite the level is NaN, and so is all that is decoded."""
        rule, level = self._rule, out[:_HEAD].view(torch.float32)
        numbers = rule.fixed or 0.0, rule.factor, rule.cap
        if kernels.twobit_encode(values, residual, numbers, level, out[_HEAD:], scratch):
            return
        mean, largest = self._magnitudes(values, residual, scratch)
        if rule.fixed is not None:
            threshold = torch.full_like(mean, rule.fixed)
        else:
            threshold = torch.minimum(rule.factor * mean, rule.cap * largest)
        level.copy_(threshold).masked_fill_(~largest.isfinite(), torch.nan)
        for start, stop in _chunks(values.numel()):
            v = residual.again(values[start:stop], start)
            positive, sent = self._select(v, threshold, scratch)
            at = _HEAD + start // 4
            pack_pairs(sent, positive, out[at : at + pairs_size(stop - start)], scratch)
            if residual.keeps:
                sign = scratch.take("sign", stop - start)
                # plus: 2 - 1, minus: 0 - 1, nothing: 0 - 0
                sign.copy_(positive.view(torch.uint8)).mul_(2).sub_(sent.view(torch.uint8))
                v.sub_(sign.mul_(level))

    def read(self, message: Tensor, out: Tensor, scratch: Scratch, divisor: int, *, add: bool) -> None:
        level = message[:_HEAD].view(torch.float32)
        if kernels.twobit_read(level, message[_HEAD:], out, divisor, add=add):
            return
        level = level / divisor
        for start, stop in _chunks(out.numel()):
            values = self._values(message, start, stop, scratch)
            if add:
                out[start:stop].addcmul_(values, level)
            else:
                torch.mul(values, level, out=out[start:stop])

    def _magnitudes(self, values: Tensor, residual: Residual, scratch: Scratch) -> tuple[Tensor, Tensor]:
        """Mean and largest magnitude of v, 0-d; this is where v is made."""
        sums, tops = [], []
        for start, stop in _chunks(values.numel()):
            v = residual.take(values[start:stop], start)
            sums.append(torch.abs(v, out=scratch.take("sign", stop - start)).sum())
            tops.append(magnitude(v))
        return torch.stack(sums).sum() / values.numel(), torch.stack(tops).max()

    def _select(self, v: Tensor, threshold: Tensor, scratch: Scratch) -> tuple[Tensor, Tensor]:
        """Which values are decoded as positive, and which as not zero."""
        positive = scratch.take("positive", v.numel(), torch.bool)
        sent = scratch.take("sent", v.numel(), torch.bool)
        torch.ge(v, threshold, out=positive)
        torch.le(v, -threshold, out=sent)
        return positive, sent.logical_or_(positive)

    def _values(self, message: Tensor, start: int, stop: int, scratch: Scratch) -> Tensor:
        return unpack_pairs(message[_HEAD + start // 4 :], stop - start, self._table, scratch)


def _chunks(count: int) -> Iterator[tuple[int, int]]:
    for start in range(0, count, CHUNK):
        yield start, min(start + CHUNK, count)
