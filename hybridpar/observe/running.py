"""Running means and the remaining time of a run, for displays.

A single step is too noisy to read, so loss and speed are exponential means over about the last twenty steps. The time
left comes from wall time between steps, so evaluation and checkpoints, which come again, count; the first steps, which
allocate and compile, and pauses do not.
"""

from __future__ import annotations

import math

from hybridpar.observe.records import EpochRecord, StepRecord

#: Steps at the start of a process that say nothing about its speed: caches fill, kernels are chosen and compiled.
WARM_UP_STEPS = 3

_DECAY = 0.95


class _SmoothedMean:
    """Exponential mean, corrected for its start as in Adam (Kingma and Ba 2015, section 3)."""

    def __init__(self) -> None:
        self._sum = 0.0
        self._weight = 0.0

    def add(self, value: float) -> None:
        if math.isfinite(value):
            self._sum = _DECAY * self._sum + (1 - _DECAY) * value
            self._weight = _DECAY * self._weight + (1 - _DECAY)

    @property
    def value(self) -> float:
        return self._sum / self._weight if self._weight else math.nan


class RunningFigures:
    """Figures of a run at its latest step."""

    def __init__(self, steps_total: int, done: int = 0) -> None:
        self.steps_total = steps_total
        self.step = done
        self.epoch = 0
        self.lr = math.nan
        self.bytes_sent = 0
        self.skipped = 0
        self.test_accuracy: float | None = None
        self._loss = _SmoothedMean()
        self._samples = _SmoothedMean()
        self._step_ms = _SmoothedMean()
        self._seen = 0
        self._anchor: tuple[int, float] | None = None
        self._latest = self._left_out = 0.0

    def add_step(self, record: StepRecord, now: float) -> None:
        """Take in a step that ended at `now`, in seconds of any clock."""
        self.step = record.step
        self.epoch = record.epoch
        self.lr = record.lr
        self.bytes_sent += record.bytes_sent
        self.skipped += record.skipped
        self._loss.add(record.loss)
        self._samples.add(record.samples)
        self._step_ms.add(record.step_ms)
        self._seen += 1
        self._latest = now - self._left_out
        if self._seen == WARM_UP_STEPS:
            self._anchor = (record.step, self._latest)

    def leave_out(self, seconds: float) -> None:
        """Do not count a pause between steps."""
        self._left_out += seconds

    def add_epoch(self, record: EpochRecord) -> None:
        """Take in the end of an epoch."""
        if record.test_accuracy is not None:
            self.test_accuracy = record.test_accuracy

    @property
    def started(self) -> bool:
        """Whether any step was seen."""
        return self._seen > 0

    @property
    def loss(self) -> float:
        """Smoothed training loss; NaN before the first finite one."""
        return self._loss.value

    @property
    def images_per_second(self) -> float:
        """Smoothed samples of all workers per second; NaN before the first step."""
        milliseconds = self._step_ms.value
        return 1000 * self._samples.value / milliseconds if milliseconds > 0 else math.nan

    @property
    def fraction(self) -> float:
        """Part of the run that is done, 0 to 1."""
        return min(self.step / self.steps_total, 1.0) if self.steps_total else 1.0

    @property
    def seconds_left(self) -> float | None:
        """Estimated seconds to the last step; None while only warm-up steps were seen."""
        if self._anchor is None or self.step <= self._anchor[0]:
            return None
        step, start = self._anchor
        return (self._latest - start) / (self.step - step) * max(self.steps_total - self.step, 0)
