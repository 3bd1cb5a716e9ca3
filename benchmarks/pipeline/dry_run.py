"""Measures the inputs of a prediction, compute and communication times, without running the pipeline.

`DryRun` does all computation of one worker in the order of its program, with made-up tensors in place of those that
would arrive, while the other workers do the same: so caches, memory and fresh gradients are as in a real step, and
nothing waits. `probe_channel` measures a channel alone, with messages of the sizes that are really sent.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from benchmarks.pipeline.setups import Setting, optimizer_step
from hybridpar.comm.grid import Grid
from hybridpar.comm.transport import MessagePart
from hybridpar.comm.world import World
from hybridpar.lanes import Lanes
from hybridpar.partition.planning import stages_from_plan
from hybridpar.pipeline.borders import BorderTable
from hybridpar.pipeline.local_stage import LocalStage
from hybridpar.pipeline.stage_module import consumers_of
from hybridpar.pipeline.stage_run import Mailbox, StageRun
from hybridpar.pipeline.step import SpanRecorder, StepRequest, StepState
from hybridpar.plan import Plan
from hybridpar.schedule.actions import COMPUTE, Kind
from hybridpar.schedule.costs import Link
from hybridpar.schedule.program import Program
from hybridpar.sync.options import SyncOptions

_COMMITTED = torch.tensor([0.0, 1.0, 0.0, 0.0, 1.0, 1.0], dtype=torch.float64)


class DryRun:
    """The computation of one worker, without any transfer.

    Args:
        setting: What is trained.
        plan: How it is cut.
        program: What the workers do.
        position: Which of them this is.
    """

    def __init__(self, setting: Setting, plan: Plan, program: Program, position: int) -> None:
        self._layout = program.layout
        self._position = position
        self._actions = [action for action in program.workers[position] if action.kind in COMPUTE]
        self._mailbox = Mailbox()
        self._lanes = Lanes("cpu")
        model = setting.build()
        stages = stages_from_plan(model, plan)
        for stage in stages:
            stage.train()
        images, labels = setting.data()
        count = setting.micro_batches
        self._batches = list(zip(images.chunk(count), labels.chunk(count), strict=True))
        borders = BorderTable(stages, stages)
        self._input = stages[0].model_inputs[0]
        facts = borders.at({self._input: self._batches[0][0]}, None)
        self._gradient_names = facts.gradients
        self._arriving = {name: torch.randn(part.shape) for name, part in facts.parts.items()}
        self._consumers = {index: consumers_of(stages, index) for index in range(len(stages))}
        self._stages: dict[int, LocalStage] = {}
        for index, stage in enumerate(stages):
            if self._layout.home(index) != position:
                continue
            last = index == len(stages) - 1
            run = StageRun(stage, self._consumers[index], self._mailbox, loss=F.cross_entropy if last else None)
            lane = self._lanes.open(f"stage {index}")
            self._stages[index] = LocalStage(
                run, lane, self._lanes, World(), [], SyncOptions(), count, optimizer_step(stage)
            )
        self._step = 0

    def run(self) -> dict[tuple[int, str], float]:
        """One step. Mean milliseconds by stage and kind of action: forward, backward, and STEP."""
        self._step += 1
        times: dict[tuple[int, str], list[float]] = {}

        def timed(stage: int, kind: str, work: Callable[[], object]) -> None:
            begin = time.perf_counter()
            work()
            times.setdefault((stage, kind), []).append((time.perf_counter() - begin) * 1e3)

        device = self._lanes.device
        step = StepState(
            self._step, StepRequest([], 0), 1.0, 1.0, [], [], SpanRecorder(device), None, values=_COMMITTED
        )
        for index, stage in self._stages.items():
            step.flights[index] = stage.gradients.new_step()
            stage.start(self._step, step.flights[index])
        for action in self._actions:
            index, micro_batch = action.stage, action.index
            assert micro_batch is not None
            self._arrive(index, micro_batch, forward=action.kind is Kind.FORWARD)
            run = self._stages[index].run
            images, labels = self._batches[micro_batch]
            inputs: dict[str, Tensor] = {self._input: images}
            work: dict[Kind, Callable[[], object]] = {
                Kind.FORWARD: partial(run.forward, micro_batch, inputs, labels, self._share, _keep),
                Kind.BACKWARD: partial(run.backward, micro_batch, _keep),
            }
            timed(index, action.kind.value, work[action.kind])
            self._leave(index, micro_batch)
        for index, stage in self._stages.items():
            step.used[index] = stage.gradients.flush()
            apply = partial(stage.apply, step, on_device=False)
            stage.lane.submit(partial(timed, index, Kind.STEP.value, apply))
            stage.lane.synchronize()
        self._mailbox.clear()
        return {key: statistics.mean(values) for key, values in times.items()}

    def _share(self) -> float:
        return 1 / len(self._batches)

    def close(self) -> None:
        """Release hooks, end lanes."""
        for stage in self._stages.values():
            stage.detach()
        self._lanes.close()

    def _arrive(self, index: int, micro_batch: int, *, forward: bool) -> None:
        """Put there what other workers would have sent."""
        for source, consumers in self._consumers.items():
            if forward and index in consumers and self._layout.home(source) != self._position:
                for name in consumers[index]:
                    self._mailbox.values[name, micro_batch, index] = self._arriving[name]
        if not forward:
            for target, names in self._consumers[index].items():
                if self._layout.home(target) != self._position:
                    for name in names:
                        if name in self._gradient_names:
                            self._mailbox.gradients[name, micro_batch, target] = self._arriving[name]

    def _leave(self, index: int, micro_batch: int) -> None:
        """Let go what would be sent to other workers."""
        for box in (self._mailbox.values, self._mailbox.gradients):
            for address in [one for one in box if one[1] == micro_batch]:
                name, _, user = address
                producer = next(
                    source for source, consumers in self._consumers.items() if name in consumers.get(user, ())
                )
                other = user if box is self._mailbox.values else producer
                if self._layout.home(other) != self._position and index in (producer, user):
                    del box[address]


def _keep(*tensors: Tensor) -> None:
    """Work on the caller's own thread has nothing to keep."""


@dataclass(frozen=True)
class Channel:
    """What a channel between two workers and the hand-over between lanes cost.

    Attributes:
        link: Latency and speed.
        submit_ms: Of a lane for one piece of work that does nothing.
        control_ms: Agreement of all workers, with its hand-overs.
    """

    link: Link
    submit_ms: float
    control_ms: float


def probe_channel(grid: Grid, world: World, sizes: list[int], rounds: int = 8) -> Channel:
    """Measure the channels between positions 0 and 1; a collective of both.

    Args:
        grid: The grid; nothing else is under way on it.
        world: All workers.
        sizes: Bytes of the messages that are really sent.
        rounds: Messages of every size, each way.
    """
    peer = 1 - grid.position
    sender, receiver = grid.senders[peer], grid.receivers[peer]
    sizes = sorted({*sizes, max(4096, min(sizes) // 2 // 4 * 4)})
    first = grid.position == 0
    samples: list[tuple[float, float]] = []
    for size in sizes:
        message = torch.zeros(size // 4)
        part = [MessagePart((size // 4,))]
        for number in range(rounds + 1):
            dist.barrier()
            time.sleep(0.02)  # as in a step, where computation lies between two messages and a shaper's bucket refills
            begin = time.perf_counter()
            if first:
                sender.send([message], part)
            else:
                receiver.receive(part)
            # The receiver's clock counts from the moment when both have come.
            took = (time.perf_counter() - begin) * 1e3
            if number and not first:
                samples.append((float(size), took))
    hop, submit = _hand_over()
    begin = time.perf_counter()
    for _ in range(50):
        if world.control_group is not None:
            world.control_group.all_reduce(torch.zeros(5, dtype=torch.float64))
    agree = (time.perf_counter() - begin) * 1e3 / 50
    gathered: list[Any] = world.gather(samples)
    found = fit_link(gathered[1])
    # Activations go from the compute lane to the sender's and from the receiver's to the compute lane.
    link = Link(found.latency_ms + 2 * hop, found.bytes_per_second)
    return Channel(link, submit, agree + 2 * hop)


def _hand_over(count: int = 200) -> tuple[float, float]:
    """Milliseconds from the end of work on one lane to the start of work on another, and of a submission alone."""
    with Lanes("cpu") as lanes:
        one, other = lanes.open("one"), lanes.open("other")
        begin = time.perf_counter()
        for _ in range(count):
            one.submit(_nothing)
        one.synchronize()
        submit = (time.perf_counter() - begin) * 1e3 / count
        begin = time.perf_counter()
        for _ in range(count):
            one.submit(_nothing)
            other.wait(one.record())
            other.submit(_nothing)
            one.wait(other.record())
        one.synchronize()
        hop = (time.perf_counter() - begin) * 1e3 / (2 * count)
    return max(0.0, hop - submit), submit


def _nothing() -> None:
    """Work that does nothing."""


def fit_link(samples: Iterable[tuple[float, float]]) -> Link:
    """The link on which transfers take the times that were measured.

    A line through the medians of every size, by least squares, with neither latency nor speed below zero. Transfers of
    a single size say nothing about latency: it is then a part of the speed.
    """
    by_size: dict[float, list[float]] = defaultdict(list)
    for size, ms in samples:
        if size > 0:
            by_size[size].append(ms)
    points = [(size, statistics.median(times)) for size, times in sorted(by_size.items())]
    if not points:
        return Link()
    slope, latency = _line(points)
    if latency < 0:
        latency = 0.0
        slope = sum(size * ms for size, ms in points) / sum(size * size for size, _ in points)
    elif slope < 0:
        slope, latency = 0.0, statistics.mean(ms for _, ms in points)
    return Link(latency, 1e3 / slope if slope > 0 else None)


def _line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Slope and intercept of the line through points, by least squares; through the origin where there is one size."""
    if len(points) == 1:
        return points[0][1] / points[0][0], 0.0
    line = statistics.linear_regression([size for size, _ in points], [ms for _, ms in points])
    return line.slope, line.intercept
