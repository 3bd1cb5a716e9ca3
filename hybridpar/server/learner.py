"""Computes gradients on one worker, pushes them to the shards, and takes the weights that come back.

The servers run the optimizer. A worker computes on the weights that it was given last. What it sends is, with a
barrier, its part of the gradient of the whole batch, so that the parts add up to what one process would have computed,
and otherwise the mean gradient of its own minibatch.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hybridpar.comm.transport import flat_view, is_dense
from hybridpar.optim.loss_scale import LossScale
from hybridpar.server.clipping import Clipping
from hybridpar.server.ledger import StepRow
from hybridpar.server.link import Links
from hybridpar.server.running import flat_buffers, put_buffers
from hybridpar.server.stripes import piece_views, trained_parameters
from hybridpar.server.wire import Gradient, Weights

#: Fields of `Exchanged` that stand in the answer of shard 0.
_ANSWERED = ("step", "applied", "staleness", "done", "stop", "save", "lowered", "rows", "news")


@dataclass(frozen=True)
class Exchanged:
    """What came of one push.

    Attributes:
        step: Steps that the servers have done, by shard 0.
        loss: Mean loss of this worker's samples.
        applied: Whether the gradient counts.
        staleness: Of the gradient, at shard 0.
        done: Whether the servers have taken in all that was wanted.
        stop: Whether all workers are to stop.
        save: Number of a checkpoint that all are to write now; 0 for none.
        lowered: What worker 0 last said that learning rates are multiplied with; None for nothing.
        norm: Norm of the gradient of all workers before clipping; None where worker 0 did not add it up.
        rows: For worker 0: what the steps since the last answer did.
        news: For worker 0: what happened to other workers.
        compute_ms: Time of forward and backward passes.
        exposed_ms: Time from there to the weights.
        pushed: Bytes that were sent, to all shards.
        pulled: Bytes that came.
    """

    step: int
    loss: float
    applied: bool
    staleness: int
    done: bool
    stop: bool
    save: int
    compute_ms: float
    exposed_ms: float
    pushed: int
    pulled: int
    lowered: float | None = None
    norm: float | None = None
    rows: Sequence[StepRow] = field(default_factory=tuple)
    news: Sequence[str] = field(default_factory=tuple)


class Learner:
    """Computes gradients of a model, and exchanges them for weights, parameter by parameter."""

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[Any, Tensor], Tensor],
        links: Links,
        *,
        barrier: bool,
        context: Callable[[], AbstractContextManager[object]] = nullcontext,
        loss_scale: LossScale | None = None,
        guard: bool = True,
        compiled: bool = False,
        clipping: Clipping | None = None,
        took: Callable[[], object] = lambda: None,
    ) -> None:
        self.model, self.links = model, links
        self._loss, self._barrier, self._guard, self._took = loss, barrier, guard, took
        self._clipping = None if barrier or clipping is None or not clipping.by_norm else clipping
        self.autocast, self._loss_scale = context, loss_scale
        #: Computes the outputs of the model.
        self.forward: Callable[..., Any] = torch.compile(model) if compiled else model
        self._parameters = trained_parameters(model)
        self._counts = links.traffic
        self._hooks: list[RemovableHandle] = []
        if loss_scale is not None:
            self._hooks += loss_scale.attach(model)

    def step(
        self,
        micro_batches: Sequence[tuple[Tensor, Tensor]],
        samples: int,
        global_samples: int,
        *,
        rate: float = 1.0,
        stop: bool = False,
        save: bool = False,
        lowered: float | None = None,
    ) -> Exchanged:
        """Compute a gradient, push it, and take the weights that come for it."""
        started = time.perf_counter()
        before, seen = flat_buffers(self.model), [buffer.clone() for buffer in counters(self.model)]
        loss = self._compute(micro_batches, samples, global_samples if self._barrier else samples)
        missing = {name for name, parameter in self._parameters.items() if parameter.grad is None}
        squares = self._squares(missing)
        sound = not self._guard or (math.isfinite(squares) and math.isfinite(loss))
        computed = time.perf_counter()
        common = Gradient(
            learner=self.links.links[0].worker,
            sequence=0,
            clock=0,
            weight=1.0 if self._barrier else None,
            rate=rate,
            samples=samples,
            loss=loss,
            sound=sound,
            factor=1.0 if self._clipping is None else self._clipping.factor(squares),
            pieces=[],
            stop=stop,
            save=save,
            lowered=lowered,
        )
        flat = {name: self._flat(parameter) for name, parameter in self._parameters.items()}
        pushes = []
        for number, link in enumerate(self.links.links):
            unused = frozenset(n for n, piece in enumerate(link.stripe.pieces) if piece.name in missing)
            statistics = torch.empty(0) if number else flat_buffers(self.model)
            pushes.append(replace(common, unused=unused, statistics=statistics))
        parts = [piece_views(link.stripe, flat) for link in self.links.links]
        first = self.links.push(pushes, parts)[0]
        counts = first.applied if self._barrier else sound
        if not counts:
            for buffer, batches in zip(counters(self.model), seen, strict=True):
                buffer.copy_(batches)
        put_buffers(self.model, before)  # where the shard holds no statistics, or sent none
        self._took()
        if self._loss_scale is not None:
            self._loss_scale.update(counts)
        return self._exchanged(first, loss, computed - started, time.perf_counter() - computed)

    def _compute(self, micro_batches: Sequence[tuple[Tensor, Tensor]], samples: int, whole: int) -> float:
        """Compute the gradient of the mean over `whole` samples, of which `samples` are given. Returns their loss."""
        for parameter in self._parameters.values():
            parameter.grad = None
        total = 0.0
        for inputs, targets in micro_batches:
            with self.autocast():
                loss = self._loss(self.forward(inputs), targets)
            part = targets.shape[0] / whole
            if self._loss_scale is None:
                (loss * part).backward()  # type: ignore[no-untyped-call]
            else:
                (loss.float() * part).backward(self._loss_scale.value)  # type: ignore[no-untyped-call]
            total += float(loss.detach()) * targets.shape[0] / samples
        return total

    @torch.no_grad()
    def _flat(self, parameter: nn.Parameter) -> Tensor:
        """The gradient of a parameter in its memory order, on the CPU."""
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        if not is_dense(gradient) or gradient.stride() != parameter.stride():
            gradient = torch.empty_like(parameter).copy_(gradient)
        return flat_view(gradient).cpu()

    def _squares(self, missing: set[str]) -> float:
        """Squared norm of the gradient; 0 where nobody wants to know it."""
        gradients = [
            parameter.grad
            for name, parameter in self._parameters.items()
            if name not in missing and parameter.grad is not None
        ]
        if not gradients or (not self._guard and self._clipping is None):
            return 0.0
        return float(torch.stack(torch._foreach_norm(gradients, 2, torch.float64)).square().sum())

    def _exchanged(self, first: Weights, loss: float, compute: float, exposed: float) -> Exchanged:
        """What came of a push, by the answer of shard 0 and by two times in seconds."""
        before, self._counts = self._counts, self.links.traffic
        return Exchanged(
            **{name: getattr(first, name) for name in _ANSWERED},
            loss=loss,
            compute_ms=compute * 1e3,
            exposed_ms=exposed * 1e3,
            pushed=self._counts[0] - before[0],
            pulled=self._counts[1] - before[1],
            norm=None if self.links.squares is None else math.sqrt(self.links.squares),
        )

    def close(self) -> None:
        """Remove all hooks. The model stays as it is."""
        for hook in self._hooks:
            hook.remove()


def counters(model: nn.Module) -> list[Tensor]:
    """Buffers that are no running statistics, such as the number of batches that BatchNorm has seen."""
    return [buffer for buffer in model.buffers() if not buffer.is_floating_point()]
