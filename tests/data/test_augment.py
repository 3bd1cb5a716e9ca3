"""Decoding; augmentation against torchvision's and timm's own on the same random numbers; repeated samples."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image
from timm.data.auto_augment import rand_augment_transform
from torchvision.transforms import InterpolationMode, RandomResizedCrop, v2

from hybridpar.config import TrainConfig
from hybridpar.config.data import Images
from hybridpar.data import TestBatches, load_dataset
from hybridpar.data.augment import (
    RandomCrop,
    as_mode,
    eval_transform,
    normalise,
    open_image,
    random_changes,
    shift_and_flip,
    train_transform,
)
from hybridpar.data.sampling import COPY, AugmentKey, cut_epoch, epoch_order, repeated
from hybridpar.errors import UsageError
from tests.data.test_loader import read_steps, same, train_batches, write_images

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
LINEAR, CUBIC = InterpolationMode.BILINEAR, InterpolationMode.BICUBIC
CPU = torch.device("cpu")


def picture(side=40):
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (side, side, 3), dtype=np.uint8))


def seeded(transform, image):
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(3)
    return transform(image)


@pytest.mark.parametrize(
    ("augment", "changes"),
    [
        ("ra:n=2,m=7", [v2.RandomHorizontalFlip(0.5), v2.RandAugment(2, 7, interpolation=LINEAR)]),
        ("ta:hflip=0", [v2.TrivialAugmentWide(interpolation=LINEAR)]),
        ("aa:vflip=0.5", [v2.RandomHorizontalFlip(), v2.RandomVerticalFlip(), v2.AutoAugment(interpolation=LINEAR)]),
        ("augmix", [v2.RandomHorizontalFlip(), v2.AugMix(interpolation=LINEAR)]),
        ("hflip=0.3,color_jitter=0.4", [v2.RandomHorizontalFlip(0.3), v2.ColorJitter(0.4, 0.4, 0.4)]),
    ],
)
def test_training_transforms_are_torchvisions(augment, changes):
    config = TrainConfig(augment=f"{augment}{',' if '=' in augment else ':'}scale=0.3/0.9,ratio=0.5/2,erase=0.5")
    crop = RandomCrop(24, scale=(0.3, 0.9), ratio=(0.5, 2.0))
    reference = v2.Compose([crop, *changes, v2.RandomErasing(0.5, value=[124, 116, 104])])
    flip = config.augmentation.hflip
    ours = train_transform(24, config, MEAN, STD, flip=0.5 if flip is None else flip)
    assert torch.equal(*(seeded(transform, picture()) for transform in (ours, reference)))


def test_test_images_are_cut_out_by_the_crop_ratio():
    mine = eval_transform(24, Images(crop=0.9, interpolation="bicubic"))
    reference = v2.Compose([v2.Resize(27, CUBIC, antialias=True), v2.CenterCrop(24), v2.PILToTensor()])
    assert torch.equal(mine(picture()), reference(picture()))


@pytest.mark.parametrize("name", ["synthetic:samples=20", "digits"])
def test_test_images_may_have_another_size(name):
    data = load_dataset(TrainConfig(data=name, image_size="16,test=24"))
    train = train_batches(data, batch_size=8)
    assert next(train.epoch(0)).micro_batches[0][0].shape[-2:] == (16, 16)
    assert next(iter(TestBatches(data, batch_size=4, rank=0, workers=1, loader_workers=0)))[0].shape[-2:] == (24, 24)


def test_a_random_interpolation_is_one_of_two():
    def crops(interpolation):
        transform = RandomCrop(24, scale=(1.0, 1.0), ratio=(1.0, 1.0), interpolation=interpolation)
        return {transform(picture()).numpy().tobytes() for _ in range(20)}

    assert len(crops("bicubic")) == 1
    assert crops("random") == crops("bilinear") | crops("bicubic")


def test_a_crop_of_an_image_decoded_smaller_ends_at_its_edge(tmp_path, monkeypatch):
    Image.new("RGB", (461, 461), (255,) * 3).save(tmp_path / "white.jpg", quality=95)  # 461 is no multiple of 4
    monkeypatch.setattr(RandomResizedCrop, "get_params", lambda *_: (0, 0, 461, 461))
    assert RandomCrop(112)(open_image(tmp_path / "white.jpg")).min() == 255


def test_a_policy_of_timm_is_timms():
    config = TrainConfig(augment="timm:rand-m9-mstd0.5-inc1")
    colour = tuple(round(255 * value) for value in MEAN)
    theirs = rand_augment_transform("rand-m9-mstd0.5-inc1", {"translate_const": 18, "img_mean": colour})
    ours = v2.Compose(random_changes(40, config, MEAN, STD, flip=0.0))
    changed = seeded(ours, v2.functional.pil_to_tensor(picture()))
    assert torch.equal(changed, v2.functional.pil_to_tensor(seeded(theirs, picture())))


@pytest.mark.parametrize("mode", ["rand", "pixel"])
def test_noise_is_drawn_in_normalised_images_and_not_cut_off(mode):
    config = TrainConfig(augment=f"erase=1,erase_mode={mode}")
    *normalise, erase = random_changes(40, config, MEAN, STD, flip=0.0)
    image = v2.functional.pil_to_tensor(picture())
    normalised = v2.Compose(normalise)(image)
    assert torch.allclose(normalised, v2.functional.normalize(image / 255, list(MEAN), list(STD)), atol=1e-6)
    erased = erase(normalised.clone())
    changed = (erased != normalised).all(0)
    assert 0.01 < changed.double().mean() < 0.5
    assert len(erased[0][changed].unique()) == (1 if mode == "rand" else int(changed.sum()))


def test_what_timm_does_not_know_is_one_error():
    with pytest.raises(UsageError, match="does not know the policy"):
        train_transform(24, TrainConfig(augment="timm:nonsense"), MEAN, STD, flip=0.5)


def test_copies_of_a_sample_are_in_one_batch_and_differ():
    data = load_dataset(TrainConfig(data="synthetic:samples=20", image_size=16))
    steps = cut_epoch(20, 8, 1)
    order = repeated(epoch_order(20, 0, 2), steps, 3)
    assert len(order) == 20
    for start, stop in steps:
        samples, counts = np.unique(order[start:stop] % COPY, return_counts=True)
        assert counts.max() <= 3
        assert len(samples) == -(-(stop - start) // 3)
        assert len(set(order[start:stop])) == stop - start
        assert all(a % COPY != b % COPY for a, b in zip(order[start : stop - 1], order[start + 1 : stop], strict=True))
    images = data.train.load(np.array([COPY + 3, 3, 5, COPY + 5]), AugmentKey(0, 1), CPU).images
    plain = data.train.load(np.array([3, 5]), AugmentKey(0, 1), CPU).images
    assert torch.equal(images[1], plain[0])
    assert torch.equal(images[2], plain[1])
    assert not torch.equal(images[0], images[1])


POLICIES = [
    "ra:erase=0.5,erase_mode=pixel",
    "timm:rand-m9-mstd0.5-inc1,erase=0.5,erase_mode=rand",
    "augmix:color_jitter=0.4,vflip=0.5,erase=0.5",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("folder")
    write_images(root, [f"{name}/{number}.jpg" for name in ("cat", "dog") for number in range(15)])
    return root


@pytest.mark.parametrize("policy", POLICIES, ids=["torchvision", "timm", "colours"])
@pytest.mark.parametrize("kind", ["files", "memory"])
def test_order_and_augmentation_are_the_same_for_any_workers_and_loader_processes(kind, policy, folder):
    where = {"data": "folder", "data_root": folder} if kind == "files" else {"data": "synthetic:samples=24"}
    data = load_dataset(TrainConfig(**where, image_size=16, augment=policy))
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    reference = read_steps(data, 1, 1, batch_size=12, repeats=2)
    assert [len(labels) for _, labels in reference] == [12, 12]
    for workers, loader_workers in ((1, 2), (2, 0), (3, 1)):
        steps = read_steps(data, workers, 1, batch_size=12, repeats=2, loader_workers=loader_workers)
        assert same(steps, reference), (workers, loader_workers)
    assert not same(read_steps(data, 1, 1, epoch=1, batch_size=12, repeats=2), reference)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.array_equal(np.random.get_state()[1], before[1])
    assert random.getstate() == before[2]


def read_image(path):
    return as_mode(open_image(path), "RGB")


@pytest.mark.parametrize(("orientation", "back"), [(3, Image.Transpose.ROTATE_180), (6, Image.Transpose.ROTATE_90)])
def test_images_are_turned_as_the_camera_noted(tmp_path, orientation, back):
    upright, exif = Image.new("RGB", (4, 2)), Image.Exif()
    upright.putpixel((3, 0), (255, 0, 0))
    exif[ExifTags.Base.Orientation] = orientation
    upright.transpose(back).save(tmp_path / "turned.png", exif=exif)
    assert read_image(tmp_path / "turned.png").tobytes() == upright.tobytes()


def test_a_damaged_note_of_the_camera_is_ignored(tmp_path):
    Image.new("RGB", (4, 2), (9, 8, 7)).save(tmp_path / "image.png", exif=b"Exif\x00\x00MM\x00*\xff\xff")
    assert read_image(tmp_path / "image.png").getpixel((0, 0)) == (9, 8, 7)


@pytest.mark.parametrize("mode", ["L", "LA", "P", "1", "RGBA", "CMYK"])
def test_images_of_any_mode_become_rgb(tmp_path, mode, recwarn):
    image = Image.new("RGB", (4, 2), (255, 255, 255)).convert(mode)
    image.save(tmp_path / ("image.jpg" if mode == "CMYK" else "image.png"), transparency=b"\0" if mode == "P" else None)
    (path,) = tmp_path.iterdir()
    read = read_image(path)
    assert (read.mode, read.size) == ("RGB", (4, 2))
    assert not recwarn.list


@pytest.mark.parametrize("name", ["image.png", "image.tif", "image.pgm"])
def test_grey_of_16_bits_keeps_its_shades(tmp_path, name):
    Image.fromarray(np.array([[0, 256, 0x8000, 0xFFFF]], dtype=np.uint16)).save(tmp_path / name)
    assert np.asarray(read_image(tmp_path / name))[0, :, 1].tolist() == [0, 1, 128, 255]


@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 5, 9)])
def test_shift_and_flip_is_pad_crop_and_mirror_of_each_image(shape, flip):
    generator = torch.Generator().manual_seed(0)
    pad = 3
    images = torch.randint(0, 256, (17, *shape), dtype=torch.uint8, generator=generator)
    rows, columns = (torch.randint(0, 2 * pad + 1, (17,), generator=generator) for _ in range(2))
    flips = torch.arange(17) % 2 == 1
    result = shift_and_flip(images, rows, columns, flips if flip else None, pad)
    for index in range(17):
        expected = v2.functional.crop(
            v2.functional.pad(images[index], [pad]), int(rows[index]), int(columns[index]), *shape[1:]
        )
        if flip and flips[index]:
            expected = v2.functional.horizontal_flip(expected)
        assert torch.equal(result[index], expected)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("size", [(8, 8), (12, 12), (6, 6)])
def test_normalise(channels_last, size):
    images = torch.randint(0, 256, (4, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    mean, std = torch.tensor([0.5, 0.4, 0.3]), torch.tensor([0.2, 0.25, 0.3])
    result = normalise(images, mean, std, size=size, channels_last=channels_last)
    pixels = v2.functional.resize(images.float(), list(size), antialias=True) / 255
    expected = v2.functional.normalize(pixels, mean.tolist(), std.tolist())
    assert torch.allclose(result, expected, atol=1e-5)
    assert result.is_contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)
