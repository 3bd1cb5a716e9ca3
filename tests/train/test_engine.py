"""A `Trainer` over stages: the same calls, the same results, and checkpoints that fit any layout."""

from __future__ import annotations

import functools
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hybridpar.comm.world import World
from hybridpar.config import TrainConfig
from hybridpar.errors import HybridparError, PlanError, UsageError
from hybridpar.partition import partition_model
from hybridpar.plan import Placement, Plan
from hybridpar.schedule.layout import Layout
from hybridpar.train.trainer import Trainer
from tests.pipeline.oracle import Residuals, images, seeded
from tests.ranks import RankError, run_ranks
from tests.small_nets import SmallNet

EXAMPLE = images(2)[0]


def small() -> nn.Module:
    return seeded(SmallNet)


def blocks() -> nn.Module:
    return seeded(Residuals)


@functools.cache
def plan_of(make: Callable[[], nn.Module], stages: int, positions: int = 1) -> Plan:
    """A plan without measurements, so that every worker makes the same one."""
    placement = Placement(layout=Layout.dealt(stages, stages, workers=positions), device="cpu")
    return partition_model(make(), EXAMPLE, stages, measure=False).plan.model_copy(update={"placement": placement})


def make_trainer(
    stages: int = 1,
    *,
    make: Callable[[], nn.Module] = blocks,
    world: World | None = None,
    replicas: int = 1,
    micro_batches: int = 2,
    **options: Any,
) -> Trainer:
    world = world or World()
    plan = plan_of(make, stages, world.size // replicas) if stages > 1 else None
    usual = {"lr": 0.05, "sync": "allreduce:bucket=0.001", "replicas": replicas, "micro_batches": micro_batches}
    config = TrainConfig(**{**usual, **options})
    return Trainer(make(), config=config, world=world, plan=plan, example=EXAMPLE, total_steps=20)


def steps(trainer: Trainer, count: int, replicas: int = 1) -> None:
    """The next steps; each replica takes its share of the same batches."""
    for _ in range(count):
        x, y = images(8, seed=trainer.steps_done)
        replica = trainer.world.rank % replicas
        trainer.step((x.chunk(replicas)[replica], y.chunk(replicas)[replica]))


def state_of(trainer: Trainer) -> dict[str, Tensor]:
    """The whole model, on every worker."""
    trainer.engine.synchronize_buffers()
    return {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}


def assert_close(state: dict[str, Tensor], expected: dict[str, Tensor], *, exact: bool) -> None:
    assert state.keys() == expected.keys()
    for name, tensor in expected.items():
        if exact and "running" not in name:
            assert torch.equal(state[name], tensor), name
        else:
            torch.testing.assert_close(state[name], tensor, rtol=1e-5, atol=1e-6, msg=name)


#: Stages, replicas, micro-batches, workers.
LAYOUTS = {
    "plain": (1, 1, 2, 1),
    "lanes": (3, 1, 2, 1),
    "more micro-batches": (2, 1, 4, 1),
    "workers": (2, 1, 2, 2),
    "replicas": (1, 2, 1, 2),
    "replicas of lanes": (2, 2, 1, 2),
    "more replicas": (1, 4, 1, 4),
}
MOVES = [
    *(("plain", "lanes"), ("lanes", "plain"), ("lanes", "more micro-batches"), ("lanes", "workers")),
    *(("workers", "plain"), ("workers", "replicas of lanes"), ("replicas of lanes", "lanes"), ("replicas", "workers")),
]


def part_of_a_run(world: World, layout: str, count: int, load: Path | None, save: Path | None, options: Any) -> Any:
    stages, replicas, micro_batches, _ = LAYOUTS[layout]
    with make_trainer(
        stages, world=world, replicas=replicas, micro_batches=micro_batches, make=normless, **options
    ) as trainer:
        if load is not None:
            assert trainer.load(load) == {"note": 3}
        steps(trainer, count, replicas)
        if save is not None:
            trainer.save(save, {"note": 3})
        return trainer.steps_done, state_of(trainer)


def normless() -> nn.Module:
    """Without BatchNorm the number of micro-batches changes nothing but the order of additions."""
    return seeded(lambda: Residuals(norm=False))


def go(
    layout: str, count: int, load: Path | None, save: Path | None, *, steps_before: int = 2, **options: Any
) -> dict[str, Tensor]:
    workers = LAYOUTS[layout][3]
    if workers == 1:
        answers = [part_of_a_run(World(), layout, count, load, save, options)]
    else:
        answers = run_ranks(part_of_a_run, workers, layout, count, load, save, options)
    for done, state in answers:
        assert done == count + (steps_before if load is not None else 0)
        assert_close(state, answers[0][1], exact=True)
    return answers[0][1]


@functools.cache
def uninterrupted(**options: Any) -> dict[str, Tensor]:
    return go("plain", 4, None, None, **options)


@pytest.mark.parametrize("options", [{}, {"optimizer": "adamw", "lr": 0.01}])
@pytest.mark.parametrize(("first", "second"), MOVES)
def test_any_layout_goes_on_from_any_other(first: str, second: str, options: dict[str, Any], tmp_path: Path) -> None:
    go(first, 2, None, tmp_path, **options)
    resumed = go(second, 2, tmp_path / "step-2", None, **options)
    whole = uninterrupted(**options)
    same_order = {"plain", "lanes", "workers"}
    assert_close(resumed, whole, exact={first, second} <= same_order)


def sharded_and_not(world: World, layout: str, options: dict[str, Any], directory: Path) -> list[Any]:
    """Weights after some steps without and with a sharded optimizer, and elements of state on this worker."""
    stages, replicas, micro_batches, _ = LAYOUTS[layout]
    found: list[Any] = []
    for shard in (False, True):
        kinds: dict[str, Any] = {"micro_batches": micro_batches, "replicas": replicas, "shard_optimizer": shard}
        with make_trainer(stages, world=world, make=normless, **kinds, **options) as trainer:
            steps(trainer, 3, replicas)
            kept = sum(
                one.numel() for opt in trainer.engine.optimizers for s in opt.state.values() for one in s.values()
            )
            if shard:
                trainer.save(directory, {"note": 3})
            found += [state_of(trainer), kept]
    return found


SHARDED = [
    ("replicas", {}, True),
    ("replicas", {}, False),
    ("replicas", {"optimizer": "adamw", "lr": 0.01, "model_ema": "0.9998", "clip_grad": 0.1}, False),
    ("replicas of lanes", {"optimizer": "adagrad"}, True),
    ("replicas of lanes", {"optimizer": "rmsprop", "lr": 0.01}, False),
]


@pytest.mark.parametrize(("layout", "options", "shared"), SHARDED)
def test_a_sharded_optimizer_makes_the_same_steps(
    layout: str, options: dict[str, Any], shared: bool, tmp_path: Path
) -> None:
    answers = run_ranks(sharded_and_not, 2, layout, options, tmp_path, lanes=2, shared_memory=shared)
    for whole, all_kept, state, kept in answers:
        assert_close(state, whole, exact=True)
        assert 0 < kept < 0.75 * all_kept
    assert sum(kept for *_, kept in answers) <= all_kept + 4  # what counts steps, and no tensor twice
    # The checkpoint has the whole state: one worker without shards goes on as if it had been alone.
    resumed = go("plain", 1, tmp_path / "step-3", None, **options, steps_before=3)
    assert_close(resumed, uninterrupted(**options), exact=False)


def test_shards_are_divided_anew_among_other_workers(tmp_path: Path) -> None:
    options = {"optimizer": "adamw", "lr": 0.01, "shard_optimizer": True}
    go("replicas", 2, None, tmp_path, **options)
    resumed = go("more replicas", 2, tmp_path / "step-2", None, **options)
    assert_close(resumed, uninterrupted(optimizer="adamw", lr=0.01), exact=False)


def test_an_optimizer_that_looks_at_all_gradients_is_not_sharded() -> None:
    with pytest.raises(RankError, match="max_grad_norm=none"):
        run_ranks(part_of_a_run, 2, "replicas", 1, None, None, {"optimizer": "timm/lamb", "shard_optimizer": True})


def test_dropout_goes_on_where_it_was(tmp_path: Path) -> None:
    def dropping() -> nn.Module:
        return seeded(lambda: Residuals(dropout=0.3))

    with make_trainer(2, make=dropping) as trainer:
        steps(trainer, 2)
        trainer.save(tmp_path)
        steps(trainer, 2)
        whole = state_of(trainer)
    with make_trainer(3, make=dropping) as trainer:
        trainer.load(tmp_path / "step-2")
        steps(trainer, 2)
        assert_close(state_of(trainer), whole, exact=True)


def test_a_trainer_over_stages_is_one_over_the_whole_model() -> None:
    results = []
    for count in (1, 3):
        with make_trainer(count, clip_grad=0.5, lr_schedule="cosine:warmup=1") as trainer:
            losses, rates = [], []
            for step in range(3):
                result = trainer.step(images(8, seed=step))
                losses.append(result.loss)
                rates.append(result.lr)
                assert result.grad_norm is not None
                assert not result.skipped
            evaluation = trainer.evaluate([images(8, seed=9)])
            results.append((losses, rates, evaluation, state_of(trainer)))
    (losses, rates, evaluation, state), (other_losses, other_rates, other, other_state) = results
    assert rates == other_rates
    assert losses == pytest.approx(other_losses, rel=1e-6)
    assert evaluation.accuracy == other.accuracy
    assert evaluation.loss == pytest.approx(other.loss, rel=1e-5)
    assert_close(other_state, state, exact=False)


def test_bfloat16_channels_last_and_recomputing_through_the_options() -> None:
    states = []
    for stages, options in ((1, {}), (2, {"recompute": (0,)})):
        with make_trainer(stages, amp="bf16", memory_format="channels_last", make=normless, **options) as trainer:
            steps(trainer, 2)
            states.append(state_of(trainer))
    assert_close(*states, exact=True)


@pytest.mark.parametrize(("stages", "dropout"), [(1, 0.0), (2, 0.0), (2, 0.3)])
def test_captured_stages_train_to_the_same_numbers(
    stages: int, dropout: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Captured by the compiler's front end as ever, but not translated, which takes minutes.
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))

    def make() -> nn.Module:
        return seeded(lambda: Residuals(dropout=dropout))

    states = []
    for compiled, recompute in ((dropout > 0, ()), (True, (1,) if stages > 1 else ())):  # masks are not those of eager
        with make_trainer(stages, make=make, compile=compiled, recompute=recompute) as trainer:
            steps(trainer, 2)
            states.append(state_of(trainer))
    assert_close(states[1], states[0], exact=False)


def out_of_step(world: World) -> dict[str, Tensor]:
    """On one worker the lanes are behind its host, on the other the host is behind its lanes."""
    with make_trainer(2, world=world, replicas=2) as trainer:
        stage = trainer.engine.pipeline.stages[1].module
        if world.rank == 1:
            stage.register_forward_pre_hook(lambda *_: time.sleep(0.05))
        for _ in range(3):
            steps(trainer, 1, 2)
            time.sleep(0.0 if world.rank == 1 else 0.15)
        return state_of(trainer)


def test_counts_of_samples_do_not_meet_the_step_before() -> None:
    first, second = run_ranks(out_of_step, 2, shared_memory=False)
    assert_close(first, second, exact=True)


def test_a_pipeline_needs_an_example_and_a_plan_its_model() -> None:
    with pytest.raises(UsageError, match="without an example"):
        Trainer(blocks(), config=TrainConfig(stages=2))
    with pytest.raises(PlanError, match="another model"):
        Trainer(small(), config=TrainConfig(), plan=plan_of(blocks, 2), example=EXAMPLE, world=World())


def refusal(act: Callable[[], object]) -> str:
    with pytest.raises(HybridparError) as caught:
        act()
    return str(caught.value)


def too_small(world: World, replicas: int, samples: tuple[int, int]) -> str:
    with make_trainer(2, world=world, replicas=replicas) as trainer:
        steps(trainer, 1, replicas)
        said = refusal(lambda: trainer.step(images(samples[world.rank])))
        steps(trainer, 1, replicas)  # the pipeline is as good as before
        return said


def test_a_batch_that_is_too_small_is_refused_by_all() -> None:
    here = "a batch of 1 samples cannot be divided into 2 micro-batches"
    for replicas, samples, first in ((1, (1, 1), here), (2, (4, 1), "1 of the other workers got a batch that cannot")):
        one, other = run_ranks(too_small, 2, replicas, samples)
        assert one.startswith(first)
        assert other.startswith(here)


def opened(world: World, options: dict[str, Any], plans: Sequence[Plan | None] = ()) -> str:
    """What is said where each worker names the plan that it has, which may be missing."""
    if plans:
        with tempfile.TemporaryDirectory() as folder:
            path, plan = Path(folder, "plan.json"), plans[world.rank]
            if plan is not None:
                path.write_text(plan.to_json())
            return opened(world, {"plan": path}).replace(str(path), "PLAN")
    return refusal(lambda: Trainer(blocks(), config=TrainConfig(**options), example=EXAMPLE, world=world))


def test_workers_that_read_different_plans_see_a_table_and_what_does_not_fit_is_refused() -> None:
    plan = plan_of(blocks, 2, 2)
    larger = plan.model_copy(update={"partition": plan.partition.model_copy(update={"micro_batch": 3})})
    first, second = run_ranks(opened, 2, {}, [plan, larger])
    assert first == second
    assert len({line.split(": ")[1] for line in first.splitlines() if line.startswith("  rank ")}) == 2
    first, second = run_ranks(opened, 2, {}, [plan, None])
    assert "different plans" in first
    assert "unreadable" in first
    assert "PLAN" in second
    for answer in run_ranks(opened, 2, {"stages": 3}):
        assert "--stages 3" in answer
        assert "do not fit 2 worker(s)" in answer
