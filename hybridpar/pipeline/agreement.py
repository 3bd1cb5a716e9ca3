"""How workers agree on a step: what was lost and used where, and whether the step counts.

All messages of a worker are summed on one lane, so they have one order everywhere. What concerns one stage is summed
over its replicas: the loss and BatchNorm sums after its last forward pass, the squared norm of its gradients and who
used which parameter after its last bucket. Where a model is cut over several workers, five numbers of these are then
added up over the stages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from hybridpar.comm.world import SumGroup, World, all_reduce_bytes
from hybridpar.errors import UsageError
from hybridpar.lanes import Lanes
from hybridpar.pipeline.local_stage import LocalStage
from hybridpar.pipeline.step import StepState
from hybridpar.schedule.actions import Kind
from hybridpar.sync.control import SAVE, Constants, backward_report, decide, start_copy

#: Loss, samples, stop, save, squared norm of the gradient.
_NUMBERS = 5


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
            step.reports[index] = stage.report_forward(step.request)

        def add() -> None:
            assert group is not None
            flight.report = step.reports[index]
            self.lane.keep(flight.report)
            self._sum(flight.report, group, f"exchanging statistics of stage {index}", self._replicas, step)

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
        total = torch.zeros(_NUMBERS, dtype=torch.float64, device=self._device)
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
    """The error of a worker that could do the step, where others cannot."""
    return UsageError(
        f"{count} of the other workers got a batch that cannot be divided into the micro-batches asked for",
        "All workers do a step, or none.",
        "Give every worker at least one sample for each micro-batch (micro_batches), or none of them a batch.",
    )
