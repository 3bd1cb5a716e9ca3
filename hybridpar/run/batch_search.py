"""Searches for the largest batch size that learns as well as the smallest.

The search of 1-bit SGD (Seide et al., Interspeech 2014, section 3.4), with the procedure of CNTK: train on the same
small part of the data at growing sizes, each time from the same weights; the first size sets the mean loss, and the
last size whose loss is at most a margin above it is the one to go on with. Afterwards everything is as it was before.

What is decided follows from losses that all workers added up by the same collective, so all decide alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from hybridpar.errors import UsageError

#: From one size to the next.
FACTOR = math.sqrt(2)

#: No batch is larger than this.
LARGEST = 1 << 20


@dataclass(frozen=True)
class Trial:
    """One size that was tried.

    Attributes:
        batch_size: Samples of a step.
        loss: Mean loss over the trial's samples; not finite where it went wrong.
        good: Whether it learned as well as the first.
    """

    batch_size: int
    loss: float
    good: bool


@dataclass(frozen=True)
class BatchChoice:
    """What a search found.

    Attributes:
        batch_size: The size to go on with.
        trials: In the order in which they were made.
    """

    batch_size: int
    trials: tuple[Trial, ...]


def bounds(
    start: int, chosen: int | None = None, *, rate_fell: float = 1.0, multiple: int = 64, largest: int = LARGEST
) -> tuple[int, int]:
    """Between which sizes to search.

    A search begins at the run's first batch size, raised where the learning rate has fallen, and goes to no less than
    half and no more than twice of what was chosen before.

    Args:
        start: The first batch size of the run, m0.
        chosen: What the search before this chose; None where there was none.
        rate_fell: Learning rate now over that of the first search; below 1 the smallest size is m0 / sqrt of it.
        multiple: Sizes are multiples of it.
        largest: No size is above it.

    Raises:
        UsageError: A size is not positive, or the rate is not.
    """
    if start < 1 or multiple < 1 or (chosen is not None and chosen < 1):
        raise UsageError(f"batch sizes {start}, {chosen} in multiples of {multiple}", "They are at least 1.")
    if not rate_fell > 0:
        raise UsageError(f"a learning rate that fell to {rate_fell} of what it was", "It is greater than 0.")
    low, high = start / math.sqrt(min(1.0, rate_fell)), float(largest)
    if chosen is not None:
        low, high = max(low, chosen / 2), min(high, 2.0 * chosen)
    lowest = min(_rounded(low, multiple), largest)
    return lowest, max(lowest, int(high))


def search_batch_size(
    trial: Callable[[int], float], smallest: int, largest: int, *, margin: float = 0.01, multiple: int = 64
) -> BatchChoice:
    """The largest batch size that learns as well as the smallest.

    Args:
        trial: Trains on the trial's samples at a size, from weights that are always the same, and returns their mean
            loss; it leaves no trace.
        smallest: The first size, as `bounds` gives it.
        largest: No size is above it.
        margin: How much higher than the first loss a loss may be, as a part of it.
        multiple: Sizes are multiples of it.

    Returns:
        The size, and what was tried. Where already the first loss is not finite, it is the smallest.
    """
    trials: list[Trial] = []
    size, chosen = smallest, smallest
    while size <= largest:
        loss = trial(size)
        # A loss that is not finite fails, though every comparison with NaN is false; CNTK takes it for a success.
        limit = trials[0].loss + margin * abs(trials[0].loss) if trials else math.inf
        good = math.isfinite(loss) and loss <= limit
        trials.append(Trial(size, loss, good))
        if not good:
            break
        chosen = size
        size = max(_rounded(size * FACTOR, multiple), size + multiple)
    return BatchChoice(chosen, tuple(trials))


def _rounded(size: float, multiple: int) -> int:
    """The nearest multiple, at least one."""
    return max(1, round(size / multiple)) * multiple
