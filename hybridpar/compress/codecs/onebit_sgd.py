"""Codec `onebit_sgd`: 1-bit SGD with AdaGrad and momentum applied by the owners of stripes.

Seide, Fu, Droppo, Li, Yu, "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Distributed Training
of Speech DNNs", Interspeech 2014, section 3.3. Stripes are sent as by `onebit`. Where one has been added up, and before
it is quantised again, its owner divides it by the size of gradients over time (AdaGrad) and smooths it (momentum):

    G = sum of the decoded stripes     h <- h + G^2     G <- G / sqrt(h)     m <- mu m + G     m is encoded and sent

So each worker keeps 1/K of h and of m, and what is quantised the second time is more homogeneous. The paper also tried
AdaGrad on each worker before the first quantisation, and after momentum; both are here, for the comparison. What
arrives is the step to take, so the optimizer is plain SGD, whose weight decay acts on the weights alone.

How AdaGrad is written is not printed there. Here the result is made as long as the stripe was before, so that learning
rates keep their meaning. CNTK divides by the mean of 1 / sqrt(h) to that end, which a few elements near zero decide.

Vectors and short groups are sent in full precision, stripe by stripe like all others: the rule is the same for them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor

from hybridpar.compress.codec import CODECS, Codec, TensorSpec
from hybridpar.compress.codecs.onebit import OneBit, RowSigns
from hybridpar.compress.memory import State
from hybridpar.compress.quantised import Compiled, Plain, QuantisedCoder, Quantiser
from hybridpar.spec import AT_LEAST_1, AT_MOST_1, BELOW_1

#: What is added to the root of h, against division by zero; far below any gradient, whatever its scale.
_EPSILON = 1e-12


def adagrad_(values: Tensor, squares: State, *, memory: float = 1.0, level: bool = True) -> Tensor:
    """Divide values, in place, by the root of what their squares have added up to.

    Duchi, Hazan, Singer, "Adaptive Subgradient Methods", JMLR 2011.
    """
    torch.mul(squares.now, memory, out=squares.next)
    squares.next.addcmul_(values, values, value=1.0 if memory == 1 else 1 - memory)
    squares.next.clamp_(max=torch.finfo(torch.float32).max)  # NaN stays NaN
    root = squares.next.sqrt().add_(_EPSILON)
    if not level:
        return values.div_(root)
    before = torch.linalg.vector_norm(values, dtype=torch.float64)
    after = torch.linalg.vector_norm(values.div_(root), dtype=torch.float64)
    # Of nothing but zeros the length is 0 before and after.
    return values.mul_(torch.where(after == 0, 1.0, before / after).float())


@CODECS.register("onebit_sgd", "1-bit SGD whole: onebit with AdaGrad and momentum at the owners of stripes")
@dataclass(frozen=True, kw_only=True)
class OneBitSgd(Compiled, Codec):
    """Signs and two levels per group both ways; between them, AdaGrad and momentum.

    Attributes:
        adagrad: `owner`: on the sum, before momentum, the paper's best; `worker`: on each worker's gradient before it
            is quantised; `after`: on the smoothed sum; `off`.
        momentum: Of the owners; the optimizer's own is 0. With 0 here it may have one.
        memory: 1 adds squares up, as AdaGrad does; below 1 they are a moving average.
        level: Keep the step of each stripe as large as it would be without AdaGrad.
        bits: Whether anything is quantised; off leaves owners' rules alone, for the comparison.
        least: As of `onebit`.
    """

    adagrad: Literal["owner", "worker", "after", "off"] = "owner"
    momentum: Annotated[float, BELOW_1] = 0.9
    memory: Annotated[float, AT_MOST_1] = 1.0
    level: bool = True
    bits: bool = True
    least: Annotated[int, AT_LEAST_1] = 32
    feedback: bool = True
    gives_sums = False

    @property
    def keeps_momentum(self) -> bool:  # type: ignore[override]
        """Owners have it, unless it is 0."""
        return self.momentum > 0

    def fits(self, shape: Sequence[int]) -> bool:
        """Whether there is anything."""
        return math.prod(shape) > 0

    def coder(self, spec: TensorSpec) -> OwnerCoder:
        signs = RowSigns(spec.shape) if OneBit(least=self.least).fits(spec.shape) else None
        plain = OwnerCoder(spec, self, Plain(signs))
        return plain if signs is None or not self.bits else OwnerCoder(spec, self, signs, plain)


class OwnerCoder(QuantisedCoder):
    """Exchanges one parameter stripe by stripe, and lets the owners of sums apply a rule.

    In a warm-up `plain` works, with the same state.
    """

    def __init__(
        self, spec: TensorSpec, rule: OneBitSgd, quantiser: Quantiser, plain: OwnerCoder | None = None
    ) -> None:
        super().__init__(spec, quantiser, "shard")
        self._rule = rule
        self.in_warmup = plain or self
        if plain is not None:
            self._states = plain._states
        else:
            stripe = len(self._ranges[spec.rank])
            sizes = {"squares": {"worker": spec.count, "off": 0}.get(rule.adagrad, stripe)}
            sizes["momentum"] = stripe if rule.momentum else 0
            for name, size in sizes.items():
                self.register_state(name, torch.zeros(size, dtype=torch.float32, device=spec.device))
        self._squares, self._momentum = self._states["squares"], self._states["momentum"]

    def write(self, index: int, parts: Sequence[Tensor]) -> None:
        if self._rule.adagrad == "worker":
            self.gradient = self._adagrad(self.gradient.clone())
        super().write(index, parts)

    def _process(self, total: Tensor) -> None:
        """The rule is about the gradient, which is the sum over the workers, or their mean."""
        divisor = self.spec.divisor
        if divisor != 1:
            total.div_(divisor)
        if self._rule.adagrad == "owner":
            self._adagrad(total)
        if self._rule.momentum:
            # As much is forgotten per sample as before: mu becomes mu^samples.
            mu = self._rule.momentum**self._samples
            total.copy_(torch.add(total, self._momentum.now, alpha=mu, out=self._momentum.next))
        if self._rule.adagrad == "after":
            self._adagrad(total)
        if divisor != 1:
            total.mul_(divisor)

    def _adagrad(self, values: Tensor) -> Tensor:
        return adagrad_(values, self._squares, memory=self._rule.memory, level=self._rule.level)
