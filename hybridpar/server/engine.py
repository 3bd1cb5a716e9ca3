"""The step of a worker whose optimizer is at servers: that of all training, with other gradients.

A worker computes on the weights that came last. What it pushes when the backward pass is over is, with a barrier, its
part of the gradient of the whole batch, so that the parts add up to what a single process would have computed, and
otherwise the mean gradient of its minibatch. The servers run the optimizer; their answer says whether the step counts,
and brings the weights of the next step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from hybridpar.comm.transport import flat_view, is_dense
from hybridpar.lanes import Lane
from hybridpar.optim.build import build_optimizer, load_optimizer_state
from hybridpar.pipeline.step import StepOutcome, StepRequest, StepValues
from hybridpar.server.link import Servers
from hybridpar.server.stripes import flat_buffers, piece_views, put_buffers, trained_parameters
from hybridpar.server.wire import Gradient, Weights
from hybridpar.sync.figures import SyncFigures
from hybridpar.sync.pieces import Gradients
from hybridpar.sync.stage_gradients import StageGradients, StepGradients, SyncOptions
from hybridpar.train.engine import Engine, EngineParts


class ServerGradients(StageGradients):
    """Pushes the gradients of a step, and instead of an optimizer's pass puts the weights that come into the model."""

    #: What the step under way is to do.
    given: StepRequest
    #: Of shard 0, to the last push.
    answer: Weights

    def __init__(
        self, *given: Any, measure: bool, model: nn.Module, servers: Servers, loss: Callable[[], float]
    ) -> None:
        # Without a barrier each gradient is clipped by its norm; else servers clip the sum.
        self._clips = servers.clipping.by_norm and not servers.barrier
        super().__init__(*given, measure=measure or self._clips)
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
        for name, parameter in self._trained.items():
            arrived = self._servers.host[name]
            if parameter.data_ptr() != arrived.data_ptr():
                parameter.copy_(arrived, non_blocking=True)

    def close_step(self) -> None:
        """A step that was rolled back has put back statistics, too."""
        super().close_step()
        self._take_statistics()

    def _take_statistics(self) -> None:
        statistics = self._servers.links[0].statistics
        if statistics.numel():
            put_buffers(self._model, statistics)

    def _push(self, squares: float, loss: float, sound: bool) -> Weights:
        """Push the gradients to all servers."""
        servers, given = self._servers, self.given
        common = Gradient(
            learner=servers.worker,
            sequence=0,
            clock=0,
            weight=servers.clipping.factor(squares) if self._clips else 1.0,
            rate=given.rate_factor,
            samples=given.samples,
            loss=loss,
            sound=sound,
            pieces=[],
            stop=given.stop,
            save=given.save,
        )
        missing = {name for name, parameter in self._trained.items() if parameter.grad is None}
        flat = {name: _flat_gradient(parameter) for name, parameter in self._trained.items()}
        pushes = []
        for stripe in servers.stripes:
            unused = frozenset(n for n, piece in enumerate(stripe.pieces) if piece.name in missing)
            pushes.append(replace(common, unused=unused))
        pushes[0] = replace(pushes[0], statistics=flat_buffers(self._model), heard=servers.heard)
        return servers.push(pushes, [piece_views(stripe, flat) for stripe in servers.stripes])


class ServedOutcome(StepOutcome):
    """What came of a step of this worker, and of its push."""

    def __init__(self, step: StepOutcome, gradients: ServerGradients, traffic: tuple[int, int]) -> None:
        self._step, self._answer = step, gradients.answer
        self.exposed_sync_ms = gradients.exposed_ms
        self.bytes_sent, self.bytes_pulled = traffic

    @property
    def bad_parameter(self) -> str | None:
        """A parameter whose gradient was not finite."""
        return self._step.bad_parameter

    @property
    def sync(self) -> SyncFigures:
        """Nothing is sent to other workers."""
        return self._step.sync

    @property
    def values(self) -> StepValues:
        """What this worker knows of its step; whether any worker asked to stop or, if all are in step, to save."""
        values = self._step.values
        return values._replace(stop=float(self._answer.stop), save=float(self._answer.save or values.save > 0))


class ServedEngine(Engine):
    """Trains a model whose optimizer is at servers."""

    def __init__(self, parts: EngineParts, servers: Servers) -> None:
        self._servers = servers
        self._share = 1.0  # of this worker's mean loss in that of a step
        #: On worker 0, of a checkpoint: the model, and the optimizer's state.
        self.saved: tuple[dict[str, Tensor], dict[str, Any]] = {}, {}
        super().__init__(replace(parts, optimizer=_no_optimizer))
        self.late = False  # the answer of the servers says whether a step counts

    @property
    def gradients(self) -> ServerGradients:
        """What pushes."""
        gradients = self.pipeline.stages[0].gradients
        assert isinstance(gradients, ServerGradients)
        return gradients

    def step(self, given: StepRequest) -> StepOutcome:
        """Push the gradient of this worker's share of a batch, and take the weights that come for it."""
        in_step = given.global_samples if self._servers.barrier else None
        given = replace(given, global_samples=in_step or given.samples)
        self._share = given.samples / (given.global_samples or 1)
        self.gradients.given = given
        before = self._servers.traffic
        step = super().step(given)
        sent, pulled = (now - then for now, then in zip(self._servers.traffic, before, strict=True))
        return ServedOutcome(step, self.gradients, (sent, pulled))

    def recover(self, steps: int) -> int:
        """Steps are those of the servers, of which this worker's are a part."""
        super().recover(steps)
        return steps

    def model_state(self) -> dict[str, Tensor]:
        """The model as the shards have it, on worker 0."""
        return self.saved[0]

    def optimizer_state(self) -> dict[str, Any]:
        """State of the shards' optimizers by parameter name, on worker 0."""
        return self.saved[1]

    def load_optimizer_state(self, saved: Mapping[str, Any]) -> None:
        """Have worker 0 hold state for the shards; that of another kind of optimizer is refused."""
        if self._servers.worker == 0:
            load_optimizer_state(build_optimizer(self.model, self._config), self.model, dict(saved))
            self.saved = {}, dict(saved)

    def state_dict(self) -> dict[str, Any]:
        """What belongs to this worker: what its codecs left out."""
        return {"pushed": {k: v for link in self._servers.links for k, v in link.encoder.state_dict().items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned, as far as it is of the same pieces; a run without servers has nothing."""
        for link in self._servers.links:
            link.encoder.load_state_dict(state.get("pushed", {}))

    def _sync_options(self) -> SyncOptions:
        return replace(super()._sync_options(), clip_norm=None, pool_batch_norm=False)

    def _make_gradients(
        self, parameters: Mapping[str, nn.Parameter], compute: Lane, *, measure: bool
    ) -> StageGradients:
        def loss() -> float:
            total = self.pipeline.stages[0].run.loss_sum
            return 0.0 if total is None else float(total) / self._share

        servers = self._servers
        return ServerGradients(parameters, compute, measure=measure, model=self.model, servers=servers, loss=loss)

    def _step_of(self, module: nn.Module) -> Callable[[float | None, Tensor | None, Gradients | None], None]:
        return lambda factor, commit, unwritten: None


def _no_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    raise AssertionError("servers run the optimizer")


@torch.no_grad()
def _flat_gradient(parameter: nn.Parameter) -> Tensor:
    """The gradient of a parameter in its memory order, on the CPU."""
    gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    if not is_dense(gradient) or gradient.stride() != parameter.stride():
        gradient = torch.empty_like(parameter).copy_(gradient)
    return flat_view(gradient).cpu()
