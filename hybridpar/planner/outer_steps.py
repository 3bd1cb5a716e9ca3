"""How many training steps an outer loop takes to the same accuracy, over those of training in synchrony: a table.

Only what was measured is planned with: an exchange every so many steps, by such a codec, with at least as many workers,
in a run at most as long as the one at hand. Rows are made from `benchmarks/outer/results/accuracy.csv` by
`python -m benchmarks.outer.accuracy --table`: ResNet-18 on digits, until 97 % of the test images are right, each
run over the synchronous one of the same fold and seed.
"""

from __future__ import annotations

from dataclasses import dataclass

#: Runs that a row rests on at least, to be planned with.
LEAST_RUNS = 5
#: What is expected at least, however good the runs were: less than few of them can tell, and a link on which an outer
#: loop gains no more than that is no reason for one.
LEAST_FACTOR = 1.05
#: A run counts as long as a row's from this part of its steps on: a run's length is known about, without short batches.
NEARLY = 0.9
#: Points of accuracy that a row may lose on average, to be planned with.
MOST_LOST = 1.0


@dataclass(frozen=True)
class OuterSteps:
    """What runs with one kind of outer loop showed.

    Attributes:
        every: H, steps from one exchange to the next; of the plain mean, not streamed.
        workers: How many there were.
        codec: What outer gradients were sent as.
        length: Steps of the run.
        runs: How many.
        lost: Points by which their accuracy at the end was below that of synchronous training, on average.
        mean: Steps to the target over those of synchronous training, on average; None where a run did not reach it.
        high: Upper end of the 95 % interval of that average.
    """

    every: int
    workers: int
    codec: str
    length: int
    runs: int
    lost: float
    mean: float | None
    high: float | None

    @property
    def holds(self) -> bool:
        """Whether a run may be planned with it."""
        return self.high is not None and self.runs >= LEAST_RUNS and self.lost <= MOST_LOST

    @property
    def factor(self) -> float:
        """Steps to the target over those of synchronous training, at the unfavourable end."""
        assert self.high is not None
        return max(LEAST_FACTOR, self.high)

    def told(self) -> str:
        """In words."""
        if self.mean is None or self.high is None:
            return f"did not reach the target in all of {self.runs} runs"
        side = "less" if self.lost > 0 else "more"
        return (
            f"{self.mean:.2f} (not above {self.high:.2f} with 95 % certainty) times the steps of synchronous training "
            f"to 97 %, and {abs(self.lost):.2f} points {side} at the end: {self.runs} runs of {self.length} steps, "
            f"{self.workers} workers"
        )


#: The table.
TABLE: tuple[OuterSteps, ...] = (
    OuterSteps(every=4, workers=2, codec="onebit", length=230, runs=1, lost=0.275, mean=1.047, high=1.047),
    OuterSteps(every=4, workers=4, codec="onebit", length=230, runs=1, lost=1.374, mean=0.898, high=0.898),
    OuterSteps(every=4, workers=8, codec="onebit", length=230, runs=1, lost=2.747, mean=None, high=None),
    OuterSteps(every=4, workers=16, codec="onebit", length=220, runs=1, lost=6.043, mean=None, high=None),
    OuterSteps(every=16, workers=2, codec="none", length=230, runs=5, lost=0.611, mean=1.041, high=1.216),
    OuterSteps(every=16, workers=2, codec="onebit", length=230, runs=15, lost=0.444, mean=1.089, high=1.16),
    OuterSteps(every=16, workers=4, codec="onebit", length=230, runs=10, lost=1.197, mean=None, high=None),
    OuterSteps(every=16, workers=8, codec="onebit", length=230, runs=1, lost=6.593, mean=None, high=None),
    OuterSteps(every=16, workers=16, codec="onebit", length=220, runs=1, lost=26.648, mean=None, high=None),
    OuterSteps(every=40, workers=2, codec="onebit", length=460, runs=5, lost=0.335, mean=1.202, high=1.463),
    OuterSteps(every=64, workers=2, codec="none", length=230, runs=1, lost=0.824, mean=1.552, high=1.552),
    OuterSteps(every=64, workers=2, codec="onebit", length=230, runs=1, lost=3.022, mean=2.007, high=2.007),
)


def expected_steps(every: int, workers: int, codec: str, length: int | None) -> OuterSteps | None:
    """What is expected of an outer loop; None where nothing was measured that says so, or it breaks."""
    if length is None:
        return None
    like = [one for one in TABLE if (one.every, one.codec) == (every, codec)]
    like = [one for one in like if one.workers >= workers and NEARLY * one.length <= length]
    if not like:
        return None
    found = min(like, key=lambda one: (one.workers, -one.length))
    return found if found.holds else None


def planned_intervals(codec: str) -> list[int]:
    """Steps from one exchange to the next of which the table knows, with a codec."""
    return sorted({one.every for one in TABLE if one.codec == codec})
