"""AdaGrad and momentum applied by the owner of each stripe of the summed gradient.

1-bit SGD (Seide et al., Interspeech 2014, section 3.3) divides gradients by their size over time (AdaGrad) and smooths
them (momentum) where a stripe has been added up, before it is quantised again:

    G = sum of the decoded stripes     h <- h + G^2     G <- G / sqrt(h)     m <- mu m + G     m is encoded and sent

So each worker keeps 1/K of h and of m, and what is quantised the second time is more homogeneous. The paper also tried
AdaGrad on each worker before the first quantisation, and after momentum; both are here, for the comparison.

How AdaGrad is written is not printed there. Here the result is made as long as the stripe was before, so that learning
rates keep their meaning. CNTK divides by the mean of 1 / sqrt(h) to that end, which a few elements near zero decide.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hybridpar.compress.codec import TensorSpec, WarmUpCoder
from hybridpar.compress.memory import State
from hybridpar.compress.quantised import Plain, QuantisedCoder, Quantiser

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


@dataclass(frozen=True)
class OwnerRule:
    """What owners do to the sum of a stripe.

    Attributes:
        adagrad: Where AdaGrad is: `owner`, `worker`, `after` or `off`.
        momentum: mu; 0 for none.
        memory: Of AdaGrad's squares from step to step; less than 1 for a moving average.
        level: Make what AdaGrad divided as long as it was before.
        warm: Number of first steps that are sent in full precision; AdaGrad and momentum are the same in them.
    """

    adagrad: str = "owner"
    momentum: float = 0.9
    memory: float = 1.0
    level: bool = True
    warm: int = 0


class OwnerCoder(WarmUpCoder):
    """Exchanges one parameter stripe by stripe, and lets the owners apply a rule."""

    def __init__(self, spec: TensorSpec, rule: OwnerRule, quantiser: Quantiser | None, bits: bool = True) -> None:
        plain = StripeCoder(spec, Plain(quantiser), self)
        coded = plain if quantiser is None or not bits else StripeCoder(spec, quantiser, self)
        super().__init__(spec, rule.warm, plain, coded)
        self._rule = rule
        stripe = len(plain.stripe)
        sizes = {"worker": spec.count, "off": 0}
        squares, momentum = (
            torch.zeros(size, dtype=torch.float32, device=spec.device)
            for size in (sizes.get(rule.adagrad, stripe), stripe if rule.momentum else 0)
        )
        self._squares = self.register_state("squares", squares)
        self._momentum = self.register_state("momentum", momentum)

    def prepare(self, gradient: Tensor) -> Tensor:
        """What of a worker's gradient is encoded."""
        return self._adagrad(gradient.clone()) if self._rule.adagrad == "worker" else gradient

    def process(self, total: Tensor) -> None:
        """The rule is about the gradient, which is the sum over the workers, or their mean."""
        divisor = self.spec.divisor
        if divisor != 1:
            total.div_(divisor)
        if self._rule.adagrad == "owner":
            self._adagrad(total)
        if self._rule.momentum:
            # As much is forgotten per sample as before: mu becomes mu^samples.
            mu = self._rule.momentum**self.samples
            total.copy_(torch.add(total, self._momentum.now, alpha=mu, out=self._momentum.next))
        if self._rule.adagrad == "after":
            self._adagrad(total)
        if divisor != 1:
            total.mul_(divisor)

    def _adagrad(self, values: Tensor) -> Tensor:
        return adagrad_(values, self._squares, memory=self._rule.memory, level=self._rule.level)


class StripeCoder(QuantisedCoder):
    """Exchanges stripes, whose sums are an owner's to change."""

    def __init__(self, spec: TensorSpec, quantiser: Quantiser, owner: OwnerCoder) -> None:
        super().__init__(spec, quantiser, "shard")
        self._owner = owner

    @property
    def stripe(self) -> range:
        """The elements that this worker owns."""
        return self._ranges[self.spec.rank]

    def begin(self, gradient: Tensor) -> None:
        super().begin(self._owner.prepare(gradient))

    def _process(self, total: Tensor) -> None:
        self._owner.process(total)
