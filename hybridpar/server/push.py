"""The messages between learners and shards: a pushed gradient, and the answer to it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Push:
    """What a learner says of a gradient.

    Attributes:
        learner: Who.
        sequence: Number of this push of the learner, from 1; a repeated push has the number of the first one.
        clock: Clock of the weights that the gradient was computed on.
        weight: What it counts in the sum of an update, before staleness; None for 1 / c, a mean over c gradients.
        rate: Learning rate, as a fraction of the peak rate.
        samples: Samples that it is of.
        loss: Their mean loss.
        sound: Whether it is finite, on all shards. One that is not counts as a push and changes nothing; where an
            update takes one of each learner, it does not happen.
        unused: Numbers of the stripe's pieces for which there was no gradient.
    """

    learner: int
    sequence: int
    clock: int
    weight: float | None = None
    rate: float = 1.0
    samples: int = 1
    loss: float = 0.0
    sound: bool = True
    unused: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Answer:
    """A learner may go on.

    Attributes:
        learner: Who.
        sequence: Of the push that is answered.
        clock: Clock of the weights that it gets.
        staleness: Of its gradient.
        applied: Whether its gradient counts, or will in the update that it waits for.
        repeated: Whether the push had come before; it was not counted again.
        drafted: Whether its weights are those of the draft.
    """

    learner: int
    sequence: int
    clock: int
    staleness: int
    applied: bool
    repeated: bool = False
    drafted: bool = False
