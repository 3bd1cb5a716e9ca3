"""Sums gradients over replicas one step late, so that the exchange overlaps with the whole next step.

Double buffering (Seide et al., Interspeech 2014, section 3.2), in the form of CNTK: a step applies the gradient that
the step before computed, whose exchange it hides behind its own forward and backward passes. The gradient is one update
old (staleness 1), and the first step applies none. For links too slow for overlap within a step.

    step t      send g(t-1) | compute g(t), while g(t-1) is summed | agree, clip, optimizer | keep g(t)
    step t+1    send g(t)   | compute g(t+1), while g(t) is summed | ...

Between steps nothing is on its way: a checkpoint holds the gradients that wait, as autograd made them. Each exchange is
committed or rolled back before the next one is sent, so what codecs keep has one order. Where the loss of a step is not
finite, the step is rolled back, and with it the gradient of the step before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from hybridpar.lanes import Event, Lane
from hybridpar.sync.reducer import Reducer, sparse_gradient
from hybridpar.sync.stage_gradients import StepGradients


class DelayedReducer(Reducer):
    """Sums gradients over the workers one step late, with the calls of `Reducer` in a step.

    What is known of a step's gradients, its `StepGradients`, is of those that the step applies. `finish` puts them in
    `.grad`; before there are any, all are None.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._observed = None  # all buckets leave together, so their order makes no difference
        # Of the host: whether gradients of a step before wait to be sent, and what is known of that step.
        self._waits = False
        self._before: StepGradients | None = None
        # Of the stage's lane: the gradients that wait, by parameter; those that are summed.
        self._waiting: dict[str, Tensor] = {}
        self._summed: dict[str, Tensor] = {}
        self._used: list[bool] = []

    @property
    def staleness(self) -> int:
        """Updates that were made since the weights that the next gradient to apply was computed on: 0 or 1."""
        return int(self._waits)

    # ------------------------------------------------------------------ a step

    def start(self, step: StepGradients) -> None:
        """Forget the gradients that the step before applied, and expect those of the next."""
        super().start(step)
        self._summed, self._used = {}, [False] * len(self._slots)

    def begin(self, step: StepGradients) -> None:
        """Send the gradients of the step before."""
        if self._waits:
            self._compute.submit(lambda: self._gather(step))
            ready = self._compute.record()
            for bucket in self.buckets:
                self._send(bucket.index, step, ready)
        self._waits, self._before = True, step

    def _gather(self, step: StepGradients) -> None:
        """On the stage's lane: bring the gradients that wait together in their buckets."""
        if self.compression is not None:
            self.compression.catch_up()
        waiting, self._waiting = self._waiting, {}
        slots = [slot for bucket in self.buckets for slot in bucket.slots]
        self._used = [slot.name in waiting for slot in slots]
        for slot in slots:
            slot.parameter.grad = waiting.get(slot.name)
        for index, meeting in enumerate(self._meetings):
            meeting.gather()
            if step.on_ready is not None:
                step.on_ready(index)
        for slot in slots:
            assert slot.parameter.grad is not None
            self._summed[slot.name], slot.parameter.grad = slot.parameter.grad, None

    def marks(self, step: StepGradients) -> list[Event]:
        """No events: the backward pass sends nothing."""
        return []

    def begin_last(self, step: StepGradients) -> None:
        """The backward pass sends nothing."""

    def flush(self) -> list[bool]:
        """After the last backward pass: keep its gradients to be sent when the next step begins."""
        gradients = {name: slot.parameter.grad for name, (_, _, slot) in self._slots.items()}
        self._waiting = {name: gradient for name, gradient in gradients.items() if gradient is not None}
        for name, gradient in self._waiting.items():
            if gradient.is_sparse:
                raise sparse_gradient(name)
        return self._used

    def issue(self, index: int, step: StepGradients) -> Event:
        """The event that is passed when a bucket of the step before has been summed."""
        return step.landed[index] if step.landed else self._compute.record()

    def squares(self, step: StepGradients) -> Tensor:
        """The squared norm of the gradients to apply; not finite where the loss of this step is not, so that its
        BatchNorm statistics are rolled back.
        """
        assert step.loss is not None
        return super().squares(step) + 0.0 * step.loss

    def finish(self, users: Tensor | None, used: Sequence[bool] | None) -> list[str]:
        """Put the reduced gradients of the step before in `.grad`, and leave out those of unused parameters."""
        for name, parameter in self._parameters.items():
            parameter.grad = self._summed.get(name)
        return super().finish(users, used)

    def _wait_for_peers(self, lane: Lane, step: StepGradients) -> None:
        """Wait for what the workers reported in the step that computed the gradients."""
        if self._before is not None:
            super()._wait_for_peers(lane, self._before)

    # ------------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """The order of buckets, what codecs keep, and the gradients that wait."""
        state = super().state_dict()
        if self._waits:
            state["late"] = {name: gradient.detach().clone() for name, gradient in self._waiting.items()}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned, where names fit; gradients that waited before are dropped."""
        super().load_state_dict(state)
        self._observed, self._before = None, None
        late = state.get("late") if sorted(state.get("order", ())) == sorted(self._parameters) else None
        self._waits, self._waiting = late is not None, {}
        if late is not None:
            self._waiting = {name: value.to(self._world.device) for name, value in late.items()}
