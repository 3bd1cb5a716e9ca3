"""The interface of schedules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from hybridpar.errors import ScheduleError
from hybridpar.registry import Registry
from hybridpar.schedule.actions import Action, Kind, Schedule
from hybridpar.schedule.costs import Costs, unit_ms
from hybridpar.schedule.layout import Edge, Layout


@dataclass(frozen=True)
class ScheduleRequest:
    """What a schedule is wanted for. Only `greedy` looks beyond the first two.

    Attributes:
        layout: Where stages run and what flows between them.
        micro_batches: Micro-batches per step.
        measured: What its actions take, where that is known.

    Raises:
        ScheduleError: A value is out of its range.
    """

    layout: Layout
    micro_batches: int
    measured: Costs | None = None

    def __post_init__(self) -> None:
        if self.micro_batches < 1:
            raise ScheduleError(f"{self.micro_batches} micro-batches", "A step has at least one.", "Use 1 or more.")
        if len(self.costs.forward_ms) != self.layout.stages:
            raise ScheduleError(
                f"costs of {len(self.costs.forward_ms)} stage(s) for a schedule of {self.layout.stages}",
                "There is one number per stage.",
                "Measure every stage, or leave them out.",
            )

    @property
    def costs(self) -> Costs:
        """What was measured; else a forward pass takes 1 ms, a backward pass twice as long, and the rest nothing."""
        return self.measured or Costs(*unit_ms(self.layout.stages))


Generator = Callable[[ScheduleRequest], Schedule]


@dataclass(frozen=True)
class ScheduleKind:
    """A schedule that can be chosen by name.

    Attributes:
        generate: Makes it for a request.
        placements: Placements of stages (`linear`, `loop`, `v`) for which the planner tries it.
        searches: Whether it tries several orders itself, which takes long where there are many passes.
    """

    generate: Generator
    placements: tuple[str, ...] = ()
    searches: bool = False

    def __call__(self, request: ScheduleRequest) -> Schedule:
        """The schedule for a request."""
        return self.generate(request)


#: All schedules by name.
SCHEDULES: Registry[ScheduleKind] = Registry("schedule", __package__)


def register_schedule(
    name: str, description: str, *, placements: tuple[str, ...] = (), searches: bool = False
) -> Callable[[Generator], Generator]:
    """Decorator that enters a function from a `ScheduleRequest` to a `Schedule` into `SCHEDULES`.

    Args:
        name: The name users type.
        description: One line for listings.
        placements: Placements of stages (`linear`, `loop`, `v`) for which the planner tries it.
        searches: Whether it tries several orders itself, which takes long where there are many passes.

    Raises:
        ValueError: The name is taken.
    """

    def enter(generate: Generator) -> Generator:
        SCHEDULES.register(name, description)(ScheduleKind(generate, placements, searches))
        return generate

    return enter


def planned_schedules(placement: str | None) -> tuple[str, ...]:
    """Names of the schedules that the planner tries for a placement; those that search themselves come last.

    Args:
        placement: `linear`, `loop` or `v`.
    """
    names = [name for name in SCHEDULES if placement in SCHEDULES.get(name).placements]
    return tuple(sorted(names, key=lambda name: SCHEDULES.get(name).searches))


def make(name: str, request: ScheduleRequest) -> Schedule:
    """The schedule of that name for a request.

    Args:
        name: One of `SCHEDULES`.
        request: The layout, the number of micro-batches, and what was measured.

    Raises:
        UsageError: No schedule has that name.
        ScheduleError: The layout or the number of micro-batches does not fit the schedule.
    """
    return SCHEDULES.get(name)(request)


def order_of_replica(name: str, layout: Layout) -> str:
    """The schedule of one replica among others that place the same stages otherwise.

    Args:
        name: What is asked for, for a worker per stage.
        layout: Of the replica.

    Returns:
        The name, or `greedy` where a lane has several stages.
    """
    return name if layout.lanes == layout.stages else "greedy"


def make_all(name: str, request: ScheduleRequest, edges: tuple[Edge, ...] | None = None) -> tuple[Schedule, ...]:
    """The schedules of all replicas of a request's layout that differ.

    Args:
        name: One of `SCHEDULES`.
        request: Of a layout of several replicas.
        edges: What flows between stages; default: as the layout says.
    """
    made = []
    for index in request.layout.kinds:
        layout = request.layout.replica(index, edges)
        order = name if request.layout.is_equal else order_of_replica(name, layout)
        made.append(make(order, replace(request, layout=layout)))
    return tuple(made)


def forwards(stage: int, count: int) -> list[Action]:
    """The forward passes of micro-batches 0 to count - 1.

    Args:
        stage: Number of the stage.
        count: Micro-batches of a step.
    """
    return [Action(stage, Kind.FORWARD, index) for index in range(count)]


def backwards(stage: int, count: int) -> list[Action]:
    """The backward passes of micro-batches 0 to count - 1: the order in which one process adds up gradients.

    Args:
        stage: Number of the stage.
        count: Micro-batches of a step.
    """
    return [Action(stage, Kind.BACKWARD, index) for index in range(count)]


def one_stage_per_lane(name: str, layout: Layout, instead: str) -> list[int]:
    """The stage of every lane; refuses layouts in which a lane has no stage or several.

    Args:
        name: The schedule that is asked for.
        layout: Where stages run.
        instead: A schedule that does work for lanes with several stages.

    Raises:
        ScheduleError: Some lane has another number of stages than one.
    """
    stages_of = [layout.stages_on(lane) for lane in range(layout.lanes)]
    for lane, stages in enumerate(stages_of):
        if len(stages) != 1:
            raise ScheduleError(
                f"lane {lane} has {len(stages)} stages {stages}, and {name!r} is asked for",
                f"{name!r} orders one stage per lane.",
                f"Use `{instead}` for lanes with several stages, or give every lane one stage.",
            )
    return [stage for (stage,) in stages_of]
