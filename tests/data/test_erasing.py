"""Erasing by noise: against timm's on the same random numbers, and alike for every layout, loader and first step."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from timm.data.random_erasing import RandomErasing

from hybridpar.config import TrainConfig
from hybridpar.data import TestBatches, load_dataset
from hybridpar.data.erasing import NoiseErasing
from hybridpar.data.sampling import AugmentKey, Draw, counter_hash
from tests.data.test_loader import read_steps, same, train_batches

SHAPE = (3, 20, 28)
KEY = AugmentKey(4, 2)


@pytest.mark.parametrize("mode", ["rand", "pixel"])
def test_images_are_erased_as_timm_does_it(mode):
    indices = np.arange(100, 148)
    images = torch.randn(48, *SHAPE, generator=torch.Generator().manual_seed(0))
    wanted = images.clone()
    python, numbers = random.getstate(), torch.get_rng_state()
    erasing = NoiseErasing(0.6, mode == "pixel", SHAPE)
    other_format = images.contiguous(memory_format=torch.channels_last)
    erasing.apply(other_format, erasing.draw(KEY, indices))
    erasing.apply(images, erasing.draw(KEY, indices))
    assert random.getstate() == python
    assert torch.equal(torch.get_rng_state(), numbers)
    changed = 0
    with torch.random.fork_rng(devices=[]):
        for image, seed in zip(wanted, (counter_hash(*KEY, Draw.ERASE, indices) >> np.uint64(1)).tolist(), strict=True):
            random.seed(seed)
            torch.manual_seed(seed)
            before = image.clone()
            RandomErasing(0.6, mode=mode, device="cpu")(image)
            changed += not torch.equal(before, image)
    random.setstate(python)
    assert 20 < changed < 40
    assert torch.equal(images, wanted)
    assert torch.equal(other_format, wanted)


def test_every_layout_sees_the_same_noise():
    config = TrainConfig(data="synthetic:samples=40", augment="erase=0.5,erase_mode=pixel")
    data = load_dataset(config)
    for repeats in (1, 2):
        whole = read_steps(data, 1, 1, batch_size=8, repeats=repeats)
        for layout in ((2, 1), (1, 4)):
            assert same(whole, read_steps(data, *layout, batch_size=8, repeats=repeats))
    plain = load_dataset(TrainConfig(data="synthetic:samples=40"))
    least = (0 - max(data.mean)) / min(data.std)
    assert min(float(images.min()) for images, _ in read_steps(plain, 1, 1)) >= least
    assert min(float(images.min()) for images, _ in whole) < least  # noise is not cut off where pixels end
    tests = [TestBatches(one, batch_size=8, rank=0, workers=1, loader_workers=0) for one in (data, plain)]
    assert torch.equal(*(next(iter(one))[0] for one in tests))


def test_loader_processes_draw_the_same_noise():
    options = {"data": "photos", "image_size": 16}
    data = load_dataset(TrainConfig(augment="erase=0.5,erase_mode=pixel", **options))
    shares = [train_batches(data, batch_size=8, loader_workers=count).epoch(0) for count in (0, 1)]
    first, second = (next(share).micro_batches[0][0].clone() for share in shares)
    assert torch.equal(first, second)
    const = load_dataset(TrainConfig(augment="erase=0.5", **options))
    other = next(train_batches(const, batch_size=8).epoch(0))
    assert not torch.equal(first, other.micro_batches[0][0])
    for share in shares:
        share.close()
