"""Sources: channels, images that cannot be read, and what a run keeps of a data set."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from hybridpar.config import DataConfig, TrainConfig
from hybridpar.data import load_dataset
from hybridpar.data.file_sets import named_images
from hybridpar.data.sampling import AugmentKey
from hybridpar.data.sources import ImageFacts
from hybridpar.errors import DataError, UsageError
from tests.data.test_loader import as_tested, train_batches

CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for part in ("train", "test"):
        for number in range(8):
            file = tmp_path / part / "ab"[number % 2] / f"{number}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGBA", (20, 20), (10 * number, 20, 30, 100 + number)).save(file)
    return tmp_path


@pytest.mark.parametrize("channels", [1, 4])
@pytest.mark.parametrize("name", ["digits", "synthetic:samples=40", "folder"])
def test_batches_have_the_channels_that_were_asked_for(name: str, channels: int, folder: Path) -> None:
    policy = "ra:erase=0.5" if channels == 1 else "hflip=0.5,erase=0.5,erase_mode=pixel"
    options = {"data": name, "image_size": f"16,channels={channels}"}
    options |= {"data_root": folder} if name == "folder" else {}
    data = load_dataset(TrainConfig(**options, augment=policy))
    assert data.sample_shape == (channels, 16, 16)
    assert len(data.mean) == len(data.std) == channels
    batch = next(train_batches(data, batch_size=8).epoch(0))
    assert batch.micro_batches[0][0].shape == (8, channels, 16, 16)
    assert as_tested(data)[:8].shape == (8, channels, 16, 16)


def test_grey_is_the_grey_of_the_colours() -> None:
    grey, colour = (load_dataset(TrainConfig(data="digits", image_size=f"channels={count}")) for count in (1, 3))
    assert torch.equal(grey.train.images[:, 0], colour.train.images[:, 1])
    assert grey.mean == pytest.approx(colour.mean[:1])
    grey, colour = (load_dataset(TrainConfig(data="synthetic", image_size=f"8,channels={count}")) for count in (1, 3))
    wanted = np.stack(
        [np.asarray(Image.fromarray(image.permute(1, 2, 0).numpy()).convert("L")) for image in colour.test.images]
    )
    assert np.abs(grey.test.images[:, 0].numpy().astype(int) - wanted).max() <= 1


def test_transparency_is_the_fourth_channel(folder: Path) -> None:
    data = load_dataset(TrainConfig(data="folder", data_root=folder, image_size="16,channels=4"))
    images = data.test.load(np.array([0, 4]), None, CPU).images
    assert images[:, :, 3, 3].tolist() == [[0, 20, 30, 100], [10, 20, 30, 101]]


def test_mean_and_deviation_have_a_number_for_each_channel() -> None:
    data = load_dataset(TrainConfig(data="digits", image_size="channels=1,mean=0.5,std=0.25"))
    assert (data.mean, data.std) == ((0.5,), (0.25,))
    with pytest.raises(UsageError, match="mean has 3 numbers"):
        TrainConfig(image_size="channels=1,mean=0.5/0.5/0.5").check()


def test_policies_are_for_images_that_they_know() -> None:
    for options in (
        {"augment": "ta", "image_size": "channels=4"},
        {"augment": "timm:original", "image_size": "channels=1"},
    ):
        with pytest.raises(UsageError, match="Policies are for RGB"):
            load_dataset(TrainConfig(data="synthetic", **options))


@pytest.mark.parametrize("options", ["channels=1", "test=24,crop=0.5", "interpolation=bicubic,mean=0.1/0.2/0.3"])
def test_files_that_are_named_are_decoded_as_the_test_images(folder: Path, options: str) -> None:
    config = TrainConfig(data="folder", data_root=folder, image_size=f"16,{options}")
    data = load_dataset(config)
    files = sorted((folder / "test/a").iterdir())
    named = named_images(files, ImageFacts.of(data), config)
    assert torch.equal(as_tested(named), as_tested(data)[:4])


def test_a_bad_image_ends_the_run_where_that_is_asked_for(folder: Path) -> None:
    path = folder / "train" / "b" / "3.png"
    path.write_bytes(path.read_bytes()[:-40])
    data = load_dataset(DataConfig(data="folder:bad=error", data_root=folder, image_size=16))
    with pytest.raises(DataError, match=r"b/3\.png"):
        data.train.load(np.array([5]), AugmentKey(0, 0), torch.device("cpu"))


def test_facts_survive_a_file() -> None:
    facts = ImageFacts.of(load_dataset(TrainConfig(data="digits")))
    plain = json.loads(json.dumps(asdict(facts)))
    assert ImageFacts.read(plain) == facts
    for change in ({"mean": [0.5]}, {"test_size": 0}, {"class_names": []}, {"sample_shape": [3, 8]}, {"std": "no"}):
        assert ImageFacts.read({**plain, **change}) is None
    two = ImageFacts.read({**plain, "sample_shape": [2, 8, 8], "mean": [0.5] * 2, "std": [0.5] * 2})
    with pytest.raises(UsageError, match="2 channels"):
        named_images([Path("a.png")], two, TrainConfig())
