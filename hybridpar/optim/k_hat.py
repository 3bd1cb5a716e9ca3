"""How many workers data parallelism is worth, by the equation of 1-bit SGD.

Data parallelism stops paying where computing, which K workers divide, takes as long as exchanging gradients, which they
do not (Seide et al., Interspeech 2014, equation 4). It knows neither overlap nor pipelines.
"""

from __future__ import annotations

import math
from typing import Annotated

from hybridpar.spec import AT_LEAST_0, POSITIVE, Options, check_rules


class KHat(Options):
    """The equation's figures, in milliseconds.

    Per step and worker, computing takes (samples x per_sample + post) / K + update, and communicating exchange / ratio.

    Attributes:
        samples: Samples of a step; half of them where double buffering sends one half while it computes the other.
        per_sample_ms: Forward and backward pass of a sample.
        post_ms: Passes over the model that the workers divide (C x T_post).
        exchange_ms: Exchanging float32 gradients (T_float).
        ratio: By how much a codec makes them smaller (Z).
        update_ms: What every worker does with the result, undivided (T_upd).

    Raises:
        UsageError: A value is out of its range; the message says which.
    """

    samples: Annotated[float, POSITIVE]
    per_sample_ms: Annotated[float, POSITIVE]
    exchange_ms: Annotated[float, AT_LEAST_0]
    ratio: Annotated[float, POSITIVE] = 1.0
    post_ms: Annotated[float, AT_LEAST_0] = 0.0
    update_ms: Annotated[float, AT_LEAST_0] = 0.0

    def __post_init__(self) -> None:
        check_rules(self)

    @property
    def divided_ms(self) -> float:
        """What K workers divide."""
        return self.samples * self.per_sample_ms + self.post_ms

    @property
    def workers(self) -> float:
        """The number of workers at which computing takes as long as communicating; below 1: do not parallelise.

        Infinite where the exchange takes no longer than the update: no number of workers saturates such a link.
        """
        left = self.exchange_ms / self.ratio - self.update_ms
        return self.divided_ms / left if left > 0 else math.inf

    def speedup(self, workers: float) -> float:
        """Of K workers over one, where one exchanges nothing, and K do both at a time.

        Args:
            workers: K.
        """
        if workers == 1:
            return 1.0
        alone = self.divided_ms + self.update_ms
        return alone / max(self.divided_ms / workers + self.update_ms, self.exchange_ms / self.ratio)
