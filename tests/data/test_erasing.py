"""Erasing by noise: against timm's on the same random numbers, and alike for every layout, loader and first step."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from timm.data.random_erasing import RandomErasing

from hybridpar.config import TrainConfig
from hybridpar.data import TestBatches, TrainBatches, load_dataset
from hybridpar.data.erasing import NoiseErasing
from hybridpar.data.sampling import AugmentKey, Draw, counter_hash

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


def batches(data, workers, micro_batches, start=0, **options):
    """Images of the steps of an epoch."""
    shares = [
        TrainBatches(data, seed=0, batch_size=8, rank=rank, workers=workers, micro_batches=micro_batches, **options)
        .epoch(1, start) for rank in range(workers)
    ]  # fmt: skip
    return [
        torch.cat([images for one in step for images, _ in one.micro_batches]) for step in zip(*shares, strict=True)
    ]


def test_every_layout_and_a_resumed_epoch_see_the_same_noise():
    config = TrainConfig(data="synthetic", synthetic_samples=40, random_erasing=0.5, erase_mode="pixel")
    data = load_dataset(config)
    for repeats in (1, 2):
        whole = batches(data, 1, 1, repeats=repeats)
        for layout in ((2, 1), (1, 4)):
            assert all(map(torch.equal, whole, batches(data, *layout, repeats=repeats)))
        assert all(map(torch.equal, whole[3:], batches(data, 1, 2, start=3, repeats=repeats)))
    plain = load_dataset(TrainConfig(data="synthetic", synthetic_samples=40))
    least = (0 - max(data.mean)) / min(data.std)
    assert min(float(images.min()) for images in batches(plain, 1, 1)) >= least
    assert min(float(images.min()) for images in whole) < least  # noise is not cut off where pixels end
    tests = [TestBatches(one, batch_size=8, rank=0, workers=1, loader_workers=0) for one in (data, plain)]
    assert torch.equal(*(next(iter(one))[0] for one in tests))


def test_loader_processes_draw_the_same_noise():
    options = {"data": "photos", "image_size": 16, "random_erasing": 0.5}
    data = load_dataset(TrainConfig(erase_mode="pixel", **options))
    shares = [
        iter(
            TrainBatches(data, seed=0, batch_size=8, rank=0, workers=1, micro_batches=1, loader_workers=count).epoch(0)
        )
        for count in (0, 1)
    ]
    first, second = (next(share).micro_batches[0][0].clone() for share in shares)
    assert torch.equal(first, second)
    const = load_dataset(TrainConfig(**options))
    other = TrainBatches(const, seed=0, batch_size=8, rank=0, workers=1, micro_batches=1, loader_workers=0).epoch(0)
    assert not torch.equal(first, next(other).micro_batches[0][0])
    for share in shares:
        share.close()
