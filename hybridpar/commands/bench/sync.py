"""`hybridpar bench sync`: times whole training steps with and without compressed gradients, on all workers.

Every codec trains a model of its own in the same processes, and each round takes one step of each, in an order that
rotates, so that what disturbs the machine disturbs all alike. Beside them runs `no exchange`, the floor: a step of a
worker that talks to nobody. Without compression gradients travel as they do without `--compress`, on one machine
through shared memory; with it, through a process group.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor, nn

from hybridpar.comm.world import World
from hybridpar.commands.bench.request import BenchSync
from hybridpar.commands.bench.table import print_table, write_rows
from hybridpar.config import TrainConfig
from hybridpar.errors import UsageError
from hybridpar.machine.launch import record_failure
from hybridpar.models import build_model, seed_everything
from hybridpar.optim.build import build_optimizer
from hybridpar.train.trainer import Trainer

#: The step that exchanges nothing, and the one that exchanges gradients as they are.
FLOOR, FULL = "no exchange", "none"
#: Untimed steps: shapes are found, and buckets are cut anew.
_WARMUP = 3
#: Bytes of the tensor by which the link is measured.
_PROBE = 8 << 20
#: What a codec must gain before it is worth what it changes.
WORTH = 1.05


@dataclass(frozen=True)
class StepTimes:
    """Steps with one codec; the slowest worker's, in milliseconds.

    Attributes:
        codec: As text, or `FLOOR`.
        step_ms: Median time of a step.
        least_ms: Shortest step.
        speedup: Of the step without compression over this one: the median over the rounds.
        exposed_ms: Median of what the host waited for the exchange; None where there is none.
        sent_bytes: What rank 0 sent in a step.
        wire_ms: What these bytes take on the link alone.
    """

    codec: str
    step_ms: float
    least_ms: float
    speedup: float
    exposed_ms: float | None
    sent_bytes: int
    wire_ms: float


def run_bench_sync(request: BenchSync, console: Console | None = None) -> int:
    """Measure as one of the workers of a job; rank 0 prints and writes. Returns the exit code.

    Args:
        request: The options.
        console: Where it is printed.

    Raises:
        HybridparError: A codec or model is unknown, or a worker died or did not answer.
    """
    with ExitStack() as stack:
        try:
            found = measure_steps(request, stack)
        except BaseException as error:
            record_failure(error, debug=False)  # before the peers notice that this worker is gone
            raise
    if found is not None:
        transport, rate, times = found
        print_times(request, transport, rate, times, console or Console())
        if request.csv is not None:
            write_rows(request.csv, [asdict(one) for one in times])
    return 0


def measure_steps(request: BenchSync, stack: ExitStack) -> tuple[str, float, list[StepTimes]] | None:
    """Time steps of all codecs; a collective of all workers.

    Args:
        request: What to measure.
        stack: Where worlds and trainers are to be closed.

    Returns:
        What gradients travel by, bytes per second of the link, and a row per codec. On rank 0 alone.

    Raises:
        UsageError: The job has one worker.
    """
    config = TrainConfig(
        batch_size=request.batch_size,
        sync_lanes=request.sync_lanes,
        bucket_mb=request.bucket_mb,
        timeout=request.timeout,
    )
    grouped = World.join(lanes=config.sync_lanes, timeout=config.timeout, shared_memory=False)
    stack.callback(grouped.close)
    if grouped.size == 1:
        raise UsageError("a job of one worker", "It has nobody to send gradients to.", "Start two or more.")
    shared = World.join(lanes=config.sync_lanes, timeout=config.timeout)
    stack.callback(shared.close)
    share = max(1, request.batch_size // grouped.size)
    draw = torch.Generator().manual_seed(grouped.rank)
    size = request.image_size
    images = torch.randn(share, 3, size, size, generator=draw).to(grouped.device)
    labels = torch.randint(0, request.classes, (share,), generator=draw).to(grouped.device)
    runners: dict[str, Callable[[], tuple[float, int]]] = {
        FLOOR: _alone(request, config, images, labels),
        **{
            text: _together(
                stack, request, replace(config, compress=text), shared if text == FULL else grouped, images, labels
            )
            for text in dict.fromkeys((FULL, *request.compress))
        },
    }
    rate = link_rate(grouped)
    rounds = _take_turns(runners, request.steps, grouped)
    if grouped.rank:
        return None
    times = []
    for name in runners:
        steps = [one[name] for one in rounds]
        sent = steps[-1][2]
        times.append(
            StepTimes(
                codec=name,
                step_ms=statistics.median(step for step, _, _ in steps),
                least_ms=min(step for step, _, _ in steps),
                speedup=statistics.median(one[FULL][0] / one[name][0] for one in rounds),
                exposed_ms=None if name == FLOOR else statistics.median(exposed for _, exposed, _ in steps),
                sent_bytes=sent,
                wire_ms=sent / rate * 1e3,
            )
        )
    return shared.transport, rate, times


def link_rate(world: World) -> float:
    """Bytes per second that a worker sends in an all-reduce, the best of five; a collective.

    Args:
        world: The workers.
    """
    tensor = torch.zeros(_PROBE // 4, device=world.device)
    sent = 2 * (world.size - 1) / world.size * _PROBE
    best = float("inf")
    for _ in range(6):
        dist.barrier(world.control)
        begin = time.perf_counter()
        dist.all_reduce(tensor)
        _settle(world.device)
        best = min(best, time.perf_counter() - begin)
    return sent / best


def advice(times: Sequence[StepTimes]) -> str:
    """One sentence on what to do.

    Args:
        times: What was measured, by codec.
    """
    by_name = {one.codec: one for one in times}
    floor, full = by_name[FLOOR], by_name[FULL]
    others = [one for one in times if one.codec not in (FLOOR, FULL)]
    best = max(others, key=lambda one: one.speedup, default=full)
    if best is full or best.speedup < WORTH:
        return (
            f"Train without --compress: no codec made a step {WORTH - 1:.0%} faster here, and without any exchange "
            f"it would be {full.step_ms / floor.step_ms:.2f} times as fast."
        )
    return (
        f"Try --compress {best.codec}, {best.speedup:.2f} times as fast as without (no exchange at all: "
        f"{floor.speedup:.2f} times), and compare the accuracy that it reaches before you keep it."
    )


def print_times(request: BenchSync, transport: str, rate: float, times: Sequence[StepTimes], console: Console) -> None:
    """Print a table and the advice.

    Args:
        request: The options.
        transport: What gradients travel over.
        rate: Bytes per second that a worker sends.
        times: What was measured, by codec.
        console: Where it is printed.
    """
    title = (
        f"{request.model}, {request.image_size}x{request.image_size} images, batch {request.batch_size}, "
        f"{request.steps} steps each; without compression by {transport}; link: {rate / 1e6:,.0f} MB/s per worker"
    )
    columns = ("--compress", "step\nms", "shortest\nms", "times\nas fast", "exposed\nms", "sent\nMB", "wire\nms")
    rows = [
        (
            one.codec,
            f"{one.step_ms:.1f}",
            f"{one.least_ms:.1f}",
            f"{one.speedup:.2f}",
            "-" if one.exposed_ms is None else f"{one.exposed_ms:.1f}",
            f"{one.sent_bytes / 1e6:.3f}",
            f"{one.wire_ms:.1f}",
        )
        for one in times
    ]
    print_table(console, title, {name: name == "--compress" for name in columns}, rows)
    console.print(
        "times as fast: as without compression. exposed: the host waits. wire: these bytes on the link alone.",
        soft_wrap=True,
    )
    console.print(advice(times), soft_wrap=True)


# --------------------------------------------------------------------------------------------------------------- steps


def _build(request: BenchSync, device: torch.device) -> nn.Module:
    seed_everything(0)
    return build_model(request.model, request.classes).to(device)


def _alone(request: BenchSync, config: TrainConfig, images: Tensor, labels: Tensor) -> Callable[[], tuple[float, int]]:
    """A step of a worker that sends nothing."""
    model = _build(request, images.device)
    optimizer = build_optimizer(model, config)
    criterion = nn.CrossEntropyLoss()

    def step() -> tuple[float, int]:
        optimizer.zero_grad()
        criterion(model(images), labels).backward()
        optimizer.step()
        return 0.0, 0

    return step


def _together(
    stack: ExitStack, request: BenchSync, config: TrainConfig, world: World, images: Tensor, labels: Tensor
) -> Callable[[], tuple[float, int]]:
    """A step of the trainer: what the host waited for the exchange in milliseconds, and the bytes sent."""
    trainer = stack.enter_context(Trainer(_build(request, images.device), config=config, world=world))

    def step() -> tuple[float, int]:
        outcome = trainer.step((images, labels)).outcome
        return outcome.exposed_sync_ms, outcome.bytes_sent

    return step


def _take_turns(
    runners: dict[str, Callable[[], tuple[float, int]]], steps: int, world: World
) -> list[dict[str, tuple[float, float, int]]]:
    """For each round and codec: milliseconds of the step and of the exposed exchange, of the slowest worker; bytes."""
    names = list(runners)
    rounds = []
    for number in range(_WARMUP + steps):
        first = number % len(names)
        taken = {}
        for name in names[first:] + names[:first]:
            dist.barrier(world.control)
            begin = time.perf_counter()
            exposed, sent = runners[name]()
            _settle(world.device)
            taken[name] = ((time.perf_counter() - begin) * 1e3, exposed, sent)
        everybody = world.gather(taken)
        if number >= _WARMUP:
            rounds.append({name: _slowest(everybody, name) for name in names})
    return rounds


def _slowest(everybody: Sequence[object], name: str) -> tuple[float, float, int]:
    both = [taken[name] for taken in everybody if isinstance(taken, dict)]
    return max(step for step, _, _ in both), max(exposed for _, exposed, _ in both), both[0][2]


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
