"""Measures how much lanes slow each other down on one device.

A device that one lane fills makes two lanes twice as slow; one that it leaves half idle makes them no slower. The
number decides whether lanes on one device are worth anything, so it is taken from whole training steps that run beside
each other, not assumed.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence

import torch
from torch import nn

from hybridpar.errors import UsageError
from hybridpar.machine.steady import least_apart
from hybridpar.partition.nest import tensor_leaves
from hybridpar.partition.state import untouched
from hybridpar.partition.unit_runner import Clock, whole_step_ms


def measure_co_run(model: nn.Module, inputs: Sequence[torch.Tensor], lanes: int, *, passes: int = 3) -> float:
    """How much slower a lane runs while all lanes of its device are busy; see `measure_lanes`.

    Args:
        model: The model, on the device in question.
        inputs: One micro-batch.
        lanes: Number of lanes.
        passes: Times both ways are measured.

    Raises:
        UsageError: There is no lane.
    """
    return measure_lanes(model, inputs, lanes, passes=passes)[0]


def measure_lanes(
    model: nn.Module, inputs: Sequence[torch.Tensor], lanes: int, *, passes: int = 3
) -> tuple[float, float]:
    """How much slower a lane runs while all lanes of its device are busy, and how sure that is.

    Args:
        model: The model, on the device in question; its state is put back, copies of it run on the other lanes.
        inputs: One micro-batch.
        lanes: Number of lanes: streams on CUDA, threads on CPU.
        passes: Times both ways are measured, in turns; the minimum of each counts.

    Returns:
        Time of a step with all lanes busy over its time alone; 1 means that lanes do not disturb each other. And the
        noise: how far the two least times of a way lie apart, relative; infinite after a single pass.

    Raises:
        UsageError: There is no lane.
    """
    if lanes < 1:
        raise UsageError(f"{lanes} lanes", "A device has at least one lane.", "Use 1 or more.")
    with untouched(model, training=True):
        twins = [model, *(copy.deepcopy(model) for _ in range(lanes - 1))]
        clock = Clock(inputs[0].device)
        together = _streams if inputs[0].device.type == "cuda" else _threads
        for twin in twins:
            whole_step_ms(twin, inputs, clock)
        alone, beside = [], []
        for _ in range(passes):
            alone.append(whole_step_ms(model, inputs, clock))
            beside.append(together(twins, inputs, clock))
    noise = max(least_apart(times) for times in (alone, beside))
    return min(beside) / min(alone), noise


def _threads(twins: Sequence[nn.Module], inputs: Sequence[torch.Tensor], clock: Clock) -> float:
    """One step of every model on a thread of its own, all started at once."""
    gate = threading.Barrier(len(twins) + 1)

    def work(twin: nn.Module) -> None:
        gate.wait()
        whole_step_ms(twin, inputs, clock)

    threads = [threading.Thread(target=work, args=(twin,)) for twin in twins]
    for thread in threads:
        thread.start()
    gate.wait()
    start = clock.mark()
    for thread in threads:
        thread.join()
    return clock.between(start, clock.mark())


def _streams(twins: Sequence[nn.Module], inputs: Sequence[torch.Tensor], clock: Clock) -> float:
    """One step of every model on a stream of its own, issued by one host thread."""
    main = torch.cuda.current_stream(clock.device)
    streams = [torch.cuda.Stream(clock.device) for _ in twins]  # type: ignore[no-untyped-call]
    start = clock.mark()
    for twin, stream in zip(twins, streams, strict=True):
        stream.wait_stream(main)
        with torch.cuda.stream(stream):
            leaves = [leaf for _, leaf in tensor_leaves(twin(*inputs)) if leaf.requires_grad]
            torch.autograd.backward(leaves, [torch.ones_like(leaf) for leaf in leaves])
        main.wait_stream(stream)
    end = clock.mark()
    clock.wait()
    return clock.between(start, end)
