"""`--batch-size auto` chooses a batch that fits into memory and is about as fast as any that does."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from functools import cache
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

from hybridpar import Trainer
from hybridpar.comm.world import World
from hybridpar.config import TrainConfig
from hybridpar.errors import UsageError
from hybridpar.machine.cluster_file import ClusterSpec
from hybridpar.plan import Plan, read_plan
from hybridpar.planner import batch as batch_module
from hybridpar.planner import probes
from hybridpar.planner.batch import GAIN, LEAST, Need, choose_batch, memory_of, require_room
from hybridpar.planner.inputs import Question
from hybridpar.planner.profile import profile_model
from hybridpar.planner.trials import Trial
from hybridpar.run import opening
from hybridpar.train.trainer import open_trial
from tests.allocated import counting
from tests.planner.small import cluster
from tests.planner.test_memory import NETS
from tests.planner.test_planned_run import always_planned
from tests.ranks import run_ranks
from tests.runs import check_run, saved_state, train, train_rank


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HYBRIDPAR_CACHE", str(tmp_path / "cache"))


# ---------------------------------------------------------------------------------------------------- the choice


@pytest.mark.parametrize("seed", range(100))
def test_the_smallest_of_the_fast_batches_that_fit_is_chosen(seed: int) -> None:
    draw = random.Random(seed)
    parts, most = draw.randint(1, 7), draw.choice([100, 1_000, 100_000])
    of_sample, of_model, limit = draw.uniform(1, 100), draw.uniform(0, 1_000), draw.uniform(1_000, 100_000)
    launch, peak = draw.uniform(0, 1_000), draw.uniform(0.5, 2)
    tried: dict[int, float] = {}

    def need(batch: int) -> Need:
        return Need(of_model + of_sample * batch, limit)

    def rate(batch: int) -> float:
        assert need(batch).fits
        tried[batch] = batch / (launch + peak * batch) * draw.uniform(0.97, 1.03)
        return tried[batch]

    if not need(LEAST * parts).fits:
        with pytest.raises(UsageError, match="GB of"):
            choose_batch(parts, most, need, rate)
        assert not tried
        return
    chosen = choose_batch(parts, most, need, rate)
    fast = [size for size in tried if tried[size] >= (1 - GAIN) * max(tried.values())]
    assert chosen.batch == min(fast) <= most
    assert chosen.batch % parts == 0
    assert (chosen.batch // parts).bit_count() == 1
    largest = max(tried)
    before = tried.get(largest // 4)
    slow = before is not None and max(tried[largest], tried[largest // 2]) < (1 + GAIN) * before
    assert slow or 2 * largest > most or not need(2 * largest).fits


def test_too_few_samples_are_one_error() -> None:
    with pytest.raises(UsageError, match="an epoch of 8 steps"):
        choose_batch(8, 15, lambda batch: Need(1, 2), lambda batch: 1.0)


# ---------------------------------------------------------------------------------------------------- the memory


#: Largest batch that is counted.
MOST = 128


def question(shape: tuple[int, ...]) -> Question:
    return Question("net", shape, TrainConfig(plan="none", batch_size=8))


@cache
def peak_of(net: str, batch: int) -> int:
    """Bytes of all tensors that are alive at the peak of a step."""
    make, shape = NETS[net]
    model = make()
    data = torch.randn(batch, *shape), torch.zeros(batch, dtype=torch.long)
    with Trainer(model, config=TrainConfig(plan="none"), world=World(), total_steps=9) as trainer:
        trainer.step(data)
        trainer.wait()
        kept = [*model.parameters(), *(one.grad for one in model.parameters() if one.grad is not None)]
        kept += [one for opt in trainer.engine.optimizers for state in opt.state.values() for one in state.values()]
        with counting(*kept) as count:
            kept.clear()
            trainer.step(data)
            trainer.wait()
            return count.peak


@cache
def sizes_of(net: str) -> object:
    make, shape = NETS[net]
    return profile_model(make(), [torch.randn(LEAST, *shape)], measure=False)


@pytest.mark.parametrize("net", NETS)
def test_what_is_chosen_under_a_cap_fits_as_counted(net: str) -> None:
    draw = random.Random(0)
    asked, chosen = question(NETS[net][1]), set()
    free = memory_of(asked.inputs(sizes_of(net), cluster(1, kind="cuda", memory=1 << 40)))
    for _ in range(100):
        limit = int(draw.uniform(0.9 * free(LEAST).bytes, 1.1 * free(MOST).bytes))
        need = memory_of(asked.inputs(sizes_of(net), cluster(1, kind="cuda", memory=limit)))
        try:
            batch = choose_batch(1, MOST, need, float).batch
        except UsageError:
            assert not need(LEAST).fits
            continue
        chosen.add(batch)
        assert peak_of(net, batch) <= limit
        assert batch == MOST or not need(2 * batch).fits
    assert len(chosen) > 2


# ------------------------------------------------------------------------------------------------------- the run


def capped(batch: int) -> ClusterSpec:
    """A machine on which a batch of the small net fits, and twice the batch does not."""
    from tests.small_nets import plain

    profile = profile_model(plain(), [torch.randn(LEAST, 3, 8, 8)], measure=False)
    need = memory_of(question((3, 8, 8)).inputs(profile, cluster(1, memory=1 << 40)))
    return cluster(1, memory=int((need(batch).bytes + need(2 * batch).bytes) / 2))


AUTO = {"batch_size": "auto", "data": "synthetic", "plan": "none"}


def test_a_run_chooses_says_and_records_its_batch_and_a_resumed_one_keeps_it(tmp_path, capsys):
    with (
        mock.patch.object(batch_module, "describe_hosts", return_value=capped(8)),
        mock.patch.object(batch_module, "held_bytes", return_value=-batch_module._OPENING_BYTES),
    ):
        assert train(tmp_path / "auto", steps=3, **AUTO) == 0
    assert "batch    8 samples per step (auto: 16 needs 0.0" in capsys.readouterr().out
    assert check_run(tmp_path / "auto", steps=3)["batch_size"] == 8
    assert json.loads((tmp_path / "auto/run.json").read_text())["options"]["batch_size"] == 8
    assert "batch-size = 8" in (tmp_path / "auto/config.toml").read_text()
    train(tmp_path / "named", steps=3, **AUTO | {"batch_size": 8})
    for left, right in zip(saved_state(tmp_path / "auto"), saved_state(tmp_path / "named"), strict=True):
        assert str(left) == str(right)
    capsys.readouterr()
    with mock.patch.object(batch_module, "measure_batch", side_effect=AssertionError("measured")):
        assert train(tmp_path / "auto", steps=5, resume=True, **AUTO) == 0
        assert train(tmp_path / "more", steps=5, resume_from=tmp_path / "auto/checkpoints/step-3", **AUTO) == 0
    assert "batch    8 samples per step\n" in capsys.readouterr().out
    assert check_run(tmp_path / "auto", steps=5)["batch_size"] == 8


def test_a_batch_that_does_not_fit_at_once_is_reached_by_micro_batches(tmp_path, capsys):
    small, tried = capped(8), []

    def opened(model: nn.Module, options: TrainConfig, world: World, example: torch.Tensor, plan: Plan | None) -> Trial:
        tried.append(len(example) // (1 if plan is None else plan.pipeline.micro_batches))
        return open_trial(model, options, world, example, plan)

    with (
        always_planned(),
        mock.patch.object(probes, "describe_hosts", return_value=small),
        mock.patch.object(probes, "measure_cluster", return_value=small),
        mock.patch.object(probes, "usable_memory", return_value=small.hosts[0].memory),
        mock.patch.object(probes, "held_bytes", return_value=0),
        mock.patch.object(opening, "open_trial", opened),
    ):
        assert train(tmp_path / "close", batch_size=64, fidelity="close", steps=2) == 0
        plan = read_plan(tmp_path / "close/plan.json")
        assert plan.pipeline.micro_batches >= 4, "BatchNorm normalises over fewer samples, which close allows"
        assert plan.predicted.memory_bytes <= small.hosts[0].memory
        capsys.readouterr()
        assert train(tmp_path / "exact", batch_size=64, steps=2) == 0
        assert "no plan fits" in capsys.readouterr().out
    assert max(tried) < 32, "no step is taken that is predicted not to fit"


def test_two_workers_choose_one_batch(tmp_path):
    run_ranks(train_rank, 2, tmp_path, "plain", None, {**AUTO, "steps": 2})
    assert check_run(tmp_path, steps=2)["batch_size"] in [16, 32, 64, 128]


@pytest.mark.parametrize(
    "options",
    [{"sync": "ps:servers=1"}, {"stages": 2}, {"plan": Path("plan.json")}, {"shares": "1,2"}, {"select_batch": 2}],
)
def test_what_auto_does_not_measure_is_one_error(options: dict[str, object]) -> None:
    with pytest.raises(UsageError, match=r"with --batch-size auto|--batch-size auto with"):
        TrainConfig(**AUTO | options).check()


def test_a_script_names_its_batch() -> None:
    with pytest.raises(UsageError, match="batch_size is auto"):
        Trainer(nn.Linear(2, 2), config=TrainConfig(batch_size="auto", lr="0.1/1"), total_steps=9)


def test_a_model_that_no_worker_can_hold_is_refused_before_it_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    def build() -> nn.Module:
        return nn.Linear(1000, 1000)

    def read_values() -> nn.Module:
        return nn.Linear(1, int(torch.ones(1)))

    monkeypatch.setattr(batch_module, "held_bytes", lambda device: 1_000_000)
    monkeypatch.setattr(batch_module, "usable_memory", lambda: 13_000_000)
    config = TrainConfig(batch_size="auto", optimizer="sgd:momentum=0")
    require_room(build, config, torch.device("cpu"))
    with pytest.raises(UsageError, match="weights, gradients and optimizer state alone need"):
        require_room(build, replace(config, optimizer="adamw"), torch.device("cpu"))
    sharded = replace(config, optimizer="adamw", shard_optimizer=True)
    require_room(build, sharded, torch.device("cpu"), workers=4)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="alone need"):
        require_room(build, config, torch.device("cpu"))
    require_room(read_values, config, torch.device("cpu"))  # what cannot be asked is not refused
