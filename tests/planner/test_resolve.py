"""A user's request and the plan that is followed become one plan."""

from __future__ import annotations

from typing import Any

import pytest

from hybridpar.config import TrainConfig
from hybridpar.errors import HybridparError, UsageError
from hybridpar.partition import partition_model
from hybridpar.plan import Kernels, Placement, Plan
from hybridpar.planner.resolve import resolve
from hybridpar.schedule.layout import Layout
from tests.pipeline.oracle import Residuals, images, seeded

EXAMPLE = images(2)[0]


#: Workers of a replica, replicas, stages, lanes of a worker, and kind of placement.
Shape = tuple[int, int, int, int, str | None]


def shape_of(config: TrainConfig, workers: int, plan: Plan | None = None) -> Shape:
    """How workers are divided."""
    layout = resolve(config, workers, plan).layout
    return layout.positions, layout.replicas, layout.stages, layout.lanes_each, layout.kind


@pytest.mark.parametrize(
    ("options", "workers", "shape"),
    [
        ({"stages": 2}, 1, (1, 1, 2, 2, "linear")),
        ({"stages": 2}, 2, (2, 1, 2, 1, "linear")),
        ({"stages": 2}, 4, (2, 2, 2, 1, "linear")),
        ({"stages": 4}, 2, (2, 1, 4, 1, "loop")),
        ({"stages": 4, "placement": "v"}, 2, (2, 1, 4, 1, "v")),
        ({"stages": 4, "placement": "linear"}, 2, (2, 1, 4, 2, "linear")),
        ({"stages": 2, "replicas": 2}, 2, (1, 2, 2, 2, "linear")),
        ({"stages": 2, "replicas": 2}, 4, (2, 2, 2, 1, "linear")),
        ({"stages": 4, "placement": "loop"}, 1, (1, 1, 4, 1, "loop")),
        ({}, 3, (1, 3, 1, 1, "linear")),
    ],
)
def test_workers_are_divided(options: dict[str, Any], workers: int, shape: Shape) -> None:
    assert shape_of(TrainConfig(**options), workers) == shape


@pytest.mark.parametrize(
    ("options", "workers", "words"),
    [
        ({"stages": 3}, 2, ("--stages 3", "do not fit 2 worker(s)", "Start 1, 3 workers")),
        ({"stages": 2}, 3, ("do not fit 3 worker(s)", "Start 1, 2 workers")),
        ({"stages": 2, "replicas": 2}, 3, ("--replicas 2", "Start 2, 4 workers")),
        ({"stages": 2, "replicas": 5}, 2, ("Start 5, 10 workers",)),
        ({"stages": 3, "placement": "v"}, 1, ("--placement v with 3 stages", "--stages 2")),
        ({"stages": 2, "placement": "v"}, 2, ("--placement v with 2 stages", "--stages 4")),
    ],
)
def test_what_does_not_fit_is_refused_with_what_would(
    options: dict[str, Any], workers: int, words: tuple[str, ...]
) -> None:
    with pytest.raises(UsageError) as info:
        resolve(TrainConfig(**options), workers)
    for word in words:
        assert word in str(info.value)


def test_a_plan_says_how_many_stages_there_are() -> None:
    plan = partition_model(seeded(Residuals), EXAMPLE, 3, measure=False).plan
    made = resolve(TrainConfig(), 1, plan)
    assert (made.layout.lane_of, made.layout.worker_of) == ((0, 1, 2), (0, 0, 0))
    assert made.partition == plan.partition
    assert resolve(TrainConfig(stages=3), 1, plan).placement == made.placement
    for decided in (set(), {"stages"}):
        with pytest.raises(UsageError, match="--stages 2 with a plan of 3 stages"):
            resolve(TrainConfig(stages=2), 1, plan, decided)
    with pytest.raises(UsageError, match="--stages 1 with a plan of 3 stages"):
        resolve(TrainConfig(), 1, plan, {"stages"})


def test_plain_options_are_a_plan_whose_stages_have_yet_to_be_cut() -> None:
    made = resolve(TrainConfig(stages=2, micro_batches=4, recompute=(1,), compress="fp16", amp="bf16", seed=3), 4)
    assert [stage.units for stage in made.partition.stages] == [(), ()]
    assert (made.pipeline.schedule, made.pipeline.micro_batches, made.pipeline.recompute) == ("greedy", 4, (1,))
    assert (made.sync.codec, made.measured.dtype, made.measured.seed) == ("fp16", "bfloat16", 3)
    assert (made.workers, made.layout.replicas, made.checksum) == (4, 2, None)
    whole = resolve(TrainConfig(kernels="auto", micro_batches=2), 2)
    assert (whole.is_staged, whole.channels_last, whole.pipeline.schedule) == (False, True, "accumulate")
    assert whole.kernels == Kernels(database="auto")
    with pytest.raises(UsageError, match="Stages are numbered from 0 to 1"):
        resolve(TrainConfig(stages=2, recompute=(-1,)), 1)


# ------------------------------------------------------------------------------------------------- placements of a plan


def placed(*stages: tuple[int, int], replicas: int = 1) -> Plan:
    """A plan whose stages are on these positions and lanes."""
    plan = partition_model(seeded(Residuals), EXAMPLE, len(stages), measure=False).plan
    return plan.model_copy(update={"placement": Placement(layout=Layout.repeated(stages, replicas))})


def test_a_placement_of_its_own_is_followed_on_one_worker() -> None:
    own = placed((0, 1), (0, 0), (0, 1))
    layout = resolve(TrainConfig(), 1, own).layout
    assert (layout.lanes_each, layout.lane_of, layout.worker_of) == (2, (1, 0, 1), (0, 0))
    other = TrainConfig(placement="loop")  # who names a placement decides it
    assert resolve(other, 1, own).layout.lane_of == (0, 0, 0)


@pytest.mark.parametrize(
    ("places", "workers", "shape"),
    [
        ([(1, 0), (0, 0)], 2, (2, 1, 2, 1, "linear")),
        ([(0, 0), (0, 0), (1, 0)], 2, (2, 1, 3, 1, None)),
        ([(0, 0), (1, 0), (2, 0)], 1, (1, 1, 3, 3, "linear")),  # the usual one is dealt out to whoever is there
    ],
)
def test_workers_are_divided_by_the_placement(places: list[tuple[int, int]], workers: int, shape: Shape) -> None:
    assert shape_of(TrainConfig(), workers, placed(*places)) == shape


@pytest.mark.parametrize(
    ("places", "workers", "words"),
    [
        ([(1, 0), (0, 0)], 4, ("on 2 worker(s), and here are 4", "Start 2 workers")),
        ([(1, 0), (0, 0)], 3, ("on 2 worker(s), and here are 3", "Start 2 workers")),
        ([(1, 0), (0, 0)], 1, ("on 2 worker(s), and here are 1", "Start 2 workers")),
    ],
)
def test_a_placement_that_cannot_be_is_refused(
    places: list[tuple[int, int]], workers: int, words: tuple[str, ...]
) -> None:
    with pytest.raises(HybridparError) as info:
        shape_of(TrainConfig(), workers, placed(*places))
    for word in words:
        assert word in str(info.value)
