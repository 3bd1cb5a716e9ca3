"""The images that a model is for: of its published weights, of timm's configurations, and what options say."""

from __future__ import annotations

import pytest
from timm.data import resolve_data_config
from timm.models import create_model

from hybridpar.config import TrainConfig
from hybridpar.data import load_dataset
from hybridpar.errors import UsageError
from hybridpar.models.pretrained import ModelInput, model_input
from hybridpar.run.data import with_images_of_model

VIT = "timm/vit_tiny_patch16_224"


def test_images_are_as_the_weights_want_them():
    assert model_input("resnet18", None) is None
    known = model_input("resnet50", "IMAGENET1K_V2")
    assert known is not None
    assert (known.size, known.interpolation, known.crop_ratio) == (224, "bilinear", 224 / 232)
    config = with_images_of_model(TrainConfig(weights="default", image_size="interpolation=bilinear"), VIT)
    images = config.images
    assert (images.size, images.mean, images.std) == (224, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    assert (images.interpolation, images.crop) == ("bilinear", 0.9)
    assert with_images_of_model(config, VIT) == config


@pytest.mark.parametrize("weights", [None, "mine.pt", "hf-hub:somebody/something"])
def test_a_model_of_timm_brings_the_images_of_its_configuration(weights):
    for name in ("mobilenetv3_small_050", "resnet10t.c3_in1k"):
        found = resolve_data_config({}, model=create_model(name))
        size = found["input_size"][-1]
        wanted = ModelInput(size, found["mean"], found["std"], found["interpolation"], found["crop_pct"])
        assert model_input(f"timm/{name}", weights) == wanted
    config = with_images_of_model(
        TrainConfig(data="folder", weights=weights, image_size="std=0.2/0.2/0.2"), "timm/resnet10t"
    )
    images = config.images
    assert (images.size, images.interpolation, images.crop) == (176, "bicubic", 0.875)
    assert images.std == (0.2, 0.2, 0.2)
    resized = model_input(VIT, weights, {"img_size": 64})
    assert resized is not None
    assert resized.size == 64
    with pytest.raises(UsageError, match="no weights 'nonsense'"):
        model_input("timm/resnet10t.nonsense", weights)
    assert model_input("timm/convnext_tiny_in22ft1k", weights) is None  # a former name


def test_a_file_for_a_model_of_torchvision_means_the_images_of_the_weights_it_is_named_after():
    default = model_input("resnet50", "fine-tuned.pth")
    assert default == model_input("resnet50", "default")
    first = model_input("resnet50", "weights/resnet50-0676ba61.pth")
    assert first == model_input("resnet50", "IMAGENET1K_V1") != default
    for args, side in (({}, 224), ({"image_size": 518}, 518)):  # its default weights are for 518 pixels
        transformer = model_input("vit_h_14", "fine-tuned.pth", args)
        assert transformer is not None
        assert transformer.size == side
    assert model_input("tests.small_nets:plain", "fine-tuned.pth") is None


def test_data_sets_with_a_size_of_their_own_keep_it_without_published_weights():
    for data in ("digits", "cifar10", "mnist", "eurosat", "synthetic"):
        for weights in (None, "mine.pt"):
            config = TrainConfig(data=data, weights=weights)
            assert with_images_of_model(config, VIT) == config
    for data in ("folder", "csv", "hf/some/thing", "imagenet", "food101", "caltech101"):
        assert with_images_of_model(TrainConfig(data=data), VIT).images.mean == (0.5, 0.5, 0.5)
    assert with_images_of_model(TrainConfig(data="folder"), "resnet18") == TrainConfig(data="folder")
    published = TrainConfig(data="digits", weights="default", model_arg=("img_size=48",))
    digits = load_dataset(with_images_of_model(published, VIT))
    assert (digits.sample_shape, digits.mean) == ((3, 48, 48), (0.5, 0.5, 0.5))
