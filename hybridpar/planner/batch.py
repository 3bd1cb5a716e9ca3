"""Chooses the batch of a run (`--batch-size auto`) by predicted memory and measured speed.

Batches are powers of two times the parts of a step: workers x micro-batches. A batch is tried only where the memory
that it is predicted to need is there, so nothing ever runs out of it. Speed is that of real steps of plain data
parallelism on a copy of the model. Larger batches cost accuracy, so of all that are about as fast the smallest is
chosen.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from hybridpar.comm.world import World
from hybridpar.config import TrainConfig
from hybridpar.errors import HybridparError, UsageError
from hybridpar.machine.launch import launched_here
from hybridpar.machine.process import usable_memory
from hybridpar.models import autocast
from hybridpar.models.deferred import is_deferred, without_values
from hybridpar.models.layers import freeze
from hybridpar.models.state import same_random, twin_of
from hybridpar.optim.build import state_copies
from hybridpar.planner.evaluate import Evaluator
from hybridpar.planner.fixed import decided_options, fixed_by
from hybridpar.planner.inputs import PlannerInputs, Question
from hybridpar.planner.links import describe_hosts
from hybridpar.planner.profile import ModelProfile, profile_model, set_way
from hybridpar.planner.space import Candidate, Space
from hybridpar.planner.trials import FIRST_STEPS, OpenTrial, as_problem, random_batch, time_in_turns, timed
from hybridpar.schedule.layout import Layout

#: Samples of a part of the first batch, and of the smallest that is tried where that does not fit.
FIRST, LEAST = 8, 2
#: Twice the batch must raise the samples per second by this part, else no larger ones are tried; and the batch that is
#: chosen is slower than the fastest by no more than that.
GAIN = 0.05
#: Steps of an epoch with the largest batch that is tried.
LEAST_STEPS = 8
#: What a process on a CPU grows by when its first trainer opens, as modules are imported and threads begin.
_OPENING_BYTES = 48 << 20
#: Steps of each batch that are timed, and seconds after which there is no other.
STEPS, SECONDS = 5, 1.5


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


@dataclass(frozen=True)
class BatchChoice:
    """The batch that was chosen, and why neither less nor more."""

    batch: int
    why: str


def choose_batch(parts: int, most: int, need: Callable[[int], Need], rate: Callable[[int], float]) -> BatchChoice:
    """The smallest batch that is about as fast as the fastest of those that fit into memory.

    `need` predicts the memory of a batch, and `rate` measures its samples per second; the latter is asked only for
    batches that fit, from small to large. `most` is the largest batch that is of use.
    """
    least = LEAST * parts
    if least > most:
        raise _refused(f"an epoch of {LEAST_STEPS} steps has fewer than {LEAST} samples for each of {parts} part(s)")
    if not need(least).fits:
        raise _refused(f"{LEAST} samples on each worker need {need(least)}")
    batch = FIRST * parts
    while batch > most or not need(batch).fits:
        batch //= 2
    rates = {batch: rate(batch)}
    while not (end := _end_of(2 * batch, most, need)):
        batch *= 2
        rates[batch] = rate(batch)
        # A single measurement may be wrong, so two in a row must gain nothing.
        before = rates.get(batch // 4, 0.0)
        if before and max(rates[batch], rates[batch // 2]) < (1 + GAIN) * before:
            break
    chosen = min(batch for batch in rates if rates[batch] >= (1 - GAIN) * max(rates.values()))
    reasons = [
        f"{batch:,} would be {abs(change):.0%} {'slower' if change < 0 else 'faster'}"
        for batch in (chosen // 2, 2 * chosen)
        if batch in rates
        for change in [rates[batch] / rates[chosen] - 1]
    ]
    return BatchChoice(chosen, ", ".join([*reasons, *([end] if chosen == batch else [])]))


def _end_of(batch: int, most: int, need: Callable[[int], Need]) -> str:
    """Why a batch is not tried; empty where it can be."""
    if batch > most:
        return f"{batch:,} would leave fewer than {LEAST_STEPS} steps in an epoch"
    return "" if need(batch).fits else f"{batch:,} needs {need(batch)}"


def _refused(why: str) -> UsageError:
    return UsageError(
        f"--batch-size auto: {why}",
        f"It chooses among batches that fit into memory and leave {LEAST_STEPS} steps in an epoch.",
        "Name a number, such as --batch-size 64, or start another number of workers.",
    )


def require_room(build: Callable[[], nn.Module], config: TrainConfig, device: torch.device, workers: int = 1) -> None:
    """Refuse a model of which a worker's memory holds no weights, gradients and optimizer state, before it is built."""
    try:
        with torch.device("meta"):
            model = build()
    except Exception:  # a builder that reads values of its tensors is built as it is
        return
    freeze(model, config.freeze)
    copies = 2 + state_copies(config) / (workers if config.shard_optimizer else 1)
    state = sum(int(param.nbytes * (copies if param.requires_grad else 1)) for param in model.parameters())
    if device.type == "cuda":
        limit = torch.cuda.mem_get_info(device)[1]
    else:
        limit = usable_memory() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if not (need := Need(held_bytes(device) + state, limit)).fits:
        raise _refused(f"weights, gradients and optimizer state alone need {need}")


def measure_batch(
    model: nn.Module,
    config: TrainConfig,
    world: World,
    sample_shape: Sequence[int],
    samples: int,
    open_trial: OpenTrial,
    announce: Callable[[str], None] = lambda text: None,
) -> BatchChoice:
    """Choose the batch for a model and a training set of so many samples; a collective."""
    # Compiling for each size takes minutes, and a captured step is as fast as its kernels.
    options = replace(config, batch_size=FIRST, compile=False, cuda_graph="off")
    parts = options.parts_per_step(options.micro_batches)
    names = [name for name, _ in model.named_parameters()]
    fixed = fixed_by(options, decided_options(config), world.size, names)
    asked = Question(type(model).__name__, tuple(sample_shape), options, fixed)
    with same_random([world.device.index or 0] if world.device.type == "cuda" else []):
        if is_deferred(model):
            raise _refused("no worker holds all of the model to measure it")
        model.to(world.device)
        announce("choosing the batch: predicting memory")
        try:
            profile = world.on_all(as_problem(lambda: sizes_of(model, options, sample_shape, LEAST, world.device)))
        except HybridparError as error:
            raise UsageError(
                f"--batch-size auto: {error.what}",
                "The memory of a batch is predicted from a trace of the model.",
                "Name a number, such as --batch-size 64.",
            ) from error
        held: int = max(world.gather(held_bytes(world.device)))  # type: ignore[type-var, assignment]
        held += _OPENING_BYTES if world.device.type == "cpu" else 0
        need = memory_of(asked.inputs(profile, describe_hosts(world)), parts, held)

        def rate(batch: int) -> float:
            announce(f"choosing the batch: timing steps of {batch:,} samples")
            example = random_batch(asked.sample_shape, batch // parts, world.device)
            opened = world.on_all(as_problem(lambda: open_trial(model, options, world, example, None)))
            with contextlib.closing(opened) as trial:
                for _ in range(FIRST_STEPS):
                    timed(trial.step, world)
                times = time_in_turns({"": trial.step}, world, rounds=STEPS, seconds=SECONDS)[""]
            return 1e3 * len(example) / min(times)

        return choose_batch(world.size * parts, samples // LEAST_STEPS, need, rate)
