"""Changes the batch size of a run at the beginning of epochs, and reports what recipes did.

At the beginning of every so many epochs the run trains on a small part of the epoch's samples at growing batch sizes
(`hybridpar.run.batch_search`), puts everything back, and goes on with the size that was found.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from hybridpar.config import TrainConfig
from hybridpar.data import TrainBatches
from hybridpar.errors import UsageError
from hybridpar.observe import RunInfo
from hybridpar.optim.pace import Leg, Pace
from hybridpar.pipeline.step import StepInput
from hybridpar.run.batch_search import BatchChoice, bounds, search_batch_size
from hybridpar.run.snapshot import Snapshot
from hybridpar.train.delayed import DoubleBufferEngine
from hybridpar.train.trainer import Trainer

#: Part of an epoch's samples that a trial sees (45 minutes of 24 hours), and its fewest steps at the smallest size and
#: at the largest.
PART, LEAST_STEPS, LEAST_AT_LARGEST = 1 / 32, 8, 4


class BatchSelector:
    """Chooses the batch size of the coming epochs.

    Args:
        trainer: What trains.
        config: Options.
        make_batches: The batches of a batch size.
        samples: Training samples of an epoch.
    """

    def __init__(
        self, trainer: Trainer, config: TrainConfig, make_batches: Callable[[int], TrainBatches], samples: int
    ) -> None:
        engine = trainer.engine
        assert not engine.plan.is_staged
        self._trainer, self._engine, self._config = trainer, engine, config
        self._make_batches, self._samples = make_batches, samples
        self.pace = Pace(config.epochs)
        self._chosen: int | None = None
        self._first_factor: float | None = None
        self._begin(0, 0, config.batch_size)

    @property
    def batches(self) -> TrainBatches:
        """Those of the present batch size."""
        return self._batches

    def is_due(self, epoch: int, first_step: int) -> bool:
        """Whether to search before a step of an epoch. Never before the first: its weights say nothing yet.

        Args:
            epoch: Number of the epoch, from 0.
            first_step: Steps of the epoch that are done.
        """
        return epoch > 0 and first_step == 0 and epoch % self._config.select_batch == 0

    def choose(self, epoch: int) -> str:
        """Search, and go on with what was found; a collective, between steps.

        Args:
            epoch: Number of the epoch, from 0.

        Returns:
            What to tell the user.
        """
        start = self._config.batch_size
        factor = self.pace.factor(self._trainer.steps_done, self._config) / self.pace.samples
        self._first_factor = self._first_factor or factor
        multiple = min(64, max(1, start // 4))
        fell = factor / self._first_factor if factor > 0 else 1.0
        low, high = bounds(start, self._chosen, rate_fell=fell, multiple=multiple)
        seen = min(self._samples, max(round(PART * self._samples), LEAST_STEPS * low))
        high = min(high, seen // LEAST_AT_LARGEST)
        if seen < LEAST_STEPS * low or high <= low:
            return f"batch size {self.pace.batch_size}: {self._samples} samples are too few to try others"
        found = self._search(epoch, low, high, multiple, seen, factor)
        self._chosen = found.batch_size
        if found.batch_size != self.pace.batch_size:
            self._begin(self._trainer.steps_done, epoch, found.batch_size)
        tried = ", ".join(f"{trial.batch_size}: {trial.loss:.4f}" for trial in found.trials)
        return f"batch size {found.batch_size} from epoch {epoch + 1} on (loss at {tried})"

    def _search(self, epoch: int, low: int, high: int, multiple: int, seen: int, factor: float) -> BatchChoice:
        trainer, engine = self._trainer, self._engine
        device = trainer.world.device
        before = Snapshot.take(trainer.model, engine, trainer.steps_done, device)
        engine.on_trial = True

        def trial(batch_size: int) -> float:
            before.restore(trainer.model, engine, device)
            samples = batch_size / self._config.batch_size
            engine.set_batch_scale(samples)
            losses, counted = 0.0, 0
            for number, batch in enumerate(self._make_batches(batch_size).epoch(epoch)):
                if number >= math.ceil(seen / batch_size):
                    break
                outcome = engine.step(
                    StepInput(batch.micro_batches, batch.samples, batch.global_samples, factor * samples)
                )
                losses, counted = losses + outcome.loss * outcome.samples, counted + outcome.samples
            return losses / counted

        try:
            return search_batch_size(trial, low, high, multiple=multiple)
        finally:
            before.restore(trainer.model, engine, device)
            engine.set_batch_scale(self.pace.samples)
            engine.on_trial = False

    def _begin(self, step: int, epoch: int, batch_size: int) -> None:
        self._batches = self._make_batches(batch_size)
        self.pace.begin(Leg(step, epoch, batch_size, self._batches.steps_per_epoch))
        self._trainer.pace = self.pace
        self._engine.set_batch_scale(self.pace.samples)

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of it, as plain values."""
        return {"legs": self.pace.plain(), "chosen": self._chosen, "first_factor": self._first_factor}

    def restore(self, state: dict[str, Any] | None) -> None:
        """Go on from what `state` returned.

        Args:
            state: What `state` returned; None where the checkpoint has none.

        Raises:
            UsageError: The checkpoint is of a run without `--select-batch`, or with other first batches.
        """
        if state is None:
            raise UsageError(
                f"the checkpoint was made without --select-batch, this run has {self._config.select_batch}",
                "Steps of different batch sizes are counted from the start of the run.",
                "Resume without it, or start a new run.",
            )
        pace = Pace.of(self._config.epochs, state["legs"])
        leg = pace.legs[-1]
        self._batches = self._make_batches(leg.batch_size)
        self.pace.legs[:] = pace.legs
        self._chosen, self._first_factor = state["chosen"], state["first_factor"]
        self._engine.set_batch_scale(self.pace.samples)


def recipe_fields(
    config: TrainConfig, trainer: Trainer, info: RunInfo, selector: BatchSelector | None
) -> dict[str, Any]:
    """What the summary says of recipes.

    Args:
        config: As users gave it.
        trainer: What trained.
        info: The run.
        selector: What chose batch sizes.
    """
    return {
        "recipe": config.recipe,
        "sync": config.sync.strip(),
        "double_buffer": _buffering(trainer),
        "final_batch_size": info.batch_size if selector is None else selector.pace.batch_size,
    }


def buffering_news(trainer: Trainer) -> str | None:
    """What `--double-buffer auto` has just decided, and by which figures; None at all other times.

    Args:
        trainer: What trains.
    """
    engine = trainer.engine
    if not isinstance(engine, DoubleBufferEngine) or engine.told or engine.prediction is None:
        return None
    engine.told = True
    predicted = engine.prediction
    decided = (
        "gradients are applied a step late from now on" if engine.delayed else "gradients are applied as they come"
    )
    return f"{decided}: predicted {predicted.delay_ms:.1f} ms a step late, {predicted.overlapped_ms:.1f} ms else"


def _buffering(trainer: Trainer) -> str:
    """What was asked for of late gradients, and what `auto` made of it."""
    engine = trainer.engine
    form = engine.double_buffer
    if form != "auto":
        return form
    return "auto:delay" if isinstance(engine, DoubleBufferEngine) and engine.delayed else "auto:off"
