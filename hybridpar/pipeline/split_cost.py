"""Measures what it costs to split the backward pass of a stage in two, which fills bubbles of a pipeline.

The two halves walk the same graph twice: what the gradients of the inputs and of the parameters have in common is
computed in both (Qi et al. 2023, "Zero Bubble Pipeline Parallelism", leaves that to the framework). So the halves are
measured against the whole before a schedule may use them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hybridpar.pipeline.stage_module import StageModule, consumers_of, module_of
from hybridpar.pipeline.stage_run import Mailbox, StageRun
from hybridpar.schedule.actions import Action, Kind, Schedule, make_schedule
from hybridpar.sync.batchnorm import BufferRollback

#: Measured passes of each kind, after one that is not counted.
_PASSES = 3
#: The most that the halves may cost together, over the whole.
MOST_SPLIT_COST = 1.1


@dataclass(frozen=True)
class BackwardCost:
    """What the backward pass of one stage takes, whole and in halves, in milliseconds.

    Attributes:
        whole_ms: In one piece.
        input_ms: The half that gives gradients of what entered the stage.
        weight_ms: The half that gives gradients of its parameters.
    """

    whole_ms: float
    input_ms: float
    weight_ms: float

    @property
    def ratio(self) -> float:
        """The halves over the whole."""
        return (self.input_ms + self.weight_ms) / self.whole_ms if self.whole_ms > 0 else 1.0


def measure_backward(
    stages: Sequence[StageModule],
    inputs: Mapping[str, Tensor],
    loss: Callable[[Any, Any], Tensor],
) -> list[BackwardCost]:
    """Measure the backward pass of every stage, whole and in halves, in turns; the minimum counts.

    Args:
        stages: All stages of a model, in order; their state is put back, and their gradients are None afterwards.
        inputs: One micro-batch of the model's inputs by name.
        loss: Mean loss, of the output and None.

    Returns:
        The costs, by stage.
    """
    modules = [module_of(stage) for stage in stages]
    rollbacks = [BufferRollback(module) for module in modules]
    device = next(iter(inputs.values())).device
    times: list[list[list[float]]] = [[[], [], []] for _ in stages]
    mailbox = Mailbox()
    last = len(stages) - 1
    runs = [
        StageRun(stage, consumers_of(stages, index), mailbox, loss=loss if index == last else None)
        for index, stage in enumerate(stages)
    ]
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        for turn in range(2 * (_PASSES + 1)):
            for run in runs:
                run.forward(0, dict(inputs), None, lambda: 1.0, _keep)
            for index in range(last, -1, -1):
                run = runs[index]
                halves = (run.backward_input, run.backward_weight) if turn % 2 else (run.backward,)
                took = [_timed(device, half) for half in halves]
                if turn > 1:
                    for slot, value in zip(times[index][1:] if turn % 2 else times[index][:1], took, strict=True):
                        slot.append(value)
    for module, rollback in zip(modules, rollbacks, strict=True):
        rollback.restore()
        module.zero_grad(set_to_none=True)
    return [BackwardCost(*(min(slot) for slot in row)) for row in times]


def may_split(costs: Sequence[BackwardCost]) -> bool:
    """Whether every stage's halves cost little enough over the whole.

    Args:
        costs: What the halves of each stage take, and what the whole does.
    """
    return all(cost.ratio <= MOST_SPLIT_COST for cost in costs)


def keep_whole(schedule: Schedule) -> Schedule:
    """The same order with whole backward passes: each stands where its first half stood.

    Args:
        schedule: With backward passes in halves.
    """
    rows = [
        [
            Action(action.stage, Kind.BACKWARD, action.index) if action.kind is Kind.BACKWARD_INPUT else action
            for action in row
            if action.kind is not Kind.BACKWARD_WEIGHT
        ]
        for row in schedule.rows
    ]
    return make_schedule(schedule.name, rows)


def _timed(device: torch.device, work: Callable[[int, Callable[..., None]], None]) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    work(0, _keep)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - start) * 1e3


def _keep(*tensors: Tensor) -> None:
    """Everything is on one lane."""
