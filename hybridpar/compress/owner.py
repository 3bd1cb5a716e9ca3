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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hybridpar.compress.codec import NO_RESIDUAL, Kept, Residual, Scratch, TensorSpec, WarmUpCoder
from hybridpar.compress.quantised import OWNER, Quantiser, ShardedCoder

#: Where AdaGrad may be.
PLACEMENTS = ("owner", "worker", "after", "off")

#: What is added to the root of h, against division by zero; far below any gradient, whatever its scale.
_EPSILON = 1e-12


def adagrad_(values: Tensor, squares: Kept, *, memory: float = 1.0, level: bool = True) -> Tensor:
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


class PlainStripes(Quantiser):
    """Stripes in full precision, cut as those of another quantiser."""

    def __init__(self, other: Quantiser | None = None) -> None:
        self._other = other

    def view(self, flat: Tensor) -> Tensor:
        return flat if self._other is None else self._other.view(flat)

    @property
    def unit(self) -> int:
        return 1 if self._other is None else self._other.unit

    def size(self, shape: Sequence[int]) -> int:
        """Four bytes per element."""
        count = 4
        for length in shape:
            count *= length
        return count

    def encode(self, values: Tensor, residual: Residual, out: Tensor, scratch: Scratch) -> None:
        """Nothing is left out, so a residual that was empty stays it."""
        self._laid(out, values.shape).copy_(values)
        if residual.keeps:
            residual.again(values, 0).zero_()

    def read(self, message: Tensor, out: Tensor, scratch: Scratch, divisor: int, *, add: bool) -> None:
        values = self._laid(message, out.shape)
        if add:
            out.add_(values, alpha=1 / divisor)
        else:
            torch.div(values, divisor, out=out)

    def _laid(self, message: Tensor, shape: Sequence[int]) -> Tensor:
        return message.view(torch.float32).view(shape)


@dataclass(frozen=True)
class OwnerRule:
    """What owners do to the sum of a stripe.

    Attributes:
        adagrad: Where AdaGrad is: one of `PLACEMENTS`.
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
        self._rule = rule
        plain = coded = ShardedCoder(spec, PlainStripes(quantiser), process=self._apply)
        if quantiser is not None and bits:
            coded = ShardedCoder(spec, quantiser, process=self._apply)
        super().__init__(spec, plain, coded)
        self.residuals = coded.residuals
        own, every = self.residuals[OWNER], spec.count
        sizes = {"worker": every, "off": 0}
        self._squares = Kept(sizes.get(rule.adagrad, own), spec.device)
        self._momentum = Kept(own if rule.momentum else 0, spec.device)
        self._kept = {"squares": self._squares, "momentum": self._momentum}
        self._scaled = torch.empty(every if rule.adagrad == "worker" else 0, dtype=torch.float32, device=spec.device)
        self._samples = 1.0

    @property
    def warm(self) -> bool:
        """Whether the next step is sent in full precision."""
        return self._steps < self._rule.warm

    def begin(self, gradient: Tensor, residuals: Mapping[str, Residual] = NO_RESIDUAL) -> None:
        if self._rule.adagrad == "worker":
            gradient = self._adagrad(self._scaled.copy_(gradient))
        self._current.begin(gradient, residuals)

    def set_batch_scale(self, samples: float) -> None:
        """Momentum forgets as much per sample as before: mu becomes mu^samples."""
        self._samples = samples

    def commit(self) -> None:
        for one in self._kept.values():
            one.commit()
        self._steps += 1

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self._steps, **{key: one.now.clone() for key, one in self._kept.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for key, one in self._kept.items():
            one.load(state[key], self.spec.name)
        self._steps = int(state["steps"])

    def _adagrad(self, values: Tensor) -> Tensor:
        return adagrad_(values, self._squares, memory=self._rule.memory, level=self._rule.level)

    def _apply(self, total: Tensor) -> None:
        """The rule is about the gradient, which is the sum over the workers, or their mean."""
        divisor = self.spec.divisor
        if divisor != 1:
            total.div_(divisor)
        if self._rule.adagrad == "owner":
            self._adagrad(total)
        if self._rule.momentum:
            mu = self._rule.momentum**self._samples
            total.copy_(torch.add(total, self._momentum.now, alpha=mu, out=self._momentum.next))
        if self._rule.adagrad == "after":
            self._adagrad(total)
        if divisor != 1:
            total.mul_(divisor)
