"""Why: a model that is trained as a pipeline answers the same calls as one that every worker holds whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hybridpar.comm.replicate import average_buffers
from hybridpar.comm.world import World
from hybridpar.config import TrainConfig
from hybridpar.errors import UsageError
from hybridpar.lanes import Lanes
from hybridpar.models import autocast
from hybridpar.optim.build import Rates, fill_momentum, load_optimizer_state, optimizer_state
from hybridpar.pipeline.capture_rules import check_capturable
from hybridpar.pipeline.cuda_graph import WARM_UPS, WARM_UPS_WITH_PEERS, StepGraph
from hybridpar.pipeline.engine import PipelineEngine
from hybridpar.pipeline.step import LateOutcome, StepState
from hybridpar.planner.stage_plan import StagePlan, pipeline_options
from hybridpar.sync.compression import Compression
from hybridpar.sync.compression_table import WireFormat
from hybridpar.sync.control import StepOutcome
from hybridpar.sync.gradient_sync import refused_by_others
from hybridpar.sync.policy import check_compression
from hybridpar.train.replica_engine import step_if_committed, sync_options

OptimizerFactory = Callable[[nn.Module], torch.optim.Optimizer]


class StageEngine:
    """Trains a model whose stages lie on lanes and workers.

    Args:
        model: The whole model, on its device.
        plan: Its stages and where they run.
        optimizer: Called with each stage that this worker trains.
        loss: Mean loss of outputs and targets.
        config: Options.
        world: The workers.
        lanes: Lanes of this worker.
    """

    #: A step may still be running when `step` returns.
    late = True

    def __init__(
        self,
        model: nn.Module,
        plan: StagePlan,
        optimizer: OptimizerFactory,
        loss: Callable[[Any, Tensor], Tensor],
        config: TrainConfig,
        world: World,
        lanes: Lanes,
    ) -> None:
        self.model = model
        self.plan = plan
        self._config = config
        self._world = world
        self._factory = optimizer
        self.optimizers: list[torch.optim.Optimizer] = []
        self._rates: list[Rates] = []
        #: Replays steps, where that was asked for.
        self.graph: StepGraph[StepState] | None = None
        self.pipeline = PipelineEngine(
            model,
            plan.stages,
            world,
            lanes,
            loss,
            self._make_optimizer,
            pipeline_options(plan, config, sync_options(config), lanes.device),
            config.micro_batches,
        )
        policy, names = self.pipeline.options.sync.policy, dict(model.named_parameters())
        try:
            check_compression(policy, names, self.pipeline.replicas, self.optimizers, tell=world.is_main)
        except BaseException:
            self.pipeline.close()
            raise
        if config.cuda_graph:
            self.graph = self._make_graph(lanes)

    def _make_graph(self, lanes: Lanes) -> StepGraph[StepState]:
        try:
            check_capturable(
                self._world.device,
                self._world,
                self.optimizers,
                positions=self.pipeline.positions,
                devices=self.plan.devices,
                random_stages=list(self.pipeline.random_stages),
                compiled=self._config.compile,
            )
        except BaseException:
            self.pipeline.close()
            raise
        parameters = [one for stage in self.pipeline.stages.values() for one in stage.module.parameters()]
        warm_ups = WARM_UPS if self._world.size == 1 else WARM_UPS_WITH_PEERS
        return StepGraph(self, lanes, self.optimizers, parameters, warm_ups)

    def _make_optimizer(self, stage: nn.Module) -> Callable[[float | None, Tensor | None], None] | None:
        if not any(True for _ in stage.parameters()):
            return None
        optimizer = self._factory(stage)
        own = {id(parameter) for parameter in stage.parameters()}
        if any(id(parameter) not in own for group in optimizer.param_groups for parameter in group["params"]):
            raise UsageError(
                "the optimizer of a stage holds parameters of other stages",
                "Each stage is stepped on its own, as soon as its gradients are there.",
                "Let the factory make the optimizer from the module that it is given, not from the whole model.",
            )
        self.optimizers.append(optimizer)
        rates = Rates(optimizer, self._world.device if self._config.cuda_graph else None)
        self._rates.append(rates)

        def step(factor: float | None, commit: Tensor | None) -> None:
            if factor is not None:
                rates.set(factor)
            fill_momentum(optimizer)
            if commit is None:
                optimizer.step()
            elif getattr(optimizer, "_step_supports_amp_scaling", False):
                step_if_committed(optimizer, commit)
            elif bool(commit):  # waits for the device: this optimizer has to be told
                optimizer.step()

        return step

    def step(
        self,
        micro_batches: Sequence[tuple[Tensor, Tensor]],
        samples: int,
        global_samples: int | None,
        *,
        rate_factor: float,
        stop: bool,
        save: bool,
    ) -> LateOutcome:
        """Issue a step on this replica's share of one global batch. See `hybridpar.train.trainer.Trainer.step`."""
        if global_samples is None:
            global_samples = self._all_samples(samples)
        if self.graph is not None:
            issued = self.graph.step(
                micro_batches, samples, global_samples, rate_factor=rate_factor, stop=stop, save=save
            )
            if issued is not None:
                return self.pipeline.adopt(issued)
        with autocast(self._config.amp, self._world.device):
            return self.pipeline.step(micro_batches, global_samples, rate_factor=rate_factor, stop=stop, save=save)

    def issue(
        self, micro_batches: Sequence[tuple[Tensor, Tensor]], samples: int, global_samples: int, flags: Tensor
    ) -> StepState:
        """See `hybridpar.pipeline.cuda_graph.Captured`."""
        with autocast(self._config.amp, self._world.device):
            return self.pipeline.issue(micro_batches, global_samples, flags)

    def refuse(self) -> None:
        """Tell the other replicas that this one cannot do the step that they begin."""
        self._all_samples(0)

    def set_rates(self, factor: float) -> None:
        """See `hybridpar.pipeline.cuda_graph.Captured`."""
        for rates in self._rates:
            rates.set(factor)

    def synchronize(self) -> None:
        """See `hybridpar.pipeline.cuda_graph.Captured`."""
        self.pipeline.wait()

    def give_up(self) -> None:
        """See `hybridpar.pipeline.cuda_graph.Captured`."""
        self.pipeline.give_up()

    def _all_samples(self, samples: int) -> int:
        """Samples of all replicas, where only each knows its own. Batches with `global_samples` spare this wait."""
        grid = self.pipeline.grid
        if grid is None or grid.replicas == 1:
            return samples
        # The step before may still add on the same group, from another thread.
        self.pipeline.wait()
        counts = [int(str(count)) for count in grid.replica_world.gather(samples)]
        if samples and 0 in counts:
            raise refused_by_others(counts.count(0))
        return sum(counts)

    def wait(self) -> None:
        """Wait until every step that was issued is done."""
        self.pipeline.wait()

    @contextmanager
    def evaluating(self) -> Iterator[Callable[..., Any]]:
        """The whole model in evaluation mode, on every worker; a collective."""
        self.synchronize_buffers()
        self.model.eval()
        try:
            yield self.pipeline.evaluate if self.plan.devices else self.model
        finally:
            self.model.train()

    def synchronize_buffers(self) -> None:
        """Make the model whole on every worker; a collective."""
        self.pipeline.wait()
        grid = self.pipeline.grid
        if self._config.batch_norm == "local" and grid is not None:
            for stage in self.pipeline.stages.values():
                average_buffers(stage.module, grid.replica_world)
        self.pipeline.collect()

    #: Gradients are those of the weights that they are applied to.
    staleness = None

    def model_state(self) -> dict[str, Tensor]:
        """The whole model as a checkpoint has it; `synchronize_buffers` makes it whole."""
        return dict(self.model.state_dict())

    def optimizer_state(self) -> dict[str, Any]:
        """State of all stages' optimizers by parameter name, on rank 0; a collective."""
        self.pipeline.wait()
        mine = [optimizer_state(optimizer, self.model) for optimizer in self.optimizers]
        parts = self.pipeline.gather_on_main(mine)
        states = [state for part in parts or [mine] for state in part]
        return {
            "kind": states[0]["kind"] if states else "none",
            "groups": [group for state in states for group in state["groups"]],
            "state": {name: values for state in states for name, values in state["state"].items()},
        }

    def load_optimizer_state(self, saved: Mapping[str, Any]) -> None:
        """Put saved state back by name, where this worker trains it."""
        self.pipeline.wait()
        if self.graph is not None:
            self.graph.forget()
        for optimizer in self.optimizers:
            own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
            names = {name for name, parameter in self.model.named_parameters() if id(parameter) in own}
            state = {name: values for name, values in saved["state"].items() if name in names}
            load_optimizer_state(optimizer, self.model, {**saved, "state": state})

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run on the same layout needs beyond model and optimizers."""
        return {"pipeline": self.pipeline.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned, where it fits; what does not, or is missing, begins anew."""
        self.pipeline.load_state_dict(state.get("pipeline", {}))

    @property
    def codecs(self) -> list[Compression]:
        """What compresses gradients here, for each of this worker's stages that has replicas."""
        reducers = [stage.reducer for stage in self.pipeline.stages.values()]
        return [one.compression for one in reducers if one is not None and one.compression is not None]

    def go_on_from(self, step: int) -> None:
        """Number of the last step, on which dropout depends."""
        self.pipeline.set_steps(step)

    def bad_parameter(self, outcome: StepOutcome) -> str | None:
        """Name of a parameter of this worker's stages whose gradient was not finite."""
        return outcome.bad_parameter if isinstance(outcome, LateOutcome) else None

    def wire_format(self) -> WireFormat:
        """What gradients travel as; a collective."""
        return WireFormat(self.pipeline.options.sync.policy, self.pipeline.layer_bytes(), self.pipeline.choice)

    def close(self) -> None:
        """Remove all hooks and leave the grid. The model stays as trained."""
        self.pipeline.close()
