"""Why: what a value must reach to be sent is known by all kernels of 2-bit thresholds, and imports none of them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ThresholdRule:
    """How a threshold follows from the values; see `hybridpar.compress.codecs.twobit`.

    Attributes:
        mode: 0 for `fixed`; 1 for the lesser of scale * mean and cap * largest; 2 for scale * mean, with what is sent
            decoded as the mean of what is sent.
        fixed: A threshold.
        scale: Of the mean magnitude.
        cap: Of the largest magnitude.
    """

    mode: int
    fixed: float
    scale: float
    cap: float
