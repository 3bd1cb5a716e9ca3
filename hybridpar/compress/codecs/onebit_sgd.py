"""Codec `onebit_sgd`: 1-bit SGD with AdaGrad and momentum applied by the owners of stripes.

Seide, Fu, Droppo, Li, Yu, "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Distributed Training
of Speech DNNs", Interspeech 2014. What `onebit` sends, with AdaGrad and momentum at the owner of each stripe and first
steps in full precision; see `hybridpar.compress.owner`. What arrives is the step to take, so the optimizer is plain
SGD, whose weight decay acts on the weights alone.

Vectors and short groups are sent in full precision, stripe by stripe like all others: the rule is the same for them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from hybridpar.compress.codec import CODECS, Codec, TensorSpec
from hybridpar.compress.codecs.onebit import OneBit, RowSigns
from hybridpar.compress.owner import OwnerCoder, OwnerRule
from hybridpar.spec import AT_LEAST_0, AT_LEAST_1, AT_MOST_1, BELOW_1


@CODECS.register("onebit_sgd", "1-bit SGD whole: onebit with AdaGrad and momentum at the owners of stripes")
@dataclass(frozen=True)
class OneBitSgd(Codec):
    """Signs and two levels per group both ways; between them, AdaGrad and momentum.

    Attributes:
        adagrad: `owner`: on the sum, before momentum, the paper's best; `worker`: on each worker's gradient before it
            is quantised; `after`: on the smoothed sum; `off`.
        momentum: Of the owners; the optimizer's own is 0. With 0 here it may have one.
        memory: 1 adds squares up, as AdaGrad does; below 1 they are a moving average.
        level: Keep the step of each stripe as large as it would be without AdaGrad.
        warm: Number of first steps that are sent in full precision.
        bits: Whether anything is quantised; off leaves owners' rules alone, for the comparison.
        least: As of `onebit`.
    """

    adagrad: Literal["owner", "worker", "after", "off"] = "owner"
    momentum: Annotated[float, BELOW_1] = 0.9
    memory: Annotated[float, AT_MOST_1] = 1.0
    level: bool = True
    warm: Annotated[int, AT_LEAST_0] = 0
    bits: bool = True
    least: Annotated[int, AT_LEAST_1] = 32
    name = "onebit_sgd"
    biased = True
    feedback = True
    kernels = ("cpu", "cuda")
    gives_sums = False

    @property
    def keeps_momentum(self) -> bool:  # type: ignore[override]
        """Owners have it, unless it is 0."""
        return self.momentum > 0

    def fits(self, shape: Sequence[int]) -> bool:
        """Whether there is anything."""
        return math.prod(shape) > 0

    def bind(self, spec: TensorSpec) -> OwnerCoder:
        rule = OwnerRule(self.adagrad, self.momentum, self.memory, self.level, self.warm)
        quantiser = RowSigns(spec.shape) if OneBit(self.least).fits(spec.shape) else None
        return OwnerCoder(spec, rule, quantiser, self.bits)
