"""A training step, from batch to optimizer.

`Engine.step` is the step of every model. It hands a batch's micro-batches to the pipeline, which runs the program of
the schedule: forward and backward passes of each stage on its lane, transfers between stages, sums of gradients over
replicas while the backward pass still computes, then the agreement of all workers on the step, and each stage's
optimizer step or rollback. A model that is not cut is a pipeline of one stage, whose passes the calling thread runs.

    step -> Executor.issue -> StageRun.forward, StageRun.backward   (F, B: passes)
                           -> Reducer                               (SYNC: sums of gradients)
                           -> Agreement                             (REPORT, DECIDE: does the step count)
                           -> LocalStage.apply                      (STEP: clip, step or roll back)
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from hybridpar.comm.world import World
from hybridpar.compress.policy import check_compression
from hybridpar.config import TrainConfig
from hybridpar.errors import UsageError, refuse
from hybridpar.lanes import Lane, Lanes
from hybridpar.models import autocast
from hybridpar.models.state import same_modes
from hybridpar.models.state_dicts import copy_of, is_extra, load_values
from hybridpar.optim.build import Rates, fill_momentum, load_optimizer_state, optimizer_state, part_of
from hybridpar.pipeline.engine import PipelineEngine
from hybridpar.pipeline.local_stage import AfterStep, OptimizerStep
from hybridpar.pipeline.stage_module import StageModule, WholeModel
from hybridpar.pipeline.step import StepOutcome, StepRequest, whole_options
from hybridpar.plan import ResolvedPlan
from hybridpar.sync.batchnorm import is_expanded
from hybridpar.sync.stage_gradients import StageGradients, SyncOptions
from hybridpar.train.stages import TakenValues, check_modes, modes_of_graphs, pipeline_options

if TYPE_CHECKING:
    from hybridpar.optim.ema import ModelAverage
    from hybridpar.optim.loss_scale import LossScale
    from hybridpar.partition.stage import Stage
    from hybridpar.pipeline.cuda_graph import StepGraph
    from hybridpar.sync.compression import Compression
    from hybridpar.sync.figures import WireFormat
    from hybridpar.sync.pieces import Gradients

_log = logging.getLogger(__name__)

OptimizerFactory = Callable[[nn.Module], torch.optim.Optimizer]
Loss = Callable[[Any, Tensor], Tensor]


@dataclass(frozen=True)
class EngineParts:
    """What an engine is made from.

    Attributes:
        model: The whole model, on its device.
        plan: The plan of the run.
        stages: The stages of the model, as the plan cuts it; None where it is not cut.
        optimizer: Called once, with the model.
        loss: Mean loss of outputs and targets.
        config: Options, without those that the plan says, and without a recipe.
        world: The workers.
        lanes: Lanes of this worker.
        example: Inputs of a micro-batch, on the device: the plan's times of stages are in proportion to its samples.
        own_only: This worker holds the tensors of its own stages only; those of others are on the meta device.
    """

    model: nn.Module
    plan: ResolvedPlan
    stages: Sequence[Stage] | None
    optimizer: OptimizerFactory
    loss: Loss
    config: TrainConfig
    world: World
    lanes: Lanes
    example: Tensor | None = None
    own_only: bool = False


class Engine:
    """Trains a model on one worker, together with the others."""

    def __init__(self, parts: EngineParts) -> None:
        model, plan, config, world = parts.model, parts.plan, parts.config, parts.world
        _check_complex(model, plan, config)
        if world.size > 1:
            _check_expanded(model)
        self.model = model
        self.own_only = parts.own_only
        self.plan = plan
        self._modes = modes_of_graphs(model, parts.stages or ())
        self._taken = TakenValues(model, parts.stages) if parts.stages else None
        self._config, self._world, self._lanes = config, world, parts.lanes
        self._factory = parts.optimizer
        self._given: torch.optim.Optimizer | None = None  # what the factory made
        #: Optimizers that are given no more parameters, and how many groups they have.
        self._closed_to_groups: WeakKeyDictionary[torch.optim.Optimizer, int] = WeakKeyDictionary()
        self.optimizers: list[torch.optim.Optimizer] = []
        self.averages: list[ModelAverage] = []
        self.loss_scales: list[LossScale] = []
        self._rates: list[Rates] = []
        self._captures = config.cuda_graph == "on" or (config.cuda_graph == "auto" and self._may_capture(parts))
        try:
            self.pipeline = self._open_pipeline(parts)
        except BaseException:
            self._open_to_groups()
            raise
        self._shares_first = self.pipeline.replicas > 1
        # The host cannot do a first forward pass meanwhile where that needs others, who may have refused the step.
        self._counts_first = plan.is_staged or plan.sync.batch_norm == "sync"
        self._given = None  # it may hold state of parameters that others step
        if self.loss_scales:
            for stage, scale in zip(self.pipeline.stages.values(), self.loss_scales, strict=True):
                stage.run.loss_scale = scale.value
                if stage.reducer is None:
                    stage.gradients.unscale = scale.inverse  # all at once, when they are measured
                else:
                    scale.attach(stage.module)
        policy, parameters = self.pipeline.options.sync.policy, dict(model.named_parameters())
        try:  # once all workers know that they were given the same policy
            check_compression(policy, parameters, self.pipeline.replicas, self.optimizers, tell=world.is_main)
            self.graph = self._make_graph() if self._captures else None
        except BaseException:
            self._open_to_groups()
            self.pipeline.close()
            raise
        # Without the guard every step counts, so the host need not wait for a GPU's decision.
        fused = all(getattr(optimizer, "_step_supports_amp_scaling", False) for optimizer in self.optimizers)
        on_gpu = world.device.type == "cuda" and (fused or not config.guard)
        self.late = plan.is_staged or self._captures or on_gpu

    def _open_pipeline(self, parts: EngineParts) -> PipelineEngine:
        config, plan, world = parts.config, parts.plan, parts.world
        micro_batches = plan.pipeline.micro_batches
        if plan.layout.replicas == 1:
            micro_batches = config.parts_per_step(micro_batches)  # one step of both halves
        stages: Sequence[StageModule] = [WholeModel(parts.model)] if parts.stages is None else parts.stages
        common: dict[str, Any] = {
            "compile": config.compile,
            "capture": self._captures,
            "record": config.timeline is not None or config.shares.strip() == "auto",
            "sync": self._sync_options(),
            "seed": config.seed,
            "own_only": parts.own_only,
        }
        if parts.example is None:
            options = whole_options(world.size, **common)
        else:
            options = pipeline_options(plan, parts.example, world, self._lanes.device, micro_batches, **common)
        return PipelineEngine(
            *(parts.model, stages, world, self._lanes, parts.loss, self._step_of, options, micro_batches),
            context=nullcontext if config.amp == "none" else partial(autocast, config.amp, world.device),
            after_step=self._after_step_of if config.model_ema is not None or config.amp == "fp16" else None,
            make_gradients=self._make_gradients,
        )

    def _make_gradients(
        self, parameters: Mapping[str, nn.Parameter], compute: Lane, *, measure: bool
    ) -> StageGradients:
        """What is done with the gradients of a stage without replicas."""
        return StageGradients(parameters, compute, measure=measure)

    def _sync_options(self) -> SyncOptions:
        """How gradients are synchronised."""
        config, sync, clipping = self._config, self.plan.sync, self._config.clipping
        limit, mode = (None, "norm") if clipping is None else (clipping.limit, clipping.mode)
        last = tuple(name for name, _ in self.model.named_parameters())[-2:]
        return SyncOptions(
            bucket_bytes=sync.bucket_bytes,
            guard=config.guard,
            clip_norm=limit,
            clip_mode=mode,
            not_clipped=last if mode == "agc" else (),
            pool_batch_norm=sync.batch_norm != "local",
            sync_batch_norm=sync.batch_norm == "sync",
            codec=sync.codec,
            seed=config.seed,
            hierarchy=config.exchange.hierarchy,
            delayed=config.late != "off",
            shard_optimizer=sync.shard_optimizer,
        )

    def _may_capture(self, parts: EngineParts) -> bool:
        """Whether steps may be captured, as far as it is known before the model is cut; says why not."""
        if self._world.device.type != "cuda":
            return False
        plan, kinds = parts.plan, ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
        hooks = [module for module in parts.model.modules() for kind in kinds if getattr(module, kind)]
        ruled_out = {
            "several workers, where the first replay is not compared": self._world.size > 1,
            f"--compress {plan.sync.codec}": plan.sync.codec != "none",
            "--shard-optimizer": plan.sync.shard_optimizer,
            "--offload": plan.pipeline.offload,
            "a hook of a module, which a replay would not call": hooks,
        }
        reason = next(filter(ruled_out.get, ruled_out), None)
        try:
            replace(parts.config, cuda_graph="on").check_conflicts()
        except UsageError as error:
            reason = error.what
        return reason is None or self._without_graph(reason)

    def _without_graph(self, reason: str) -> Literal[False]:
        if self._world.is_main:
            _log.warning("no CUDA graph of the training step: %s; its kernels are launched one by one", reason)
        return False

    def _make_graph(self) -> StepGraph | None:
        from hybridpar.pipeline.cuda_graph import StepGraph, why_not_captured

        reason = why_not_captured(
            self._world.device,
            self._world,
            self.optimizers,
            positions=self.plan.layout.positions,
            random_stages=list(self.pipeline.random_stages),
            compiled=self._config.compile,
        )
        if reason is not None and self._config.cuda_graph == "on":
            raise refuse("--cuda-graph on", *reason)
        if reason is not None:
            self._captures = self._without_graph(reason[0])
            return None
        modules = [stage.module for stage in self.pipeline.stages.values()]
        alone = self._world.size == 1
        return StepGraph(self.pipeline.executor, self.set_rates, self._lanes, self.optimizers, modules, alone)

    def _step_of(self, module: nn.Module) -> OptimizerStep:
        """What steps the parameters of a stage or of the model."""
        optimizer = self._make_optimizer(module)
        rates = Rates(optimizer, self._world.device if self._captures else None)
        self._rates.append(rates)
        if not optimizer.param_groups:
            return lambda factor, commit, unwritten: None if unwritten is None else unwritten.materialise()

        def step(factor: float | None, commit: Tensor | None, unwritten: Gradients | None) -> Tensor | None:
            if factor is not None:
                rates.set(factor)
            squares = None
            if unwritten is not None:
                from hybridpar.sync.pieces import can_step, step_in_pieces

                if can_step(optimizer):
                    fill_momentum(optimizer)
                    return step_in_pieces(optimizer, unwritten)
                squares = unwritten.materialise()
            fill_momentum(optimizer)
            if commit is not None and getattr(optimizer, "_step_supports_amp_scaling", False):
                fused: Any = optimizer  # it reads on the device whether to step
                stays = torch.empty((), dtype=torch.float32, device=commit.device)
                fused.found_inf, fused.grad_scale, commit = torch.logical_not(commit, out=stays), None, None
            if commit is None or bool(commit):  # waits for the device: another optimizer has to be told
                optimizer.step()
            return squares

        return step

    def _make_optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        """The optimizer of what this worker owns of a stage or of the model; without groups if nothing is stepped."""
        if self._given is None:
            self._given = self._factory(self.model)
            known = {id(parameter) for parameter in self.model.parameters()}
            if any(id(param) not in known for group in self._given.param_groups for param in group["params"]):
                raise UsageError(
                    "the optimizer holds parameters that the model does not",
                    "Gradients are synchronised for the parameters of the model.",
                    "Make the optimizer from the model that the factory is given.",
                )
            vars(self._given)["add_param_group"] = _refuse_more
            self._closed_to_groups[self._given] = len(self._given.param_groups)
        optimizer, layout = self._given, self.plan.layout
        is_sharded = self.plan.sync.shard_optimizer and layout.replicas > 1
        if self.plan.is_staged or is_sharded:
            _check_divisible(optimizer, "--shard-optimizer" if is_sharded else "a pipeline")
            params = {id(parameter) for parameter in module.parameters()}
            if is_sharded:
                from hybridpar.sync.shards import owned

                params = owned(module, layout.replica_of(self._world.rank), layout.replicas)
            optimizer = part_of(optimizer, params)  # which refuses more groups as the one given does
            self._closed_to_groups[optimizer] = len(optimizer.param_groups)
        self.optimizers.append(optimizer)
        return optimizer

    def _after_step_of(self, module: nn.Module) -> AfterStep:
        """What keeps the moving average and the loss scale of a stage or of the model."""
        config = self._config
        average = scale = None
        if (ema := config.ema) is not None:
            from hybridpar.optim.ema import ModelAverage

            average = ModelAverage(module, ema.decay, warmup=ema.warmup, every=ema.every)
            self.averages.append(average)
        if config.amp == "fp16":
            from hybridpar.optim.loss_scale import LossScale

            scale = LossScale(next((param.device for param in module.parameters()), self._world.device))
            self.loss_scales.append(scale)

        def follow(step: int, commit: bool | Tensor) -> None:
            if average is not None and commit is not False:
                average.update(step, commit if isinstance(commit, Tensor) else None)
            if scale is not None:
                scale.update(commit)

        return follow

    # ------------------------------------------------------------------ a step

    def step(self, request: StepRequest) -> StepOutcome:
        """Train on this replica's share of one global batch."""
        if self._modes:
            check_modes(self._modes)
        if self._taken is not None:
            self._taken.check()
        for optimizer, groups in self._closed_to_groups.items():
            if len(optimizer.param_groups) != groups:  # appended to the list
                _refuse_more()
        executor, total = self.pipeline.executor, request.global_samples
        if total is None and self.pipeline.replicas == 1:
            total = request.weight
        if self.graph is not None and not self._shares_first and request.count is None:
            issued = self.graph.step(request, total)
            if issued is not None:
                return executor.adopt(issued)
        counted: float | Callable[[], float] | None = total
        if counted is None:
            counted = executor.count_samples(request.weight)
            # Lanes cannot wait for the sum. The host can: it runs a first forward pass meanwhile. Without samples there
            # is no pass that would ask.
            if self._counts_first or not request.micro_batches:
                counted = counted()
        outcome = executor.step(request, counted)
        if self._shares_first:  # its forward passes may have registered buffers, which stay if it counts
            self.pipeline.wait()
            self._shares_first = not outcome.committed
            for stage in self.pipeline.stages.values():
                stage.replica_buffers.share(new=True)
        return outcome

    def refuse(self) -> None:
        """Tell the other replicas that this one cannot do the step that they begin."""
        counted = self.pipeline.executor.count_samples(0, refusing=True)
        with suppress(UsageError):  # this worker's own error is the one to raise
            counted()

    def set_rates(self, factor: float) -> None:
        """Set the learning rates to `factor` times their peaks, on the device where steps are captured."""
        for rates in self._rates:
            rates.set(factor)

    def set_batch_scale(self, samples: float, *, decay: float = 1.0) -> None:
        """Say how many samples the coming steps have, as a multiple of those that momentum was given for."""
        for rates in self._rates:
            rates.scale(samples, decay)
        for codec in self.codecs:
            codec.set_batch_scale(samples)

    def recover(self, steps: int) -> int:
        """How many of these steps count, after an error that has ended some; see `Executor.recover`."""
        self.pipeline.executor.recover()
        return min(steps, self.pipeline.executor.steps)

    def wait(self) -> None:
        """Wait until every step that was issued is done, as far as the host can tell."""
        self.pipeline.executor.wait()

    def bad_parameter(self, outcome: StepOutcome) -> str | None:
        """Name of a parameter of this worker's stages whose gradient was not finite."""
        return outcome.bad_parameter or (None if self.plan.is_staged else self.pipeline.stages[0].gradients.first_bad())

    # ----------------------------------------------------------- between steps

    @contextmanager
    def evaluating(self) -> Iterator[Callable[..., Any]]:
        """The whole model in evaluation mode, as something to call, on every worker; a collective.

        With `own_only` the calls are collectives of the workers of a replica; the last stage's returns the output, and
        those of others None.
        """
        self.synchronize_buffers()
        with same_modes(self.model):
            self.model.eval()
            self.pipeline.use_graphs(training=False)
            whole = self.model if self.plan.is_staged else self.pipeline.forwards[0]
            try:
                yield self.pipeline.evaluate if self.own_only else whole
            finally:
                self.pipeline.use_graphs(training=True)
        for stage in self.pipeline.stages.values():
            stage.replica_buffers.share()  # where a module counts in evaluation mode, too

    def synchronize_buffers(self) -> None:
        """Make the model whole on every worker; a collective."""
        self.pipeline.wait()
        for stage in self.pipeline.stages.values():
            stage.replica_buffers.share()
            if self.plan.sync.batch_norm == "local":
                from hybridpar.sync.statistics import average_statistics

                average_statistics(stage.module, stage.replicas)
        self.pipeline.collect()

    def collect(self) -> None:
        """Make the model whole on every worker, with what each trains at present; a collective."""
        self.synchronize_buffers()

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Inside, `model` holds the moving average, once `synchronize_buffers` has made it whole; a collective."""
        self.pipeline.wait()
        before = copy_of(self.held_state())
        for average in self.averages:
            average.copy_to_module()
        try:
            yield
        finally:
            load_values(self.model, before)

    @property
    def codecs(self) -> list[Compression]:
        """What compresses gradients here, for each of this worker's stages that has replicas."""
        reducers = [stage.gradients for stage in self.pipeline.stages.values()]
        return [reducer.compression for reducer in reducers if reducer.compression is not None]

    def wire_format(self) -> WireFormat:
        """What gradients are sent as; a collective."""
        from hybridpar.sync.figures import WireFormat

        return WireFormat(self.pipeline.options.sync.policy, self.pipeline.layer_bytes())

    # ------------------------------------------------------------------- state

    def model_state(self) -> dict[str, Any]:
        """What this worker holds of the model, as a checkpoint has it; `synchronize_buffers` makes it whole."""
        return self.held_state()

    @property
    def is_saved(self) -> bool:
        """Whether checkpoints have what this worker trains: of equal replicas they have the first."""
        return self.plan.sync.shard_optimizer or self.plan.layout.replica_of(self._world.job_rank) == 0

    @property
    def stepped(self) -> set[str]:
        """Names of the parameters that this worker steps."""
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        params = {id(param) for group in groups for param in group["params"]}
        return {name for name, param in self.model.named_parameters() if id(param) in params}

    def held_state(self) -> dict[str, Any]:
        """What this worker holds of the model's state: all of it, or that of its stages."""
        state = self.model.state_dict()
        return {name: value for name, value in state.items() if is_extra(name) or not value.is_meta}

    def average_state(self) -> dict[str, Tensor] | None:
        """The moving average of the whole model, on the CPU, as a checkpoint has it; a collective."""
        if self._config.model_ema is None:
            return None
        with self.averaged():
            self.synchronize_buffers()
            state = copy_of(self.held_state(), "cpu")
        self.load_average_state(state)  # buffers of BatchNorm may now be the mean over replicas
        return state

    def load_average_state(self, state: Mapping[str, Tensor]) -> None:
        """Put a saved average back, where this worker keeps it."""
        self.pipeline.wait()
        for average in self.averages:
            average.load_state_dict(state)

    def training_state(self) -> dict[str, Any]:
        """State of optimizers and loss scale, which is of use on any layout; a collective."""
        state: dict[str, Any] = {"optimizer": self.optimizer_state()}
        if self.loss_scales:  # the same everywhere
            state["loss_scale"] = self.loss_scales[0].state_dict()
        return state

    def load_training_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `training_state` returned, after `go_on_from`."""
        self.load_optimizer_state(state["optimizer"])
        for scale in self.loss_scales if "loss_scale" in state else ():
            scale.load_state_dict(state["loss_scale"])

    def optimizer_state(self) -> dict[str, Any]:
        """State of this worker's optimizers by parameter name."""
        self.pipeline.wait()
        states = [optimizer_state(optimizer, self.model) for optimizer in self.optimizers]
        return {
            "kind": states[0]["kind"],
            "groups": [group for state in states for group in state["groups"]],
            "state": {name: values for state in states for name, values in state["state"].items()},
        }

    def load_optimizer_state(self, saved: Mapping[str, Any]) -> None:
        """Put saved state back by name, where this worker trains it."""
        self.pipeline.wait()
        if self.graph is not None:
            self.graph.forget()
        for optimizer in self.optimizers:
            load_optimizer_state(optimizer, self.model, saved, take=True)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run on the same layout needs beyond model and optimizers; a collective."""
        return {"pipeline": self.pipeline.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned, where it fits; what does not, or is missing, begins anew."""
        self.pipeline.load_state_dict(state.get("pipeline", {}))

    def go_on_from(self, step: int) -> None:
        """Number of the last step, on which the random operations of stages depend."""
        self.pipeline.wait()
        self.pipeline.executor.start_at(step)

    def close(self) -> None:
        """Remove all hooks and leave the grid. The model stays as trained, and the optimizer's options as given."""
        for rates in self._rates:
            rates.scale(1.0, 1.0)
        self._open_to_groups()
        for scale in self.loss_scales:
            scale.detach()
        self.pipeline.close()

    def _open_to_groups(self) -> None:
        """Let the optimizer that was given, and parts of it, be given more parameters again."""
        for optimizer in self._closed_to_groups:
            vars(optimizer).pop("add_param_group", None)


def _check_complex(model: nn.Module, plan: ResolvedPlan, config: TrainConfig) -> None:
    """Refuse complex parameters where gradients must be real numbers."""
    name = next((name for name, param in model.named_parameters() if param.is_complex()), None)
    used = {
        f"--compress {plan.sync.codec}": plan.sync.codec != "none",
        "--sync outer": plan.sync.outer is not None or config.outer is not None,
        f"--clip-grad {config.clip_grad}": config.clipping is not None and config.clipping.mode == "value",
    }
    if name is not None and (option := next(filter(used.get, used), None)):
        raise refuse(f"the complex parameter {name!r}", option, "It changes gradients of real numbers.")


def _check_expanded(model: nn.Module) -> None:
    """Refuse buffers that cannot be written into where workers exchange them."""
    name = next((name for name, buffer in model.named_buffers() if is_expanded(buffer)), None)
    if name is not None:
        raise UsageError(
            f"the elements of the buffer {name!r} share memory: it is an expanded tensor",
            "Workers take each other's buffers, and torch writes into no such tensor.",
            "Register a copy: register_buffer(name, value.expand(...).clone()).",
        )


def _check_divisible(optimizer: torch.optim.Optimizer, what: str) -> None:
    """Refuse to divide an optimizer that looks at all parameters together."""
    if optimizer.defaults.get("max_grad_norm") is not None:
        raise UsageError(
            f"{what} with {type(optimizer).__name__}, which clips by the norm of all gradients",
            "Each stage, or replica, steps the parameters that it owns, and sees the gradients of those.",
            "Use the optimizer with max_grad_norm=none, and --clip-grad 1 for the same limit.",
        )


def _refuse_more(group: Mapping[str, Any] | None = None) -> None:
    """In the place of an optimizer's `add_param_group`, and where that was gone round."""
    raise UsageError(
        "the optimizer is given more parameters while training",
        "Stages, workers and the schedule of rates divide what the optimizer was made with.",
        "Make it with all parameters; those with requires_grad False wait until that changes.",
    )
