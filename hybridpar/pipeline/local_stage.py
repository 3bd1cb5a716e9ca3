"""A stage on its worker: its passes, gradients, BatchNorm statistics, buffers and optimizer step.

The executor calls a `LocalStage` in two places: on the host, where the sums of gradients are issued, and on the stage's
lane, where everything else happens. For a model that is not cut, that lane is the host thread itself.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace

from torch import Tensor

from hybridpar.comm.node_worlds import NodeWorlds
from hybridpar.comm.world import SumGroup, World
from hybridpar.lanes import Lane, Lanes
from hybridpar.lanes.base import Constants
from hybridpar.pipeline.stage_run import StageRun
from hybridpar.pipeline.step import COMMIT, SQUARES
from hybridpar.sync.batchnorm import BatchNormPool, BufferRollback
from hybridpar.sync.clipping import clip_each, clip_factor
from hybridpar.sync.coded_reducer import CodedReducer
from hybridpar.sync.compression import Compression, Decision
from hybridpar.sync.delayed_reducer import DelayedReducer
from hybridpar.sync.direct_reducer import DirectReducer
from hybridpar.sync.figures import SyncCosts
from hybridpar.sync.options import SyncOptions
from hybridpar.sync.pieces import Pieces
from hybridpar.sync.reducer import Flight, GradientReducer, LocalGradients, SyncLanes
from hybridpar.sync.shared_reducer import SharedReducer

_log = logging.getLogger(__name__)

#: Steps an optimizer. It takes the rate factor (None where rates have been set), the commit flag where the decision is
#: on the device, and the gradients where they are not in `.grad`. It returns their squared norm where it took that.
OptimizerStep = Callable[[float | None, Tensor | None, Pieces | None], Tensor | None]

#: Told the number of a step that counts, or may, and a 0-d tensor that is 0 where it does not.
AfterStep = Callable[[int, bool | Tensor], None]


class LocalStage:
    """A stage on its worker.

    Args:
        run: Runs the stage's passes.
        lane: The stage's lane.
        lanes: The lanes of this worker.
        replicas: The workers that hold the same stage.
        sync_lanes: Lanes that all stages of the worker share; unused where there is one replica.
        options: How gradients are synchronised.
        micro_batches: Micro-batches per step; with one, and one replica, BatchNorm needs no pooling.
        step_optimizer: Steps the optimizer; None where nothing is trained here.
        norm_group: Adds over the replicas for BatchNorm layers that normalise over them; of the stage's lane.
        nodes: Which of the replicas are on which node, where codecs are used between nodes only.
        after_step: Called on the lane when parameters and buffers of a step are final, with its number and whether it
            counts: a 0-d tensor, 1 or 0, where the host does not read it.

    Attributes:
        gradients: Sums the gradients over the replicas, where there are any.
        batch_norm: Pools the statistics of the stage's BatchNorm layers; None where they are not pooled.
        constants: Numbers that were copied to the device of the lane.
        measured: Whether the norm of the gradient is needed, so that optimizers wait for the decision.
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
        after_step: AfterStep | None = None,
    ) -> None:
        self.run = run
        self.lane = lane
        self.module = run.module
        self.options = options
        self._lanes = lanes
        self._replicas = replicas
        self._sync_lanes = sync_lanes
        self._nodes = nodes
        self._step_optimizer = step_optimizer
        self._after_step = after_step
        self._step = 0
        self.guarded = options.guard
        self.measured = options.guard or options.global_norm is not None
        self._pooled = options.pool_batch_norm and (replicas.size > 1 or micro_batches > 1)
        self._norm_group = norm_group
        self.gradients: LocalGradients
        self.batch_norm: BatchNormPool | None = None
        self.attach()
        spared = self.batch_norm.layers if self.batch_norm is not None else ()
        self._rollback = BufferRollback(self.module, spared) if options.guard else None
        self.constants = Constants(lane.device)

    # ---------------------------------------------------------------- the host

    def attach(self) -> None:
        """Install hooks and take over BatchNorm layers, at first and again after `detach`."""
        self.gradients = self._make_gradients()
        self.batch_norm = BatchNormPool(self.module, self._norm_group) if self._pooled else None

    def detach(self) -> None:
        """Remove hooks and give BatchNorm layers their class back. Safe to call twice."""
        self.gradients.close()
        if self.batch_norm is not None:
            self.batch_norm.release()

    def set_delayed(self, delayed: bool) -> None:
        """From the next step on apply gradients one step late, or as they come; between steps, on all replicas alike.

        Gradients that wait are dropped where they are no longer applied late.

        Args:
            delayed: Whether they come one step late.
        """
        before = self.reducer
        if before is None or self.options.delayed == delayed:
            return
        state = before.state_dict()
        before.close()
        self.options = replace(self.options, delayed=delayed)
        self.gradients = self._make_gradients()
        assert self.reducer is not None
        self.reducer.load_state_dict(state)
        self.reducer.follow_trainable()

    def _make_gradients(self) -> LocalGradients:
        options = self.options
        if self._replicas.size == 1:
            return LocalGradients(dict(self.module.named_parameters()), self.lane, self.measured)
        parameters, plain = dict(self.module.named_parameters()), options.policy.changes_nothing
        place = (parameters, self._replicas, self._lanes, self.lane)
        if self.lane.device.type == "cpu" and not options.delayed:  # a hook finds the gradient in the cache
            # Stages know the norm of all of them only once they have added theirs up.
            exact = options.global_norm is not None or self.lane is not self._lanes.caller
            if plain and self._replicas.transport == "shared memory" and SharedReducer.fits(parameters):
                try:
                    return SharedReducer(*place, self.measured, self._sync_lanes, exact=exact)
                except OSError as error:  # on all workers
                    if self._replicas.is_main:
                        _log.warning("all gradients do not fit in shared memory (%s): they are added in parts", error)
            elif not plain and self._nodes is None and options.policy.in_one_message and CodedReducer.fits(parameters):
                return CodedReducer(
                    *(*place, options.bucket_bytes, self.measured, self._sync_lanes),
                    codec=options.policy,
                    seed=options.seed,
                    exact=exact,
                )
        kind = DelayedReducer if options.delayed else GradientReducer
        return kind(
            *place,
            *(options.bucket_bytes, self.measured, self._sync_lanes),
            codec=options.policy,
            seed=options.seed,
            nodes=self._nodes,
        )

    @property
    def reducer(self) -> GradientReducer | None:
        """`gradients`, where there are replicas."""
        return self.gradients if isinstance(self.gradients, GradientReducer) else None

    @property
    def compression(self) -> Compression | None:
        """What compresses gradients here, if anything does."""
        return self.gradients.compression

    # ---------------------------------------------------------------- the lane

    def start(self, step: int, flight: Flight) -> None:
        """Begin a step.

        Args:
            step: Its number, from 1.
            flight: What will be known about its gradients.
        """
        self._step = step
        self.run.start_step(step)
        self.gradients.start(flight)
        if self.batch_norm is not None:
            self.batch_norm.discard()
        if self._rollback is not None:
            self._rollback.keep()

    def after_forward(self) -> None:
        """Add the BatchNorm statistics of a micro-batch to those of the step."""
        if self.batch_norm is not None:
            self.batch_norm.fold()

    def apply(
        self,
        values: Tensor | None,
        sums: Tensor | None = None,
        users: Tensor | None = None,
        used: list[bool] | None = None,
        factor: float | None = None,
        costs: SyncCosts | None = None,
        *,
        on_device: bool,
    ) -> str | None:
        """Commit the step or roll it back.

        Args:
            values: Loss, samples, stop, save, commit (1 or 0) and squared norm, as all workers know them; None where
                every step counts and the norm is not needed.
            sums: BatchNorm sums over the replicas; None without replicas.
            users: Number of replicas that used each parameter, in the order of the buckets; None without replicas.
            used: For each of them whether this worker used it.
            factor: Of the learning rate; None where the rates have been set.
            costs: What is known of the sync of this step.
            on_device: Do not read the decision on the host.

        Returns:
            Name of the first parameter whose gradient is not finite, where the step is rolled back because of that.
        """
        self.gradients.place_gradients()
        commit = self._decision(values, on_device)
        unused = self.gradients.keep_used(users, used) if users is not None and used is not None else []
        pieces, squares = self._clip(values)
        if sums is None and self.batch_norm is not None:
            sums = self.batch_norm.sums
        bad = None
        if commit is False:
            if self._rollback is not None:
                self._rollback.restore()
            bad = self.gradients.first_bad()
        else:
            where = commit if isinstance(commit, Tensor) else None
            if self._step_optimizer is not None:
                stepped = self._step_optimizer(factor, where, pieces)
                squares = stepped if squares is None else squares
            if squares is not None and values is not None:
                values[SQUARES] = squares
            if self._rollback is not None and where is not None:
                self._rollback.restore(unless=where)
            if self.batch_norm is not None and sums is not None:
                self.batch_norm.commit(sums, where=where)
        if users is not None:
            self._settle_codecs(commit, unused, costs)
        if self._after_step is not None:
            self._after_step(self._step, commit)
        self.gradients.close_step()
        return bad

    def _clip(self, values: Tensor | None) -> tuple[Pieces | None, Tensor | None]:
        """Clip the gradients of the stage, which are those of all replicas by now.

        Returns:
            The gradients, where they are not in `.grad`, and their squared norm, where it has been taken here.
        """
        options = self.options
        pieces = self.gradients if isinstance(self.gradients, DirectReducer) else None
        squares = None
        if options.global_norm is not None and values is not None:
            shrink = clip_factor(values[SQUARES], options.global_norm)
            if shrink is not None:
                self.gradients.scale(shrink)
        elif options.clip_norm is not None and options.clip_mode != "norm":
            if pieces is not None:
                squares, pieces = pieces.materialise(), None
            named = self.module.named_parameters()
            clip_each(
                [one for name, one in named if name not in options.not_clipped], options.clip_mode, options.clip_norm
            )
        return pieces, squares

    def _decision(self, values: Tensor | None, on_device: bool) -> bool | Tensor:
        """Whether the step counts: a 0-d tensor, 1 or 0, where the host does not read it."""
        if values is None or not self.guarded:
            return True
        return values[COMMIT] if on_device else bool(values[COMMIT])

    def _settle_codecs(self, commit: bool | Tensor, unused: list[str], costs: SyncCosts | None) -> None:
        """Let codecs keep what the step left, or put it back."""
        compression = self.gradients.compression
        if compression is None:
            return
        if isinstance(commit, Tensor):
            compression.commit_or_rollback_later(Decision(commit), unused, costs)
        else:
            compression.commit_or_rollback(commit, unused, costs)

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
