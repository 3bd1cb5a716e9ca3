"""Searches for the largest batch size that learns as well as the smallest.

The search of 1-bit SGD (Seide et al., Interspeech 2014, section 3.4), with the procedure of CNTK: train on the same
small part of the data at growing sizes, each time from the same weights; the first size sets the mean loss, and the
last size whose loss is at most a margin above it is the one to go on with. Afterwards everything is as it was before.

At the beginning of every so many epochs a run trains on a small part of the epoch's samples at growing sizes, puts
everything back, and goes on with the size that was found. What is decided follows from losses that all workers added up
by the same collective, so all decide alike.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any, ClassVar

from hybridpar.optim.schedule import Leg, Pace
from hybridpar.pipeline.step import StepRequest
from hybridpar.run.part import Part, Run

#: From one size to the next.
FACTOR = math.sqrt(2)

#: No batch is larger than this.
LARGEST = 1 << 20

#: Part of an epoch's samples that a trial sees (45 minutes of 24 hours), and its fewest steps at the smallest size and
#: at the largest.
PART, LEAST_STEPS, LEAST_AT_LARGEST = 1 / 32, 8, 4


def search_batch_size(
    trial: Callable[[int], float], smallest: int, largest: int, *, margin: float = 0.01, multiple: int = 64
) -> tuple[int, dict[int, float]]:
    """The largest batch size that learns as well as the smallest, and the losses of those that were tried."""
    losses: dict[int, float] = {}
    size, chosen = smallest, smallest
    while size <= largest:
        loss = losses[size] = trial(size)
        # A loss that is not finite fails, though every comparison with NaN is false; CNTK takes it for a success.
        if not math.isfinite(loss) or loss > losses[smallest] + margin * abs(losses[smallest]):
            break
        chosen = size
        size = max(_rounded(size * FACTOR, multiple), size + multiple)
    return chosen, losses


def _rounded(size: float, multiple: int) -> int:
    """The nearest multiple, at least one."""
    return max(1, round(size / multiple)) * multiple


class BatchSelector(Part):
    """Chooses the batch size of the coming epochs."""

    key: ClassVar[str] = "batch_sizes"

    def __init__(self, run: Run) -> None:
        self._trainer, self._engine, self._samples = run.trainer, run.trainer.engine, run.samples
        self._config, self._start = run.config, run.config.samples_per_step
        self.pace = self._trainer.pace = Pace(run.config.epochs, [Leg(0, 0, self._start, run.samples.per_epoch)])

    def begin_epoch(self, run: Run, epoch: int) -> None:
        """Search before the first step of an epoch. Never before the first epoch: its weights say nothing yet."""
        if epoch == 0 or run.state.epoch_step > 0 or epoch % self._config.select_batch != 0:
            return
        with run.clock.away(), run.progress.pause("trying batch sizes"):
            run.progress.message(self.choose(epoch))
        run.total = run.progress.steps_total = self.pace.total_steps()

    def choose(self, epoch: int) -> str:
        """Search, and go on with what was found; a collective."""
        now, samples = self.pace.batch_size, len(self._samples.images.train)
        multiple = min(64, max(1, self._start // 4))
        low = _rounded(max(self._start, now / 2), multiple)
        seen = min(samples, max(round(PART * samples), LEAST_STEPS * low))
        high = min(2 * now if len(self.pace.legs) > 1 else LARGEST, seen // LEAST_AT_LARGEST)
        if seen < LEAST_STEPS * low or high <= low:
            return f"batch size {now}: {samples} samples are too few to try others"
        factor = self.pace.factor(self._trainer.steps_done, self._config) / self.pace.samples
        with self._trainer.on_trial() as undo:

            def trial(batch_size: int) -> float:
                undo()
                return self._loss_at(batch_size, epoch, seen, factor)

            chosen, losses = search_batch_size(trial, low, high, multiple=multiple)
        if chosen != now:
            per_epoch = self._samples.make(chosen).steps_per_epoch
            self.pace.begin(Leg(self._trainer.steps_done, epoch, chosen, per_epoch))
        self._go_on()
        tried = ", ".join(f"{size}: {loss:.4f}" for size, loss in losses.items())
        return f"batch size {chosen} from epoch {epoch + 1} on (loss at {tried})"

    def _loss_at(self, batch_size: int, epoch: int, seen: int, factor: float) -> float:
        """The mean loss over a small part of the data, trained at a batch size."""
        scale, losses, counted = batch_size / self._start, 0.0, 0
        self._engine.set_batch_scale(scale)
        batches = self._samples.make(batch_size).epoch(epoch)
        for batch in itertools.islice(batches, math.ceil(seen / batch_size)):
            request = StepRequest(batch.micro_batches, batch.samples, batch.global_samples, factor * scale)
            outcome = self._engine.step(request)
            losses, counted = losses + outcome.loss * outcome.samples, counted + outcome.samples
        return losses / counted

    def _go_on(self) -> None:
        """Train at the batch size of the last leg."""
        self._samples.batches = self._samples.make(self.pace.batch_size)
        self._engine.set_batch_scale(self.pace.samples)

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of it, as plain values."""
        return {"legs": self.pace.plain()}

    def restore(self, run: Run, state: dict[str, Any] | None) -> None:
        """Go on from what `state` returned; without it the batch has been the first one until now."""
        if state is not None:
            self.pace.legs[:] = Pace.of(self._config.epochs, state["legs"]).legs
            self._go_on()
            run.total = self.pace.total_steps()

    def summary(self, run: Run) -> dict[str, Any]:
        """The last batch size."""
        return {"final_batch_size": self.pace.batch_size}
