"""Gradients that go to parameter servers: what takes the place of the sum over replicas, and of the optimizer.

The step is that of `hybridpar.train.engine`. A worker computes on the weights that it was given last. What it pushes
when the backward pass is over is, with a barrier, its part of the gradient of the whole batch, so that the parts add up
to what one process would have computed, and otherwise the mean gradient of its minibatch. The servers run the
optimizer; their answer says whether the step counts, and brings the weights of the next one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from hybridpar.comm.transport import flat_view, is_dense
from hybridpar.lanes import Lane
from hybridpar.server.clipping import Clipping
from hybridpar.server.link import Links
from hybridpar.server.running import flat_buffers, put_buffers
from hybridpar.server.stripes import piece_views, trained_parameters
from hybridpar.server.wire import Gradient, Weights
from hybridpar.sync.reducer import Flight, LocalGradients


@dataclass(frozen=True)
class PushPlan:
    """What the coming push says beside its gradient.

    Attributes:
        samples: Samples that it is of.
        rate: Learning rate, as a fraction of its peak.
        stop: Whether all workers are to stop.
        save: Whether all workers are to write a checkpoint.
        lowered: From worker 0: what learning rates are multiplied with; None for no news.
    """

    samples: int
    rate: float = 1.0
    stop: bool = False
    save: bool = False
    lowered: float | None = None


class ServedModel:
    """A model whose parameters are at servers. On a GPU weights arrive in memory of the host, and are copied."""

    def __init__(self, model: nn.Module, links: Links, host: Mapping[str, Tensor], *, barrier: bool) -> None:
        self.model, self.links, self.host, self.barrier = model, links, host, barrier
        self._parameters = trained_parameters(model)

    @torch.no_grad()
    def take_weights(self) -> None:
        """Put into the model what the servers sent last."""
        self.take_statistics()
        for name, parameter in self._parameters.items():
            if parameter.data_ptr() != self.host[name].data_ptr():
                parameter.copy_(self.host[name], non_blocking=True)

    def take_statistics(self) -> None:
        """Put the running statistics that came last into the model."""
        if self.links.links[0].statistics.numel():
            put_buffers(self.model, self.links.links[0].statistics)

    def push(self, common: Gradient) -> Weights:
        """Push the gradients of the model; the answer of shard 0."""
        missing = {name for name, parameter in self._parameters.items() if parameter.grad is None}
        flat = {name: _flat_gradient(parameter) for name, parameter in self._parameters.items()}
        pushes = []
        for number, link in enumerate(self.links.links):
            unused = frozenset(n for n, piece in enumerate(link.stripe.pieces) if piece.name in missing)
            statistics = torch.empty(0) if number else flat_buffers(self.model)
            pushes.append(replace(common, unused=unused, statistics=statistics))
        return self.links.push(pushes, [piece_views(link.stripe, flat) for link in self.links.links])[0]


class ServerGradients(LocalGradients):
    """Pushes the gradients of a step, and in place of an optimizer's pass puts the weights that come into the model.

    `loss` gives the mean loss of this worker's samples once the last backward pass is done.
    """

    plan: PushPlan
    #: Of shard 0, to the last push.
    answer: Weights

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        compute: Lane,
        measure: bool,
        served: ServedModel,
        worker: int,
        clipping: Clipping,
        loss: Callable[[], float],
    ) -> None:
        # Without a barrier each gradient is clipped by its norm; else servers clip the sum.
        self._clipping = clipping if clipping.by_norm and not served.barrier else None
        super().__init__(parameters, compute, measure or self._clipping is not None)
        self._served, self._worker, self._loss, self._guard = served, worker, loss, measure
        #: Time from the last backward pass to the weights.
        self.exposed_ms = 0.0

    def measure(self, flight: Flight) -> None:
        """Push the gradients; their squares are finite exactly where the step counts."""
        super().measure(flight)
        plan, squares, loss = self.plan, float(flight.squares.sum()), self._loss()
        sound = not self._guard or (math.isfinite(squares) and math.isfinite(loss))
        began = time.perf_counter()
        self.answer = self._served.push(
            Gradient(
                learner=self._worker,
                sequence=0,
                clock=0,
                weight=1.0 if self._served.barrier else None,
                rate=plan.rate,
                samples=plan.samples,
                loss=loss,
                sound=sound,
                factor=1.0 if self._clipping is None else self._clipping.factor(squares),
                pieces=[],
                stop=plan.stop,
                save=plan.save,
                lowered=plan.lowered,
            )
        )
        self.exposed_ms = (time.perf_counter() - began) * 1e3
        counts = self.answer.applied if self._served.barrier else sound
        flight.squares = torch.full_like(flight.squares.sum(), squares if counts else math.nan)

    def place_gradients(self) -> None:
        """The weights are there, and the gradients have done their part."""
        self._served.take_weights()

    def close_step(self) -> None:
        """A step that was rolled back has put back statistics, too."""
        self._served.take_statistics()


@torch.no_grad()
def _flat_gradient(parameter: nn.Parameter) -> Tensor:
    """The gradient of a parameter in its memory order, on the CPU."""
    gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    if not is_dense(gradient) or gradient.stride() != parameter.stride():
        gradient = torch.empty_like(parameter).copy_(gradient)
    return flat_view(gradient).cpu()
