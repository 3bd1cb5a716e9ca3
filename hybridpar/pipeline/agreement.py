"""How workers agree on a step: what was lost and used where, and whether the step counts.

All messages of a worker are summed on one lane, so they have one order everywhere. What concerns one stage is summed
over its replicas: the loss and BatchNorm sums after its last forward pass, the squared norm of its gradients and who
used which parameter after its last bucket. Where a model is cut over several workers, five numbers of these are then
added up over the stages.

The sum of squares is finite exactly where all gradients are, so one number serves the guard and clipping; all workers
read the same sum, so all decide alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from hybridpar.comm.world import SumGroup, World, all_reduce_bytes
from hybridpar.errors import UsageError
from hybridpar.lanes import Lanes
from hybridpar.lanes.base import Constants, start_copy
from hybridpar.pipeline.local_stage import LocalStage
from hybridpar.pipeline.step import StepRequest, StepState
from hybridpar.schedule.actions import Kind

# Layout of a forward report; BatchNorm sums follow.
LOSS, _SAMPLES, _STOP, SAVE, _LAYOUT, _LAYOUT_SQUARED, HEAD = range(7)


class Agreement:
    """Sums the control messages of a worker's stages.

    Args:
        stages: This worker's stages by number.
        world: All workers.
        replicas: Those that hold the same stages.
        lanes: The lanes of this worker.
        whole: The model is not cut, so its one stage is all there is.

    Attributes:
        lane: Where the messages are summed.
    """

    def __init__(
        self, stages: Mapping[int, LocalStage], world: World, replicas: World, lanes: Lanes, *, whole: bool = False
    ) -> None:
        # One worker alone waits for no other.
        self.lane = lanes.caller if whole and world.size == 1 else lanes.open("control", priority=-1)
        self._stages = stages
        self._world = world
        self._replicas = replicas
        self._lanes = lanes
        self._whole = whole
        self._device = lanes.device
        self._constants = Constants(lanes.device)

    def count_samples(self, samples: int, *, refusing: bool = False) -> Callable[[], int]:
        """Start to sum the samples of a step over the replicas.

        Args:
            samples: Of this worker.
            refusing: This worker cannot do the step.

        Returns:
            Waits for the sum and returns it; raises UsageError where another worker refuses the step.
        """
        group = self._replicas.control_sum
        if group is None:
            return lambda: samples
        counts = torch.tensor([float(samples), float(refusing)], dtype=torch.float64, device=self._device)
        self.lane.wait(self._lanes.caller.record())
        self.lane.submit(lambda: self._sum(counts, group, "exchanging sample counts", self._replicas), uses=(counts,))
        known = self.lane.record()

        def read() -> int:
            self._lanes.caller.wait(known)
            total, refused = map(float, counts.tolist())
            if refused:
                raise refused_by_others(round(refused))
            return round(total)

        return read

    def share_forward(self, step: StepState, index: int) -> None:
        """Issue the forward report of a stage; sets `reported` of its flight now and `step.reports` when the lane runs.

        Args:
            step: The step.
            index: The stage, whose last forward pass has been issued.
        """
        stage, flight, group = self._stages[index], step.flights[index], self._replicas.control_sum

        def report() -> None:
            step.reports[index] = _report_of(stage, step.request)

        def add() -> None:
            assert group is not None
            message = step.reports[index]
            self.lane.keep(message)
            self._sum(message, group, f"exchanging statistics of stage {index}", self._replicas, step)
            flight.loss, flight.layouts = message[LOSS], message[_LAYOUT:HEAD]

        stage.lane.submit(report)
        if group is not None:
            self.lane.wait(stage.lane.record())
            self.lane.submit(add)
            flight.reported = self.lane.record()

    def reach(self, step: StepState) -> None:
        """Issue the agreement on a step, whose backward passes and sums of gradients have been issued.

        Args:
            step: Gets `shared`, `decided` and, when the lane comes to it, its values.
        """
        for event in step.backward_done.values():
            self.lane.wait(event)
        for action, event in step.events.items():
            if action.kind is Kind.SYNC:
                self.lane.wait(event)
        for index in self._stages:
            self.lane.submit(lambda index=index: self._share_backward(step, index))  # type: ignore[misc]
            if self._replicas.control_sum is not None:
                step.shared[index] = self.lane.record()
        self.lane.submit(lambda: self._decide(step))
        step.decided = self.lane.record()

    def _share_backward(self, step: StepState, index: int) -> None:
        """On the lane: sum the backward report of a stage, the squares of its gradients and who used what."""
        flight, group = step.flights[index], self._replicas.control_sum
        self.lane.keep(flight.squares)
        step.squares[index] = self._stages[index].gradients.squares(flight)
        if group is not None:
            message = backward_report(step.squares[index], step.used[index], self._constants)
            self._sum(message, group, f"exchanging who used the parameters of stage {index}", self._replicas, step)
            step.squares[index], step.users[index] = message[0], message[1:]

    def _decide(self, step: StepState) -> None:
        """On the lane: add up what the stages know of the step, and decide."""
        guard = any(stage.guarded for stage in self._stages.values())
        measured = any(stage.measured for stage in self._stages.values())
        total = torch.zeros(SAVE + 2, dtype=torch.float64, device=self._device)
        for index, squares in step.squares.items():
            report = step.reports[index]
            self.lane.keep(report, squares)
            total += torch.cat((report[: SAVE + 1], squares.reshape(1))).to(total.device, non_blocking=True)
        if self._world.size > self._replicas.size:  # replicas know the same of a stage, so the first one tells it
            assert self._world.control_sum is not None
            if self._replicas.rank:
                total.zero_()
            self._sum(total, self._world.control_sum, "agreeing on the step", self._world, step)
        step.values = decide(total, total[SAVE + 1], guard=guard, measured=measured)
        if step.request.flags is None:
            step.host_values = start_copy(step.values)

    def _sum(self, message: Tensor, group: SumGroup, doing: str, workers: World, step: StepState | None = None) -> None:
        """On the lane: sum a message over some workers, in place, and note the bytes sent in a step."""
        with self._world.named_errors(doing):
            group.all_reduce(message)
        if step is not None:
            step.message_bytes.append(all_reduce_bytes(8 * message.numel(), workers.size))


def refused_by_others(count: int) -> UsageError:
    """The error of a worker that could do the step, where others cannot.

    Args:
        count: How many cannot.
    """
    return UsageError(
        f"{count} of the other workers got a batch that cannot be divided into the micro-batches asked for",
        "All workers do a step, or none.",
        "Give every worker at least one sample for each micro-batch (micro_batches), or none of them a batch.",
    )


def _report_of(stage: LocalStage, request: StepRequest) -> Tensor:
    """The forward report of a stage; loss and samples are 0 where the loss is another stage's."""
    loss = stage.run.loss_sum
    if request.flags is not None:
        stage.lane.keep(request.flags)
    return forward_report(
        torch.zeros((), dtype=torch.float64, device=stage.lane.device) if loss is None else loss,
        0 if loss is None else sum(batch.samples for batch in request.micro_batches),
        stop=request.stop,
        save=request.save,
        layout=stage.gradients.layout,
        batch_norm=stage.batch_norm.sums if stage.batch_norm is not None else None,
        flags=request.flags,
        constants=stage.constants,
    )


def forward_report(
    loss: Tensor,
    samples: int,
    *,
    stop: bool = False,
    save: bool = False,
    layout: int,
    batch_norm: Tensor | None,
    flags: Tensor | None = None,
    constants: Constants | None = None,
) -> Tensor:
    """The message of a stage after its last forward pass, 1-D float64: `HEAD` numbers, then BatchNorm sums.

    Args:
        loss: This worker's part of the mean loss, 0-d.
        samples: Samples of this worker.
        stop: This worker wants to stop.
        save: This worker wants a checkpoint.
        layout: Fingerprint of the buckets, 16 bits.
        batch_norm: Sums of the BatchNorm layers.
        flags: `stop` and `save` as a float64 tensor on the device of the loss, instead of what the host says.
        constants: Numbers that were copied to the device before.
    """
    known = constants or Constants(loss.device)
    if flags is None:
        flags = known.of(float(stop), float(save))
    head = (loss.double().reshape(1), known.of(samples), flags, known.of(layout, layout * layout))
    return torch.cat(head if batch_norm is None else (*head, batch_norm))


def backward_report(squares: Tensor, used: Sequence[bool], constants: Constants | None = None) -> Tensor:
    """The message of a stage after its last bucket, 1-D float64.

    Args:
        squares: This worker's part of the squared norm of the gradient, 0-d float64.
        used: For each parameter whether this worker used it.
        constants: Numbers that were copied to the device before.
    """
    return torch.cat((squares.reshape(1), (constants or Constants(squares.device)).of(*used)))


def decide(report: Tensor, squares: Tensor, *, guard: bool, measured: bool) -> Tensor:
    """The values of a `StepOutcome`, from the summed reports.

    Args:
        report: The summed forward report.
        squares: Squared norm of the reduced gradient.
        guard: Whether a non-finite gradient rolls the step back.
        measured: Whether anybody computed the norm.
    """
    commit = torch.isfinite(squares).double() if guard else torch.ones_like(squares)
    known = squares if measured else torch.full_like(squares, -1.0)
    return torch.cat((report[: SAVE + 1], torch.stack((commit, known))))
