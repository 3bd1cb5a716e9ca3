"""Training whose gradients are applied late, so that their exchange overlaps with a whole step.

Double buffering (Seide et al., Interspeech 2014, section 3.2), on the sync lanes that every run has:

- `delay`: a step applies the gradient of the step before (`hybridpar.sync.delayed_reducer`);
- `half`: as the paper has it: each batch is cut in two, and the gradient of one half is summed while the other is
  computed. These are late updates, too, of half as many samples: two of them make a step, each with its part of the
  batch's learning rate, mu^(1/2) of momentum and half of the weight decay, so that a step means what it meant before.

In a pipeline the replicas of every stage do so. One replica alone has nothing to overlap, and takes plain steps.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from hybridpar.errors import UsageError
from hybridpar.pipeline.step import LateOutcome, StepOutcome, StepRequest, StepSpans, StepValues
from hybridpar.sync.delayed_reducer import DelayedReducer
from hybridpar.sync.figures import SyncFigures, add_up
from hybridpar.train.engine import Engine, EngineParts


class JoinedOutcome(StepOutcome):
    """Two half steps as one."""

    def __init__(self, halves: Sequence[StepOutcome]) -> None:
        self._halves = halves
        self.staleness = statistics.mean(half.staleness or 0.0 for half in halves)

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
        origin = self._halves[0].spans.origin
        spans = [span.shifted(1e3 * (half.spans.origin - origin)) for half in self._halves for span in half.spans.spans]
        return StepSpans(origin, tuple(sorted(spans, key=lambda span: (span.start_ms, span.end_ms))))

    @property
    def bad_parameter(self) -> str | None:
        """A parameter of this worker's stages whose gradient was not finite."""
        return next(filter(None, (half.bad_parameter for half in self._halves)), None)

    @property
    def sync(self) -> SyncFigures:
        """What the sync of this worker's gradients took, in both halves."""
        return add_up([costs for half in self._halves if isinstance(half, LateOutcome) for costs in half.costs])

    @property
    def values(self) -> StepValues:
        """Sums over both halves; a step of which a half was rolled back was not done."""
        halves = [half.values for half in self._halves]
        sums = StepValues(*map(sum, zip(*halves, strict=True)))
        squares = sums.squares if min(half.squares for half in halves) >= 0 else -1.0
        return sums._replace(commit=min(half.commit for half in halves), squares=squares)


class DoubleBufferEngine(Engine):
    """Trains a model as `Engine` does, and applies gradients late."""

    def __init__(self, parts: EngineParts) -> None:
        self._halves = parts.config.late == "half" and parts.plan.layout.replicas > 1
        super().__init__(parts)
        self.set_batch_scale(1.0)

    def _make_optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        optimizer = super()._make_optimizer(module)
        if self._halves and not isinstance(optimizer, torch.optim.SGD):
            raise UsageError(
                f"late=half with {type(optimizer).__name__}",
                "Half a batch is half a step for SGD alone: other optimizers' steps do not grow with gradients.",
                "Use torch.optim.SGD, or late=delay.",
            )
        return optimizer

    def step(self, given: StepRequest) -> StepOutcome:
        """Train on this worker's share of one global batch, by late gradients."""
        if self._halves and len(given.micro_batches) == 1:
            self.refuse()
            raise UsageError(
                "a batch that cannot be cut in two halves",
                "With late=half a worker's batch has two micro-batches at least.",
                "Hand over tensors, or twice as many micro-batches.",
            )
        if self.pipeline.replicas > 1 and given.global_samples is None:
            # The exchange begins with the step, so whether somebody refuses the step is to be known before.
            given = replace(given, global_samples=self.pipeline.executor.count_samples(given.weight)())
        if not self._halves:
            return self._late_step(given)
        middle, outcomes = (len(given.micro_batches) + 1) // 2, []
        for half in (given.micro_batches[:middle], given.micro_batches[middle:]):
            samples = sum(int(targets.shape[0]) for _, targets in half)
            outcomes.append(self._late_step(replace(given, micro_batches=half, samples=samples)))
        return JoinedOutcome(outcomes)

    def _late_step(self, given: StepRequest) -> StepOutcome:
        reducers = self.pipeline.executor.reducers
        ages = [reducer.staleness for reducer in reducers if isinstance(reducer, DelayedReducer)]
        outcome = super().step(given)
        outcome.staleness = float(max(ages, default=0))
        return outcome

    def go_on_from(self, step: int) -> None:
        """Number of the last step; each half of a batch is a step of the pipeline."""
        super().go_on_from(2 * step if self._halves else step)

    def set_batch_scale(self, samples: float, *, decay: float = 1.0) -> None:
        """Say how many samples the coming steps have; two steps of half a batch mean what one step means."""
        part = 0.5 if self._halves else 1.0
        super().set_batch_scale(part * samples, decay=part * decay)
