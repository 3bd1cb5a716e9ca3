import copy

import pytest
import torch
from torch import nn

from hybridpar import Trainer
from hybridpar.config import TrainConfig
from hybridpar.errors import UsageError
from hybridpar.models.freezing import freeze


def net() -> nn.Sequential:
    blocks = [nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.BatchNorm2d(3, affine=False)) for _ in range(2)]
    return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(12, 2))


@pytest.mark.parametrize(
    ("patterns", "frozen"),
    [
        ("0", ["0.0.weight", "0.0.bias", "0.1.weight", "0.1.bias"]),
        ("*.0.bias, 3.weight", ["0.0.bias", "1.0.bias", "3.weight"]),
        (["[01].1"], ["0.1.weight", "0.1.bias", "1.1.weight", "1.1.bias"]),
        ("", []),
    ],
)
def test_patterns_name_parameters_and_modules(patterns, frozen):
    model = net()
    assert freeze(model, patterns) == frozen
    assert [name for name, one in model.named_parameters() if not one.requires_grad] == frozen


def test_a_pattern_that_names_nothing_is_refused():
    model = net()
    with pytest.raises(UsageError, match=r"--freeze 3\.wieght(.|\n)*Did you mean 3\.weight") as caught:
        freeze(model, "0,3.wieght")
    assert caught.value.exit_code == 2
    assert all(one.requires_grad for one in model.parameters())


def test_frozen_batch_norm_keeps_its_statistics():
    model = net()
    freeze(model, "0")
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model(torch.randn(4, 3, 2, 2)).sum().backward()
    moved = {name for name, buffer in model.named_buffers() if not torch.equal(buffer, before[name])}
    assert {name[0] for name in moved} == {"1"}
    assert not model[0][1].training
    assert not model[0][2].training
    assert model[1][1].training


def test_batch_norm_can_be_left_in_training():
    model = net()
    freeze(model, "0", batch_norm=False)
    assert model[0][1].training


def test_only_what_patterns_name_is_put_into_evaluation_and_only_until_train():
    model = net()
    model[1][1].requires_grad_(False)
    before = [set(vars(module)) for module in model.modules()]
    freeze(model, "*.bias, 0.1.weight")
    assert [name for name, module in model.named_modules() if not module.training] == ["0.1"]
    assert all(module.training for module in model.train().modules())
    assert [set(vars(module)) for module in model.modules()] == before


def test_batch_norm_frozen_keeps_the_statistics_of_the_model() -> None:
    norm = nn.Sequential(nn.Flatten(), nn.Linear(12, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    before = copy.deepcopy(norm.state_dict())
    x, y = torch.randn(6, 3, 2, 2), torch.randint(0, 2, (6,))
    norm[2].running_mean += 0.5
    wanted = nn.functional.cross_entropy(copy.deepcopy(norm).eval()(x), y)
    for micro_batches in (1, 2):
        model = copy.deepcopy(norm)
        with Trainer(model, config=TrainConfig(batch_norm="frozen", micro_batches=micro_batches)) as trainer:
            assert trainer.step((x, y)).loss == pytest.approx(float(wanted.detach()), rel=1e-6)
        assert torch.equal(model[2].running_mean, before["2.running_mean"] + 0.5)
        assert not torch.equal(model[2].weight, before["2.weight"])
