"""Gradients that go to parameter servers: what becomes of them instead of a sum over replicas and an optimizer's pass.

The step is that of `hybridpar.train.engine`. A worker computes on the weights that it was given last. What it pushes
when the backward pass is over is, with a barrier, its part of the gradient of the whole batch, so that the parts add up
to what a single process would have computed, and otherwise the mean gradient of its minibatch. The servers run the
optimizer; their answer says whether the step counts, and brings the weights of the next step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from hybridpar.comm.transport import flat_view, is_dense
from hybridpar.pipeline.step import StepInput
from hybridpar.server.clipping import Clipping
from hybridpar.server.link import Links
from hybridpar.server.running import flat_buffers, put_buffers
from hybridpar.server.stripes import piece_views, trained_parameters
from hybridpar.server.wire import Gradient, Weights
from hybridpar.sync.reducer import Reducer, StepGradients


@dataclass(frozen=True)
class Servers:
    """The servers as a worker sees them.

    Attributes:
        worker: Its number.
        links: The ways to them.
        host: Where weights arrive, by name: in the parameters, or for those of a GPU in memory of the host.
        barrier: Whether all workers are in step.
        clipping: How gradients are clipped.
    """

    worker: int
    links: Links
    host: Mapping[str, Tensor]
    barrier: bool
    clipping: Clipping = field(default_factory=Clipping)


class ServerGradients(Reducer):
    """Pushes the gradients of a step, and instead of an optimizer's pass puts the weights that come into the model."""

    #: What the step under way is to do.
    given: StepInput
    #: From worker 0: what learning rates are multiplied with; None for no news.
    lowered: float | None = None
    #: Of shard 0, to the last push.
    answer: Weights

    def __init__(
        self, *given: Any, measure: bool, model: nn.Module, servers: Servers, loss: Callable[[], float], **options: Any
    ) -> None:
        clipping = servers.clipping
        # Without a barrier each gradient is clipped by its norm; else servers clip the sum.
        self._clipping = clipping if clipping.by_norm and not servers.barrier else None
        super().__init__(*given, measure=measure or self._clipping is not None, **options)
        self._model, self._servers, self._loss, self._guard = model, servers, loss, measure
        self._trained = trained_parameters(model)
        #: Time from the last backward pass to the weights.
        self.exposed_ms = 0.0

    def measure(self, step: StepGradients) -> None:
        """Push the gradients; their squares are finite exactly where the step counts."""
        super().measure(step)
        squares, loss = float(step.squares.sum()), self._loss()
        sound = not self._guard or (math.isfinite(squares) and math.isfinite(loss))
        began = time.perf_counter()
        self.answer = self._push(squares, loss, sound)
        self.exposed_ms = (time.perf_counter() - began) * 1e3
        counts = self.answer.applied if self._servers.barrier else sound
        step.squares = torch.full_like(step.squares.sum(), squares if counts else math.nan)

    def finish(self, users: Tensor | None, used: Sequence[bool] | None) -> list[str]:
        """Gradients have done their part."""
        self.take_weights()
        return []

    @torch.no_grad()
    def take_weights(self) -> None:
        """Put the weights that the servers sent last into the model."""
        self._take_statistics()
        host = self._servers.host
        for name, parameter in self._trained.items():
            if parameter.data_ptr() != host[name].data_ptr():
                parameter.copy_(host[name], non_blocking=True)

    def close_step(self) -> None:
        """A step that was rolled back has put back statistics, too."""
        super().close_step()
        self._take_statistics()

    def _take_statistics(self) -> None:
        statistics = self._servers.links.links[0].statistics
        if statistics.numel():
            put_buffers(self._model, statistics)

    def _push(self, squares: float, loss: float, sound: bool) -> Weights:
        """Push the gradients to all servers; the answer of shard 0."""
        servers, given = self._servers, self.given
        common = Gradient(
            learner=servers.worker,
            sequence=0,
            clock=0,
            weight=1.0 if servers.barrier else None,
            rate=given.rate_factor,
            samples=given.samples,
            loss=loss,
            sound=sound,
            factor=1.0 if self._clipping is None else self._clipping.factor(squares),
            pieces=[],
            stop=given.stop,
            save=given.save,
            lowered=self.lowered,
        )
        missing = {name for name, parameter in self._trained.items() if parameter.grad is None}
        flat = {name: _flat_gradient(parameter) for name, parameter in self._trained.items()}
        pushes = []
        for number, link in enumerate(servers.links.links):
            unused = frozenset(n for n, piece in enumerate(link.stripe.pieces) if piece.name in missing)
            statistics = torch.empty(0) if number else flat_buffers(self._model)
            pushes.append(replace(common, unused=unused, statistics=statistics))
        return servers.links.push(pushes, [piece_views(link.stripe, flat) for link in servers.links.links])[0]


@torch.no_grad()
def _flat_gradient(parameter: nn.Parameter) -> Tensor:
    """The gradient of a parameter in its memory order, on the CPU."""
    gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    if not is_dense(gradient) or gradient.stride() != parameter.stride():
        gradient = torch.empty_like(parameter).copy_(gradient)
    return flat_view(gradient).cpu()
