"""Sums gradients over replicas one step late, so that the exchange overlaps with the whole next step.

Double buffering (Seide et al., Interspeech 2014, section 3.2), in the form of CNTK: the step applies the gradient that
the step before computed, whose exchange it hides behind its own forward and backward passes. The gradient is one update
old (staleness 1), and the first step applies none. For links too slow for overlap within a step.

    step t      compute g(t) | wait for the sum of g(t-1) | agree, clip, optimizer | send g(t)
    step t+1    compute g(t+1), while g(t) is summed | ...

Exchanges follow one another, and each is committed or rolled back before the next one is sent, so what codecs keep has
one order. Gradients stay as autograd made them until their exchange has been applied: a checkpoint holds them, and a
resumed run sends them again. Where the loss of a step is not finite, the step is rolled back, and with it the gradient
of the step before.
"""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hybridpar.errors import HybridparError
from hybridpar.lanes import Event
from hybridpar.sync.buckets import Bucket, view_like
from hybridpar.sync.reducer import Flight, GradientReducer

_log = logging.getLogger(__name__)


@dataclass
class _Late:
    """Gradients that were sent at the end of a step.

    Attributes:
        flight: Of their exchange.
        gradients: As autograd made them, by parameter; those that were not used are missing.
        used: For each parameter, in the order of the buckets.
        rate: Learning rate of the step that made them.
    """

    flight: Flight
    gradients: dict[str, Tensor]
    used: list[bool]
    rate: float


class DelayedReducer(GradientReducer):
    """Sums gradients over the workers one step late, with the calls of `GradientReducer` in a step.

    `place_gradients` puts the gradients of the step before in `.grad`; before there are any, all are None. For a model
    that is not cut: its lane is the caller's.

    Args:
        arguments: As of `GradientReducer`.
        options: As of `GradientReducer`.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._flats: list[Tensor] = []
        self._views: list[list[Tensor]] = []
        self._late: _Late | None = None
        self._fresh: tuple[dict[str, Tensor], list[bool]] | None = None
        self._rate = 0.0
        super().__init__(*arguments, **options)
        self._observed = None  # all buckets leave together, so their order makes no difference

    @property
    def staleness(self) -> int:
        """Updates that were made since the weights that the next gradient to apply was computed on: 0 or 1."""
        return 0 if self._late is None else 1

    # ------------------------------------------------------------------ a step

    def gradient_ready(self, name: str) -> None:
        """Called by autograd when a parameter's gradient has been accumulated; nothing leaves yet."""
        if self._flight is not None and name in self._places:
            self._places[name][1].seen = self._flight.number

    def begin_last(self, flight: Flight, rate: float | None = None) -> None:
        """The next backward pass is the last of the step. The rate counts when its gradients are sent."""
        self._rate = self._rate if rate is None else rate

    def flush(self) -> list[bool]:
        """After the last backward pass: keep its gradients to be sent when the step ends.

        Returns:
            For each parameter, in the order of the buckets, whether it was used here in the step before.
        """
        flight = self._flight
        assert flight is not None
        for bucket in self.buckets:
            self._refuse_sparse(bucket.slots)
        slots = [slot for bucket in self.buckets for slot in bucket.slots]
        gradients = {slot.name: slot.parameter.grad for slot in slots if slot.parameter.grad is not None}
        self._fresh = gradients, [slot.seen == flight.number for slot in slots]
        if self._late is None:
            return [False] * len(slots)
        flight.squares, flight.costs = self._late.flight.squares, self._late.flight.costs
        return self._late.used

    def issue(self, index: int, flight: Flight) -> Event:
        """The event that is passed when a bucket of the step before has been summed."""
        return self._lanes.caller.record() if self._late is None else self._late.flight.landed[index]

    def squares(self, flight: Flight) -> Tensor:
        """The squared norm of the gradients to apply; not finite where the loss of this step is not, so that its
        BatchNorm statistics are rolled back.
        """
        assert flight.loss is not None
        return super().squares(flight) + 0.0 * flight.loss

    def place_gradients(self) -> None:
        """Put the reduced gradients of the step before in `.grad`."""
        for bucket, views in zip(self.buckets, self._views, strict=True) if self._late is not None else ():
            for slot, view in zip(bucket.slots, views, strict=True):
                slot.parameter.grad = view

    def scale(self, factor: Tensor) -> None:
        """Multiply all reduced gradients by a 0-d factor, in place."""
        for flat in self._flats if self._late is not None else ():
            flat.mul_(factor.to(flat.dtype))

    def close_step(self) -> None:
        """End the step: send its gradients."""
        flight, fresh = self._flight, self._fresh
        self._flight = self._fresh = None
        if flight is not None and fresh is not None:
            self._leave(*fresh, flight, self._rate)

    # ----------------------------------------------------------------- sending

    def _leave(self, gradients: dict[str, Tensor], used: list[bool], step: Flight | None, rate: float) -> None:
        if self.compression is not None:
            self.compression.catch_up()
            self.compression.set_rate(rate)
        device = self._world.device
        squares = torch.zeros(len(self.buckets), dtype=torch.float64, device=device)
        flight = Flight(self._steps, squares, flats=self._flats)
        if step is not None:
            flight.layouts, flight.reported = step.layouts, step.reported
        self._late = _Late(flight, gradients, used, rate)
        with torch.no_grad():
            for bucket, views in zip(self.buckets, self._views, strict=True):
                for slot, view in zip(bucket.slots, views, strict=True):
                    gradient = gradients.get(slot.name)
                    if gradient is None:
                        view.zero_()
                    else:
                        view.copy_(gradient)
        ready = self._lanes.caller.record()
        for bucket in self.buckets:
            self._send(bucket, flight, ready)

    def land(self) -> None:
        """Let the host wait until the sums of the last step are there; the next step applies them all the same.

        Raises:
            SyncError: A worker died or did not answer in time.
        """
        with self._world.named_errors("reducing gradients"):
            for event in () if self._late is None else self._late.flight.landed:
                event.synchronize()

    # ------------------------------------------------------------------ layout

    def follow_trainable(self) -> None:
        """Rebuild buckets where parameters were frozen or thawed; gradients of the last step are dropped then."""
        if self.is_cut():
            return
        if self._late is not None:
            self.land()
            if self.compression is not None:
                self.compression.forget()
            _log.warning("gradients of the last step are dropped: parameters were frozen or thawed since")
            self._late = None
        super().follow_trainable()
        self._flats = [_new_flat(bucket) for bucket in self.buckets]
        self._views = [
            [view_like(flat, slot) for slot in bucket.slots]
            for bucket, flat in zip(self.buckets, self._flats, strict=True)
        ]

    def state_dict(self) -> dict[str, Any]:
        """The order of buckets; and the gradients that were sent last, with codecs as before they were sent."""
        late = self._late
        if late is None:
            return super().state_dict()
        self.land()
        if self.compression is not None:
            self.compression.forget()
        state = super().state_dict()
        state["late"] = {
            "gradients": {name: gradient.detach().clone() for name, gradient in late.gradients.items()},
            "used": list(late.used),
            "rate": late.rate,
            "places": [slot.name for bucket in self.buckets for slot in bucket.slots],
        }
        self._leave(late.gradients, late.used, late.flight, late.rate)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned, and send the gradients that had been sent last; a collective."""
        self.land()
        if self._late is not None and self.compression is not None:
            self.compression.forget()
        self._late = None
        super().load_state_dict(state)
        self._observed = None
        late = state.get("late")
        if late is None:
            return
        self.follow_trainable()
        if late["places"] != [slot.name for bucket in self.buckets for slot in bucket.slots]:
            _log.warning("gradients that were on their way are dropped: other parameters are trained now")
            return
        gradients = {name: value.to(self._world.device) for name, value in late["gradients"].items()}
        self._leave(gradients, list(late["used"]), None, float(late["rate"]))

    def close(self) -> None:
        """Remove all hooks, after the sums that are under way; whether these fail makes no difference any more."""
        with contextlib.suppress(HybridparError, RuntimeError):
            self.land()
        self._late = None
        super().close()


def _new_flat(bucket: Bucket) -> Tensor:
    first = bucket.slots[0].parameter
    return torch.zeros(bucket.numel, dtype=first.dtype, device=first.device)
