"""Why: plain data parallelism, and one worker alone, need no lanes for computing: the host runs the whole model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hybridpar.comm.replicate import average_buffers
from hybridpar.comm.world import World
from hybridpar.config import TrainConfig
from hybridpar.lanes import Lanes
from hybridpar.models import autocast
from hybridpar.optim.adagrad_sgd import AdaGradSGD
from hybridpar.optim.build import Rates, fill_momentum, load_optimizer_state, optimizer_state, scaled_options
from hybridpar.partition.profile import measure_backward_ms
from hybridpar.pipeline.capture_rules import check_capturable
from hybridpar.pipeline.cuda_graph import WARM_UPS, WARM_UPS_WITH_PEERS, StepGraph
from hybridpar.sync.compression import Compression
from hybridpar.sync.compression_table import WireFormat
from hybridpar.sync.control import DecidedOutcome, StepOutcome
from hybridpar.sync.gradient_sync import GradientSync, SyncOptions
from hybridpar.sync.policy import check_compression


class ReplicaEngine:
    """Trains a model that every worker holds whole.

    Args:
        model: The model, on its device.
        optimizer: Its optimizer.
        loss: Mean loss of outputs and targets.
        config: Options.
        world: The workers, each a replica.
        lanes: Lanes of this worker.
        example: Inputs of one micro-batch, on the device, by which `auto` times the backward pass.
    """

    #: A step's outcome is known when `step` returns, unless the decision is left on the device.
    late: bool

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Callable[[Any, Tensor], Tensor],
        config: TrainConfig,
        world: World,
        lanes: Lanes,
        example: Tensor | None = None,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self._loss = loss
        self._config = config
        self._world = world
        self._lanes = lanes
        if config.cuda_graph:
            check_capturable(world.device, world, [optimizer], compiled=config.compile)
        self._rates = Rates(optimizer, world.device if config.cuda_graph else None)
        # What a step makes of the optimizer's momentum and weight decay; see `scaled_options`.
        self._momentum_power, self._decay_factor = 1.0, 1.0
        #: Steps are taken that will be undone; nothing is to be concluded from them.
        self.on_trial = False

        def time_backward() -> float:
            assert example is not None
            with self.autocast():
                return measure_backward_ms(model, (example,))

        parts = config.micro_batches if world.size > 1 else config.parts_per_step
        self.sync = GradientSync(
            *(model, world, lanes, sync_options(config), parts),
            time_backward=None if example is None else time_backward,
        )
        try:  # once all workers know that they were given the same policy
            check_compression(self.sync.options.policy, dict(model.named_parameters()), world.size, [optimizer])
        except BaseException:
            self.sync.close()
            raise
        self._forward: Callable[..., Any] = torch.compile(model) if config.compile else model
        # The optimizer can follow a decision that the host has not read; see GradScaler for the same protocol.
        fused = bool(getattr(optimizer, "_step_supports_amp_scaling", False))
        self._decides_on_device = fused and config.guard and (world.device.type == "cuda" or config.cuda_graph)
        # Without the guard every step counts, so nobody has to wait for a GPU to say so.
        self.late = self._decides_on_device or config.cuda_graph or (world.device.type == "cuda" and not config.guard)
        #: Replays steps, where that was asked for.
        self.graph: StepGraph[DecidedOutcome] | None = None
        if config.cuda_graph:
            warm_ups = WARM_UPS if world.size == 1 else WARM_UPS_WITH_PEERS
            self.graph = StepGraph(self, lanes, [optimizer], list(model.parameters()), warm_ups)

    def step(
        self,
        micro_batches: Sequence[tuple[Tensor, Tensor]],
        samples: int,
        global_samples: int | None,
        *,
        rate_factor: float,
        stop: bool,
        save: bool,
    ) -> StepOutcome:
        """Train on this worker's share of one global batch. See `hybridpar.train.trainer.Trainer.step`."""
        if global_samples is None and self._world.size == 1:
            global_samples = samples
        self.model.train()
        if self.graph is not None:
            issued = self.graph.step(
                micro_batches, samples, global_samples, rate_factor=rate_factor, stop=stop, save=save
            )
            if issued is not None:
                return DecidedOutcome.of(issued.values.clone(), 0.0, issued.bytes_sent, self._lanes)
        self.set_rates(rate_factor)
        self.sync.begin(samples, global_samples=global_samples, rate=rate_factor, stop=stop, save=save)
        self._run(micro_batches)
        outcome = self.sync.finish()
        self._commit(outcome)
        return outcome

    def issue(
        self, micro_batches: Sequence[tuple[Tensor, Tensor]], samples: int, global_samples: int, flags: Tensor
    ) -> DecidedOutcome:
        """See `hybridpar.pipeline.cuda_graph.Captured`."""
        self.sync.begin(samples, global_samples=global_samples, flags=flags)
        self._run(micro_batches)
        outcome = self.sync.finish(copy=False)
        self._commit(outcome)
        return outcome

    @property
    def staleness(self) -> float | None:
        """Updates made since the weights that a step's gradient was computed on; None where that is always none."""
        return None

    def refuse(self) -> None:
        """Tell the others that this worker cannot do the step that they begin."""
        if self._world.size > 1:
            self.sync.refuse()

    def set_rates(self, factor: float) -> None:
        """See `hybridpar.pipeline.cuda_graph.Captured`."""
        self._rates.set(factor)

    def set_batch_scale(self, samples: float) -> None:
        """Say how many samples the coming steps have, as a multiple of those that momentum was given for."""
        self._momentum_power = samples
        if isinstance(self.optimizer, AdaGradSGD):
            self.optimizer.momentum_power = samples
        for codec in self.codecs:
            codec.set_batch_scale(samples)

    def synchronize(self) -> None:
        """See `hybridpar.pipeline.cuda_graph.Captured`."""
        self._lanes.caller.synchronize()

    def give_up(self) -> None:
        """See `hybridpar.pipeline.cuda_graph.Captured`: the next step begins by forgetting this one."""

    def _run(self, micro_batches: Sequence[tuple[Tensor, Tensor]]) -> None:
        for index, (inputs, targets) in enumerate(micro_batches):
            self.sync.micro_batch(int(targets.shape[0]), last=index == len(micro_batches) - 1)
            with self.autocast():
                loss = self._loss(self._forward(inputs), targets)
            self.sync.forward_done(loss).backward()  # type: ignore[no-untyped-call]

    def autocast(self) -> Any:
        """The context in which the model runs."""
        return autocast(self._config.amp, self._world.device)

    def _commit(self, outcome: DecidedOutcome) -> None:
        fill_momentum(self.optimizer)
        with scaled_options(self.optimizer, self._momentum_power, self._decay_factor):
            if self._decides_on_device:
                step_if_committed(self.optimizer, outcome.commit)
            elif not self._config.guard or outcome.committed:
                self.optimizer.step()
        # Without the guard every step counts, which the host knows by itself.
        self.sync.end(outcome, decided_on_device=self._decides_on_device or not self._config.guard)

    @contextmanager
    def evaluating(self) -> Iterator[Callable[..., Any]]:
        """The model in evaluation mode, as something to call."""
        self.synchronize_buffers()
        self.model.eval()
        try:
            yield self._forward
        finally:
            self.model.train()

    def wait(self) -> None:
        """Steps are done when `step` returns, as far as the host can tell."""

    def synchronize_buffers(self) -> None:
        """Make the model what it is to be evaluated and saved as; a collective."""
        if self._config.batch_norm == "local":
            average_buffers(self.model, self._world)

    def model_state(self) -> dict[str, Tensor]:
        """The model as a checkpoint has it; a collective."""
        return dict(self.model.state_dict())

    def optimizer_state(self) -> dict[str, Any]:
        """State of the optimizer by parameter name."""
        return optimizer_state(self.optimizer, self.model)

    def load_optimizer_state(self, saved: Mapping[str, Any]) -> None:
        """Put saved state back by name."""
        if self.graph is not None:
            self.graph.forget()
        load_optimizer_state(self.optimizer, self.model, dict(saved))

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run on the same layout needs beyond model and optimizer."""
        return self.sync.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned, where it fits; also what a run with late gradients saved.

        Nothing stays of the steps before: what does not fit, as the state of a run on stages or with parameter servers,
        or is missing, begins anew.
        """
        state = state.get("sync", state)
        self.sync.load_state_dict(dict(state) if "order" in state else {})

    @property
    def codecs(self) -> list[Compression]:
        """What compresses gradients here, if anything does."""
        compression = self.sync.reducer.compression
        return [] if compression is None else [compression]

    def go_on_from(self, step: int) -> None:
        """Nothing here depends on the number of the step."""

    def bad_parameter(self, outcome: StepOutcome) -> str | None:
        """Name of the first parameter whose gradient is not finite."""
        return self.sync.first_bad_parameter()

    def wire_format(self) -> WireFormat:
        """What gradients travel as; a collective."""
        return WireFormat(self.sync.options.policy, self.sync.layer_bytes(), self.sync.choice)

    def close(self) -> None:
        """Remove all hooks. The model stays as trained."""
        self.sync.close()


def sync_options(config: TrainConfig) -> SyncOptions:
    """How gradients are synchronised, from the options of a run."""
    return SyncOptions(
        bucket_bytes=config.bucket_bytes,
        guard=config.guard,
        clip_norm=config.clip_norm,
        pool_batch_norm=config.batch_norm != "local",
        sync_batch_norm=config.batch_norm == "sync",
        codec=config.compress,
        fidelity=config.fidelity,
        seed=config.seed,
        hierarchy=config.hierarchy,
        delayed=config.double_buffer in ("delay", "half"),
    )


def step_if_committed(optimizer: torch.optim.Optimizer, commit: Tensor) -> None:
    """Step a fused optimizer where a 0-d tensor on the device says so, which the host has not read."""
    optimizer.found_inf = (1.0 - commit).float()  # type: ignore[attr-defined]
    optimizer.grad_scale = None  # type: ignore[attr-defined]
    optimizer.step()
