"""The pipeline over workers and replicas against its oracle: one process with the unsplit model."""

from __future__ import annotations

import copy
import gc
import tempfile
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hybridpar.comm.world import World
from hybridpar.errors import HybridparError, ScheduleError
from hybridpar.partition.split import split_model
from hybridpar.partition.trace import trace_model
from hybridpar.partition.units import find_units
from hybridpar.pipeline.engine import PipelineEngine
from hybridpar.pipeline.step import StepState
from hybridpar.schedule.layout import Layout
from tests.lanes.checked import Checker, Lanes
from tests.pipeline.oracle import (
    MODELS,
    MORE_MODELS,
    Batch,
    Residuals,
    Run,
    Setting,
    assert_equal,
    batches_of,
    cut,
    first_output,
    images,
    options_of,
    places,
    seeded,
    train_stages,
    train_whole,
    with_sync,
)
from tests.ranks import run_ranks

TRANSPORTS = [True, False]  # shared memory, gloo


def train_rank(
    world: World, name: str, stages: int, where: Layout, setting: Setting, samples: int, options: dict[str, Any]
) -> Run:
    """One worker's part. Workers build their models from different seeds: those of rank 0 count."""
    model = seeded(MORE_MODELS[name], seed=7 + world.rank)
    batches = batches_for(setting, samples)
    first = setting.of_replica(batches[0], 0) or setting.of_replica(batches[0], 1)
    parts = cut(model, first[0][0], stages)
    check = Checker(world.rank, max_delay=0.001) if options.pop("checked", False) else None
    return train_stages(model, parts, batches, setting, where, world=world, check=check, **options)


def batches_for(setting: Setting, samples: int) -> list[Batch]:
    """Three batches of so many samples, and before them one of each other size."""
    others = [images(sum(shares), seed=10 + index) for index, shares in enumerate(setting.others)]
    return [*others, *batches_of(samples)]


def on_workers(
    workers: int,
    name: str,
    stages: int,
    where: Layout,
    setting: Setting | None = None,
    *,
    samples: int = 8,
    exact: bool = True,
    shared_memory: bool = True,
    **options: Any,
) -> list[Run]:
    """Train on ranks of the pool, and demand of each what the oracle has."""
    setting = setting or Setting()
    args = (name, stages, where, setting, samples, options)
    runs: list[Run] = run_ranks(train_rank, workers, *args, shared_memory=shared_memory)
    check_runs(runs, name, setting, samples, exact=exact)
    return runs


def check_runs(runs: list[Run], name: str, setting: Setting, samples: int, *, exact: bool) -> None:
    oracle = train_whole(seeded(MORE_MODELS[name]), batches_for(setting, samples), setting)
    for run in runs:
        assert_equal(run, oracle, exact=exact, whole=False)
    states = [{key for key in run.state if "/" in key} for run in runs]
    assert set().union(*states) == {key for key in oracle.state if "/" in key}
    for run in runs[1:]:
        for key, tensor in run.state.items():
            if key in runs[0].state:
                assert torch.equal(tensor, runs[0].state[key]), f"{key}: workers differ"


@pytest.mark.parametrize("shared_memory", TRANSPORTS)
@pytest.mark.parametrize(
    ("workers", "stages", "kind", "schedule"),
    [
        (2, 2, "linear", "1f1b"),
        (2, 4, "loop", "interleaved"),
        (2, 4, "v", "greedy"),
        (2, 4, "linear", "gpipe"),  # two lanes on each of two workers
        (3, 3, "linear", "1f1b"),
        (3, 3, "linear", "looped_bfs"),
    ],
)
def test_stages_on_workers(workers: int, stages: int, kind: str, schedule: str, shared_memory: bool) -> None:
    where = places(stages, kind, workers=workers)
    on_workers(workers, "residual", stages, where, schedule=schedule, shared_memory=shared_memory)


@pytest.mark.parametrize("name", [name for name in MODELS if name != "residual"])
@pytest.mark.parametrize("workers", [2, 3])
def test_any_model_on_workers(name: str, workers: int) -> None:
    on_workers(workers, name, workers, places(workers, workers=workers), exact=name != "dense")


@pytest.mark.parametrize("shared_memory", TRANSPORTS)
@pytest.mark.parametrize(
    ("stages", "kind", "schedule"),
    [(1, "linear", "accumulate"), (2, "linear", "1f1b"), (3, "linear", "gpipe"), (4, "v", "greedy")],
)
def test_replicas_of_lanes(stages: int, kind: str, schedule: str, shared_memory: bool) -> None:
    setting = Setting(2, shares=(4, 4))
    on_workers(2, "residual", stages, places(stages, kind), setting, schedule=schedule, shared_memory=shared_memory)


@pytest.mark.parametrize("name", [name for name in MODELS if name != "residual"])
def test_any_model_in_replicas(name: str) -> None:
    on_workers(2, name, 2, places(2), Setting(2, shares=(4, 4)), exact=name != "dense")


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "looped_bfs", "greedy", "interleaved"])
@pytest.mark.parametrize("replicas", [1, 2])
def test_every_access_is_ordered(replicas: int, schedule: str) -> None:
    if replicas == 2:
        on_workers(
            2, "residual", 2, places(2), Setting(2, shares=(4, 4)), schedule=schedule, checked=True, together=True
        )
    else:
        on_workers(2, "residual", 2, places(2, workers=2), schedule=schedule, checked=True, together=True)


@pytest.mark.parametrize(
    ("name", "schedule", "options"),
    [
        ("residual", "1f1b", {}),
        ("residual", "greedy", {"guard": False}),
        ("unused", "gpipe", {"clip_norm": 0.1, "bucket_bytes": 1}),  # of some buckets nothing is used
    ],
)
def test_late_gradients_of_stages(name: str, schedule: str, options: dict[str, Any]) -> None:
    setting = with_sync(Setting(2, shares=(4, 4)), delayed=True, **options)
    exact = "clip_norm" not in options
    runs = on_workers(2, name, 2, places(2), setting, exact=exact, schedule=schedule, checked=True, together=True)
    assert runs[0].norms[0] == (None if options.get("guard") is False else 0.0)


def test_late_gradients_are_ordered_where_they_are_compressed() -> None:
    setting = with_sync(Setting(2, shares=(4, 4)), delayed=True, codec="onebit")
    options = {"checked": True, "together": True}
    ours, theirs = run_ranks(train_rank, 2, "residual", 2, places(2), setting, 8, options, shared_memory=False)
    assert all(torch.equal(tensor, theirs.state[name]) for name, tensor in ours.state.items())


@pytest.mark.parametrize("shared_memory", TRANSPORTS)
def test_uneven_micro_batches_in_uneven_replicas(shared_memory: bool) -> None:
    setting = Setting(3, shares=(10, 4, 7))
    on_workers(3, "residual", 2, places(2), setting, samples=21, exact=False, shared_memory=shared_memory)


@pytest.mark.parametrize("shared_memory", TRANSPORTS)
@pytest.mark.parametrize(("stages", "kind", "schedule"), [(1, "linear", "accumulate"), (4, "v", "greedy")])
def test_shares_that_change_and_replicas_without_samples(
    stages: int, kind: str, schedule: str, shared_memory: bool
) -> None:
    # Rank 0, whose order of gradients counts for all, has none in the first step.
    setting = Setting(2, shares=(4, 8), others=((0, 9), (7, 0), (5, 5)))
    where = places(stages, kind)
    on_workers(2, "residual", stages, where, setting, samples=12, schedule=schedule, shared_memory=shared_memory)


def test_stages_on_workers_in_replicas_one_of_them_idle() -> None:
    setting = Setting(2, shares=(4, 8), others=((0, 9), (7, 0)))
    on_workers(4, "residual", 2, places(2, workers=2), setting, samples=12, together=True, bytes_per_second=1e6)


ALONE_AND_TWO = Layout.unequal([(0, 0), (1, 2)])  # worker 0 beside workers 1 and 2 as a pipeline


@pytest.mark.parametrize(
    ("schedule", "shared_memory"), [("gpipe", True), ("1f1b", False), ("greedy", True), ("greedy", False)]
)
def test_a_worker_alone_beside_two_as_a_pipeline(schedule: str, shared_memory: bool) -> None:
    # A replica without samples in one step, shares that change, and BatchNorm over all of them.
    setting = Setting(2, shares=(8, 4), others=((0, 9), (7, 0), (5, 5)))
    options = {"schedule": schedule, "shared_memory": shared_memory}
    runs = on_workers(3, "residual", 2, ALONE_AND_TWO, setting, samples=12, checked=True, together=True, **options)
    held = [{key for key in run.state if "/" in key} for run in runs]
    assert held[0] == held[1] | held[2]
    assert not held[1] & held[2]


@pytest.mark.parametrize("name", [name for name in MODELS if name != "residual"])
def test_any_model_in_unequal_replicas(name: str) -> None:
    setting = with_sync(Setting(2, shares=(5, 4)), clip_norm=0.1)
    # The worker that runs both stages has a rank between those of the others.
    on_workers(3, name, 2, Layout.unequal([(0, 2), (1, 1)]), setting, samples=9, exact=False)


@pytest.mark.parametrize(("schedule", "shared_memory"), [("gpipe", True), ("1f1b", False), ("greedy", True)])
def test_workers_in_another_order_along_the_pipeline(schedule: str, shared_memory: bool) -> None:
    # As planned where the first worker is the fast one, and the last stage is to be on it.
    where = Layout.repeated([(1, 0), (0, 0)])
    setting, options = Setting(4, shares=(8,)), {"schedule": schedule, "shared_memory": shared_memory}
    on_workers(2, "residual", 2, where, setting, **options)


def test_cuts_of_replicas_that_cross_each_other() -> None:
    setting = Setting(2, shares=(4, 8))
    layout = Layout.unequal([(0, 1, 1), (2, 2, 3)])
    on_workers(4, "dense", 3, layout, setting, samples=12, exact=False, schedule="greedy")


@pytest.mark.parametrize(
    "options", [{"clip_norm": 0.1}, {"guard": False}, {"pool_batch_norm": False}, {"guard": False, "clip_norm": 0.1}]
)
@pytest.mark.parametrize("where", ["workers", "replicas"])
def test_options_of_the_sync(where: str, options: dict[str, Any]) -> None:
    setting = with_sync(Setting(2, shares=(4, 4) if where == "replicas" else ()), **options)
    if where == "replicas" and not setting.sync.pool_batch_norm:
        pytest.skip("each replica keeps its own statistics; the Trainer averages them")
    runs = on_workers(
        2,
        "residual",
        2,
        places(2, workers=2 if where == "workers" else 1),
        setting,
        exact="clip_norm" not in options,
        together=True,
    )
    assert [runs[0].losses, runs[0].norms] == [runs[1].losses, runs[1].norms]


@pytest.mark.parametrize("recompute", [(0,), (1,), (0, 1)])
def test_recomputing_with_replicas(recompute: tuple[int, ...]) -> None:
    on_workers(2, "residual", 2, places(2), Setting(2, shares=(4, 4)), recompute=recompute)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_what_the_loss_ignores_has_no_gradient(workers: int) -> None:
    # Zeros in its place would let weight decay change the parameters behind it.
    stages = max(workers, 3)
    runs = on_workers(workers, "ignored", stages, places(stages, workers=workers), Setting(loss=first_output))
    assert not any("aux" in name for run in runs for name in run.gradients[0])


# ----------------------------------------------------------- two by two workers


def test_two_stages_in_two_replicas() -> None:
    runs = on_workers(4, "residual", 2, places(2, workers=2), Setting(2, shares=(4, 4)))
    # Ranks 0 and 1 are the replicas of the first stage.
    held = [{key for key in run.state if "/" in key} for run in runs]
    assert held[0] == held[1]
    assert held[2] == held[3]
    assert not held[0] & held[2]


# ------------------------------------------------------------ torch's own runtime


def beside_torch(world: World, name: str, schedule: str) -> dict[str, float]:
    """Gradients of our executor and of torch's runtime, which is fed the same stages and the same order."""
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    model = seeded(MODELS[name])
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.track_running_stats = False
            module.running_mean = module.running_var = module.num_batches_tracked = None
    batch = images(8)
    example = batch[0][:2]
    theirs = copy.deepcopy(model)
    relayed = cut(theirs, example, 2, relay=True)
    stage = PipelineStage(relayed[world.rank], world.rank, 2, torch.device("cpu"))
    ours: list[dict[str, Tensor]] = []
    texts: list[str] = []

    def look(engine: PipelineEngine) -> None:
        assert engine.executor.program is not None
        texts.append(engine.executor.program.schedule.to_csv())

    run = train_stages(
        model,
        cut(model, example, 2),
        [batch],
        Setting(),
        places(2, workers=2),
        schedule=schedule,
        world=world,
        on_engine=look,
    )
    ours = run.gradients
    runtime = _PipelineScheduleRuntime([stage], 4, loss_fn=F.cross_entropy, scale_grads=True)
    with tempfile.NamedTemporaryFile("w", suffix=".csv") as file:
        file.write(texts[0])
        file.flush()
        runtime._load_csv(file.name, format="compute_only")
    if world.rank == 0:
        runtime.step(batch[0])
    else:
        runtime.step(target=batch[1], losses=[])
    expected = {n: p.grad for n, p in theirs.named_parameters() if p.grad is not None}
    assert expected.keys() == ours[0].keys()
    return {n: float((gradient - expected[n]).abs().max() / expected[n].abs().max()) for n, gradient in ours[0].items()}


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("name", ["residual", "dense"])
def test_torchs_runtime_fed_our_schedule_gives_the_same_gradients(name: str, schedule: str) -> None:
    for differences in run_ranks(beside_torch, 2, name, schedule):
        assert differences
        assert max(differences.values()) < 1e-5, differences


# ---------------------------------------------------------------------- bad input


def open_engine(world: World, stages: Any, model: nn.Module, layout: Layout, **options: Any) -> None:
    with Lanes("cpu") as lanes:
        made = options_of(layout, 2, **options)
        engine = PipelineEngine(model, stages, world, lanes, F.cross_entropy, lambda stage: None, made, 2)
        engine.close()


class TestBadInput:
    """Everything is refused before the first step, in words that say what to do."""

    def test_stages_out_of_order(self) -> None:
        model = seeded(Residuals)
        parts = cut(model, images(2)[0], 3)
        for wrong in (parts[::-1], parts[1:], [parts[0], parts[2]], []):
            with pytest.raises(ScheduleError, match="not all stages of a model in order"):
                open_engine(World(), wrong, model, places(3))

    def test_a_schedule_that_does_not_fit_the_placement(self) -> None:
        model = seeded(Residuals)
        parts = cut(model, images(2)[0], 4)
        with pytest.raises(HybridparError, match="1f1b"):
            train_stages(model, parts, batches_of(8), Setting(), places(4, "v"), schedule="1f1b")

    def test_inputs_that_a_stage_refuses(self) -> None:
        model = seeded(Residuals)
        parts = cut(model, images(2)[0], 2)
        with pytest.raises(HybridparError, match=r"stage 0 cannot run on inputs of shape \(2, 4, 8, 8\)"):
            train_stages(model, parts, [(torch.zeros(8, 4, 8, 8), images(8)[1])], Setting(), places(2))

    def test_a_model_with_as_many_names_but_other_stages(self) -> None:
        for answer in run_ranks(other_stages, 2):
            assert "SyncError" in answer, answer


class Activations(nn.Module):
    """Cut on either side of the activation, both stages hold the same parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


def other_threads(world: World) -> None:
    model = seeded(Residuals)
    open_engine(world, cut(model, images(2)[0], 2), model, places(2, workers=2), threads=1 + world.rank)


def test_hosts_may_have_different_numbers_of_cores() -> None:
    assert run_ranks(other_threads, 2) == [None, None]


def other_stages(world: World) -> str:
    model, example = seeded(Activations), torch.zeros(2, 6)
    units = find_units(trace_model(model, (example,)), (example,))
    assert len(units.graph) == 3
    parts = split_model(units, [0, world.rank, 1])
    try:
        open_engine(world, parts, model, places(2, workers=2))
    except HybridparError as error:
        return f"{type(error).__name__}: {error}"
    return "passed"


# ----------------------------------------------------------------- whole models


def evaluate_everywhere(world: World) -> tuple[Tensor, Tensor, dict[str, Any] | None]:
    """The whole model on every worker, and what `gather_on_main` collects."""
    model = seeded(Residuals, seed=7 + world.rank)
    seen: list[Any] = []

    def look(engine: PipelineEngine) -> None:
        engine.collect()
        model.eval()
        with torch.no_grad():
            seen.append(model(images(4, seed=9)[0]))
        seen.append(engine.gather_on_main({"rank": world.rank}))

    parts = cut(model, images(2)[0], 2)
    train_stages(model, parts, batches_of(8), Setting(), places(2, workers=2), world=world, on_engine=look)
    return seen[0], seen[1]


def test_the_model_is_whole_on_every_worker() -> None:
    (first, gathered), (second, nothing) = run_ranks(evaluate_everywhere, 2)
    model = seeded(Residuals)
    train_whole(model, batches_of(8), Setting())
    model.eval()
    with torch.no_grad():
        torch.testing.assert_close(first, model(images(4, seed=9)[0]), rtol=1e-5, atol=1e-6)
    assert torch.equal(first, second)
    assert gathered == [{"rank": 0}, {"rank": 1}]
    assert nothing is None


def test_what_travels_is_gathered_after_the_step_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both use one process group from different threads, and a group takes collectives of one thread at a time."""
    calls: list[str] = []
    engine = PipelineEngine.__new__(PipelineEngine)
    engine.executor = SimpleNamespace(reducers=[])  # type: ignore[assignment]
    engine.model, engine.world = nn.Linear(2, 2), World()
    monkeypatch.setattr(engine, "wait", lambda: calls.append("wait"))
    monkeypatch.setattr(engine.world, "gather", lambda item: calls.append("gather") or [item])
    assert engine.layer_bytes() == []
    assert calls == ["wait", "gather"]


def steps_that_are_left(world: World) -> int:
    """How many steps are alive after a training, if nobody looks for cycles of references."""
    gc.collect()
    gc.disable()
    try:
        train_rank(world, "residual", 2, places(2), Setting(2, shares=(4, 4)), 8, {"schedule": "gpipe"})
        return sum(isinstance(one, StepState) for one in gc.get_objects())
    finally:
        gc.enable()


def test_a_step_that_is_over_keeps_no_gradients() -> None:
    assert run_ranks(steps_that_are_left, 2) == [0, 0]
