"""The moving average of a model against timm's, and under every layout."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from timm.utils import ModelEmaV3
from torch import Tensor, nn

from hybridpar import Trainer
from hybridpar.comm.world import World
from hybridpar.config import TrainConfig
from hybridpar.errors import UsageError
from hybridpar.optim.ema import ModelAverage
from tests.ranks import run_ranks
from tests.train.test_engine import assert_close, make_trainer, steps
from tests.train.training import make_net

EMA: dict[str, Any] = {"model_ema": "0.8,warmup"}


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))


def train_some(model: nn.Module) -> None:
    with torch.no_grad():
        model(torch.randn(8, 4).to(next(model.parameters()).dtype))
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))


def average_of(trainer: Trainer) -> dict[str, Tensor]:
    """The averaged model, on every worker."""
    with trainer.averaged():
        return {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}


@pytest.mark.parametrize("warmup", [False, True])
@pytest.mark.parametrize("every", [1, 3])
def test_it_is_timms_number_for_number(warmup: bool, every: int) -> None:
    model = net()
    mine = ModelAverage(model, 0.9, warmup=warmup, every=every)
    timms = ModelEmaV3(model, decay=0.9, use_warmup=warmup)
    for step in range(1, 13):
        train_some(model)
        mine.update(step)
        if step % every == 0:
            timms.update(model, step=step // every)
        assert all(torch.equal(mine.state_dict()[name], one) for name, one in timms.module.state_dict().items())


def test_a_decision_on_the_device_is_obeyed() -> None:
    model = net()
    on_host, on_device = ModelAverage(model, 0.9), ModelAverage(model, 0.9)
    for step in range(1, 6):
        train_some(model)
        on_host.update(step)
        on_device.update(step, torch.tensor(True))
        before = copy.deepcopy(on_device.state_dict())
        assert_close(before, on_host.state_dict(), exact=False)
        on_device.update(step, torch.tensor(False))
        assert all(torch.equal(before[name], one) for name, one in on_device.state_dict().items())


def test_half_precision_is_averaged_in_float32() -> None:
    model = net().bfloat16()
    average = ModelAverage(model, 0.999)
    for step in range(1, 4):
        train_some(model)
        average.update(step)
    assert average.state_dict()["0.weight"].dtype == torch.float32
    model.load_state_dict(average.state_dict())


def oracle(count: int, micro_batches: int = 2) -> dict[str, Tensor]:
    """timm's average beside a trainer that keeps none."""
    with make_trainer(1, micro_batches=micro_batches) as trainer:
        timms = ModelEmaV3(trainer.model, decay=0.8, use_warmup=True)
        for step in range(count):
            steps(trainer, 1)
            timms.update(trainer.model, step=step + 1)
        return dict(timms.module.state_dict())


def staged(world: World, count: int, options: dict[str, Any]) -> dict[str, Tensor]:
    replicas = options.get("replicas", 1)
    with make_trainer(world=world, **options, **EMA) as trainer:
        steps(trainer, count, replicas)
        return average_of(trainer)


@pytest.mark.parametrize(
    ("workers", "options"),
    [
        (1, {"stages": 1}),
        (1, {"stages": 2}),
        (2, {"stages": 2}),
        (2, {"stages": 1, "replicas": 2, "micro_batches": 1}),
    ],
)
def test_every_layout_keeps_the_average_of_the_model(workers: int, options: dict[str, Any]) -> None:
    for state in run_ranks(staged, workers, 4, options):
        assert_close(state, oracle(4), exact=options == {"stages": 1})


def test_a_checkpoint_has_the_average_as_a_state_dict(tmp_path: Path) -> None:
    with make_trainer(2, **EMA) as trainer:
        steps(trainer, 3)
        average = average_of(trainer)
        trainer.save(tmp_path)
    state = load_file(tmp_path / "step-3" / "model_ema.safetensors")
    assert all(torch.equal(state[name], one) for name, one in average.items())
    with make_trainer(1, **EMA) as other:
        other.load(tmp_path)
        assert_close(average_of(other), average, exact=True)
    with make_trainer(1) as plain:  # keeps none, and reads the checkpoint all the same
        plain.load(tmp_path)
        assert plain.engine.average_state() is None
        plain.save(tmp_path / "plain")
    with make_trainer(1, **EMA) as other:  # its average begins with the model of a checkpoint that has none
        other.load(tmp_path / "plain")
        assert_close(average_of(other), dict(other.model.state_dict()), exact=True)


@pytest.mark.parametrize("stages", [1, 2])
def test_a_step_that_is_rolled_back_does_not_change_the_average(stages: int) -> None:
    with make_trainer(stages, **EMA) as trainer:
        steps(trainer, 2)
        before = average_of(trainer)
        x, y = torch.full((8, 3, 8, 8), math.nan), torch.zeros(8, dtype=torch.int64)
        assert trainer.step((x, y)).skipped
        assert all(torch.equal(before[name], one) for name, one in average_of(trainer).items())
        steps(trainer, 1)
        assert not torch.equal(before["stem.weight"], average_of(trainer)["stem.weight"])


def test_the_average_is_evaluated_by_itself() -> None:
    x, y = torch.randn(8, 3, 4, 4), torch.randint(0, 5, (8,))
    with Trainer(make_net(), config=TrainConfig(lr=0.5, model_ema="0.9998")) as trainer:
        for _ in range(5):
            trainer.step((x, y))
        own = trainer.evaluate([(x, y)])
        with trainer.averaged():
            averaged = trainer.evaluate([(x, y)])
        assert averaged.loss != own.loss
        assert trainer.evaluate([(x, y)]) == own


def test_what_does_not_fit_is_refused() -> None:
    for text, said in (("0.9,warmpu=on", "Did you mean warmup?"), ("1.0", "less than 1")):
        with pytest.raises(UsageError) as caught:
            TrainConfig(model_ema=text).check()
        assert said in str(caught.value)
    with Trainer(make_net()) as trainer, pytest.raises(UsageError, match="model_ema"), trainer.averaged():
        pass
