"""The step of a worker whose optimizer is at servers: that of all training, with other gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from hybridpar.optim.build import build_optimizer, load_optimizer_state
from hybridpar.pipeline.local_stage import AfterStep
from hybridpar.pipeline.step import StepInput, StepOutcome
from hybridpar.server.gradients import ServerGradients, Servers
from hybridpar.sync.options import SyncOptions
from hybridpar.sync.pieces import Gradients
from hybridpar.sync.reducer import Reducer
from hybridpar.train.engine import Engine, EngineParts


class ServedEngine(Engine):
    """Trains a model whose optimizer is at servers."""

    def __init__(self, parts: EngineParts, servers: Servers) -> None:
        self._servers = servers
        self._share = 1.0  # of this worker's mean loss in that of a step
        self._followed = 0  # steps that the moving average has seen
        #: Batches that this worker has computed.
        self.own_steps = 0
        #: On worker 0, of a checkpoint: the model, and the optimizer's state.
        self.saved: tuple[dict[str, Tensor], dict[str, Any]] = {}, {}
        super().__init__(parts)
        self.late = False  # the answer of the servers says whether a step counts

    @property
    def gradients(self) -> ServerGradients:
        """What pushes."""
        gradients = self.pipeline.stages[0].gradients
        assert isinstance(gradients, ServerGradients)
        return gradients

    def step(self, given: StepInput) -> StepOutcome:
        """Push the gradient of this worker's share of a batch, and take the weights that come for it."""
        whole = given.global_samples if self._servers.barrier else None
        given = replace(given, global_samples=whole or given.samples)
        self._share = given.samples / (given.global_samples or 1)
        self.gradients.given = given
        self.own_steps += 1
        return super().step(given)

    def recover(self, steps: int) -> int:
        """Steps are those of the servers, of which this worker's are a part."""
        super().recover(steps)
        return steps

    def go_on_from(self, step: int) -> None:
        """Number of the last step that servers have done."""
        super().go_on_from(step)
        self._followed = self.own_steps = step

    def follow(self, step: int, *, counts: bool = True) -> None:
        """Move the average towards the weights of now, for each step that the servers have done since last time."""
        if counts or not self._servers.barrier:
            for number in range(self._followed + 1, step + 1):
                for average in self.averages:
                    average.update(number)
        self._followed = step

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
        """What belongs to this worker: its position in the data, what its codecs left out, and its loss scale."""
        links, scale = self._servers.links, self.loss_scale_state()
        return {"own_steps": self.own_steps, "codecs": links.coder_states(), "loss_scale": scale}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned; of a run without servers there is nothing."""
        if "own_steps" not in state:
            return
        self.own_steps = int(state["own_steps"])
        self._servers.links.load_coders(state["codecs"])
        if not self._servers.barrier and state["loss_scale"] is not None and self.loss_scales:
            self.load_loss_scale_state(state["loss_scale"])

    def _sync_options(self) -> SyncOptions:
        return replace(super()._sync_options(), clip_norm=None, pool_batch_norm=False)

    def _make_reducer(self, *given: Any, **options: Any) -> Reducer:
        def loss() -> float:
            total = self.pipeline.stages[0].run.loss_sum
            return 0.0 if total is None else float(total) / self._share

        return ServerGradients(*given, **options, model=self.model, servers=self._servers, loss=loss)

    def _step_of(self, module: nn.Module) -> Callable[[float | None, Tensor | None, Gradients | None], None]:
        return lambda factor, commit, unwritten: None

    def _after_step_of(self, module: nn.Module) -> AfterStep:
        super()._after_step_of(module)

        def follow(_: int, commit: bool | Tensor) -> None:
            self.follow(self.gradients.answer.step, counts=bool(commit))
            for scale in self.loss_scales:
                scale.update(commit)

        return follow
