"""The data set photos: what is cut from where, and that the parts share no pixel."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hybridpar.config import DataConfig
from hybridpar.data import load_dataset
from hybridpar.data.photos import COLUMNS, PHOTOGRAPHS, ROWS, TEST_CELLS


@pytest.fixture(scope="module")
def photos():
    return load_dataset(DataConfig(data="photos"))


def test_parts_come_from_different_cells_and_crops_lie_within_them(photos):
    for source, count in ((photos.train, 4 * 48), (photos.test, 2 * 32)):
        assert torch.bincount(source.labels).tolist() == [count] * len(PHOTOGRAPHS)
        for number, left, top, side in source.dataset.crops.tolist():
            photograph = source.dataset.photographs[number]
            wide, high = photograph.width // COLUMNS, photograph.height // ROWS
            cell = (top // high, left // wide)
            assert (cell in TEST_CELLS) == (source is photos.test)
            assert ((top + side - 1) // high, (left + side - 1) // wide) == cell
            assert min(wide, high) / 2 <= side <= min(wide, high)
    assert len({tuple(crop) for crop in photos.train.dataset.crops.tolist()}) > 3000


def test_crops_are_resized_and_statistics_are_theirs(photos):
    cpu = torch.device("cpu")
    some = photos.train.load(np.arange(0, len(photos.train), 16), None, cpu)
    assert some.shape == (192, 3, 96, 96)
    assert (some.double() / 255).mean((0, 2, 3)).tolist() == pytest.approx(photos.mean, abs=0.03)
    large = load_dataset(DataConfig(data="photos", image_size=128))
    assert large.sample_shape == (3, 128, 128)
    assert np.array_equal(large.train.dataset.crops, photos.train.dataset.crops)
    assert large.test.load(np.array([3]), None, cpu).shape == (1, 3, 128, 128)
