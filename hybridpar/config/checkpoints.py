"""When a run saves, what it keeps, and when it ends early: what `--checkpoints` stands for."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import Annotated, Literal

from hybridpar.errors import check
from hybridpar.spec import AT_LEAST_1, UNNAMED, read_fields

#: A figure of an epoch that can be followed.
Metric = Literal["test_accuracy", "test_loss", "train_loss", "ema_test_accuracy", "ema_test_loss"]


@dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """`epoch/60s,keep=2,best=3,by=test_loss,stop=5`: when a run saves, and what stays.

    Attributes:
        every: `epoch`, a number of steps as `200`, seconds as `60s`, or several of these; or `never`.
        keep: How many of the last checkpoints stay.
        best: Of how many of the best epochs the checkpoints stay.
        by: The figure that says which epochs are the best: accuracies the larger, losses the smaller.
        stop: End the run after so many tested epochs without a better one; None: never.
    """

    every: Annotated[tuple[str, ...], UNNAMED] = ("epoch", "60s")
    keep: Annotated[int, AT_LEAST_1] = 2
    best: Annotated[int, AT_LEAST_1] = 1
    by: Metric = "test_accuracy"
    stop: Annotated[int | None, AT_LEAST_1] = None

    def __post_init__(self) -> None:
        units = [part.lstrip("0123456789") for part in self.every]
        is_known = all(re.fullmatch("epoch|[1-9][0-9]*s?", part) for part in self.every) and len(units) == len({*units})
        check(
            is_known or self.never,
            f"--checkpoints {'/'.join(self.every)}",
            "It must be epoch, a number of steps as 200, seconds as 60s, one of each separated by /, or never.",
            "Write for instance --checkpoints epoch/60s.",
        )

    @property
    def never(self) -> bool:
        """Whether nothing is saved but at the end of a run that is interrupted."""
        return self.every == ("never",)

    @property
    def steps(self) -> int | None:
        """Steps from one checkpoint to the next."""
        return next((int(part) for part in self.every if part.isdigit()), None)

    @property
    def seconds(self) -> float | None:
        """Seconds from one checkpoint to the next."""
        return next((float(part[:-1]) for part in self.every if part[:-1].isdigit() and part[-1] == "s"), None)


@functools.cache
def read_checkpoints(text: str) -> Checkpoints:
    """What a value of `--checkpoints` stands for."""
    return read_fields(f"--checkpoints {text}", text, Checkpoints)
