"""Data sets that need no download: digits and synthetic images."""

import numpy as np
import pytest
import torch

from hybridpar.config import DataConfig
from hybridpar.data import describe_data, load_dataset


def test_digits_are_the_documented_split():
    data = load_dataset(DataConfig(data="digits"))
    assert (len(data.train), len(data.test), data.classes) == (1437, 360, 10)
    assert data.sample_shape == tuple(data.train.images.shape[1:]) == (3, 32, 32)
    sizes = torch.bincount(torch.cat([data.train.labels, data.test.labels]))
    shares = torch.bincount(data.test.labels) / sizes
    assert (shares - 0.2).abs().max() < 1 / sizes.min(), "stratified to the nearest image"
    assert describe_data(data) == "digits, 1,437 training and 360 test images, 10 classes, 32x32"


def test_digits_are_scikit_learns_images():
    from sklearn.datasets import load_digits

    data = load_dataset(DataConfig(data="digits", image_size=8))
    ours = torch.cat([data.train.images, data.test.images])
    assert torch.equal(ours[:, 0], ours[:, 1])
    labels = torch.cat([data.train.labels, data.test.labels]).tolist()
    theirs = load_digits()
    pixels = np.rint(theirs.images * 255 / 16).astype(np.uint8)
    ours_set = sorted((image.tobytes(), label) for image, label in zip(ours[:, 0].numpy(), labels, strict=True))
    assert ours_set == sorted((image.tobytes(), label) for image, label in zip(pixels, theirs.target, strict=True))


@pytest.mark.parametrize("name", ["digits", "synthetic"])
def test_statistics_are_those_of_the_training_images(name):
    data = load_dataset(DataConfig(data=name))
    pixels = data.train.images.double() / 255
    tolerance = 1e-3 if name == "digits" else 0.03
    assert torch.allclose(pixels.mean((0, 2, 3)), torch.tensor(data.mean).double(), atol=tolerance)
    assert torch.allclose(pixels.std((0, 2, 3)), torch.tensor(data.std).double(), atol=tolerance)


@pytest.mark.parametrize("size", [None, 17])
def test_synthetic_images_can_be_learned_and_the_test_images_are_others(size):
    data = load_dataset(DataConfig(data="synthetic", image_size=size))
    assert data.sample_shape == (3, size or 32, size or 32) == (*data.train.images.shape[1:],)
    train, test = data.train.images.double(), data.test.images.double()
    centres = torch.stack([train[data.train.labels == label].mean(0) for label in range(10)])
    nearest = torch.cdist(test.flatten(1), centres.flatten(1)).argmin(1)
    assert (nearest == data.test.labels).double().mean() > 0.95
    assert torch.cdist(test.flatten(1), train.flatten(1)).min() > 0
    small = load_dataset(DataConfig(data="synthetic:samples=25", image_size=size))
    assert (len(small.train), len(small.test)) == (25, 10)
