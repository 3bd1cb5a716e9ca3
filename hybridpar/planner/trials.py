"""What the planner knows of steps that are taken to be timed, and how they are timed in turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from pydantic import TypeAdapter
from torch import Tensor, nn

from hybridpar.comm.world import World
from hybridpar.config import TrainConfig
from hybridpar.errors import HybridparError
from hybridpar.formats.cache import load_measurement, store_measurement
from hybridpar.machine.steady import MOST_NOISE
from hybridpar.partition.nest import tensor_leaves
from hybridpar.partition.profile import intra_op_threads
from hybridpar.plan import Plan

_T = TypeVar("_T")

#: Steps of a plan that are not counted: shapes are found, buckets are cut anew.
FIRST_STEPS = 2


@dataclass(frozen=True)
class StepValues:
    """What a step computed: its loss, its gradients by parameter, and whether it drew random numbers."""

    loss: float
    gradients: Mapping[str, Tensor]
    draws: bool = False


class Trial(Protocol):
    """Steps of a copy of a model, as `hybridpar.train.trial.Trial` takes them."""

    def step(self) -> None:
        """Take a step, to its end."""

    def values(self) -> StepValues:
        """Take a step of the whole model, and return what it computed."""

    def close(self) -> None:
        """End what it holds."""


#: Opens a trial of a model with options, on workers, with inputs of a batch, and maybe of a plan.
OpenTrial = Callable[[nn.Module, TrainConfig, World, Tensor, Plan | None], Trial]


def as_problem(act: Callable[[], _T]) -> Callable[[], _T]:
    """What `act` does, with errors of any kind as the one kind that workers tell each other."""

    def run() -> _T:
        try:
            return act()
        except HybridparError:
            raise
        except Exception as error:
            raise HybridparError(f"{type(error).__name__}: {error}") from error

    return run


def remembered(
    world: World, kind: str, key: Mapping[str, object], types: TypeAdapter[_T], measure: Callable[[], _T]
) -> _T:
    """What was stored under a key, or is measured now and, where its noise allows that, stored; a collective."""
    known: _T | None = world.from_main(lambda: load_measurement(kind, key, types))
    if known is not None:
        return known
    measured = measure()
    if world.is_main and getattr(measured, "noise", 0.0) <= MOST_NOISE:
        store_measurement(kind, key, types.dump_python(measured, mode="json", exclude_defaults=True))
    return measured


def timed(step: Callable[[], object], world: World, threads: int | None = None) -> tuple[float, ...]:
    """Milliseconds of a step of every worker; a collective."""
    world.barrier()
    began = time.perf_counter()
    with intra_op_threads(threads):
        world.on_all(as_problem(step))
    return tuple(map(float, world.gather(1e3 * (time.perf_counter() - began))))  # type: ignore[arg-type]


def time_in_turns(
    steps: Mapping[str, Callable[[], object]],
    world: World,
    *,
    rounds: int,
    seconds: float | None = None,
    threads: int | None = None,
) -> dict[str, list[float]]:
    """Milliseconds of steps, of the slowest worker, by name; a collective.

    The steps take turns, each round in another order, so that what the machine does meanwhile disturbs all alike. After
    two rounds it ends where another one would not be over before `seconds`.
    """
    times: dict[str, list[float]] = {name: [] for name in steps}
    order, begun = list(steps), time.perf_counter()
    for done in range(1, rounds + 1):
        lap = time.perf_counter()
        for name in order:
            times[name].append(max(timed(steps[name], world, threads)))
        order = order[1:] + order[:1]
        now = time.perf_counter()
        if done > 1 and any(world.gather(seconds is not None and now - begun + (now - lap) > seconds)):
            break
    return times


def any_loss(output: Any, target: Any = None) -> Tensor:
    """Something to go backward from, for any kind of output that depends on a parameter."""
    leaves = [leaf for _, leaf in tensor_leaves(output) if leaf.requires_grad]
    return torch.stack([leaf.float().square().mean() for leaf in leaves]).sum()


def random_batch(shape: Sequence[int], samples: int, device: torch.device) -> Tensor:
    """Inputs, the same on all workers."""
    return torch.randn(samples, *shape, generator=torch.Generator().manual_seed(0)).to(device)
