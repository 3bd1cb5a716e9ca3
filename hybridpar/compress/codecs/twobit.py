"""Codec `twobit`: minus, nothing or plus for each value, by a threshold.

The coding of MXNet's 2-bit gradient compression (apache/mxnet, PR 8662), with v = g + r and a threshold t:

    v >= t: send plus, decoded as t      v <= -t: send minus, decoded as -t      else: send nothing, decoded as 0

so what is not sent is v - C(v), which is error feedback. MXNet's t is fixed by the user. With t > max |v| nothing is
sent at all, and a gradient of 1e-3 takes 500 steps to reach 0.5. By default t follows v instead:

    t = min(factor * mean |v|, cap * max |v|)

With `factor` 1.1 to 1.5 that is close to the least squared error for normal and for Laplace distributed values. The cap
means that something is always sent, and it stops what a larger factor would start: a threshold that grows with the
residual that it causes. `levels=mean` selects |v| > 0.7 mean |v| and decodes it as the mean of what was selected, the
optimum of ternary weight networks (Li, Zhang, Liu, 2016): same bits, smaller error.
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

_LEVELS = ("threshold", "mean")
_PULLS = ("codes", "full")

#: |v| above so many times its mean is sent, with `levels=mean`.
_SELECT = 0.7

#: Bytes before the codes of a stripe: the level.
_HEAD = 4


@dataclass(frozen=True)
class Threshold:
    """When a value is large enough to be sent, and as what.

    Attributes:
        fixed: The threshold, or None for one that follows the values.
        factor: Of the mean magnitude.
        cap: Of the largest magnitude.
        by_mean: Whether values are selected and decoded by means; then none of the others matters.
    """

    fixed: float | None = None
    factor: float = 1.5
    cap: float = 0.5
    by_mean: bool = False

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
        levels: `threshold`, or `mean` for the better decoder.
        pull: `codes`: the owner of a stripe encodes the sum, too. `full`: it sends the sum in float32, as MXNet's
            server does, and little more than half of all bytes is saved.
        least: Parameters with fewer elements are sent in full precision, and so are vectors.
        meet: As that of `onebit`. `pull=full` needs owners, so it is always `shard`.
    """

    threshold: float | None = None
    factor: float = 1.5
    cap: float = 0.5
    levels: str = "threshold"
    pull: str = "codes"
    least: int = 1000
    meet: str = "auto"
    name = "twobit"
    biased = True
    at_once = True
    feedback = True
    kernels = ("cpu", "cuda")

    def __post_init__(self) -> None:
        for option, value, allowed in (("levels", self.levels, _LEVELS), ("pull", self.pull, _PULLS)):
            check_choice(option, value, allowed, "No such way.")
        if self.levels == "mean" and self.threshold is not None:
            raise UsageError(
                f"threshold={self.threshold:g} with levels=mean", "Means say what is sent.", "Leave out one of them."
            )
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
        return Threshold(self.threshold, self.factor, self.cap, self.levels == "mean")


class TernaryQuantiser(Quantiser):
    """A stripe as [level][codes].

    Args:
        rule: What is sent.
        device: Where the parameter is.
    """

    def __init__(self, rule: Threshold, device: torch.device) -> None:
        self._rule = rule
        self._table = pair_table(device)
        mode = 2 if rule.by_mean else 1 if rule.fixed is None else 0
        scale = _SELECT if rule.by_mean else rule.factor
        self._kernel = kernels.ThresholdRule(mode, rule.fixed or 0.0, scale, rule.cap)

    @property
    def unit(self) -> int:
        """What fills a word of 32 bits."""
        return 16

    def size(self, shape: Sequence[int]) -> int:
        """Level and codes."""
        return _HEAD + pairs_size(shape[0])

    def encode(self, values: Tensor, residual: Residual, out: Tensor, scratch: Scratch) -> None:
        """Where a value is not finite the level is NaN, and so is all that is decoded."""
        if kernels.twobit_encode(values, residual, self._kernel, out[:_HEAD].view(torch.float32), out[_HEAD:], scratch):
            return
        mean, largest = self._magnitudes(values, residual, scratch)
        level = out[:_HEAD].view(torch.float32)
        if self._rule.by_mean:
            threshold = mean * _SELECT
            level.copy_(self._mean_of_selected(values, residual, threshold, scratch))
        elif self._rule.fixed is not None:
            threshold = torch.full_like(mean, self._rule.fixed)
            level.copy_(threshold)
        else:
            threshold = torch.minimum(self._rule.factor * mean, self._rule.cap * largest)
            level.copy_(threshold)
        level.masked_fill_(~largest.isfinite(), torch.nan)
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

    def _mean_of_selected(self, values: Tensor, residual: Residual, threshold: Tensor, scratch: Scratch) -> Tensor:
        """Mean magnitude of what is sent, 0-d; 0 where nothing is."""
        total, count = torch.zeros_like(threshold), torch.zeros_like(threshold)
        for start, stop in _chunks(values.numel()):
            v = residual.again(values[start:stop], start)
            _, sent = self._select(v, threshold, scratch)
            magnitude = torch.abs(v, out=scratch.take("sign", stop - start))
            total += magnitude.mul_(sent).sum()
            count += sent.sum()
        return total / count.clamp(min=1)

    def _select(self, v: Tensor, threshold: Tensor, scratch: Scratch) -> tuple[Tensor, Tensor]:
        """Which values are decoded as positive, and which as not zero."""
        positive = scratch.take("positive", v.numel(), torch.bool)
        sent = scratch.take("sent", v.numel(), torch.bool)
        if self._rule.by_mean:  # the comparison is strict, so that zeros are never sent
            torch.gt(v, threshold, out=positive)
            torch.lt(v, -threshold, out=sent)
        else:
            torch.ge(v, threshold, out=positive)
            torch.le(v, -threshold, out=sent)
        return positive, sent.logical_or_(positive)

    def _values(self, message: Tensor, start: int, stop: int, scratch: Scratch) -> Tensor:
        return unpack_pairs(message[_HEAD + start // 4 :], stop - start, self._table, scratch)


def _chunks(count: int) -> Iterator[tuple[int, int]]:
    for start in range(0, count, CHUNK):
        yield start, min(start + CHUNK, count)
