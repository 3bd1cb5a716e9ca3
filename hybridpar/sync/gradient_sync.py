"""Why: a step must count on all workers or on none, and leave the same bits everywhere.

`GradientSync` is what stands between autograd and the optimizer on data-parallel replicas. The reducer sends buckets of
gradients while the backward pass still computes; beside them travel two small messages (`hybridpar.sync.control`):
loss, samples, requests to stop or save and BatchNorm sums, hidden behind the backward pass; and after the last bucket
which parameters were used anywhere and the squared norm of the reduced gradient. From these all workers draw the same
conclusion: clip, commit, or roll back.

The sum over workers is the gradient of the mean over the global batch, because each worker scales its loss by its share
of the samples. That is exact for uneven shares and costs no pass over the gradients.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from hybridpar.comm.node_worlds import NodeWorlds
from hybridpar.comm.replicate import replicate
from hybridpar.comm.world import World
from hybridpar.compress import Policy
from hybridpar.errors import SyncError, UsageError
from hybridpar.lanes import Lanes
from hybridpar.sync.batchnorm import BatchNormPool
from hybridpar.sync.choice import Choice, Part, choose_policy
from hybridpar.sync.compression import Compression
from hybridpar.sync.compression_table import LayerBytes, layer_bytes
from hybridpar.sync.constants import Constants
from hybridpar.sync.control import (
    HEAD,
    ControlLane,
    DecidedOutcome,
    Pending,
    backward_report,
    decide,
    forward_report,
)
from hybridpar.sync.delayed_reducer import DelayedReducer
from hybridpar.sync.local_gradients import LocalGradients
from hybridpar.sync.policy import agree_on_policy, is_auto
from hybridpar.sync.reducer import GradientReducer, open_sync_lanes
from hybridpar.sync.rollback import BufferRollback


@dataclass(frozen=True)
class SyncOptions:
    """How gradients are synchronised.

    Attributes:
        bucket_bytes: Size at which a bucket is full; a parameter of at least this size travels alone.
        guard: Roll a step back on all workers when any gradient is not finite.
        clip_norm: Scale the gradient down to this global norm.
        pool_batch_norm: Pool BatchNorm's running statistics over micro-batches and workers.
        sync_batch_norm: Also normalise by the moments over the replicas. The last of the world's groups that add is
            taken for it.
        codec: What gradients travel as: a policy of `hybridpar.compress` or its text, or `auto`, which measures.
            Anything but `none` needs process groups.
        fidelity: What `auto` may choose from: `exact`, `close` or `lossy`.
        seed: For what codecs draw at random.
        hierarchy: Where there are several nodes, and one of them has several workers, codecs are used between nodes
            alone.
        delayed: Apply each gradient one step late, and let it travel meanwhile (`hybridpar.sync.delayed_reducer`).
    """

    bucket_bytes: int = 8 << 20
    guard: bool = True
    clip_norm: float | None = None
    pool_batch_norm: bool = True
    sync_batch_norm: bool = False
    codec: str | Policy = "none"
    fidelity: str = "exact"
    seed: int = 0
    hierarchy: bool = True
    delayed: bool = False

    @property
    def policy(self) -> Policy:
        """What gradients travel as, once workers have agreed on it."""
        assert isinstance(self.codec, Policy)
        return self.codec

    @property
    def uses_nodes(self) -> bool:
        """Whether it matters which workers are on one node, once workers have agreed on the policy."""
        return self.hierarchy and not self.policy.changes_nothing


@dataclass
class _Step:
    """What `GradientSync` knows about the step under way."""

    samples: int
    stop: bool
    save: bool
    loss: Tensor
    global_samples: int | None
    flags: Tensor | None = None
    counts: Pending | None = None
    report: Pending | None = None
    micro_samples: int = 0
    last: bool = False
    message_bytes: int = 0


class GradientSync:
    """Synchronises the gradients of one model over the workers of a world.

    The calls of a step, in order: `begin`; for every micro-batch `micro_batch`, the forward pass, `forward_done`, and
    `backward` of what that returns; then `finish`, the optimizer where the outcome says so, and `end`. In a world of
    one worker the same calls do the guard, clipping and BatchNorm pooling.

    Args:
        model: The model, on its device. Its parameters and buffers are overwritten with rank 0's.
        world: The workers.
        lanes: Lanes of the model's device.
        options: See `SyncOptions`.
        micro_batches: Micro-batches per step; with one, and one worker, BatchNorm needs no pooling.
        time_backward: Measures the milliseconds of the backward pass of a micro-batch, behind which sync can hide; for
            codec `auto`, on rank 0 alone.

    Raises:
        SyncError: The workers built different models, or were given different options.
    """

    def __init__(
        self,
        model: nn.Module,
        world: World,
        lanes: Lanes,
        options: SyncOptions | None = None,
        micro_batches: int = 1,
        time_backward: Callable[[], float] | None = None,
    ) -> None:
        self.model = model
        self.world = world
        self.options = options or SyncOptions()
        parameters = dict(model.named_parameters())
        policy = agree_on_policy(self.options.codec, parameters, world, self.options.fidelity)
        #: What was measured and chosen, where that was asked for.
        self.choice: Choice | None = None
        if is_auto(policy):
            lanes_left = len(world.lane_sums) - int(self.options.sync_batch_norm)
            self.choice = choose_policy(
                [Part([parameters])],
                world,
                fidelity=self.options.fidelity,
                bucket_bytes=self.options.bucket_bytes,
                sync_lanes=max(1, lanes_left),
                time_backward=time_backward,
            )
            policy = self.choice.policy
        self.options = replace(self.options, codec=policy)
        self._measure = self.options.guard or self.options.clip_norm is not None
        self._lanes = lanes
        self._control = ControlLane(world, lanes)
        self._constants = Constants(world.device)
        synced = self.options.sync_batch_norm and world.size > 1
        if synced and len(world.lane_sums) < 2:
            raise SyncError(
                "no group is left for BatchNorm over replicas",
                "It adds on a group of its own, beside those of the gradients.",
                "Make the world with one more: World.join(lanes=2).",
            )
        self._norms = world.lane_sums[-1] if synced else None
        self._nodes: NodeWorlds | None = None
        # A part of a job cannot be divided further.
        if world.size == world.job_size > 1 and self.options.uses_nodes:
            self._nodes = NodeWorlds.open(world, [range(world.size)], len(world.lane_sums) - int(synced))
        self._sync_lanes = open_sync_lanes(world, lanes, spared=int(synced)) if world.size > 1 else ()
        self.reducer = self._open_reducer(parameters)
        replicate(model, world, agree=(self.options, micro_batches))
        self._pooled = self.options.pool_batch_norm and (world.size > 1 or micro_batches > 1)
        self.batch_norm = self._pool_batch_norm()
        spared = self.batch_norm.layers if self.batch_norm is not None else ()
        self._rollback = BufferRollback(model, spared) if self.options.guard else None
        self._step: _Step | None = None
        self._batch_norm_sums: Tensor | None = None
        self._unused: list[str] = []

    def _open_reducer(self, parameters: dict[str, nn.Parameter]) -> GradientReducer | LocalGradients:
        if self.world.size == 1:
            return LocalGradients(parameters, self.world.device, self._measure)
        options = self.options
        kind = DelayedReducer if options.delayed else GradientReducer
        return kind(
            *(parameters, self.world, self._lanes, options.bucket_bytes, self._measure, self._sync_lanes),
            *(options.codec, options.seed, self._nodes),
        )

    def _pool_batch_norm(self) -> BatchNormPool | None:
        return BatchNormPool(self.model, self._norms) if self._pooled else None

    def set_delayed(self, delayed: bool) -> None:
        """From the next step on apply gradients one step late, or as they come; between steps, on all workers alike.

        Gradients that are on their way are dropped where they are no longer applied late.
        """
        if self.world.size == 1 or self.options.delayed == delayed:
            return
        state = self.reducer.state_dict()
        self.reducer.close()
        self.options = replace(self.options, delayed=delayed)
        self.reducer = self._open_reducer(dict(self.model.named_parameters()))
        self.reducer.load_state_dict(state)

    def begin(
        self,
        samples: int,
        *,
        global_samples: int | None = None,
        rate: float = 1.0,
        stop: bool = False,
        save: bool = False,
        flags: Tensor | None = None,
    ) -> None:
        """Start a step; gradients of the step before are forgotten.

        Args:
            samples: Samples of this worker in this step, over all micro-batches.
            global_samples: Samples of all workers, where the caller knows; else they are exchanged, hidden behind
                the first forward pass.
            rate: Learning rate of the step, in any unit: a codec may scale what it keeps by its changes.
            stop: This worker wants training to end after this step.
            save: This worker wants a checkpoint after this step.
            flags: `stop` and `save` as a float64 tensor on the device, in place of what the host says.
        """
        self.reducer.open()
        self.reducer.set_rate(rate)
        if self.batch_norm is not None:
            self.batch_norm.discard()
        if self._rollback is not None:
            self._rollback.keep()
        loss = torch.zeros((), dtype=torch.float64, device=self.world.device)
        step = _Step(samples, stop, save, loss, global_samples if self.world.size > 1 else samples, flags)
        if step.global_samples is None:
            mine = torch.tensor([float(samples), 0.0], dtype=torch.float64, device=self.world.device)
            step.counts = self._send(step, mine, "exchanging sample counts")
        self._step = step

    def refuse(self) -> None:
        """Instead of `begin` without `global_samples`: no step is possible with what this worker was given.

        The others learn it in their first `forward_done`.

        Raises:
            SyncError: A worker died or did not answer in time.
        """
        mine = torch.tensor([0.0, 1.0], dtype=torch.float64, device=self.world.device)
        self._control.send(mine, "exchanging sample counts").wait()

    def micro_batch(self, samples: int, *, last: bool) -> None:
        """Announce the next micro-batch.

        Args:
            samples: Its samples.
            last: Whether it is the step's last; only then do full buckets leave.
        """
        step = self._current()
        step.micro_samples, step.last = samples, last
        if self.options.sync_batch_norm:  # the forward pass meets the others, who may have refused the step
            self._learn_samples(step)

    def forward_done(self, loss: Tensor) -> Tensor:
        """Take note of a micro-batch's loss.

        Args:
            loss: Mean loss of the micro-batch, 0-d.

        Returns:
            The loss times the micro-batch's share of the global batch: what to call `backward` on.

        Raises:
            UsageError: Another worker refused the step.
        """
        step = self._current()
        scaled = loss * (step.micro_samples / self._learn_samples(step))
        step.loss = step.loss + scaled.detach().double()
        if self.batch_norm is not None:
            self.batch_norm.fold()
        if step.last:
            sums = self.batch_norm.sums if self.batch_norm is not None else None
            message = forward_report(
                step.loss,
                step.samples,
                stop=step.stop,
                save=step.save,
                layout=self.reducer.layout,
                batch_norm=sums,
                flags=step.flags,
                constants=self._constants,
            )
            step.report = self._send(step, message, "exchanging forward reports")
            self.reducer.release(step.report)
        return scaled

    def finish(self, *, copy: bool = True) -> DecidedOutcome:
        """Wait until all buckets are reduced, and agree on what becomes of the step.

        On return every parameter used on any worker has the reduced, clipped gradient in `.grad`; a parameter used
        nowhere has None.

        Args:
            copy: Start to copy the values to the host. Without that the outcome is for `end` alone.

        Raises:
            SyncError: A worker died, did not answer in time, or cut other buckets than this one.
        """
        step = self._current()
        if step.report is None:
            raise SyncError("the step has no last micro-batch", "finish() follows micro_batch(..., last=True).")
        used = self.reducer.flush()
        started = time.perf_counter()
        squares, sent = self.reducer.wait()
        votes = self._send(step, backward_report(squares, used, self._constants), "agreeing on the step").wait()
        report = step.report.wait()
        self._batch_norm_sums = report[HEAD:]
        if self.options.clip_norm is not None:
            factor = clip_factor(votes[0], self.options.clip_norm)
            if factor is not None:
                self.reducer.scale(factor)
        self._unused = self.reducer.keep_used(votes[1:], used)
        values = decide(report, votes[0], guard=self.options.guard, measured=self._measure)
        # A worker alone has no one to wait for: what it did since then is computing.
        exposed = (time.perf_counter() - started) * 1e3 if self.world.size > 1 else 0.0
        sent += step.message_bytes
        if not copy:
            return DecidedOutcome.bare(values, sent)
        return DecidedOutcome.of(values, exposed, sent, self._lanes, self.reducer.costs)

    def end(self, outcome: DecidedOutcome, *, decided_on_device: bool = False) -> None:
        """Commit or roll back what the forward passes left: BatchNorm's running statistics, and other buffers.

        Args:
            outcome: What `finish` returned.
            decided_on_device: The host has not read the decision; statistics move where it says so.
        """
        if self._rollback is not None:
            if decided_on_device:
                self._rollback.restore(unless=outcome.commit)
            elif not outcome.committed:
                self._rollback.restore()
        if self.batch_norm is not None and self._batch_norm_sums is not None:
            if decided_on_device:
                self.batch_norm.commit(self._batch_norm_sums, where=outcome.commit)
            elif outcome.committed:
                self.batch_norm.commit(self._batch_norm_sums)
        if self.reducer.compression is not None:
            self._commit_or_rollback(self.reducer.compression, outcome, decided_on_device)
        self._step = None
        self.reducer.close_step()

    def _commit_or_rollback(self, compression: Compression, outcome: DecidedOutcome, decided_on_device: bool) -> None:
        """Let codecs keep what the step left, or put it back."""
        if not self.options.guard:  # every step counts, which the host knows by itself
            compression.commit_or_rollback(True, self._unused, outcome.costs)
        elif decided_on_device:
            compression.commit_or_rollback_later(outcome, self._unused, outcome.costs)
        else:
            compression.commit_or_rollback(outcome.committed, self._unused, outcome.costs)

    def layer_bytes(self) -> list[LayerBytes]:
        """What each parameter travels as; empty where gradients are added as they are."""
        return layer_bytes(self.model, self.reducer.bytes_by_parameter())

    def first_bad_parameter(self) -> str | None:
        """Name of the first parameter, in the model's order, whose reduced gradient is not finite."""
        return first_bad_parameter(self.model)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to go on bit for bit: the agreed order of buckets."""
        return self.reducer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; nothing stays of the steps before. Without entries it begins anew."""
        self.reducer.load_state_dict(state)

    def detach(self) -> None:
        """Leave the model to others until `attach`: no hooks, and BatchNorm layers of their own class."""
        self.reducer.close()
        if self.batch_norm is not None:
            self.batch_norm.release()

    def attach(self) -> None:
        """Synchronise the model again after `detach`, beginning anew."""
        self.reducer = self._open_reducer(dict(self.model.named_parameters()))
        self.batch_norm = self._pool_batch_norm()

    def close(self) -> None:
        """Remove all hooks and give BatchNorm layers their class back. The model stays as trained."""
        self.detach()
        if self._nodes is not None:
            self._nodes.close()

    def _current(self) -> _Step:
        if self._step is None:
            raise SyncError("no step is under way", "Every step starts with begin().")
        return self._step

    def _learn_samples(self, step: _Step) -> int:
        """Samples of all workers."""
        if step.global_samples is None:
            assert step.counts is not None
            samples, refusing = step.counts.wait().tolist()
            if refusing:
                raise refused_by_others(round(refusing))
            step.global_samples = round(samples)
        return step.global_samples

    def _send(self, step: _Step, message: Tensor, doing: str) -> Pending:
        step.message_bytes += self._control.bytes_of(message.numel())
        return self._control.send(message, doing)


def refused_by_others(count: int) -> UsageError:
    """The error of a worker that could do the step, where others cannot."""
    return UsageError(
        f"{count} of the other workers got a batch that cannot be divided into the micro-batches asked for",
        "All workers do a step, or none.",
        "Give every worker at least one sample for each micro-batch (micro_batches), or none of them a batch.",
    )


def clip_factor(squares: Tensor, limit: float) -> Tensor | None:
    """What gradients are multiplied with, so that their norm is at most a limit; None where the host sees no need.

    Args:
        squares: Squared norm of all gradients, 0-d float64. On a GPU it is not read.
        limit: Most that the norm may be.
    """
    # The same guard against division by zero as torch.nn.utils.clip_grad_norm_.
    factor = (limit / (squares.sqrt() + 1e-6)).clamp(max=1.0)
    if factor.device.type == "cpu" and (not math.isfinite(float(squares)) or float(factor) == 1.0):
        return None
    return factor


def first_bad_parameter(module: nn.Module) -> str | None:
    """Name of the first parameter of a module, in its order, whose gradient is not finite."""
    for name, parameter in module.named_parameters():
        if parameter.grad is not None and not bool(torch.isfinite(parameter.grad).all()):
            return name
    return None
