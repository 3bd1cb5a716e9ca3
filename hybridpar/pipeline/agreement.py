"""Why: whether a step counts and how much it is clipped depends on all workers, and each must conclude the same.

In a pipeline no worker sees the whole model: the loss is known where the last stage is, the norm of the gradient in
parts. Both travel in one small message to all workers; what concerns one stage alone, BatchNorm's sums and which
parameters were used, is added over its replicas. All of it happens on one lane, so that it has one order everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hybridpar.comm.world import World
from hybridpar.lanes import Lanes
from hybridpar.pipeline.local_stage import LocalStage
from hybridpar.pipeline.step import StepState
from hybridpar.schedule.actions import Kind
from hybridpar.sync.constants import Constants
from hybridpar.sync.control import all_reduce_bytes, decide, start_copy

#: Loss, samples, stop, save, squared norm of the gradient.
_NUMBERS = 5


class Agreement:
    """All workers learn what all workers computed.

    Args:
        stages: This worker's stages by number.
        world: All workers.
        replicas: Those that hold the same stages.
        lanes: The lanes of this worker.

    Attributes:
        lane: Where the messages are added.
    """

    def __init__(self, stages: Mapping[int, LocalStage], world: World, replicas: World, lanes: Lanes) -> None:
        self.lane = lanes.open("control", priority=-1)
        self._stages = stages
        self._world = world
        self._replicas = replicas
        self._device = lanes.device
        self._constants = Constants(lanes.device)

    def reach(self, step: StepState) -> None:
        """Issue the agreement on a step, whose backward passes and sums of gradients have been issued.

        Args:
            step: Gets `shared`, `decided` and, when the lane comes to it, its values.
        """
        for index, event in step.reported.items():
            self.lane.wait(event)
            self._share(step, index)
        for action, event in step.events.items():
            if action.kind is Kind.SYNC:
                self.lane.wait(event)
        self.lane.submit(lambda: self._agree(step))
        step.decided = self.lane.record()
        step.bytes_sent += all_reduce_bytes(8 * _NUMBERS, self._world.size)

    def _agree(self, step: StepState) -> None:
        request, keep = step.request, self.lane.keep
        message = torch.zeros(_NUMBERS, dtype=torch.float64, device=self._device)
        flags = request.flags
        if flags is None:
            flags = self._constants.of(request.stop, request.save)
        keep(flags)
        message[2:4] = flags
        for index in self._stages:
            flight, (squares, _) = step.flights[index], step.reports[index]
            loss = step.losses[index]
            keep(squares, *(() if loss is None else (loss,)))
            message[4] += squares.to(message.device, non_blocking=True)
            if flight is not None:
                keep(flight.squares)
                message[4] += flight.squares.sum()
            if loss is not None:
                message[0] += loss.to(message.device, non_blocking=True)
                message[1] += sum(batch.samples for batch in request.micro_batches)
        if self._world.control_sum is not None:
            with self._world.named_errors("agreeing on the step"):
                self._world.control_sum.all_reduce(message)
        guard = any(stage.guarded for stage in self._stages.values())
        measured = any(stage.measured for stage in self._stages.values())
        step.values = decide(message[:4], message[4], guard=guard, measured=measured)
        if request.flags is None:
            step.host_values = start_copy(step.values)

    def _share(self, step: StepState, index: int) -> None:
        """Sum a stage's message over its replicas."""
        group = self._replicas.control_sum
        if group is None:
            return

        def add() -> None:
            message = step.reports[index][1]
            if message is not None:
                self.lane.keep(message)
                with self._world.named_errors(f"exchanging statistics of stage {index}"):
                    group.all_reduce(message)

        self.lane.submit(add)
        step.shared[index] = self.lane.record()
