"""Training whose gradients are applied late, so that their exchange overlaps with a whole step.

Double buffering (Seide et al., Interspeech 2014, section 3.2), on the sync lanes that every run has:

- `delay`: a step applies the gradient of the step before (`hybridpar.sync.delayed_reducer`);
- `half`: as the paper has it: each batch is cut in two, and the gradient of one half is summed while the other is
  computed. These are late updates, too, of half as many samples: two of them make a step, each with its part of the
  batch's learning rate, mu^(1/2) of momentum and half of the weight decay, so that a step means what it meant before;
- `auto`: the first steps are plain; from their times all workers decide whether `delay` is predicted to gain.

In a pipeline the replicas of every stage do so. One replica alone has nothing to overlap, and takes plain steps.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from hybridpar.errors import UsageError
from hybridpar.optim.adagrad_sgd import AdaGradSGD
from hybridpar.pipeline.step import COMMIT, SQUARES, LateOutcome, StepInput, StepOutcome, StepSpans
from hybridpar.sync.delayed_reducer import DelayedReducer
from hybridpar.sync.figures import SyncFigures, add_up
from hybridpar.train.engine import Engine, EngineParts
from hybridpar.train.gain import ObservedStep, PredictedGain, gain_over

#: Steps by which `auto` decides, after as many that are left out.
WATCHED, LEFT_OUT = 8, 3


class JoinedOutcome(StepOutcome):
    """Two half steps as one.

    Args:
        halves: Their outcomes; each loss is its part of the mean over the batch.
    """

    def __init__(self, halves: Sequence[LateOutcome]) -> None:
        self._halves = tuple(halves)

    @property
    def exposed_sync_ms(self) -> float:  # type: ignore[override]
        """Time in which this worker only waited for the sync of gradients, in both halves."""
        return sum(half.exposed_sync_ms for half in self._halves)

    @property
    def bytes_sent(self) -> int:  # type: ignore[override]
        """Bytes this worker sent, in both halves."""
        return sum(half.bytes_sent for half in self._halves)

    @property
    def spans(self) -> StepSpans:
        """When everything on this worker really ran, in one half after the other."""
        origin, spans = self._halves[0].spans.origin, []
        for half in self._halves:
            spans += [one.shifted(1e3 * (half.spans.origin - origin)) for one in half.spans.spans]
        return StepSpans(origin, tuple(sorted(spans, key=lambda span: (span.start_ms, span.end_ms))))

    @property
    def bad_parameter(self) -> str | None:
        """A parameter of this worker's stages whose gradient was not finite."""
        return next((name for half in self._halves if (name := half.bad_parameter) is not None), None)

    @property
    def sync(self) -> SyncFigures:
        """What the sync of this worker's gradients took, in both halves."""
        return add_up([costs for half in self._halves for costs in half.costs])

    def _value(self, index: int) -> float:
        values = [half._value(index) for half in self._halves]
        if index == COMMIT:  # a step of which a half was rolled back was not done
            return min(values)
        if index == SQUARES and min(values) < 0:  # not known
            return -1.0
        return max(values) if index in (2, 3) else sum(values)


class DoubleBufferEngine(Engine):
    """Trains a model as `Engine` does, and applies gradients late.

    Args:
        parts: As of `Engine`. For `half` the optimizer must be SGD; `double_buffer` of the options says how.

    Raises:
        UsageError: Halves of a batch with another optimizer than SGD.
    """

    def __init__(self, parts: EngineParts) -> None:
        config, overlaps = parts.config, parts.plan.placement.replicas > 1
        self._halves = config.double_buffer == "half" and overlaps
        super().__init__(parts)
        if self._halves:
            # Two steps of half a batch each are to mean what one step means.
            self._decay_factor = 0.5
            self.set_batch_scale(1.0)
        self._watching = config.double_buffer == "auto" and overlaps
        self._watched: list[ObservedStep] = []
        #: What `auto` predicted, once it has, and whether the user knows.
        self.prediction: PredictedGain | None = None
        self.told = False
        self._staleness = 0.0

    @property
    def staleness(self) -> float | None:
        """Updates made since the weights that the last step's gradients were computed on; in halves, their mean."""
        return self._staleness

    @property
    def delayed(self) -> bool:
        """Whether gradients are applied late."""
        return any(stage.options.delayed for stage in self.pipeline.stages.values()) and self.pipeline.replicas > 1

    def _make_optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        optimizer = super()._make_optimizer(module)
        if self._halves:
            _check_halves(optimizer)
        return optimizer

    def step(self, given: StepInput) -> StepOutcome:
        """Train on this worker's share of one global batch, by late gradients.

        Args:
            given: The share, and what the step is to do with it.

        Returns:
            What the workers agreed on.

        Raises:
            UsageError: This worker's batch cannot be cut in halves, or another worker refuses the step.
            SyncError: A worker died or did not answer in time.
        """
        if self._halves and len(given.micro_batches) == 1:
            self.refuse()
            raise UsageError(
                "a batch that cannot be cut in two halves",
                "With double_buffer='half' a worker's batch has two micro-batches at least.",
                "Hand over tensors, or twice as many micro-batches.",
            )
        if self.delayed and given.global_samples is None:
            # The exchange begins with the step, so whether somebody refuses the step is to be known before.
            given = replace(given, global_samples=self.pipeline.executor.count_samples(given.samples)())
        if self._halves:
            return self._step_in_halves(given)
        self._staleness = self._age
        started = time.perf_counter()
        outcome = super().step(given)
        if self._watching and not self.on_trial:
            self.pipeline.wait()
            self._watch((time.perf_counter() - started) * 1e3, outcome)
        return outcome

    def _step_in_halves(self, given: StepInput) -> JoinedOutcome:
        micro_batches = given.micro_batches
        middle = (len(micro_batches) + 1) // 2
        outcomes, ages = [], []
        for half in (micro_batches[:middle], micro_batches[middle:]):
            ages.append(self._age)
            own = sum(int(targets.shape[0]) for _, targets in half)
            outcome = super().step(replace(given, micro_batches=half, samples=own))
            assert isinstance(outcome, LateOutcome)
            outcomes.append(outcome)
        self._staleness = statistics.mean(ages)
        return JoinedOutcome(outcomes)

    def go_on_from(self, step: int) -> None:
        """Number of the last step; each half of a batch is a step of the pipeline."""
        super().go_on_from(2 * step if self._halves else step)

    def set_batch_scale(self, samples: float) -> None:
        """Say how many samples the coming steps have; half a batch is a step of its own."""
        super().set_batch_scale(0.5 * samples if self._halves else samples)

    @property
    def _age(self) -> float:
        reducers = [stage.reducer for stage in self.pipeline.stages.values()]
        return float(max((one.staleness for one in reducers if isinstance(one, DelayedReducer)), default=0))

    def _watch(self, host_ms: float, outcome: StepOutcome) -> None:
        """Take a step of the beginning into account; after the last of them all workers decide, and alike."""
        self._watched.append(observed_step(host_ms, outcome, self._world.device))
        if len(self._watched) < LEFT_OUT + WATCHED:
            return
        answers: list[Any] = self._world.gather(tuple(ObservedStep.median(self._watched[LEFT_OUT:])))
        workers, replicas = [ObservedStep(*one) for one in answers], self.pipeline.replicas
        # The replicas of a position wait for each other, and a step for the position that exchanges longest.
        positions = [workers[start : start + replicas] for start in range(0, len(workers), replicas)]
        self.prediction = max(map(gain_over, positions), key=lambda one: one.gain)
        self._watching = False
        self._set_delayed(self.prediction.pays)

    def _set_delayed(self, delayed: bool) -> None:
        self.pipeline.wait()
        for stage in self.pipeline.stages.values():
            stage.set_delayed(delayed)
        for codec in self.codecs:  # which may be new
            codec.set_batch_scale(self._momentum_power)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs beyond model and optimizers, and what `auto` decided."""
        return {**super().state_dict(), "double_buffer": {"delayed": self.delayed, "watching": self._watching}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned; `auto` keeps what was decided, or decides again where nothing was."""
        if self._config.double_buffer == "auto":
            saved = state.get("double_buffer", {"delayed": False, "watching": True})
            watching = self.pipeline.replicas > 1 and bool(saved["watching"])
            if watching and not self._watching:
                self._watched, self.prediction, self.told = [], None, False
            self._watching = watching
            self._set_delayed(bool(saved["delayed"]))
        super().load_state_dict(state)


def observed_step(host_ms: float, outcome: StepOutcome, device: torch.device) -> ObservedStep:
    """What a step whose gradients are not late says about how long a late one would take.

    On a CPU the part of the sync in which codecs compute needs the very core that the model does: nothing hides it.

    Args:
        host_ms: Duration of the step.
        outcome: What it left.
        device: Where the worker computes.
    """
    exposed, figures = outcome.exposed_sync_ms, outcome.sync
    own = (figures.encode_ms or 0.0) + (figures.decode_ms or 0.0)
    whole = own + (figures.wire_ms or 0.0)
    stays = exposed * own / whole if whole and device.type == "cpu" else 0.0
    sync = exposed if figures.sync_ms is None else figures.sync_ms
    return ObservedStep(compute_ms=host_ms - exposed, sync_ms=sync, exposed_ms=exposed, stays_ms=stays)


def _check_halves(optimizer: torch.optim.Optimizer) -> None:
    """Refuse optimizers of which two steps on halves of a batch are not as one step on all of it."""
    if not isinstance(optimizer, (torch.optim.SGD, AdaGradSGD)):
        raise UsageError(
            f"double_buffer='half' with {type(optimizer).__name__}",
            "Half a batch is half a step for SGD alone: other optimizers' steps do not grow with gradients.",
            "Use torch.optim.SGD, or double_buffer='delay'.",
        )
