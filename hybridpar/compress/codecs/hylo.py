"""Codec `hylo`: important filters of convolutions, and 2 bits per value of dense layers.

After "Hylo: Hybrid Layer-Based Optimization to Reduce Communication in Distributed Deep Learning". Its abstract says:
layers above a size are compressed; of a convolution some important kernels are sent, at a rate that follows the layer's
size; a dense layer is quantised to 2 bits with a threshold that follows its values; what is not sent accumulates. It
gives no formulas. Those here are this project's, with N elements of a parameter and v = g + r:

* N <= `least`, or neither a convolution nor a matrix: full precision.
* A convolution of O filters sends k = ceil(rho O) of them, rho = (least / N) ** power, at least `rate` and at most 1.
  Workers agree on which: the k with the largest sum over the workers of mean v**2, of equal ones the first. So all send
  the same filters, no indices are sent, and the values are added by one all-reduce (agreed indices as in ScaleCom, Chen
  et al., NeurIPS 2020). v of these filters is sent in full and their residual is 0; of the others v stays.
* A matrix goes as `twobit` with an adapted threshold.

With parameter servers it is as in the paper: a worker pushes the filters that are most important to itself, and what
comes back is in full precision.

No filter starves: each is sent at least once in any `delay` + 1 steps, however small it is. k stays the same for that,
so that bytes follow from the shape; instead the filters closest to their deadline go first, as few as suffice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from hybridpar.compress.codec import CODECS, Codec, Coder, Collective, Round, TensorSpec
from hybridpar.compress.codecs.twobit import TwoBit
from hybridpar.compress.memory import WORKER
from hybridpar.compress.quantised import Compiled
from hybridpar.spec import AT_LEAST_0, AT_LEAST_1, AT_MOST_1, POSITIVE


@CODECS.register("hylo", "Hylo: important filters of convolutions, 2 bits for dense layers, small layers in full")
@dataclass(frozen=True, kw_only=True)
class Hylo(Compiled, Codec):
    """A codec for each kind of layer.

    Attributes:
        least: Parameters of at most so many elements are sent in full precision.
        rate: Least share of filters that is sent.
        power: How fast the share falls with the size.
        delay: Most steps that a filter waits.
        factor: Of the threshold of dense layers, see `twobit`.
        cap: Of the threshold of dense layers, see `twobit`.
    """

    least: Annotated[int, AT_LEAST_1] = 50_000
    rate: Annotated[float, AT_MOST_1] = 0.1
    power: Annotated[float, AT_LEAST_0] = 0.5
    delay: Annotated[int, AT_LEAST_0] = 50
    factor: Annotated[float, POSITIVE] = 1.5
    cap: Annotated[float, AT_MOST_1] = 0.5
    reads_state = True
    feedback: bool = True
    castable = True

    def fits(self, shape: Sequence[int]) -> bool:
        """Whether it is a large convolution or matrix."""
        return len(shape) in (2, 4, 5) and math.prod(shape) > self.least

    def filters(self, shape: Sequence[int]) -> int:
        """How many filters of a convolution are sent in a step."""
        share = min(max(math.pow(self.least / math.prod(shape), self.power), self.rate), 1.0)
        return max(math.ceil(share * shape[0]), math.ceil(shape[0] / (self.delay + 1)))

    def coder(self, spec: TensorSpec) -> Coder:
        if len(spec.shape) == 2:
            return TwoBit(factor=self.factor, cap=self.cap).coder(spec)
        return FilterCoder(spec, self.filters(spec.shape), self.delay)


class FilterCoder(Coder):
    """Sends the filters that all workers together find most important, and knows how long the others have waited."""

    def __init__(self, spec: TensorSpec, sent: int, delay: int) -> None:
        filters, self._delay, self._sent = spec.shape[0], delay, sent
        self._shape = filters, spec.count // filters
        scores = Round(Collective.SUM, torch.float64, (filters,))
        super().__init__(spec, [scores, Round(Collective.SUM, spec.wire, (sent * self._shape[1],))])
        self.residuals = {WORKER: range(spec.count)}
        self._waited = self.register_state("waited", torch.zeros(filters, dtype=torch.int64, device=spec.device))
        self._values = self._chosen = torch.empty(0)

    def write(self, index: int, parts: Sequence[Tensor]) -> None:
        (out,) = parts
        if index == 0:  # mean squares in float64, which are finite exactly where the filter is
            self._values = self.memory[WORKER].take(self.gradient.view(self._shape))
            norms: Tensor = torch.linalg.vector_norm(self._values, dim=1, dtype=torch.float64)
            torch.div(norms.square_(), self._shape[1], out=out)
            return
        rows = out.view(self._sent, -1)
        torch.mul(self._values.index_select(0, self._chosen), self.spec.share, out=rows)
        if self.memory[WORKER].keeps:
            self._values.index_add_(0, self._chosen, rows.float(), alpha=-1 / self.spec.share)

    def read(self, index: int, parts: Sequence[Tensor]) -> None:
        super().read(index, parts)
        if index == 0:
            self._chosen = choose(parts[0], self._waited.now, self._sent, self._delay)
            torch.add(self._waited.now, 1, out=self._waited.next).index_fill_(0, self._chosen, 0)

    def finish(self, out: Tensor) -> None:
        rows = self.messages[0].to(torch.float32).view(self._sent, -1)
        out.zero_()
        out.view(self._shape).index_copy_(0, self._chosen, rows.div_(self.spec.divisor * self.spec.share))


def choose(scores: Tensor, waited: Tensor, count: int, delay: int) -> Tensor:
    """Which filters are sent.

    A filter that has waited w steps must go within the next delay - w steps after this one. All deadlines can be kept
    as long as, for every t, no more than (t + 1) count filters are due within t steps. So as many of the most urgent
    ones go now as would otherwise be too many; the rest is chosen by score.
    """
    slack = delay - waited
    steps = torch.arange(delay + 1, device=slack.device)
    due = (slack.unsqueeze(1) <= steps).sum(0)
    forced = (due - count * steps).clamp_(min=0).max()
    urgency = torch.argsort(torch.argsort(slack, stable=True))
    most = torch.finfo(scores.dtype).max
    ranked = scores.clamp(max=most / 2).masked_fill(urgency < forced, most).masked_fill(~scores.isfinite(), torch.inf)
    return torch.sort(ranked, descending=True, stable=True).indices[:count].sort().values
