"""A stage on its worker: its passes, gradients, BatchNorm statistics, buffers and optimizer step.

The executor calls a `LocalStage` in two places: on the host, where the sums of gradients are issued, and on the stage's
lane, where everything else happens. For a model that is not cut, that lane is the host thread itself.

Then all workers agree on a step: what was lost and used where, and whether the step counts. All messages of a worker
are summed on one lane, so they have one order everywhere. What concerns one stage is summed over its replicas: the loss
and BatchNorm sums after its last forward pass, the squared norm of its gradients and who used which parameter after its
last bucket. Where a model is cut over several workers, five numbers of these are then added up over the stages.

The sum of squares is finite exactly where all gradients are, so one number serves the guard and clipping; all workers
read the same sum, so all decide alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from hybridpar.comm.world import World, all_reduce_bytes
from hybridpar.errors import SyncError, UsageError
from hybridpar.lanes import Lane, Lanes
from hybridpar.lanes.base import Constants, start_copy
from hybridpar.pipeline.stage_run import StageRun
from hybridpar.pipeline.step import COMMIT, SQUARES, StepState
from hybridpar.sync.batchnorm import BatchNormPool, BufferRollback, ReplicaBuffers
from hybridpar.sync.stage_gradients import StageGradients, StepGradients, SyncLanes, SyncOptions, clip_each, clip_factor

if TYPE_CHECKING:
    from hybridpar.comm.group import Group
    from hybridpar.compress.nodes import NodeWorlds
    from hybridpar.sync.pieces import Gradients
    from hybridpar.sync.reducer import Reducer
    from hybridpar.sync.shards import ParameterShards

#: Steps an optimizer. It takes the rate factor (None where rates have been set), the commit flag where the decision is
#: on the device, and the gradients where they are not in `.grad`. It returns their squared norm where it took that.
OptimizerStep: TypeAlias = "Callable[[float | None, Tensor | None, Gradients | None], Tensor | None]"

#: Makes what is done with the gradients of a stage without replicas, from what `StageGradients` is made from.
MakeGradients = Callable[..., StageGradients]

#: Told the number of a step that counts, or may, and a 0-d tensor that is false where it does not.
AfterStep = Callable[[int, bool | Tensor], None]


class LocalStage:
    """A stage on its worker."""

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
        norm_group: Group | None = None,
        shard_group: Group | None = None,
        nodes: NodeWorlds | None = None,
        after_step: AfterStep | None = None,
        make_gradients: MakeGradients = StageGradients,
    ) -> None:
        self.run = run
        self.lane = lane
        self.module = run.module
        self.options = options
        self.replicas = replicas
        self._step_optimizer = step_optimizer
        self._after_step = after_step
        self._step = 0
        self.is_open = False  # a step has begun, and is neither committed nor rolled back
        self.is_stepping = False  # its optimizer has begun
        self.guarded = options.guard
        self._global_norm = options.global_norm
        self.measured = options.guard or self._global_norm is not None
        self._shards: ParameterShards | None = None
        if shard_group is not None:
            from hybridpar.sync.shards import ParameterShards

            self._shards = ParameterShards(self.module, replicas, shard_group)
        named = dict(self.module.named_parameters())
        #: `gradients`, where there are replicas.
        self.reducer: Reducer | None = None
        if replicas.size > 1:
            # Stages know the norm of all of them only once they have added theirs up, and each shard steps a part.
            exact = self._global_norm is not None or lane is not lanes.caller or self._shards is not None
            kind = reducer_kind(delayed=options.delayed)
            given = (named, replicas, lanes, lane, sync_lanes, options)
            self.reducer = kind(*given, measure=self.measured, exact=exact, nodes=nodes)
        self.gradients: StageGradients = self.reducer or make_gradients(named, lane, measure=self.measured)
        pooled = options.pool_batch_norm and (replicas.size > 1 or micro_batches > 1)
        self.batch_norm = BatchNormPool(self.module, norm_group, lane.device) if pooled else None
        if self.batch_norm is not None:
            run.pool_batch_norm(self.batch_norm)
        spared = self.batch_norm.layers if self.batch_norm is not None else ()
        self._rollback = BufferRollback(self.module, spared) if options.guard else None
        #: Buffers that are no statistics of BatchNorm, which replicas have in common.
        self.replica_buffers = ReplicaBuffers(self.module, replicas, self.batch_norm)
        self.constants = Constants(lane.device)

    # ---------------------------------------------------------------- the host

    def detach(self) -> None:
        """Remove hooks and give BatchNorm layers their class back. Safe to call twice."""
        self.gradients.close()
        if self.batch_norm is not None:
            self.batch_norm.release()

    @property
    def steps_done(self) -> int:
        """Number of the last step that is over."""
        return self._step - self.is_open

    # ---------------------------------------------------------------- the lane

    def start(self, step: int, gradients: StepGradients) -> None:
        """Begin a step."""
        if (name := self.replica_buffers.unshared()) is not None:
            raise UsageError(
                f"forward has registered a buffer {name!r}, the first of stage {self.run.index}, after the first step",
                "Replicas have their buffers in common; after the first step they agree on whether there are any.",
                "Register it when the model is made, or in its first forward pass.",
            )
        self.undo()
        self._step, self.is_open = step, True
        self.run.start_step(step)
        self.gradients.start(gradients)
        if self.batch_norm is not None:
            self.batch_norm.discard()
        if self._rollback is not None:
            self._rollback.keep()

    def undo(self) -> None:
        """Put back the buffers that a step has changed which an error has ended; it has not been."""
        if self.is_open:
            self.run.put_back_buffers()
            if self._rollback is not None:
                self._rollback.restore()
            self._step, self.is_open, self.is_stepping = self._step - 1, False, False

    def apply(self, step: StepState, *, on_device: bool) -> None:
        """Commit the step or roll it back; the decision may be only on the device."""
        index = self.run.index
        if self.run.seen:
            self.run.put_back_buffers()
        users, costs = step.users.get(index), step.flights[index].costs
        decided = step.values if self.measured else None
        values = None if decided is None else decided.to(self.lane.device, non_blocking=True)
        # A 0-d tensor where the host does not read it.
        commit: bool | Tensor = True
        if values is not None and self.guarded:
            commit = values[COMMIT] > 0 if on_device else bool(values[COMMIT])
        unused = self.gradients.finish(users, step.used[index])
        unwritten, squares = self._clip(values)
        if self.replica_buffers.shared:
            self.replica_buffers.take()
        if commit is False:
            if self._rollback is not None:
                self._rollback.restore()
            if (bad := self.gradients.first_bad()) is not None:
                step.bad.append(bad)
        else:
            where = commit if isinstance(commit, Tensor) else None
            self.is_stepping = True
            if self._step_optimizer is not None:
                stepped = self._step_optimizer(step.rate, where, unwritten)
                squares = stepped if squares is None else squares
                if self._shards is not None:
                    costs.updated = self._shards.exchange()
            if squares is not None and values is not None:
                values[SQUARES] = squares
            if self._rollback is not None and where is not None:
                self._rollback.restore(unless=where)
            if self.batch_norm is not None:
                sums = self.batch_norm.sums if users is None else step.reports[index][0][HEAD:]
                self.batch_norm.commit(sums, where=where)
        compression = self.gradients.compression
        if users is not None and compression is not None:
            if isinstance(commit, Tensor):
                compression.settle_later(commit, unused, costs)
            else:
                compression.settle(commit, unused, costs)
        if self._after_step is not None:
            self._after_step(self._step, commit)
        self.gradients.close_step()
        self.is_open = self.is_stepping = False
        # Only now, as the optimizer's pass writes to the decision as well.
        used = (decided, users, *step.reports.get(index, ()))
        self.lane.keep(*[tensor for tensor in used if tensor is not None])

    def _clip(self, values: Tensor | None) -> tuple[Gradients | None, Tensor | None]:
        """Clip the gradients of the stage, which are those of all replicas by now."""
        options, unwritten, squares = self.options, self.gradients.unwritten, None
        if self._global_norm is not None and values is not None:
            shrink = clip_factor(values[SQUARES], self._global_norm)
            if shrink is not None:
                self.gradients.scale(shrink)
        elif options.clip_norm is not None and options.clip_mode != "norm":
            if unwritten is not None:
                squares, unwritten = unwritten.materialise(), None
            named = self.module.named_parameters()
            clip_each(
                [parameter for name, parameter in named if name not in options.not_clipped],
                options.clip_mode,
                options.clip_norm,
            )
        return unwritten, squares


def reducer_kind(*, delayed: bool) -> type[Reducer]:
    """What sums gradients over replicas, loaded only where there are some."""
    if delayed:
        from hybridpar.sync.delayed_reducer import DelayedReducer

        return DelayedReducer
    from hybridpar.sync.reducer import Reducer

    return Reducer


# Layout of a forward report; BatchNorm sums follow.
LOSS, _SAMPLES, _STOP, SAVE, LAYOUT, _LAYOUT_SQUARED, HEAD = range(7)


class Agreement:
    """Sums the control messages of a worker's stages; but for two methods its work is that of its lane."""

    def __init__(self, stages: Mapping[int, LocalStage], world: World, lanes: Lanes, *, is_whole: bool) -> None:
        # One worker alone waits for no other.
        self.lane = lanes.caller if is_whole and world.size == 1 else lanes.open("control", priority=-1)
        self._stages = stages
        self._world = world
        self._lanes = lanes
        self._device = lanes.device
        self._constants = Constants(lanes.device)
        self._is_cut = any(world.size > stage.replicas.size for stage in stages.values())
        self._guarded = any(stage.guarded for stage in stages.values())
        self._measured = any(stage.measured for stage in stages.values())

    def count_samples(self, samples: float, *, refusing: bool = False) -> Callable[[], float]:
        """Start to sum the samples of a step over the replicas."""
        # Each of them has one worker of every replica, so the sums are the same.
        parties = list({id(stage.replicas): stage.replicas for _, stage in sorted(self._stages.items())}.values())
        if parties[0].control_group is None:
            return lambda: samples
        given = [samples, float(refusing)]
        counts = [torch.tensor(given, dtype=torch.float64, device=self._device) for _ in parties]
        self.lane.wait(self._lanes.caller.record())
        for count, party in zip(counts, parties, strict=True):
            self.lane.submit(partial(self._sum, count, "exchanging sample counts", party), uses=(count,))
        known = self.lane.record()

        def read() -> float:
            self._lanes.caller.wait(known)
            total, refused = map(float, counts[-1].tolist())
            if refused:
                raise RefusedStepError(
                    f"{round(refused)} of the other workers got a batch that cannot be divided into the micro-batches "
                    "asked for",
                    "All workers do a step, or none.",
                    "Give every worker at least one sample for each micro-batch (micro_batches), or none of them a "
                    "batch.",
                )
            return total

        return read

    def report_forward(self, index: int, step: StepState) -> None:
        """On a stage's lane: its forward report; loss and samples are 0 where the loss is another stage's."""
        stage, request = self._stages[index], step.request
        loss, flags, samples = stage.run.loss_sum, request.flags, request.samples
        if loss is None:
            loss, samples = torch.zeros((), dtype=torch.float64, device=stage.lane.device), 0
        if flags is not None:
            stage.lane.keep(flags)
        report = forward_report(
            loss, samples, (request.stop, request.save) if flags is None else flags, constants=stage.constants
        )
        if stage.replicas.size > 1:
            layout, batch_norm = stage.gradients.layout, stage.batch_norm
            report.append(stage.constants.of(layout, layout * layout))
            report = [torch.cat(report if batch_norm is None else [*report, batch_norm.sums])]
        step.reports[index] = report
        if stage.replica_buffers.shared:
            stage.replica_buffers.look()

    def sum_forward(self, index: int, step: StepState) -> None:
        """Sum the forward report of a stage over its replicas, and give them the buffers of the first."""
        stage, (message,) = self._stages[index], step.reports[index]
        self.lane.keep(message)
        self._sum(message, f"exchanging statistics of stage {index}", stage.replicas, step)
        if self._device.type == "cpu":  # on a GPU it would stall the lane
            check_layout(message[LAYOUT:HEAD], stage.replicas.size)
        step.flights[index].loss = message[LOSS]
        if stage.replica_buffers.shared:
            stage.replica_buffers.exchange()

    def report_backward(self, index: int, step: StepState) -> None:
        """On a stage's lane: the norm of its gradients, where no sum over replicas takes it."""
        self._stages[index].gradients.measure(step.flights[index])

    def sum_backward(self, index: int, step: StepState) -> None:
        """Sum the backward report of a stage over its replicas: the squares of its gradients and who used what."""
        flight, stage = step.flights[index], self._stages[index]
        self.lane.keep(flight.squares)
        message = torch.cat((stage.gradients.squares(flight).reshape(1), self._constants.of(*step.used[index])))
        self._sum(message, f"exchanging who used the parameters of stage {index}", stage.replicas, step)
        step.squares[index], step.users[index] = message[0], message[1:]

    def decide(self, step: StepState) -> None:
        """Add up what the stages know of the step, and decide."""
        known: list[list[Tensor]] = []
        for index, stage in self._stages.items():
            if self._is_cut and stage.replicas.rank:  # replicas know the same: the first of them says it
                continue
            flight, report, squares = step.flights[index], step.reports[index], step.squares.get(index)
            self.lane.keep(*report, flight.squares)
            if squares is None:
                squares = stage.gradients.squares(flight)
            head = report if stage.replicas.size == 1 else [report[0][: SAVE + 1]]
            known.append([*head, squares.reshape(1)])
        if self._is_cut or len(known) > 1:
            parts = list(map(torch.cat, known)) or [torch.zeros(SAVE + 2, dtype=torch.float64, device=self._device)]
            total = sum(parts[1:], start=parts[0])
            if self._is_cut:
                self._sum(total, "agreeing on the step", self._world, step)
            known = [[total[: SAVE + 1], total[SAVE + 1 :]]]
        *head, norm = known[0]
        step.values = decide(head, norm, guard=self._guarded, measured=self._measured)
        if step.request.flags is None:
            step.host_values = start_copy(step.values)

    def _sum(self, message: Tensor, doing: str, workers: World, step: StepState | None = None) -> None:
        """On the lane: sum a message over some workers, in place, and note the bytes sent in a step."""
        assert workers.control_group is not None
        with workers.named_errors(doing):
            workers.control_group.all_reduce(message)
        if step is not None:
            step.sent.append(all_reduce_bytes(8 * message.numel(), workers.size))


class RefusedStepError(UsageError):
    """The error of a worker that could do the step, where others cannot; all of them may go on with the next one."""


def forward_report(
    loss: Tensor, samples: int, flags: tuple[bool, bool] | Tensor = (False, False), *, constants: Constants
) -> list[Tensor]:
    """The first numbers of a stage's message after its last forward pass, up to `SAVE`, in parts that are 1-D float64.

    Behind them replicas have two of their layout, and BatchNorm sums.
    """
    loss = loss.double().reshape(1)
    if isinstance(flags, Tensor):
        return [loss, constants.of(samples), flags]
    return [loss, constants.of(samples, *flags)]


def check_layout(layouts: Tensor, workers: int) -> None:
    """Refuse to go on where workers cut different buckets.

    All fingerprints h are equal exactly where K sum(h^2) = sum(h)^2; with 16 bits the sums are exact in float64.
    """
    total, squares = layouts.tolist()
    if workers * squares != total**2:
        raise SyncError(
            "the workers do not train the same parameters",
            "Names, shapes, memory formats and requires_grad of all parameters must be equal on all workers.",
            "Build and freeze the model in the same way on every worker.",
        )


def decide(report: Sequence[Tensor], squares: Tensor, *, guard: bool, measured: bool) -> Tensor:
    """The values of a `StepOutcome`, from the summed reports up to `SAVE`, in parts, and the squared norm, all 1-D."""
    commit = torch.lt(squares, torch.inf, out=torch.empty_like(squares)) if guard else torch.ones_like(squares)
    return torch.cat((*report, commit, squares if measured else torch.full_like(squares, -1.0)))
