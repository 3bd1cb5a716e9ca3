"""Converts learning rate and momentum between per step and per sample.

1-bit SGD's authors give both per sample, so that a search for the batch size changes nothing else (as CNTK's
`learningRatesPerSample` and momentum time constants). For SGD with momentum mu on means over N samples:

    rate per sample = lr / N        time constant = -N / ln(mu), in samples
"""

from __future__ import annotations

import math


def rate_per_sample(lr: float, samples: int) -> float:
    """The learning rate of one sample's gradient.

    Args:
        lr: Learning rate of the mean over a step's samples.
        samples: Samples of a step.
    """
    return lr / samples


def rate_per_step(per_sample: float, samples: int) -> float:
    """The learning rate of the mean over a step's samples; the inverse of `rate_per_sample`."""
    return per_sample * samples


def time_constant(momentum: float, samples: int) -> float:
    """Samples after which momentum remembers 1/e of a gradient; 0 without momentum.

    Args:
        momentum: mu of a step.
        samples: Samples of a step.
    """
    return -samples / math.log(momentum) if momentum else 0.0


def momentum_per_step(constant: float, samples: float) -> float:
    """The mu of a step of so many samples; the inverse of `time_constant`."""
    return math.exp(-samples / constant) if constant else 0.0
