import pytest
import timm
import torch
import torchvision
from timm.optim import param_groups_layer_decay
from torch import nn

from hybridpar.models.weights import head_parameters, layer_numbers, learning_rate_scales


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


def test_a_resnet_of_torchvision_has_the_layers_of_one_of_timm():
    # In timm a head is matched by no rule, and so in the last layer.
    ours, theirs = torchvision.models.resnet18(num_classes=5), timm.create_model("resnet18", num_classes=5)
    assert learning_rate_scales(ours, 0.5) == learning_rate_scales(theirs, 0.5)


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
