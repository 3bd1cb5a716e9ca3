"""What is frozen, by names, and the layers of models with their learning rates, beside timm's."""

import copy

import pytest
import timm
import torch
import torchvision
from timm.optim import param_groups_layer_decay
from torch import nn

from hybridpar import Trainer
from hybridpar.config import TrainConfig
from hybridpar.errors import UsageError
from hybridpar.models.layers import freeze, head_parameters, layer_numbers, learning_rate_scales


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


def test_only_what_patterns_name_is_put_into_evaluation_and_only_until_train():
    model = net()
    model[1][1].requires_grad_(False)
    before = [set(vars(module)) for module in model.modules()]
    freeze(model, "*.bias, 0.1.weight")
    assert [name for name, module in model.named_modules() if not module.training] == ["0.1"]
    freeze(model, "0")  # a layer without parameters, too
    assert [name for name, module in model.named_modules() if not module.training] == ["0.1", "0.2"]
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


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "resnet18", "convnext_atto", "test_efficientnet"])
def test_scales_are_those_of_timm(name):
    model = timm.create_model(name, num_classes=10)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = param_groups_layer_decay(model, layer_decay=0.7)
    expected = {names[id(one)]: group["lr_scale"] for group in groups for one in group["params"]}
    scales = learning_rate_scales(model, 0.7)
    assert scales == pytest.approx(expected)
    assert len(set(scales.values())) > 3


def test_a_vit_of_torchvision_has_the_layers_of_one_of_timm():
    ours = torchvision.models.VisionTransformer(16, 8, 4, 2, 16, 32, num_classes=5)
    numbers = layer_numbers(ours)
    assert {numbers[one] for one in ("class_token", "conv_proj.weight", "encoder.pos_embedding")} == {0}
    assert [numbers[f"encoder.layers.encoder_layer_{block}.ln_1.weight"] for block in range(4)] == [1, 2, 3, 4]
    assert numbers["encoder.ln.weight"] == 4
    assert numbers["heads.head.weight"] == numbers["heads.head.bias"] == 5
    theirs = timm.create_model("vit_tiny_patch16_224", depth=4)
    assert max(layer_numbers(theirs).values()) == 5


@pytest.mark.parametrize(
    ("name", "layers", "head"),
    [
        ("vgg11", 11, "classifier.6"),
        ("densenet121", 63, "classifier"),
        ("convnext_tiny", 23, "classifier.2"),
    ],
)
def test_layers_of_other_models(name, layers, head):
    with torch.device("meta"):
        model = torchvision.models.get_model(name)
    numbers = layer_numbers(model)
    assert set(numbers.values()) == set(range(layers))
    assert list(numbers) == [name for name, _ in model.named_parameters()]
    assert sorted(numbers.values()) == list(numbers.values())
    assert {one.rpartition(".")[0] for one in head_parameters(model)} == {head}
    assert numbers[f"{head}.weight"] == layers - 1


def test_the_head_has_a_factor_of_its_own():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 2))
    scales = learning_rate_scales(model, 0.5, 10.0)
    assert list(scales.values()) == [0.5] * 4 + [10.0] * 2
    assert set(learning_rate_scales(model).values()) == {1.0}


class Wrapped(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.backbone = nn.Module()
        self.backbone.stem = nn.Linear(8, 8)
        self.backbone.blocks = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.score = nn.Linear(8, 2)


def test_a_wrapper_is_no_layer():
    numbers = layer_numbers(Wrapped())
    assert numbers["scale"] == numbers["backbone.stem.weight"] == 0
    assert numbers["backbone.blocks.0.weight"] == 1
    assert numbers["backbone.blocks.1.weight"] == 2
    assert numbers["score.bias"] == 3
