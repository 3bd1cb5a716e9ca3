"""`Trainer`: what `hybridpar train` does to a model, one step at a time, in any training loop.

It holds one worker's replica of a model and everything a step needs: lanes, gradient sync, optimizer, and the learning
rate as a function of the step. The same program runs on one process or under torchrun.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hybridpar.comm.world import GOOD_ORDER, World
from hybridpar.config import TrainConfig
from hybridpar.config.optimizer import Automatic, OnPlateau
from hybridpar.errors import SyncError, TrainingError, UsageError, first_line, refuse
from hybridpar.formats.checkpoint_files import resolve_checkpoint, usable
from hybridpar.lanes import Lanes
from hybridpar.models import autocast, freeze, model_fingerprint
from hybridpar.models.build import article
from hybridpar.models.deferred import DeferredModel, module_of, named_tensors
from hybridpar.models.outputs import OutputLoss
from hybridpar.models.state import random_state, restore_random_state
from hybridpar.models.state_dicts import load_values
from hybridpar.optim.build import build_optimizer, expand
from hybridpar.optim.losses import as_sum, ignored_label, make_loss, soft_targets
from hybridpar.optim.schedule import Pace, Plateau, rate_factor, warmup_length
from hybridpar.pipeline.local_stage import RefusedStepError
from hybridpar.pipeline.step import StepRequest
from hybridpar.plan import Plan, ResolvedPlan
from hybridpar.planner.planned_run import PlannedRun, plan_loop
from hybridpar.planner.resolve import join_workers
from hybridpar.spec import check_rules
from hybridpar.train.checkpoint import CheckpointData, load_checkpoint, save_checkpoint
from hybridpar.train.engine import Engine, EngineParts, OptimizerFactory
from hybridpar.train.results import BadSteps, evaluate
from hybridpar.train.results import Evaluation as Evaluation
from hybridpar.train.results import StepResult as StepResult
from hybridpar.train.stages import cut_model

if TYPE_CHECKING:
    from hybridpar.data import Batch
    from hybridpar.train.trial import Trial

_log = logging.getLogger(__name__)

LossFunction = Callable[[Any, Tensor], Tensor]


class Trainer:
    """Trains a model on one worker, in step with its peers.

    Args:
        model: Any module. It is moved to this worker's device; with several workers its parameters and buffers are
            overwritten with those of rank 0. After `close` it is as trained, on every worker. Or a `DeferredModel`:
            then each worker holds its own stages only.
        optimizer: Called once with the whole model, returns the optimizer; default: what `config` says. Its groups are
            then divided: each stage steps the parameters that it owns. Where a worker holds its own stages only, the
            other parameters are on the meta device.
        loss: Called with the model's output and the target, returns the *mean* over the samples; default:
            cross-entropy with the configured label smoothing, of auxiliary outputs, too: see
            `hybridpar.models.outputs`. A loss that is another mean has a method `count(targets)` and returns a *sum*:
            the sums of all micro-batches and workers are divided by all counts. `CrossEntropyLoss` and `NLLLoss` with
            `weight` or `ignore_index` are divided so by themselves.
        config: Options; those that concern data and run directory are not used here. With `plan="auto"` and both
            `total_steps` and `example`, memory format, kernels and codec, and of a pipeline that is asked for cut,
            placement and schedule, are searched for, if need be between the first steps. The attribute `plan` says what
            was found, and `planned` why.
        total_steps: Length of the learning-rate schedule; None keeps the rate constant.
        steps_per_epoch: For the warm-up, which is given in epochs.
        world: The workers; default: joined from the environment and left again by `close`.
        lanes: Lanes of the worker's device; default: opened here and closed by `close`.
        plan: The plan to follow, where `config` decides nothing else, as the file that `config.plan` names; or what
            `plan_run` found, for this config.
        example: Inputs of one micro-batch, by which a model is cut into stages, and with `total_steps` measured: then
            `compress="auto"` knows what computation the exchange hides behind. Without, all of the exchange counts.
        name: What to call the model in the plan.
        classes: Number of classes, which soft targets of mixup and cutmix have.
        several_labels: A sample may have several classes: its target has a 0 or a 1 for each, and with `loss="auto"`
            each is trained by binary cross-entropy.

    Raises:
        UsageError: Stages, replicas and workers do not fit each other, or something that a pipeline needs is missing.
        PlanError: The plan cannot be read, or is for another model or other machines.
        SyncError: The workers did not build equal models.
        LaunchError: The peers cannot be reached.

    Example:
        >>> trainer = Trainer(model, config=TrainConfig(lr=0.1))          # doctest: +SKIP
        >>> for images, labels in loader:                                 # doctest: +SKIP
        ...     result = trainer.step((images, labels))
    """

    def __init__(
        self,
        model: nn.Module | DeferredModel,
        optimizer: OptimizerFactory | None = None,
        loss: LossFunction | None = None,
        config: TrainConfig | None = None,
        *,
        total_steps: int | None = None,
        steps_per_epoch: int = 1,
        world: World | None = None,
        lanes: Lanes | None = None,
        plan: Plan | PlannedRun | None = None,
        example: Tensor | None = None,
        name: str | None = None,
        classes: int | None = None,
        several_labels: bool = False,
    ) -> None:
        given = plan if isinstance(plan, Plan) else None
        #: The options as they were given; where a plan says otherwise, `plan` counts.
        self.config = config or TrainConfig()
        if self.config.parameter_servers is not None:
            raise UsageError(
                f"Trainer with sync={self.config.sync!r}",
                "A trainer makes steps together with its peers; with parameter servers every worker makes its own.",
                "Use `hybridpar train --sync`, or hybridpar.server in a script of your own.",
            )
        per_batch = self.config.rate is not None and self.config.rate.samples is not None
        if per_batch and not isinstance(plan, PlannedRun) and "batch_size" not in self.config.named:
            raise UsageError(
                f"Trainer with lr={self.config.lr!r}",
                "Such a rate is for a number of samples per step, and the batches are those of the script.",
                "Give batch_size, the samples of a step on all workers, or a plain rate.",
            )
        if self.config.mixing.is_on and classes is None:
            raise UsageError(
                "a Trainer that mixes batches, without the number of classes",
                "The targets of mixup and cutmix have a value for each class.",
                "Give it: Trainer(..., classes=10).",
            )
        self._classes, self._single_label = classes, False
        self.total_steps = total_steps
        self.steps_per_epoch = steps_per_epoch
        #: Says what the learning rate is, where batches change their size on the way.
        self.pace: Pace | None = None
        self._deferred = model if isinstance(model, DeferredModel) else None
        model = module_of(model)
        self._owns_world = world is None
        with contextlib.ExitStack() as opened:
            self.world = world or join_workers(self.config, plan=given)
            if self._owns_world:
                opened.callback(self.world.close)
            after_lanes = opened.enter_context(contextlib.ExitStack())  # lanes end first: they may still work
            self.lanes = lanes or opened.enter_context(Lanes(self.world.device))
            check_rules(self.config)
            self.config.check_conflicts()
            if self._deferred is not None and (option := self.config.needs_whole):
                raise refuse("a DeferredModel", option, "With it every worker holds the whole model.")
            freeze(model, self.config.freeze, batch_norm=self.config.batch_norm == "frozen")
            self.planned = (
                plan
                if isinstance(plan, PlannedRun)
                else plan_loop(model, self.config, self.world, example, total_steps, name, given, open_trial)
            )
            threads, before = self.planned.plan.compute.threads, torch.get_num_threads()
            if threads is not None and threads < before:
                after_lanes.callback(torch.set_num_threads, before)
                torch.set_num_threads(threads)
            if self._deferred is not None and self.planned.plan.layout.positions == 1:
                self._deferred.fill({name for name, _, _ in named_tensors(model)})
                self._deferred = None
            self.model = model.to(self.world.device) if self._deferred is None else model
            self.fingerprint = model_fingerprint(self.model)
            if loss is None:
                loss = OutputLoss(make_loss(self.config, several_labels=several_labels, mixed=self.config.mixing.is_on))
                self._single_label = isinstance(self.config.criterion, Automatic) and not several_labels
            self._loss = as_sum(loss)
            count = getattr(self._loss, "count", None)
            self._count = count if callable(count) else None
            self._ignored = ignored_label(self._loss) if self._count is None else None
            schedule = self.config.rate_schedule
            self._plateau = Plateau(self.config.peak_lr, schedule) if isinstance(schedule, OnPlateau) else None
            self.engine = self._open_engine(optimizer, self.planned.plan, example)
            after_lanes.callback(self.engine.close)
            self._opened = opened.pop_all()
        self._parts = self.config.parts_per_step(self.plan.pipeline.micro_batches)
        self._mixes, self._staged = self.config.mixing.is_on, self.plan.is_staged
        self.steps_done = 0
        self._left = ""  # how this worker came to take part in no further step
        self._bad_steps = BadSteps(self.engine)

    def _open_engine(self, optimizer: OptimizerFactory | None, plan: ResolvedPlan, example: Tensor | None) -> Engine:
        asked, device = replace(self.config, **plan.compute.options), self.world.device
        self._channels_last = plan.channels_last
        if plan.channels_last:
            self.model.to(memory_format=torch.channels_last)
        if plan.kernels is not None:
            from hybridpar.tvm_kernels import optimize

            optimize(self.model, None if asked.kernels == "auto" else asked.kernels)
        options = expand(asked, total_steps=self.total_steps, replicas=plan.layout.replicas)
        if asked.is_onebit:
            plan = plan.with_codec(options.compress)
        if plan.sync.outer is not None and asked.outer is None:
            options = replace(options, sync=f"outer:{plan.sync.outer}")
        #: The learning rate of which every step's is a fraction.
        self.peak_rate = options.peak_lr

        def make(model: nn.Module) -> torch.optim.Optimizer:
            if optimizer is not None:
                made = optimizer(model)
                self.peak_rate = float(made.param_groups[0]["lr"])
                return made
            return build_optimizer(model, options)

        if asked.cuda_graph == "on":  # before the model is measured and cut; the engines look at the rest
            from hybridpar.pipeline.cuda_graph import why_not_captured

            positions = plan.layout.positions
            if reason := why_not_captured(device, self.world, (), positions=positions, compiled=asked.compile):
                raise refuse("--cuda-graph on", *reason)
        parts = EngineParts(self.model, plan, None, make, self._loss, options, self.world, self.lanes)
        kind: Callable[[EngineParts], Engine] = Engine
        if options.outer is not None:
            from hybridpar.train.outer import OuterEngine

            kind = partial(OuterEngine, total_steps=self.total_steps, warmup_steps=self._warmup_steps)
        elif options.late != "off":
            from hybridpar.train.delayed import DoubleBufferEngine

            kind = DoubleBufferEngine
        if not plan.is_staged:
            return kind(parts)
        if example is None:
            raise UsageError(
                "a pipeline without an example of its inputs",
                "A model is cut into stages by running it on one micro-batch.",
                "Give one: Trainer(..., example=images), of the size of a micro-batch.",
            )
        placed = self._place(example)
        with autocast(asked.amp, device):
            plan, stages = cut_model(self.model, placed, plan, asked, self.world, self._deferred)
        own_only = self._deferred is not None
        return kind(replace(parts, plan=plan, stages=stages, example=placed, own_only=own_only))

    @property
    def _warmup_steps(self) -> int:
        total = self.total_steps
        return 0 if total is None else warmup_length(total, self.steps_per_epoch, self.config)

    @property
    def plan(self) -> ResolvedPlan:
        """What is done in a step: stages, replicas, micro-batches, codecs, kernels."""
        return self.engine.plan

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer of this worker; in a pipeline that of the first stage here that has trained parameters.

        It has no groups where nothing is trained here.
        """
        optimizers = self.engine.optimizers
        return next((optimizer for optimizer in optimizers if optimizer.param_groups), optimizers[0])

    # ------------------------------------------------------------------ a step

    def step(self, batch: tuple[Tensor, Tensor] | Batch, *, stop: bool = False, save: bool = False) -> StepResult:
        """Train on this worker's share of one global batch.

        Args:
            batch: Inputs and targets, first dimension samples, which are divided into nearly equal
                `plan.pipeline.micro_batches`; or micro-batches made by a loader. Shares may differ between workers, and
                be empty on some of them.
            stop: Ask all workers to stop after this step; `result.outcome.stop` is then true on all of them.
            save: Likewise for a checkpoint.

        Returns:
            What happened. On a GPU nothing in it has been waited for yet.

        Raises:
            TrainingError: The gradients were not finite three steps running; on all workers at the same step.
            UsageError: This worker's batch, or that of another, has fewer samples than there are micro-batches.
            SyncError: A worker died or did not answer in time.
        """
        started = time.perf_counter()
        if self._left:
            raise TrainingError(
                f"this worker {self._left}, and took part in no step since",
                "The others still wait in that step, or have ended: what is sent now would be taken for its messages.",
                "End the loop there, and go on from a checkpoint on all workers.",
            )
        self._recover()
        factor, count = self._rate_factor(), None
        try:
            micro_batches, samples, global_samples = self._divide(batch)
            placed = [(self._place(inputs), self._place(targets)) for inputs, targets in micro_batches]
            if self._single_label:
                self._single_label = False  # the first batch says it, and to look waits for the device
                self._check_single(placed)
        except UsageError:
            with contextlib.suppress(SyncError):  # this worker's problem is the one to tell
                self.engine.refuse()
            raise
        try:
            if self._mixes:
                placed = self._mixed(placed)
            if self._count is not None:  # on a GPU the host waits for it
                global_samples, count = None, sum(float(self._count(targets)) for _, targets in placed)
            outcome = self.engine.step(StepRequest(placed, samples, global_samples, factor, stop, save, count))
        except Exception as error:
            if self.world.job_size > 1 and not isinstance(error, RefusedStepError):
                self._left = self._leave(f"left step {self.steps_done + 1}", error)
            raise
        self.steps_done += 1
        host_ms = (time.perf_counter() - started) * 1e3
        result = StepResult(self.steps_done, outcome, self.peak_rate * factor, host_ms, staged=self._staged)
        self._bad_steps.watch(result)
        return result

    def _leave(self, how: str, error: BaseException | None) -> str:
        """Tell the other workers how this one came to take part no more, unless it was they who failed."""
        how += "" if error is None else f" with {type(error).__name__}: {first_line(error).rstrip('.')}"
        if not (self._left or isinstance(error, SyncError)):
            self.world.leave(how)
        return how

    def _recover(self) -> None:
        """Count no steps that an error has ended."""
        steps = self.engine.recover(self.steps_done)
        if steps < self.steps_done:
            self.steps_done = steps
            self._bad_steps.forget()

    def _divide(self, batch: tuple[Tensor, Tensor] | Batch) -> tuple[Sequence[tuple[Tensor, Tensor]], int, int | None]:
        if not isinstance(batch, (tuple, list)) and hasattr(batch, "micro_batches"):
            return batch.micro_batches, batch.samples, batch.global_samples
        parts = self._parts
        inputs, targets = _pair(batch)
        samples = len(targets)
        is_divided = parts * self.engine.pipeline.replicas > 1
        # On a GPU the host would have to wait for the answer.
        if is_divided and self._ignored is not None and targets.is_cpu and (targets == self._ignored).any():
            _log.warning(
                "the loss leaves targets of %d out, and micro-batches and workers are weighed by all of their samples: "
                "give it another ignore_index, such as 255, and use that in the targets, for a mean over what counts",
                self._ignored,
            )
            self._ignored = None
        if samples == 0 and self.engine.pipeline.replicas > 1 and self.plan.sync.batch_norm != "sync":
            return [], 0, None
        if samples < (2 * parts if self._mixes else parts):
            raise UsageError(
                f"a batch of {samples} samples cannot be divided into {parts} micro-batches",
                "Every micro-batch needs a sample, and two where the model has BatchNorm or batches are mixed.",
                "Use larger batches, or fewer micro-batches (micro_batches).",
            )
        # Where batches are mixed, a sample and its neighbour stay together.
        split = [2 * (samples // 2 * part // parts) for part in range(1, parts)] if self._mixes else parts
        return list(zip(inputs.tensor_split(split), targets.tensor_split(split), strict=True)), samples, None

    def _check_single(self, micro_batches: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Refuse targets with several classes where the loss is that of a single one."""
        for _, targets in micro_batches:
            dense = targets.ndim == 2 and (targets.is_floating_point() or targets.dtype == torch.bool)
            if dense and ((targets.sum(dim=1) - 1).abs() > 0.01).any():
                raise UsageError(
                    "targets of several classes, with the loss of a single class",
                    "By default the loss is cross-entropy, and its targets are class numbers, or add up to 1.",
                    "Use Trainer(..., several_labels=True), or give it a loss.",
                )

    def _mixed(self, placed: list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
        """Mixup and cutmix, by one draw for the global batch of the step."""
        from hybridpar.data.mix import mix_step

        config, done, classes = self.config, self.steps_done, self._classes
        assert classes is not None
        epoch = (done if self.pace is None else self.pace.first_steps(done)) / self.steps_per_epoch
        soft = [(inputs, soft_targets(targets, classes, config.criterion.smoothing)) for inputs, targets in placed]
        return mix_step(soft, config.mixing, config.seed, done, epoch)

    def _place(self, tensor: Tensor) -> Tensor:
        if self._channels_last and tensor.ndim == 4:
            return tensor.to(self.world.device, memory_format=torch.channels_last, non_blocking=True)
        return tensor.to(self.world.device, non_blocking=True)

    def _rate_factor(self) -> float:
        lowered = 1.0 if self._plateau is None else self._plateau.factor
        if self.pace is not None:
            return lowered * self.pace.factor(self.steps_done, self.config)
        if self.total_steps is None:
            return lowered
        return lowered * rate_factor(self.steps_done, self.total_steps, self.steps_per_epoch, self.config)

    def note_metric(self, metric: float) -> None:
        """Tell `lr_schedule="plateau"` the result of an evaluation; on all workers alike, as `evaluate` gives it.

        Args:
            metric: Such as the accuracy after an epoch; the larger, the better. During the warm-up it does not count.
        """
        if self._plateau is not None and self.steps_done > self._warmup_steps:
            self._plateau.step(metric)

    @contextlib.contextmanager
    def on_trial(self) -> Iterator[Callable[[], None]]:
        """Inside, steps are tried whose effects are undone at the end; a collective, for a model that is not cut.

        Yields:
            Undoes them earlier, any number of times; a collective.
        """
        self.engine.wire_format()
        before = copy.deepcopy(self._state())

        def undo() -> None:
            self.engine.wait()
            self._restore(copy.deepcopy(before))  # some of it is taken over

        try:
            yield undo
        finally:
            undo()

    def wait(self) -> None:
        """Wait until the steps that were asked for are done, before the model is looked at or changed by others.

        Only a pipeline runs behind: there, `step` returns while the step may still run, and `evaluate`, `save` and
        `load` wait by themselves.

        Raises:
            SyncError: A worker died or did not answer in time.
        """
        self.engine.wait()

    def collect(self) -> None:
        """Make `model` whole on every worker, as it is trained by now; a collective.

        In a pipeline over several workers each has the present values of its own stages only, until this, `evaluate`,
        `save` or the end of the training. A `DeferredModel` stays in parts.

        Raises:
            SyncError: A worker died or did not answer in time.
        """
        self.engine.collect()

    # -------------------------------------------------------------- evaluation

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Inside, `model` holds the moving average of `model_ema` on every worker; a collective. Train outside.

        Raises:
            UsageError: There is no average.
        """
        if self.config.model_ema is None:
            raise UsageError(
                "Trainer.averaged without model_ema",
                "An average is kept from the first step on, where it is asked for.",
                'Use for instance TrainConfig(model_ema="0.9998").',
            )
        with self.engine.averaged():
            self.engine.synchronize_buffers()
            yield

    def evaluate(self, batches: Iterable[tuple[Tensor, Tensor]]) -> Evaluation:
        """Accuracy and loss over a test set that is divided among the workers; shares may be uneven or empty.

        In a pipeline, too, every worker evaluates the whole model on its own share; afterwards `model` is whole. Of a
        `DeferredModel` each evaluates its stages, and the workers of a replica are given the same share. Inside
        `averaged` it is the moving average that is tested.

        Args:
            batches: This worker's share. Every sample counts once, so shares must not overlap.

        Raises:
            UsageError: No worker has a single sample.
        """
        with self.engine.evaluating() as forward, autocast(self.plan.compute.amp, self.world.device):
            placed = ((self._place(inputs), self._place(targets)) for inputs, targets in map(_pair, batches))
            loss = self._loss.of_scores if isinstance(self._loss, OutputLoss) else self._loss
            return evaluate(forward, loss, placed, self.world, count=self._count)

    # ------------------------------------------------------------- checkpoints

    def save(self, directory: str | Path, extra: Mapping[str, Any] | None = None) -> Path:
        """Write `directory/step-N`; a collective, called by every worker after the same step.

        Args:
            directory: Where worker 0 can write.
            extra: More plain values and tensors to keep, read back by `load`.

        Returns:
            The directory that was written.

        Raises:
            RunDirectoryError: The checkpoint cannot be written; older ones are untouched.
        """
        self._recover()
        engine, is_main, data = self.engine, self.world.is_main, self._state()
        training = data.training | {"extra": dict(extra or {})}
        if not is_main:
            training = {"optimizer": training["optimizer"]} if engine.is_saved and training["optimizer"] else {}
        if not (engine.is_saved if engine.own_only else is_main):
            data = replace(data, model={}, average=None)
        return save_checkpoint(Path(directory), replace(data, training=training), self.world)

    def _state(self) -> CheckpointData:
        """What a checkpoint holds, as far as this worker has it; a collective."""
        engine = self.engine
        engine.synchronize_buffers()
        training = engine.training_state()
        if self._plateau is not None:
            training["plateau"] = self._plateau.state_dict()
        local = {"random": random_state(self.world.device), "sync": engine.state_dict()}
        state = engine.model_state(), training, local, self.world.size, engine.average_state()
        return CheckpointData(self.steps_done, self.fingerprint, *state)

    def _restore(self, data: CheckpointData) -> None:
        """Go on from what `_state` returned; a collective."""
        from hybridpar.sync.compression import settle_codecs

        load_values(self.model, data.model)
        if not self.engine.own_only:
            self.model.load_state_dict(data.model)  # which modules may have hooks for
        self.engine.go_on_from(data.step)
        self.engine.load_training_state(data.training)
        self.engine.load_average_state(data.model if data.average is None else data.average)
        if self._plateau is not None and "plateau" in data.training:
            self._plateau.load_state_dict(data.training["plateau"])
        self.steps_done = data.step
        self._bad_steps.forget()
        if data.local is not None and data.workers == self.world.size:
            restore_random_state(data.local["random"], self.world.device)
            sync = data.local["sync"]
        else:
            # Another layout: no worker's generators fit, so each gets new ones that depend on the step.
            torch.manual_seed(self.config.seed + 1000003 * data.step + self.world.rank)
            sync = {}
        self.engine.load_state_dict(sync)
        settle_codecs(self.engine.codecs, self.world, data.local)

    def load(self, path: str | Path) -> dict[str, Any]:
        """Continue from a checkpoint written by any number of workers.

        Args:
            path: A `step-N` directory, or a run directory whose newest whole checkpoint is taken.

        Returns:
            What `save` was given as `extra`.

        Raises:
            CheckpointError: It is not a whole checkpoint, or belongs to another model.
        """
        engine = self.engine
        engine.wait()
        path = resolve_checkpoint(Path(path))
        held = engine.held_state().keys() if engine.own_only else None
        stepped = engine.stepped or None
        data = load_checkpoint(path, self.world.rank, fingerprint=self.fingerprint, held=held, stepped=stepped)
        with usable(path):
            self._restore(data)
            extra: dict[str, Any] = dict(data.training["extra"])
        return extra

    def close(self) -> None:
        """Make `model` whole on every worker, as `collect` does, and release hooks, lanes and, where the trainer joined
        it, the job. Safe to call twice.

        Where an error ends the training, a `with` block or what calls this while it handles one, no other worker is
        waited for: parameters and buffers of `model` that only others train are then on the meta device.

        Raises:
            SyncError: A worker died or did not answer in time; the model is left as after another error.
        """
        self._end(sys.exc_info()[1])

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._end(error)

    def _end(self, error: BaseException | None) -> None:
        try:
            if self._owns_world:
                self._leave(f"{GOOD_ORDER if error is None else 'left'} after step {self.steps_done}", error)
            lanes = self.lanes.caller, *self.lanes.others
            if error is None and not self.lanes.closed and all(lane.failure is None for lane in lanes):
                if self.engine.pipeline.is_spread:
                    self.engine.collect()
            else:  # others may be gone
                self.engine.pipeline.leave_out()
        except BaseException as problem:
            self.engine.pipeline.leave_out()
            error = error or problem
            raise
        finally:
            # After an exception the lanes skip what has not begun: it may wait for peers that are gone.
            self._opened.__exit__(type(error) if error is not None else None, error, None)


def open_trial(model: nn.Module, config: TrainConfig, world: World, example: Tensor, plan: Plan | None = None) -> Trial:
    """Steps of a copy of a model to be timed; see `Trial`."""
    from hybridpar.train.trial import Trial  # most runs need none

    return Trial(Trainer, model, config, world, example, plan)


def _pair(batch: Any) -> tuple[Tensor, Tensor]:
    """Inputs and targets of a batch."""
    parts = batch if isinstance(batch, (tuple, list)) else (batch,)
    have_samples = [isinstance(part, Tensor) and part.ndim for part in parts]
    if len(parts) != 2 or not all(have_samples):
        raise UsageError(
            f"a batch is {article(batch)}" + (f" of {', '.join(map(article, parts))}" if parts is batch else ""),
            "It must be a pair of tensors, inputs and targets, whose first dimension is the samples.",
            "Convert arrays with torch.as_tensor; give several inputs as one tensor, which the model divides.",
        )
    return parts[0], parts[1]
