"""Computes gradients on one worker, pushes them to the shards, and takes the weights that come back.

The servers run the optimizer. A worker computes on the weights that it was given last. What it sends is, with a
barrier, its part of the gradient of the whole batch, so that the parts add up to what one process would have computed,
and otherwise the mean gradient of its own minibatch.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
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
        fastest: Steps per second of the fastest worker, of those who said so; 0 where none did.
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
    fastest: float = 0.0
    lowered: float | None = None
    norm: float | None = None
    rows: Sequence[dict[str, Any]] = field(default_factory=tuple)
    news: Sequence[str] = field(default_factory=tuple)


class Pusher:
    """Sends a worker's part of an update to the shards, parameter by parameter, and takes their answers.

    Args:
        model: The model; its parameters and running statistics are overwritten by every answer.
        links: The ways to the shards.
        took: Called when weights have come, to put them where the model's parameters are.
    """

    def __init__(self, model: nn.Module, links: Links, took: Callable[[], object]) -> None:
        self.model = model
        self.links = links
        self._took = took
        self._parameters = trained_parameters(model)
        self._places: dict[str, list[tuple[int, int, slice]]] = {name: [] for name in self._parameters}
        for shard, link in enumerate(links.links):
            for number, piece in enumerate(link.stripe.pieces):
                where = slice(piece.start, piece.start + piece.count)
                self._places[piece.name].append((shard, number, where))
        self._counts: tuple[int, int] = self._traffic()
        self._handed: set[str] = set()  # parameters whose gradient has been sent

    def _send(self, name: str, flat: Tensor) -> None:
        """What is pushed of a parameter is there: 1-D float32, which stays as it is until the answers have come."""
        for shard, number, where in self._places[name]:
            self.links.ready(shard, number, flat[where])

    def _hand_over(self, name: str) -> None:
        """The gradient of a parameter is complete."""
        parameter = self._parameters[name]
        with torch.no_grad():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            elif not is_dense(parameter.grad) or parameter.grad.stride() != parameter.stride():
                parameter.grad = torch.empty_like(parameter).copy_(parameter.grad)
            flat = flat_view(parameter.grad).cpu()
        self._handed.add(name)
        self._send(name, flat)

    def _finish(self, end: dict[str, Any], missing: set[str], statistics: Tensor) -> list[dict[str, Any]]:
        """All is sent but for some parameters; wait for the answers of the shards."""
        unused = [
            [number for number, piece in enumerate(link.stripe.pieces) if piece.name in missing]
            for link in self.links.links
        ]
        return self.links.finish_push(end, unused, statistics)

    def _exchanged(self, first: dict[str, Any], loss: float, compute: float, exposed: float) -> Exchanged:
        """What came of a push, by the answer of shard 0 and by two times in seconds."""
        before, self._counts = self._counts, self._traffic()
        return Exchanged(
            step=int(first["step"]),
            loss=loss,
            applied=bool(first["applied"]),
            staleness=int(first["staleness"]),
            done=bool(first["done"]),
            stop=bool(first["stop"]),
            save=int(first["save"]),
            compute_ms=compute * 1e3,
            exposed_ms=exposed * 1e3,
            pushed=self._counts[0] - before[0],
            pulled=self._counts[1] - before[1],
            fastest=float(first["fastest"]),
            lowered=first["lowered"],
            norm=None if self.links.squares is None else math.sqrt(self.links.squares),
            rows=first.get("rows", ()),
            news=first.get("news", ()),
        )

    def _traffic(self) -> tuple[int, int]:
        return sum(link.sent for link in self.links.links), sum(link.received for link in self.links.links)

    def close(self) -> None:
        """Let go of the model, which stays as it is."""


class GradientPusher(Pusher):
    """Exchanges gradients for weights, step by step; a subclass says how a gradient is computed.

    Args:
        model: The model; its parameters and running statistics are overwritten by every answer.
        links: The ways to the shards.
        trained: What this worker trains of the model, whose running statistics it pushes.
        names: The parameters of it.
        barrier: Whether an update takes a part of one batch from every worker.
        took: Called when weights have come, to put them where the model's parameters are.
    """

    def __init__(
        self,
        model: nn.Module,
        links: Links,
        trained: nn.Module,
        names: Iterable[str],
        *,
        barrier: bool,
        took: Callable[[], object],
    ) -> None:
        super().__init__(model, links, took)
        self._trained, self._barrier = trained, barrier
        self._own = {name: self._parameters[name] for name in names}
        self._hooks: list[RemovableHandle] = []

    def _call_after_gradients(self, function: Callable[[str], None]) -> None:
        """Call a function with the name of a parameter whenever a part of its gradient has been added."""
        self._hooks += [
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                lambda _, name=name: function(name)
            )
            for name, parameter in self._own.items()
        ]

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
        """Compute a gradient, push it, and take the weights that come for it.

        Args:
            micro_batches: Inputs and targets; the same on all workers of a replica.
            samples: Samples of this worker or replica.
            global_samples: Samples of all in this step.
            rate: Learning rate as a fraction of its peak.
            stop: Ask all workers to stop.
            save: Ask all workers for a checkpoint.
            lowered: Tell the others, if not None, what their learning rates are multiplied with.

        Returns:
            What the servers answered, and what the exchange took; all workers of a replica hear the same.

        Raises:
            SyncError: A shard is gone, or an update waits for a worker that is, or one of this replica is.
        """
        started = time.perf_counter()
        before, seen = flat_buffers(self._trained), [buffer.clone() for buffer in counters(self._trained)]
        self._handed = set()
        self.links.begin_push(rate)
        end: dict[str, Any] = {"weight": 1.0 if self._barrier else None, "factor": 1.0, "samples": samples}
        end |= {"stop": stop, "save": save} | ({} if lowered is None else {"lowered": lowered})
        whole = global_samples if self._barrier else samples
        missing = self._compute(micro_batches, samples, whole, rate, end)
        computed = time.perf_counter()
        first = self._finish(end, missing, flat_buffers(self._trained).cpu())[0]
        counts = bool(first["applied"] if self._barrier else end["sound"])
        if not counts:
            for buffer, batches in zip(counters(self._trained), seen, strict=True):
                buffer.copy_(batches)
        put_buffers(self._trained, before)  # where the shard holds no statistics, or sent none
        self._took()
        self._follow(first, counts)
        return self._exchanged(first, end["loss"], computed - started, time.perf_counter() - computed)

    def _compute(
        self, micro_batches: Sequence[tuple[Tensor, Tensor]], samples: int, whole: int, rate: float, end: dict[str, Any]
    ) -> set[str]:
        """Compute and hand over the gradient of the mean over `whole` samples, of which `samples` are given.

        It puts `loss` and `sound` into `end`, and what else it knows better. Returns what `_hand_over_rest` did.
        """
        raise NotImplementedError

    def _hand_over_rest(self) -> set[str]:
        """All gradients are complete. Returns the names of parameters that have none."""
        missing = {name for name, parameter in self._own.items() if parameter.grad is None}
        for name in self._own:
            if name not in self._handed:
                self._hand_over(name)
        return missing

    def _follow(self, first: dict[str, Any], counts: bool) -> None:
        """Shard 0 has answered, and the gradient counts or not."""

    def close(self) -> None:
        """Remove all hooks. The model stays as it is."""
        for hook in self._hooks:
            hook.remove()


class Learner(GradientPusher):
    """Computes gradients of a whole model, and exchanges them for weights.

    Args:
        model: The model; its parameters and running statistics are overwritten by every answer.
        loss: Mean loss of outputs and targets.
        links: The ways to the shards.
        barrier: Whether an update takes a part of one batch from every worker.
        context: Makes the context in which model and loss run, as that of autocast.
        loss_scale: What the loss is multiplied with, and gradients divided by before they are pushed. It follows the
            steps where all workers make them together, else this worker's own gradients.
        guard: Whether a gradient that is not finite does not count.
        compiled: Whether the model is run through torch.compile.
        clipping: How gradients are clipped. Without a barrier servers are told what each is multiplied with.
        took: Called when weights have come, to put them where the model's parameters are.
    """

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
        super().__init__(model, links, model, trained_parameters(model), barrier=barrier, took=took)
        self._loss = loss
        self._guard = guard
        self._clipping = None if barrier or clipping is None or not clipping.by_norm else clipping
        self.autocast, self._loss_scale = context, loss_scale
        self._forward: Callable[..., Any] = torch.compile(model) if compiled else model
        self._last = False
        self._call_after_gradients(lambda name: self._hand_over(name) if self._last else None)
        if loss_scale is not None:
            self._hooks += loss_scale.attach(model)

    def forward(self, inputs: Tensor) -> Any:
        """Outputs of the model.

        Args:
            inputs: Of the search.
        """
        return self._forward(inputs)

    def _compute(
        self, micro_batches: Sequence[tuple[Tensor, Tensor]], samples: int, whole: int, rate: float, end: dict[str, Any]
    ) -> set[str]:
        self.model.train()
        for parameter in self._own.values():
            parameter.grad = None
        total = 0.0
        for index, (inputs, targets) in enumerate(micro_batches):
            self._last = index == len(micro_batches) - 1
            with self.autocast():
                loss = self._loss(self._forward(inputs), targets)
            part = targets.shape[0] / whole
            if self._loss_scale is None:
                (loss * part).backward()  # type: ignore[no-untyped-call]
            else:
                (loss.float() * part).backward(self._loss_scale.value)  # type: ignore[no-untyped-call]
            total += float(loss.detach()) * targets.shape[0] / samples
        missing = self._hand_over_rest()
        squares = self._squares(missing)
        sound = not self._guard or (math.isfinite(squares) and math.isfinite(total))
        end |= {"loss": total, "sound": sound}
        if self._clipping is not None:
            end["factor"] = self._clipping.factor(squares)
        return missing

    def _follow(self, first: dict[str, Any], counts: bool) -> None:
        if self._loss_scale is not None:
            self._loss_scale.update(counts)

    def _squares(self, missing: set[str]) -> float:
        """Squared norm of the gradient; 0 where nobody wants to know it."""
        gradients = [
            parameter.grad
            for name, parameter in self._own.items()
            if name not in missing and parameter.grad is not None
        ]
        if not gradients or (not self._guard and self._clipping is None):
            return 0.0
        return float(torch.stack(torch._foreach_norm(gradients, 2, torch.float64)).square().sum())


def counters(model: nn.Module) -> list[Tensor]:
    """Buffers that are no running statistics, such as the number of batches that BatchNorm has seen.

    Args:
        model: The model, or a part of it.
    """
    return [buffer for buffer in model.buffers() if not buffer.is_floating_point()]
