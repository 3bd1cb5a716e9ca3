"""Image files that a user names are found, and made what the model was tested on."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from PIL import Image

from hybridpar.config import TrainConfig
from hybridpar.data import TestBatches, load_dataset
from hybridpar.data.image_facts import ImageFacts, find_images, named_images
from hybridpar.errors import UsageError


@pytest.fixture
def photos(tmp_path):
    """Six pictures of another size than is tested, in folders, beside what is no picture."""
    for number, name in enumerate(("train/a/1.png", "train/b/2.png", "test/a/3.png", "test/b/4.JPG", "test/b/5.png")):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        pixels = torch.randint(0, 255, (40, 52, 3), generator=torch.Generator().manual_seed(number), dtype=torch.uint8)
        Image.fromarray(pixels.numpy()).save(file)
    (tmp_path / "test/b/readme.txt").write_text("no image")
    (tmp_path / "test/.hidden").mkdir()
    (tmp_path / "test/.hidden/6.png").write_bytes(b"")
    return tmp_path


def as_tested(data):
    return torch.cat([images for images, _ in TestBatches(data, batch_size=2, rank=0, workers=1, loader_workers=0)])


@pytest.mark.parametrize("options", ["", ",test=24,crop=0.5", ",interpolation=bicubic"])
def test_files_become_what_the_test_set_is_made_of(photos, options):
    config = TrainConfig(data="folder", data_root=photos, image_size=f"32,mean=0.1/0.2/0.3{options}")
    data = load_dataset(config)
    named = named_images(find_images([photos / "test"]), ImageFacts.of(data), config)
    assert torch.equal(as_tested(named), as_tested(data))


@pytest.mark.parametrize("size", [None, 48])
def test_images_of_a_set_in_memory_are_tested_whole(tmp_path, size):
    config = TrainConfig(data="digits", image_size=size)
    data = load_dataset(config)
    for number in range(3):
        Image.fromarray(data.test.images[number].permute(1, 2, 0).numpy()).save(tmp_path / f"{number}.png")
    named = named_images(find_images([tmp_path]), ImageFacts.of(data), config)
    assert torch.equal(as_tested(named), as_tested(data)[:3])


def test_folders_are_searched_and_hidden_ones_are_not(photos):
    found = find_images([photos / "test", photos / "train/a/1.png"])
    assert [str(file.relative_to(photos)) for file in found] == [
        "test/a/3.png",
        "test/b/4.JPG",
        "test/b/5.png",
        "train/a/1.png",
    ]


def test_a_folder_without_images_is_refused(photos):
    (photos / "empty").mkdir()
    with pytest.raises(UsageError, match=r"there is no image in .*empty"):
        find_images([photos / "empty"])


def test_facts_survive_a_file():
    facts = ImageFacts.of(load_dataset(TrainConfig(data="digits")))
    assert ImageFacts.read(json.loads(json.dumps(facts.plain()))) == facts


def test_files_are_no_images_of_two_channels():
    facts = ImageFacts.of(load_dataset(TrainConfig(data="digits")))
    grey = dataclasses.replace(facts, sample_shape=(2, 8, 8), mean=(0.5,) * 2, std=(0.5,) * 2)
    with pytest.raises(UsageError, match="2 channels"):
        named_images([Path("a.png")], grey, TrainConfig())
