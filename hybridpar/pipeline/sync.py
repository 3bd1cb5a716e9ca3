"""Why: gradients must leave while the backward pass still computes, and a step must count everywhere or nowhere.

`GradientSync` owns what happens to gradients between autograd and the optimizer on data-parallel replicas:

1. Hooks fire as autograd accumulates each gradient. When the last gradient of a bucket arrives in the last
   micro-batch, the bucket leaves on a sync lane. Buckets leave in index order, so that every lane's process group
   sees the same collectives in the same order on every worker.
2. Two small messages travel beside them (`hybridpar.pipeline.control`): loss, samples, requests to stop or save and
   BatchNorm sums, hidden behind the backward pass; and after the last bucket which parameters were used anywhere and
   the squared norm of the reduced gradient, of which each worker computes its share of the buckets.
3. The step commits on all workers, or on none.

The sum over workers is the gradient of the mean over the global batch because each worker scales its loss by its
share of the samples (`StepOutcome` and `GradientSync.loss_scale`), which is exact for uneven shares and costs no pass
over the gradients.

Bucket order: first the reverse of the order in which modules hold parameters, then, re-made once after step 1, the
order that rank 0 observed (Li et al. 2020, "PyTorch Distributed", section 3.2.3).
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hybridpar.errors import SyncError
from hybridpar.lanes import Event, Lane, Lanes
from hybridpar.pipeline.batchnorm import BatchNormPool
from hybridpar.pipeline.buckets import Bucket, layout_fingerprint, make_buckets
from hybridpar.pipeline.control import (
    HEAD,
    ControlLane,
    Pending,
    StepOutcome,
    all_reduce_bytes,
    backward_report,
    check_layout,
    decide,
    forward_report,
)
from hybridpar.pipeline.replicate import replicate
from hybridpar.pipeline.world import World


@dataclass(frozen=True)
class SyncOptions:
    """How gradients are synchronised.

    Attributes:
        bucket_bytes: Size at which a bucket is full; a parameter of at least this size travels alone.
        guard: Roll a step back on all workers when any gradient is not finite.
        clip_norm: Scale the gradient down to this global norm.
        pool_batch_norm: Pool BatchNorm's running statistics over micro-batches and workers.
    """

    bucket_bytes: int = 8 << 20
    guard: bool = True
    clip_norm: float | None = None
    pool_batch_norm: bool = True


class GradientSync:
    """Synchronises the gradients of one model over the workers of a world.

    The calls of a step, in order: `begin`, then for every micro-batch `micro_batch`, the forward pass,
    `forward_done`, the backward pass of `loss * loss_scale`; then `finish`, the optimizer (if the outcome says so),
    and `end`. In a world of one worker the same calls do the guard, clipping and BatchNorm pooling.

    Args:
        model: The model, on its device. Its parameters and buffers are overwritten with rank 0's.
        world: The workers.
        lanes: Lanes of the model's device.
        options: See `SyncOptions`.
        micro_batches: Micro-batches per step, to decide whether BatchNorm needs pooling at all.
    """

    def __init__(
        self, model: nn.Module, world: World, lanes: Lanes, options: SyncOptions | None = None, micro_batches: int = 1
    ) -> None:
        self.model = model
        self.world = world
        self.options = options or SyncOptions()
        self._lanes = lanes
        self._parameters = dict(model.named_parameters())
        self._sync_lanes: list[tuple[Lane, dist.ProcessGroup]] = [
            (lanes.open(f"sync-{index}", priority=-1), group) for index, group in enumerate(world.lane_groups)
        ]
        self._control = ControlLane(world, lanes)
        self._needs_norm = self.options.guard or self.options.clip_norm is not None
        pooled = self.options.pool_batch_norm and (world.size > 1 or micro_batches > 1)
        self.batch_norm = BatchNormPool(model) if pooled else None
        self._order = list(reversed(self._parameters))
        self._trainable: tuple[bool, ...] = ()
        self._observed: list[str] | None = []
        self._buckets: list[Bucket] = []
        self._bucket_of: dict[str, tuple[Bucket, int]] = {}
        self._layout = 0
        self._in_step = False
        replicate(model, world, agree=(self.options, micro_batches))
        self._hooks: dict[str, RemovableHandle] = {}
        self._reset_step()

    # ---------------------------------------------------------------- the step

    def begin(self, samples: int, *, global_samples: int | None = None, stop: bool = False, save: bool = False) -> None:
        """Start a step; gradients of the step before are forgotten.

        Args:
            samples: Samples of this worker in this step, over all micro-batches.
            global_samples: Samples of all workers, where the caller knows; else they are exchanged, hidden behind
                the first forward pass.
            stop: This worker wants training to end after this step.
            save: This worker wants a checkpoint after this step.
        """
        for parameter in self._parameters.values():
            parameter.grad = None
        self._follow_trainable()
        self._reset_step()
        self._in_step = True
        self._samples = samples
        self._global_samples = global_samples if self.world.size > 1 else samples
        self._requests = (stop, save)
        if self._global_samples is None:
            mine = torch.tensor([float(samples)], dtype=torch.float64, device=self.world.device)
            self._counts = self._control.send(mine, "exchanging sample counts")
            self._sent += self._control.bytes_of(1)

    def micro_batch(self, samples: int, *, last: bool) -> None:
        """Announce the next micro-batch; in the last one, full buckets leave."""
        self._micro_samples = samples
        self._last = last

    def forward_done(self, loss: Tensor) -> Tensor:
        """Take note of a micro-batch's loss.

        Args:
            loss: Mean loss of the micro-batch, 0-d.

        Returns:
            The loss times the micro-batch's share of the global batch: what to call `backward` on.
        """
        if self._global_samples is None:
            assert self._counts is not None
            self._global_samples = int(self._counts.wait().item())
        scaled = loss * (self._micro_samples / self._global_samples)
        self._loss = self._loss + scaled.detach().double()
        if self.batch_norm is not None:
            self.batch_norm.fold()
        if self._last:
            stop, save = self._requests
            sums = self.batch_norm.sums if self.batch_norm is not None else None
            message = forward_report(
                self._loss, self._samples, stop=stop, save=save, layout=self._layout, batch_norm=sums
            )
            self._report = self._control.send(message, "exchanging forward reports")
            self._sent += self._control.bytes_of(message.numel())
        return scaled

    def finish(self) -> StepOutcome:
        """Wait until all buckets are reduced, and agree on what becomes of the step.

        On return every parameter used on any worker has the reduced, clipped gradient in `.grad`; a parameter used
        nowhere has None.

        Raises:
            SyncError: A worker died, did not answer in time, or cut other buckets than this one.
        """
        used = self._flush()
        started = time.perf_counter()
        with self.world.named_errors("reducing gradients"):
            for event in self._launched:
                self._lanes.caller.wait(event)
        values = self._agree(used, self._squares)
        exposed = (time.perf_counter() - started) * 1e3
        return StepOutcome(values, exposed, self._sent)

    def end(self, outcome: StepOutcome, *, skip_on_device: bool = False) -> None:
        """Commit or roll back what the sync itself holds: BatchNorm statistics, and the order of buckets.

        Args:
            outcome: What `finish` returned.
            skip_on_device: The decision has not been read by the host; everything must be done masked.
        """
        if self.batch_norm is not None:
            sums = self._reduced_batch_norm
            if skip_on_device:
                self.batch_norm.commit(sums, where=outcome.commit)
            elif outcome.committed:
                self.batch_norm.commit(sums)
            else:
                self.batch_norm.discard()
        self._in_step = False
        if self._observed and self.world.size > 1:
            self._adopt_observed_order()

    def first_bad_parameter(self) -> str | None:
        """Name of the first parameter, in the model's order, whose reduced gradient is not finite."""
        for name, parameter in self._parameters.items():
            if parameter.grad is not None and not bool(torch.isfinite(parameter.grad).all()):
                return name
        return None

    def state_dict(self) -> dict[str, Any]:
        """The agreed bucket order, by parameter name. Restoring it makes a resumed run add in the same order."""
        return {"order": list(self._order), "settled": self._observed is None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the bucket order where the names still fit; otherwise it is observed anew."""
        if sorted(state["order"]) == sorted(self._parameters):
            self._order = list(state["order"])
            self._observed = None if state["settled"] else []
            self._trainable = ()

    def close(self) -> None:
        """Remove all hooks and give BatchNorm layers their class back. The model stays as trained."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks = {}
        if self.batch_norm is not None:
            self.batch_norm.release()

    # ---------------------------------------------------------------- buckets

    def _reset_step(self) -> None:
        self._ready: set[str] = set()
        self._seen: set[str] = set()
        self._next_bucket = 0
        self._last = False
        self._micro_samples = 0
        self._sent = 0
        self._loss = torch.zeros((), dtype=torch.float64, device=self.world.device)
        self._launched: list[Event] = []
        self._squares = torch.zeros(len(self._buckets), dtype=torch.float64, device=self.world.device)
        self._checked: set[Lane] = set()
        self._report: Pending | None = None
        self._counts: Pending | None = None
        for bucket in self._buckets:
            bucket.pending = len(bucket.slots)

    def _follow_trainable(self) -> None:
        """Cut the buckets anew where parameters were frozen or thawed since the last step."""
        trainable = tuple(parameter.requires_grad for parameter in self._parameters.values())
        if trainable == self._trainable:
            return
        self._trainable = trainable
        order = [(name, self._parameters[name]) for name in self._order if self._parameters[name].requires_grad]
        # With nobody to send to, fusing would be copying for nothing: every tensor is a bucket.
        self._buckets = make_buckets(order, self.options.bucket_bytes if self.world.size > 1 else 1)
        self._bucket_of = {slot.name: (bucket, i) for bucket in self._buckets for i, slot in enumerate(bucket.slots)}
        self._layout = layout_fingerprint(self._buckets)
        me = weakref.ref(self)
        for name, parameter in order:
            if name not in self._hooks:
                self._hooks[name] = parameter.register_post_accumulate_grad_hook(_make_hook(me, name))

    def gradient_ready(self, name: str) -> None:
        """Called by autograd when a parameter's gradient has been accumulated."""
        if not self._in_step or name not in self._bucket_of:
            return
        bucket, place = self._bucket_of[name]
        parameter = self._parameters[name]
        if parameter.grad is not None and parameter.grad.is_sparse:
            raise SyncError(
                f"the gradient of {name!r} is sparse", "Gradients are sent dense.", "Build the layer with sparse=False."
            )
        bucket.adopt(bucket.slots[place])
        self._seen.add(name)
        if not self._last:
            return
        if name in self._ready:
            raise SyncError(
                f"the gradient of {name!r} arrived twice in one backward pass",
                "A bucket leaves at the first arrival, so a second one would be lost.",
                "Use non-reentrant activation checkpointing, and call backward once per micro-batch.",
            )
        self._ready.add(name)
        if self._observed is not None:
            self._observed.append(name)
        bucket.pending -= 1
        self._launch_full_buckets()

    def _launch_full_buckets(self) -> None:
        while self._next_bucket < len(self._buckets) and self._buckets[self._next_bucket].pending <= 0:
            self._launch(self._buckets[self._next_bucket])
            self._next_bucket += 1

    def _launch(self, bucket: Bucket) -> None:
        flat, squares = bucket.flat(), self._squares[bucket.index]
        if not self._sync_lanes:
            # One worker: nothing travels. The norm is taken here, while the gradient is still in the cache.
            if self._needs_norm:
                _sum_of_squares(flat, squares)
            return
        lane, group = self._sync_lanes[bucket.index % len(self._sync_lanes)]
        self._check_peers(lane)
        measure = self._needs_norm and bucket.index % self.world.size == self.world.rank

        def reduce() -> None:
            dist.all_reduce(flat, group=group)
            if measure:
                _sum_of_squares(flat, squares)

        lane.wait(self._lanes.caller.record())
        lane.submit(reduce, uses=(flat, squares))
        self._launched.append(lane.record())
        self._sent += all_reduce_bytes(bucket.bytes, self.world.size)

    def _check_peers(self, lane: Lane) -> None:
        """Before a lane's first bucket, let it see that all workers cut the same buckets.

        A collective whose sizes differ between workers does not fail in an orderly way: gloo aborts the process.
        """
        if lane in self._checked:
            return
        self._checked.add(lane)
        assert self._report is not None
        if self._report.event is not None and self.world.device.type == "cpu":
            report = self._report.message
            lane.wait(self._report.event)
            lane.submit(lambda: check_layout(report, self.world.size), uses=(report,))

    def _flush(self) -> list[bool]:
        """After the last backward: give unused parameters zeros, send what is left. Returns who was used here."""
        used = [slot.name in self._seen for bucket in self._buckets for slot in bucket.slots]
        if self._last and self._next_bucket < len(self._buckets):
            with torch.no_grad():
                for bucket in self._buckets[self._next_bucket :]:
                    for slot in bucket.slots:
                        if slot.name not in self._seen:
                            bucket.adopt(slot)
                    bucket.pending = 0
            self._launch_full_buckets()
        return used

    # ---------------------------------------------------------------- agreement

    def _agree(self, used: Sequence[bool], squares: Tensor) -> Tensor:
        if self._report is None:
            raise SyncError(
                "the step has no forward pass", "finish() follows at least one micro-batch.", "Call begin() first."
            )
        tail = self._control.send(backward_report(squares, used), "agreeing on the step")
        self._sent += self._control.bytes_of(tail.message.numel())
        report, votes = self._report.wait(), tail.wait()
        self._reduced_batch_norm = report[HEAD:]
        self._drop_unused(votes[1:], used)
        if self.options.clip_norm is not None:
            self._clip(votes[0], self.options.clip_norm)
        return decide(report, votes[0], guard=self.options.guard, measured=self._needs_norm)

    def _drop_unused(self, users: Tensor, used: Sequence[bool]) -> None:
        """A parameter used on no worker keeps `.grad` None, so that the optimizer skips it."""
        if all(used):
            return
        names = [slot.name for bucket in self._buckets for slot in bucket.slots]
        for name, count in zip(names, users.tolist(), strict=True):
            if count == 0:
                self._parameters[name].grad = None

    def _clip(self, squares: Tensor, limit: float) -> None:
        # The same guard against division by zero as torch.nn.utils.clip_grad_norm_.
        factor = (limit / (squares.sqrt() + 1e-6)).clamp(max=1.0)
        if factor.device.type == "cpu" and (not math.isfinite(float(squares)) or float(factor) == 1.0):
            return
        for bucket in self._buckets:
            for slot in bucket.slots:
                if slot.parameter.grad is not None:
                    slot.parameter.grad.mul_(factor.to(slot.parameter.grad.dtype))

    def _adopt_observed_order(self) -> None:
        """Cut the buckets once more, by the order in which gradients really came; rank 0's order counts for all."""
        assert self._observed is not None
        numbers = {name: index for index, name in enumerate(self._parameters)}
        rest = [name for name in self._order if name not in set(self._observed)]
        order = torch.tensor([numbers[name] for name in [*self._observed, *rest]], dtype=torch.int64)
        with self.world.named_errors("agreeing on the order of buckets"):
            message = order.to(self.world.device)
            dist.broadcast(message, src=0, group=self.world.control)
        names = list(self._parameters)
        self._order = [names[index] for index in message.tolist()]
        self._observed = None
        self._trainable = ()


def _make_hook(sync: weakref.ref[GradientSync], name: str) -> Callable[[Tensor], None]:
    def hook(parameter: Tensor) -> None:
        target = sync()
        if target is not None:
            target.gradient_ready(name)

    return hook


def _sum_of_squares(flat: Tensor, into: Tensor) -> None:
    """Write the sum of squares of a 1-D tensor; exact in range: float32 overflow is recomputed in float64."""
    values = flat if flat.dtype in (torch.float32, torch.float64) else flat.float()
    total = torch.dot(values, values).double()
    if flat.device.type == "cpu" and not math.isfinite(float(total)):
        total = torch.linalg.vector_norm(values, dtype=torch.float64).square()
    into.copy_(total)
