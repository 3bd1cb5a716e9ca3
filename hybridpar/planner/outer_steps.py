"""How many training steps an outer loop takes to the same accuracy, over those of training in synchrony: a table.

Only what was measured is planned with: an exchange every so many steps, by such a codec, with at least as many workers,
in a run at most as long as the one at hand. Rows are made from `benchmarks/outer/results/accuracy.csv` by
`python -m benchmarks.outer.accuracy --table`: ResNet-18 on digits, until 97 % of the test images are right, each
run over the synchronous one of the same fold and seed. Only what reached that in all of several runs has a row.
"""

from __future__ import annotations

from dataclasses import dataclass

#: What is expected at least, however good the runs were: less than few of them can tell, and a link on which an outer
#: loop gains no more than that is no reason for one.
LEAST_FACTOR = 1.05
#: A run counts as long as a row's from this part of its steps on: a run's length is known about, without short batches.
NEARLY = 0.9


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
        mean: Steps to the target over those of synchronous training, on average.
        high: Upper end of the 95 % interval of that average.
    """

    every: int
    workers: int
    codec: str
    length: int
    runs: int
    lost: float
    mean: float
    high: float

    @property
    def factor(self) -> float:
        """Steps to the target over those of synchronous training, at the unfavourable end."""
        return max(LEAST_FACTOR, self.high)

    def __str__(self) -> str:
        side = "less" if self.lost > 0 else "more"
        return (
            f"{self.mean:.2f} (not above {self.high:.2f} with 95 % certainty) times the steps of synchronous training "
            f"to 97 %, and {abs(self.lost):.2f} points {side} at the end: {self.runs} runs of {self.length} steps, "
            f"{self.workers} workers"
        )


#: The table.
TABLE: tuple[OuterSteps, ...] = (
    OuterSteps(every=16, workers=2, codec="none", length=230, runs=5, lost=0.611, mean=1.041, high=1.216),
    OuterSteps(every=16, workers=2, codec="onebit", length=230, runs=15, lost=0.444, mean=1.089, high=1.16),
    OuterSteps(every=40, workers=2, codec="onebit", length=460, runs=5, lost=0.335, mean=1.202, high=1.463),
)

#: The codecs of these rows, besides gradients as they are.
OUTER_CODECS = ("onebit",)


def expected_steps(workers: int, length: int | None) -> list[OuterSteps]:
    """What is expected of each outer loop that was measured for so many workers and a run of such a length.

    Of several rows the one of the fewest workers counts, and of the longest run.
    """
    rows: dict[tuple[str, int], OuterSteps] = {}
    for row in sorted(TABLE, key=lambda row: (row.workers, -row.length)):
        if row.workers >= workers and length is not None and NEARLY * row.length <= length:
            rows.setdefault((row.codec, row.every), row)
    return [rows[key] for key in sorted(rows)]
