"""Predicts the memory of plain data parallelism before anything is run, by the batch."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from hybridpar.config import TrainConfig
from hybridpar.errors import HybridparError
from hybridpar.machine.launch import launched_here
from hybridpar.models import autocast
from hybridpar.models.deferred import without_values
from hybridpar.models.state import twin_of
from hybridpar.planner.evaluate import Evaluator
from hybridpar.planner.inputs import PlannerInputs
from hybridpar.planner.measure import profile_model, set_way
from hybridpar.planner.profile import ModelProfile
from hybridpar.planner.space import Candidate, Space
from hybridpar.planner.trials import random_batch
from hybridpar.schedule.layout import Layout


class Need(NamedTuple):
    """Bytes that a worker needs, and that it has: of the worker with the least left."""

    bytes: float
    limit: float

    @property
    def fits(self) -> bool:
        """Whether all workers have the memory that they need."""
        return self.bytes <= self.limit

    def __str__(self) -> str:
        return f"{self.bytes / 1e9:,.2f} GB of {self.limit / 1e9:,.2f} GB per worker"


def memory_of(inputs: PlannerInputs, micro_batches: int = 1, held: int = 0) -> Callable[[int], Need]:
    """Predicts what a worker needs for plain data parallelism, by the samples of a step.

    So many bytes are `held` on each device already; the steps that are timed are those of a copy of the model.
    """
    held += inputs.profile.model_bytes
    workers, shards = inputs.cluster.workers, bool(inputs.fixed.shard_optimizer)
    inputs = replace(inputs, fixed=replace(inputs.fixed, shard_optimizer=shards))

    def need(batch: int) -> Need:
        space = Space(replace(inputs, batch=batch), workers)
        codec = space.codec_choices[-1 if inputs.fixed.codecs is not None and workers > 1 else 0]
        layout = Layout.repeated([(0, 0)], workers)
        cut = space.cut(layout)
        assert cut is not None
        candidate = Candidate(layout, micro_batches, cut, "accumulate", codec, sharded=shards and workers > 1)
        outcome = Evaluator(space).outcome(candidate)
        return Need(outcome.memory_bytes, outcome.limit_bytes - held)

    return need


def held_bytes(device: torch.device) -> int:
    """What the device's memory holds already.

    On a CPU it is what this process has, without the pages of files, and its part of what its launcher has.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return total - free
    launcher = _process_bytes(os.getppid()) // int(os.environ["LOCAL_WORLD_SIZE"]) if launched_here() else 0
    return _process_bytes(os.getpid()) + launcher


def _process_bytes(process: int) -> int:
    try:
        _, resident, shared, *_ = map(int, Path(f"/proc/{process}/statm").read_text().split())
    except OSError:  # a system that does not tell
        return 0
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


def sizes_of(
    model: nn.Module, options: TrainConfig, sample_shape: Sequence[int], samples: int, device: torch.device
) -> ModelProfile:
    """The graph of a model with the sizes of its tensors for so many samples, and times that are estimated.

    A model is traced without memory, and with its values where its forward pass asks for them.
    """
    memory_format = "channels_last" if options.uses_channels_last else "contiguous"

    def of(copy: nn.Module) -> ModelProfile:
        example = set_way(copy, random_batch(sample_shape, samples, device), memory_format)
        with autocast(options.amp, device):
            return profile_model(copy, [example], measure=False)

    with contextlib.suppress(HybridparError, RuntimeError, NotImplementedError):
        return of(without_values(model))
    return of(twin_of(model))
