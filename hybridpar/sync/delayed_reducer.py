"""Why: on a link too slow for overlap within a step, gradients can travel while the whole next step is computed.

Double buffering (Seide et al., Interspeech 2014, section 3.2), in the form of CNTK: the step applies the gradient that
the step before computed, whose exchange it hides behind its own forward and backward passes. The gradient is one update
old (staleness 1), and the first step applies none.

    step t      compute g(t) | wait for the sum of g(t-1) | agree, clip, optimizer | g(t) leaves
    step t+1    compute g(t+1), while g(t) travels | ...

Exchanges follow one another, and each is settled before the next one leaves; so what codecs keep has one order. What
autograd made stays as it is until its exchange has been applied: a checkpoint holds it, and a resumed run sends it
again. Where the loss of a step is not finite the step does not count, and takes the gradient with it that waited.
"""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hybridpar.errors import HybridparError
from hybridpar.sync.buckets import Bucket, view_like
from hybridpar.sync.control import LOSS, Pending
from hybridpar.sync.reducer import Flight, GradientReducer

_log = logging.getLogger(__name__)


@dataclass
class _Late:
    """Gradients that left at the end of a step.

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
    """Sums gradients over the workers one step late. See `GradientReducer` for arguments and the calls of a step.

    On return of `wait` the gradients are those of the step before; before there are any, all are None.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._observed = None  # all buckets leave together, so their order makes no difference
        self._flats: list[Tensor] = []
        self._views: list[list[Tensor]] = []
        self._late: _Late | None = None
        self._fresh: tuple[dict[str, Tensor], list[bool]] | None = None
        self._rate = 0.0

    @property
    def staleness(self) -> int:
        """Updates that were made since the weights that the next gradient to apply was computed on: 0 or 1."""
        return 0 if self._late is None else 1

    def set_rate(self, rate: float) -> None:
        """See `GradientReducer`. An exchange may be on its way, so codecs are told when the next one leaves."""
        self._rate = rate

    # ------------------------------------------------------------------ a step

    def gradient_ready(self, name: str) -> None:
        """Called by autograd when a parameter's gradient has been accumulated; nothing leaves yet."""
        if self._flight is not None and name in self._places:
            self._places[name][1].seen = self._flight.number

    def release(self, report: Pending) -> None:
        """See `GradientReducer`."""
        assert self._flight is not None
        self._flight.report = report

    def flush(self) -> list[bool]:
        """See `GradientReducer`; used by the step before."""
        flight = self._flight
        assert flight is not None
        for bucket in self.buckets:
            self._refuse_sparse(bucket)
        slots = [slot for bucket in self.buckets for slot in bucket.slots]
        gradients = {slot.name: slot.parameter.grad for slot in slots if slot.parameter.grad is not None}
        self._fresh = gradients, [slot.seen == flight.number for slot in slots]
        return [False] * len(slots) if self._late is None else self._late.used

    def wait(self) -> tuple[Tensor, int]:
        """See `GradientReducer`: of the exchange that was on its way during this step."""
        flight = self._flight
        assert flight is not None
        assert flight.report is not None
        late = self._late
        if late is not None:
            with self._world.named_errors("reducing gradients"):
                for event in late.flight.landed:
                    self._lanes.caller.wait(event)
            flight.squares, flight.costs = late.flight.squares, late.flight.costs
            for bucket, views in zip(self.buckets, self._views, strict=True):
                for slot, view in zip(bucket.slots, views, strict=True):
                    slot.parameter.grad = view
        # BatchNorm's sums are those of this step: where its loss is not finite, it must not count.
        squares = flight.squares + 0.0 * flight.report.wait()[LOSS]
        return squares, flight.costs.sent

    def scale(self, factor: Tensor) -> None:
        """See `GradientReducer`."""
        for flat in self._flats if self._late is not None else ():
            flat.mul_(factor.to(flat.dtype))

    def close_step(self) -> None:
        """End the step: its gradients leave."""
        flight, fresh = self._flight, self._fresh
        self._flight = self._fresh = None
        if flight is not None and fresh is not None:
            self._leave(*fresh, flight.report, self._rate)

    # ----------------------------------------------------------------- sending

    def _leave(self, gradients: dict[str, Tensor], used: list[bool], report: Pending | None, rate: float) -> None:
        if self.compression is not None:
            self.compression.catch_up()
            self.compression.set_rate(rate)
        device = self._world.device
        squares = torch.zeros(len(self.buckets), dtype=torch.float64, device=device)
        flight = Flight(self._steps, squares, report=report, flats=self._flats)
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
        """Wait on the host until nothing is on its way; what arrived is applied in the next step all the same.

        Raises:
            SyncError: A worker died or did not answer in time.
        """
        with self._world.named_errors("reducing gradients"):
            for event in () if self._late is None else self._late.flight.landed:
                event.synchronize()

    # ------------------------------------------------------------------ layout

    def follow_trainable(self) -> None:
        """See `GradientReducer`. What is on its way when buckets are cut anew is forgotten."""
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
        """See `GradientReducer`; and the gradients that are on their way, with codecs as before these left."""
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
        self._leave(late.gradients, late.used, late.flight.report, late.rate)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `GradientReducer`. Gradients that were on their way leave again; a collective."""
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
        """See `GradientReducer`. What is on its way arrives first, or fails unnoticed: nobody needs it any more."""
        with contextlib.suppress(HybridparError, RuntimeError):
            self.land()
        self._late = None
        super().close()


def _new_flat(bucket: Bucket) -> Tensor:
    first = bucket.slots[0].parameter
    return torch.zeros(bucket.numel, dtype=first.dtype, device=first.device)
