"""Options of data as specs: what each text stands for, and what is wrong with one that stands for nothing."""

from __future__ import annotations

import pytest

from hybridpar.config import TrainConfig
from hybridpar.config.data import (
    Augmentation,
    AutoAugment,
    DropRates,
    HubOptions,
    Images,
    Mixing,
    RandAugment,
    Synthetic,
    TimmAugment,
    images_over,
    samples_of,
)
from hybridpar.errors import UsageError

READ = [
    ({"image_size": 64}, "images", Images(size=64)),
    ({"image_size": "test=288"}, "images", Images(test=288)),
    (
        {"image_size": "224,test=288,crop=0.95,mean=0.5/0.4/0.3,std=0.2/0.2/0.2,interpolation=bicubic"},
        "images",
        Images(size=224, test=288, crop=0.95, mean=(0.5, 0.4, 0.3), std=(0.2, 0.2, 0.2), interpolation="bicubic"),
    ),
    ({"image_size": "train_interpolation=random,test=auto"}, "images", Images(train_interpolation="random")),
    ({"augment": "hflip=0,vflip=0.1"}, "augmentation", Augmentation(hflip=0.0, vflip=0.1)),
    (
        {"augment": "ra:n=3,erase=0.25,erase_mode=pixel,scale=0.2/1,repeats=3"},
        "augmentation",
        RandAugment(n=3, m=9, erase=0.25, erase_mode="pixel", scale=(0.2, 1.0), repeats=3),
    ),
    ({"augment": "aa:set=svhn"}, "augmentation", AutoAugment(set="svhn")),
    ({"augment": "timm:rand-m9-mstd0.5,hflip=0"}, "augmentation", TimmAugment(spec="rand-m9-mstd0.5", hflip=0.0)),
    ({"mix": "mixup=0.2,cutmix=1,off=280"}, "mixing", Mixing(mixup=0.2, cutmix=1.0, off=280)),
    ({"drop": 0.1}, "drop_rates", DropRates(rate=0.1)),
    ({"drop": "path=0.2"}, "drop_rates", DropRates(path=0.2)),
    ({"data": "hf/some/thing:small,download"}, "data_options", HubOptions(configuration="small", download=True)),
    ({"data": "synthetic:samples=20"}, "data_options", Synthetic(samples=20)),
]


@pytest.mark.parametrize(("options", "name", "value"), READ)
def test_a_text_stands_for(options, name, value):
    config = TrainConfig(**options)
    config.check()
    assert getattr(config, name) == value


@pytest.mark.parametrize(
    ("options", "what", "why"),
    [
        ({"image_size": 4}, "--image-size 4: size=4", "at least 8"),
        ({"image_size": "32,crop=1.5"}, "--image-size 32,crop=1.5: crop=1.5", "at most 1"),
        ({"image_size": "mean=0.5/0.5"}, "--image-size: mean has 2 numbers", "each of 3 channels"),
        ({"image_size": "interpolation=cubic"}, "interpolation=cubic", "or 'bicubic'"),
        ({"augment": "timm"}, "--augment timm without SPEC", "no default"),
        ({"augment": "scale=0.5/0.1"}, "--augment: scale=0.5/0.1", "the smaller one first"),
        ({"data": "folder:bad=ignore"}, "bad=ignore", "'skip' or 'error'"),
    ],
)
def test_a_text_that_stands_for_nothing_is_one_error(options, what, why):
    with pytest.raises(UsageError) as caught:
        TrainConfig(**options).check()
    assert what in caught.value.what
    assert why in caught.value.why


@pytest.mark.parametrize(
    ("below", "above", "both"),
    [
        (None, 64, "64"),
        ("224,crop=0.9,mean=0.5/0.5/0.5", None, "224,crop=0.9,mean=0.5/0.5/0.5"),
        ("224,crop=0.9", "test=288,crop=0.95", "224,test=288,crop=0.95"),
        ("test=288", 64, "64,test=288"),
    ],
)
def test_what_is_named_wins_over_what_is_known(below, above, both):
    assert images_over(below, above) == both


def test_how_files_are_got_and_read_is_not_what_samples_there_are():
    assert samples_of("cifar10:download") == samples_of("cifar10:bad=error") == "cifar10"
    assert samples_of("synthetic:classes=5,download") == "synthetic:classes=5"
