"""When the parts of a model are exchanged in the outer loop: rounds of H steps, and the steps of each round.

In a round every fragment of the parameters is sent once, each in its turn, and its result arrives `delay`
steps later. Rounds may grow as the learning rate falls, by the quadratic synchronisation rule (Gu et al., "A Quadratic
Synchronization Rule for Distributed Deep Learning", ICLR 2024):

    H(t) = max(H, floor((ratio * peak rate / rate(t))^2))

The last round of a run ends at its last step, with an exchange of all fragments.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple


class Transfer(NamedTuple):
    """An exchange of a fragment.

    Attributes:
        sent: Step after which the fragment leaves.
        arrives: Step after which its result is used.
        fragment: Its number.
    """

    sent: int
    arrives: int
    fragment: int


@dataclass(frozen=True)
class OuterRound:
    """Steps `start` + 1 to `stop`, in which each fragment is exchanged once.

    Attributes:
        start: Step after which it begins.
        stop: Its last step.
        is_last: It is the last round of the run.
    """

    start: int
    stop: int
    is_last: bool = False

    def transfers(self, fragments: int, delay: int) -> list[Transfer]:
        """What is exchanged, in order; at most a single fragment is on its way at a time."""
        length = self.stop - self.start
        ends = [self.start + (index + 1) * length // fragments for index in range(fragments)]
        slots = [Transfer(end - delay, end, index) for index, end in enumerate(ends)]
        if not self.is_last:
            return slots
        early = slots[:-1] if length // fragments > delay else []
        return early + [Transfer(self.stop, self.stop, index) for index in range(fragments)]


@dataclass(frozen=True)
class Timetable:
    """The rounds of a run.

    Attributes:
        every: H, steps of a round; of the shortest with `ratio`.
        first: Step after which the first round begins.
        total: Steps of the run; None where that is not known, and no round is the last.
        ratio: Of the quadratic rule; None keeps H.
        warmup: First steps of the run, in which the learning rate rises and H stays.
    """

    every: int
    first: int = 0
    total: int | None = None
    ratio: float | None = None
    warmup: int = 0

    def next_round(self, start: int, rate_factor: float) -> OuterRound:
        """The round that begins after a step.

        Args:
            start: The step.
            rate_factor: Learning rate of the step that follows, as a part of its peak.
        """
        length = self.every
        left = None if self.total is None or start >= self.total else self.total - start
        if self.ratio is not None and start >= self.warmup:
            root = self.ratio / rate_factor if rate_factor > 0 else math.inf
            length = max(length, math.floor(root * root) if root < 2**15 else 2**30)
        return OuterRound(
            start, start + (length if left is None else min(length, left)), left is not None and length >= left
        )

    def round_at(self, step: int) -> OuterRound:
        """The round of fixed length that a step is in, where nothing else is known.

        Args:
            step: Steps done, at least `first`.
        """
        start = step - (step - self.first) % self.every
        return self.next_round(start, math.inf)
