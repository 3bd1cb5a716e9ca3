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
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hybridpar.comm.transport import flat_view, is_dense
from hybridpar.optim.loss_scale import LossScale
from hybridpar.server.clipping import Clipping
from hybridpar.server.link import Links
from hybridpar.server.running import flat_buffers, put_buffers
from hybridpar.server.stripes import trained_parameters

#: Fields of `Exchanged` that stand in the answer of shard 0.
_ANSWERED = ("step", "applied", "staleness", "done", "stop", "save", "lowered")


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
    rows: Sequence[dict[str, Any]] = field(default_factory=tuple)
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
        self._places: dict[str, list[tuple[int, int, slice]]] = {name: [] for name in self._parameters}
        for shard, link in enumerate(links.links):
            for number, piece in enumerate(link.stripe.pieces):
                where = slice(piece.start, piece.start + piece.count)
                self._places[piece.name].append((shard, number, where))
        self._counts: tuple[int, int] = self._traffic()
        self._handed: set[str] = set()  # parameters whose gradient has been sent
        self._last = False
        self._hooks: list[RemovableHandle] = [
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                lambda _, name=name: self._hand_over(name) if self._last else None
            )
            for name, parameter in self._parameters.items()
        ]
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
        self._handed = set()
        self.links.begin_push(rate)
        loss = self._compute(micro_batches, samples, global_samples if self._barrier else samples)
        missing = {name for name, parameter in self._parameters.items() if parameter.grad is None}
        for name in self._parameters:
            if name not in self._handed:
                self._hand_over(name)
        squares = self._squares(missing)
        sound = not self._guard or (math.isfinite(squares) and math.isfinite(loss))
        end: dict[str, Any] = {"weight": 1.0 if self._barrier else None, "samples": samples, "loss": loss}
        end |= {"factor": 1.0 if self._clipping is None else self._clipping.factor(squares), "sound": sound}
        end |= {"stop": stop, "save": save} | ({} if lowered is None else {"lowered": lowered})
        computed = time.perf_counter()
        unused = [
            [number for number, piece in enumerate(link.stripe.pieces) if piece.name in missing]
            for link in self.links.links
        ]
        first = self.links.finish_push(end, unused, flat_buffers(self.model).cpu())[0]
        counts = bool(first["applied"]) if self._barrier else sound
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
        for index, (inputs, targets) in enumerate(micro_batches):
            self._last = index == len(micro_batches) - 1
            with self.autocast():
                loss = self._loss(self.forward(inputs), targets)
            part = targets.shape[0] / whole
            if self._loss_scale is None:
                (loss * part).backward()  # type: ignore[no-untyped-call]
            else:
                (loss.float() * part).backward(self._loss_scale.value)  # type: ignore[no-untyped-call]
            total += float(loss.detach()) * targets.shape[0] / samples
        return total

    def _hand_over(self, name: str) -> None:
        """The gradient of a parameter is complete: it is sent, and stays as it is until the answers have come."""
        parameter = self._parameters[name]
        with torch.no_grad():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            elif not is_dense(parameter.grad) or parameter.grad.stride() != parameter.stride():
                parameter.grad = torch.empty_like(parameter).copy_(parameter.grad)
            flat = flat_view(parameter.grad).cpu()
        self._handed.add(name)
        for shard, number, where in self._places[name]:
            self.links.ready(shard, number, flat[where])

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

    def _exchanged(self, first: dict[str, Any], loss: float, compute: float, exposed: float) -> Exchanged:
        """What came of a push, by the answer of shard 0 and by two times in seconds."""
        before, self._counts = self._counts, self._traffic()
        return Exchanged(
            **{name: first[name] for name in _ANSWERED},
            loss=loss,
            compute_ms=compute * 1e3,
            exposed_ms=exposed * 1e3,
            pushed=self._counts[0] - before[0],
            pulled=self._counts[1] - before[1],
            norm=None if self.links.squares is None else math.sqrt(self.links.squares),
            rows=first.get("rows", ()),
            news=first.get("news", ()),
        )

    def _traffic(self) -> tuple[int, int]:
        return sum(link.sent for link in self.links.links), sum(link.received for link in self.links.links)

    def close(self) -> None:
        """Remove all hooks. The model stays as it is."""
        for hook in self._hooks:
            hook.remove()


def counters(model: nn.Module) -> list[Tensor]:
    """Buffers that are no running statistics, such as the number of batches that BatchNorm has seen."""
    return [buffer for buffer in model.buffers() if not buffer.is_floating_point()]
