"""How many workers data parallelism is worth, by the equation of 1-bit SGD.

Data parallelism stops paying where computing, which K workers divide, takes as long as exchanging gradients, which they
do not (Seide et al., Interspeech 2014, equation 4). It knows neither overlap nor pipelines.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hybridpar.errors import UsageError


@dataclass(frozen=True)
class KHat:
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

    samples: float
    per_sample_ms: float
    exchange_ms: float
    ratio: float = 1.0
    post_ms: float = 0.0
    update_ms: float = 0.0

    def __post_init__(self) -> None:
        rules = (
            ("samples", 0 < self.samples < math.inf),
            ("per_sample_ms", 0 < self.per_sample_ms < math.inf),
            ("exchange_ms", 0 <= self.exchange_ms < math.inf),
            ("ratio", self.ratio > 0),
            ("post_ms", 0 <= self.post_ms < math.inf),
            ("update_ms", 0 <= self.update_ms < math.inf),
        )
        for name, holds in rules:
            if not holds:
                raise UsageError(f"{name} is {getattr(self, name)}", "Times and sizes are finite and at least 0.")

    @property
    def divided_ms(self) -> float:
        """What K workers divide."""
        return self.samples * self.per_sample_ms + self.post_ms

    @property
    def saturates(self) -> bool:
        """Whether the equation holds: the exchange takes longer than what it could always hide behind."""
        return self.exchange_ms / self.ratio > self.update_ms

    @property
    def unclamped(self) -> float:
        """The equation as it stands; infinite outside of its domain."""
        return self.divided_ms / (self.exchange_ms / self.ratio - self.update_ms) if self.saturates else math.inf

    @property
    def workers(self) -> float:
        """The number of workers at which computing takes as long as communicating, at least 1.

        Infinite where no number of workers saturates the link.
        """
        return max(1.0, self.unclamped)

    def speedup(self, workers: float) -> float:
        """Of K workers over one, where one exchanges nothing, and K do both at a time.

        Args:
            workers: K.
        """
        if workers == 1:
            return 1.0
        alone = self.divided_ms + self.update_ms
        return alone / max(self.divided_ms / workers + self.update_ms, self.exchange_ms / self.ratio)
