"""Why: a stage's gradients, BatchNorm statistics, buffers and optimizer step or roll back together, on its own lane.

A `LocalStage` is one stage of this worker with everything that belongs to it. The executor calls it in two places: on
the host, where the sync is issued, and on the stage's lane, where everything happens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor

from hybridpar.comm.collective import SumGroup
from hybridpar.comm.node_worlds import NodeWorlds
from hybridpar.comm.world import World
from hybridpar.lanes import Lane, Lanes
from hybridpar.pipeline.stage_module import module_of
from hybridpar.pipeline.stage_run import StageRun
from hybridpar.sync.batchnorm import BatchNormPool
from hybridpar.sync.compression import Decision
from hybridpar.sync.constants import Constants
from hybridpar.sync.figures import SyncCosts
from hybridpar.sync.gradient_sync import SyncOptions, clip_factor, first_bad_parameter
from hybridpar.sync.local_gradients import LocalGradients
from hybridpar.sync.reducer import Flight, SyncLanes
from hybridpar.sync.rollback import BufferRollback
from hybridpar.sync.stage_reducer import StageReducer

OptimizerStep = Callable[[float | None, Tensor | None], None]


class LocalStage:
    """A stage on its worker.

    Args:
        run: Runs the stage's passes.
        lane: The stage's lane.
        lanes: The lanes of this worker.
        replicas: The workers that hold the same stage.
        sync_lanes: Lanes that all stages of the worker share; unused where there is one replica.
        options: How gradients are synchronised.
        micro_batches: Micro-batches per step.
        step_optimizer: Takes the rate factor (None where the rates have been set) and, where the decision is on the
            device, the commit flag; None where nothing is trained here.
        norm_group: Adds over the replicas for BatchNorm layers that normalise over them; of the stage's lane.
        nodes: Which of the replicas are on which node, where codecs are used between nodes alone.

    Attributes:
        batch_norm: What pools the statistics of the stage's BatchNorm layers, where that is asked for.
        measured: Whether somebody needs the norm of the gradient, so that optimizers wait for the decision.
        guarded: Whether a gradient that is not finite rolls the step back.
    """

    def __init__(
        self,
        run: StageRun,
        lane: Lane,
        lanes: Lanes,
        replicas: World,
        sync_lanes: SyncLanes,
        options: SyncOptions,
        micro_batches: int,
        step_optimizer: OptimizerStep | None,
        norm_group: SumGroup | None = None,
        nodes: NodeWorlds | None = None,
    ) -> None:
        self.run = run
        self.lane = lane
        module = self.module = module_of(run.stage)
        self._options = options
        self._replicas = replicas
        self._device = lane.device
        self._step_optimizer = step_optimizer
        self.guarded = options.guard
        self.measured = options.guard or options.clip_norm is not None
        parameters = dict(module.named_parameters())
        self.reducer: StageReducer | None = None
        self.gradients: StageReducer | LocalGradients
        if replicas.size > 1:
            self.reducer = StageReducer(
                *(parameters, replicas, lanes, lane, options.bucket_bytes, self.measured, sync_lanes),
                codec=options.codec,
                seed=options.seed,
                nodes=nodes,
            )
            self.gradients = self.reducer
        else:
            self.gradients = LocalGradients(parameters, lane.device, self.measured)
        pooled = options.pool_batch_norm and (replicas.size > 1 or micro_batches > 1)
        self.batch_norm = BatchNormPool(module, norm_group) if pooled else None
        spared = self.batch_norm.layers if self.batch_norm is not None else ()
        self._rollback = BufferRollback(module, spared) if options.guard else None
        self._used: list[bool] = []
        self._constants = Constants(lane.device)

    # ---------------------------------------------------------------- the host

    @property
    def buckets(self) -> int:
        """Number of gradient buckets; 0 where nothing is synchronised."""
        return len(self.reducer.buckets) if self.reducer is not None else 0

    def new_flight(self) -> Flight | None:
        """What will be known about the gradients of the next step."""
        return self.reducer.new_flight() if self.reducer is not None else None

    # ---------------------------------------------------------------- the lane

    def start(self, step: int, flight: Flight | None) -> None:
        """Begin a step."""
        self.run.start_step(step)
        if self.reducer is not None and flight is not None:
            self.reducer.start(flight)
        else:
            self.gradients.open()
        if self.batch_norm is not None:
            self.batch_norm.discard()
        if self._rollback is not None:
            self._rollback.keep()

    def after_forward(self) -> None:
        """Take the BatchNorm statistics of a micro-batch into account."""
        if self.batch_norm is not None:
            self.batch_norm.fold()

    def finish_backward(self) -> tuple[Tensor, Tensor | None]:
        """After the last backward pass: what others must be told.

        Returns:
            Sum of squares of the gradients, 0-d float64 (with replicas 0: the sums come with the buckets); and the
            message to the replicas, float64: which parameters were used here, then the BatchNorm sums. None without
            replicas.
        """
        if self.reducer is None:
            return self.gradients.wait()[0].sum(), None
        parts = [self._constants.of(*self._used)]
        if self.batch_norm is not None:
            parts.append(self.batch_norm.sums)
        return torch.zeros((), dtype=torch.float64, device=self._device), torch.cat(parts)

    def flush(self) -> None:
        """Let the buckets that are not full leave, with zeros for parameters that were not used here."""
        if self.reducer is not None:
            self._used = self.reducer.flush()

    def apply(
        self,
        values: Tensor | None,
        message: Tensor | None,
        factor: float | None,
        costs: SyncCosts | None = None,
        *,
        on_device: bool,
    ) -> str | None:
        """Commit the step or roll it back.

        Args:
            values: Loss, samples, stop, save, commit (1 or 0) and squared norm, as all workers know them; None where
                every step counts and nobody needs the norm.
            message: The summed message to the replicas.
            factor: Of the learning rate; None where the rates have been set.
            costs: What is known of the sync of this step.
            on_device: Do not read the decision on the host.

        Returns:
            Name of the first parameter whose gradient is not finite, where the step is rolled back because of that.
        """
        if values is not None and self._options.clip_norm is not None:
            shrink = clip_factor(values[5], self._options.clip_norm)
            if shrink is not None:
                self.gradients.scale(shrink)
        sums = self.batch_norm.sums if self.batch_norm is not None else None
        if self.reducer is not None and message is not None:
            count = len(self._used)
            unused = self.gradients.keep_used(message[:count], self._used)
            sums = message[count:]
            self._commit_or_rollback(values, unused, costs, on_device)
        if on_device and values is not None:
            commit = values[4]
            if self._step_optimizer is not None:
                self._step_optimizer(factor, commit)
            if self._rollback is not None:
                self._rollback.restore(unless=commit)
            if self.batch_norm is not None and sums is not None:
                self.batch_norm.commit(sums, where=commit)
            return None
        if values is None or not self.guarded or bool(values[4]):
            if self._step_optimizer is not None:
                self._step_optimizer(factor, None)
            if self.batch_norm is not None and sums is not None:
                self.batch_norm.commit(sums)
            return None
        if self._rollback is not None:
            self._rollback.restore()
        return first_bad_parameter(self.module)

    def _commit_or_rollback(
        self, values: Tensor | None, unused: list[str], costs: SyncCosts | None, on_device: bool
    ) -> None:
        """Let codecs keep what the step left, or put it back."""
        compression = self.reducer.compression if self.reducer is not None else None
        if compression is None:
            return
        if values is None or not self.guarded:
            compression.commit_or_rollback(True, unused, costs)
        elif on_device:
            compression.commit_or_rollback_later(Decision(values[4]), unused, costs)
        else:
            compression.commit_or_rollback(bool(values[4]), unused, costs)

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Inside, forward passes leave no trace in buffers: the activations of one that counted are computed again."""
        pooled = self.batch_norm.layers if self.batch_norm is not None else ()
        ignored = {id(buffer) for layer in pooled for buffer in layer.buffers()}
        # Autograd has saved the running statistics of stock layers, which it does not read in training; through
        # `.data` their version stays as it was.
        buffers = [buffer.data for buffer in self.module.buffers() if id(buffer) not in ignored]
        saved = [buffer.clone() for buffer in buffers]
        with self.batch_norm.paused() if self.batch_norm is not None else nullcontext():
            yield
        for buffer, before in zip(buffers, saved, strict=True):
            buffer.copy_(before)

    def close(self) -> None:
        """Remove hooks and give BatchNorm layers their class back."""
        self.gradients.close()
        if self.batch_norm is not None:
            self.batch_norm.release()
