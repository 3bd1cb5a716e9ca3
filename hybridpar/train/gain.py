"""Predicts whether double buffering makes a training faster, before it is tried.

Double buffering hides the exchange behind computing, but pays the fixed cost of an update once more per half batch
(Seide et al., Interspeech 2014, section 3.2).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hybridpar.errors import UsageError

#: Part of computing that is the backward pass, behind which overlapped sync hides within a step.
BACKWARD_SHARE = 2 / 3

#: A form must be predicted to be faster by this factor before `auto` changes the result for it.
LEAST_GAIN = 1.05


@dataclass(frozen=True)
class PredictedGain:
    """Milliseconds of a step in each way to sync.

    Attributes:
        plain_ms: Computing, then the exchange.
        overlapped_ms: The exchange as far as possible behind the backward pass, bucket by bucket.
        delay_ms: The exchange behind the whole next step.
        half_ms: The exchange of each half batch behind the computing of the other.
    """

    plain_ms: float
    overlapped_ms: float
    delay_ms: float
    half_ms: float

    @property
    def gain(self) -> float:
        """How many times faster `delay` is than overlapped sync, which is what would run instead."""
        return self.overlapped_ms / self.delay_ms

    @property
    def pays(self) -> bool:
        """Whether `auto` chooses `delay`."""
        return self.gain >= LEAST_GAIN


def predicted_gain(
    compute_ms: float,
    sync_ms: float,
    *,
    fixed_ms: float = 0.0,
    exposed_ms: float | None = None,
    backward_share: float = BACKWARD_SHARE,
) -> PredictedGain:
    """What double buffering is to gain.

    Args:
        compute_ms: Forward and backward pass of a step.
        sync_ms: One exchange of all gradients; as long for half a batch as for a whole one.
        fixed_ms: What every update costs whatever the batch: adding it to the model (T_upd of the paper).
        exposed_ms: What overlapped sync was measured to leave to wait for; default: what the backward pass cannot hide.
        backward_share: Part of `compute_ms` that is the backward pass.

    Raises:
        UsageError: A time is negative or not finite, or nothing is computed.
    """
    times = {"compute_ms": compute_ms, "sync_ms": sync_ms, "fixed_ms": fixed_ms, "exposed_ms": exposed_ms or 0.0}
    for name, value in times.items():
        if not (math.isfinite(value) and value >= 0):
            raise UsageError(f"{name} is {value}", "It is a time, at least 0 and finite.")
    if compute_ms + fixed_ms == 0:
        raise UsageError("a step that takes no time", "There is nothing to hide an exchange behind.")
    exposed = max(0.0, sync_ms - backward_share * compute_ms) if exposed_ms is None else exposed_ms
    return PredictedGain(
        plain_ms=compute_ms + sync_ms + fixed_ms,
        overlapped_ms=compute_ms + exposed + fixed_ms,
        delay_ms=max(compute_ms, sync_ms) + fixed_ms,
        half_ms=2 * (max(compute_ms / 2, sync_ms) + fixed_ms),
    )


class ObservedStep(NamedTuple):
    """Times of a step whose gradients are not late.

    Attributes:
        compute_ms: All of it but what it waited for its sync.
        sync_ms: Time in which any lane exchanged.
        exposed_ms: What the step waited for it.
        stays_ms: Part of that which would not be hidden by being late either.
    """

    compute_ms: float
    sync_ms: float
    exposed_ms: float
    stays_ms: float

    @classmethod
    def median(cls, steps: Sequence[ObservedStep]) -> ObservedStep:
        """The median of each time."""
        return cls(*(statistics.median(column) for column in zip(*steps, strict=True)))


def gain_over(workers: Sequence[ObservedStep]) -> PredictedGain:
    """What double buffering is to gain over the steps that were observed.

    Args:
        workers: A step of each worker, at least one.

    Raises:
        UsageError: As of `predicted_gain`.
    """
    # All wait for the slowest, and a sync that waits for others is no longer than the shortest one seen.
    sync, exposed = (min(column) for column in list(zip(*workers, strict=True))[1:3])
    stays = min(exposed, min(one.stays_ms for one in workers))
    compute = max(one.compute_ms for one in workers)
    hidden = max(0.0, sync - stays)
    return predicted_gain(compute, hidden, fixed_ms=stays, exposed_ms=min(hidden, exposed - stays))
