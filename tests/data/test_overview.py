"""What a run says of its data at the start."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from hybridpar.config import DataConfig
from hybridpar.data import ImageData, describe_data, load_dataset
from hybridpar.data.sampling import AugmentKey
from hybridpar.errors import DataError


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for part, images in (("train", 6), ("test", 4)):
        for name in ("cat", "dog"):
            (tmp_path / part / name).mkdir(parents=True)
            for number in range(images):
                Image.new("RGB", (12, 9), (number, 0, 0)).save(tmp_path / part / name / f"{number}.jpg")
    return tmp_path


def folder(root: Path) -> ImageData:
    return load_dataset(DataConfig(data="folder", data_root=root, image_size=16))


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


def test_images_in_memory_are_counted() -> None:
    data = load_dataset(DataConfig(data="digits"))
    assert describe_data(data) == "digits, 1,437 training and 360 test images, 10 classes, 32x32"


def test_what_is_ignored_is_told(root: Path) -> None:
    (root / "train" / ".ipynb_checkpoints").mkdir()
    (root / "test" / "cat" / "notes.TXT").write_text("x")
    told = describe_data(folder(root))
    assert told == (
        "folder, 12 training and 8 test images, 2 classes, 16x16; "
        "ignored: 1 hidden directory (.ipynb_checkpoints), 1 file that is no image (.txt)"
    )


def test_damaged_images_are_found_before_training(root: Path) -> None:
    for path in ("test/cat/3.jpg", "train/dog/1.jpg", "train/dog/2.jpg"):
        truncate(root / path)
    (root / "test" / "dog" / "0.jpg").write_bytes(b"")
    told = describe_data(folder(root))
    assert "; 2 of 8 test images cannot be read and will be left out: cat/3.jpg, dog/0.jpg; " in told
    assert told.endswith(
        "; 2 of 12 training images cannot be read and will be replaced by other images: dog/1.jpg, dog/2.jpg"
    )


@pytest.mark.parametrize("part", ["train", "test"])
def test_a_part_of_which_nothing_can_be_read_is_an_error(root: Path, part: str) -> None:
    for path in (root / part).glob("*/*.jpg"):
        path.write_text("no image")
    with pytest.raises(DataError, match=f"no {'training' if part == 'train' else part} image can be read") as caught:
        describe_data(folder(root))
    assert "cat/0.jpg: it is no image of a known format" in caught.value.what


def test_without_time_a_part_that_is_spread_over_the_images_is_read(root: Path, monkeypatch) -> None:
    monkeypatch.setattr("hybridpar.data.overview._AT_ONCE", 2)
    truncate(root / "test" / "cat" / "0.jpg")
    truncate(root / "test" / "dog" / "3.jpg")
    told = describe_data(folder(root), seconds=0.0)
    assert "1 of 2 test images that were tried cannot be read and will be left out: cat/0.jpg" in told


def test_a_bad_image_ends_the_run_where_that_is_asked_for(root: Path) -> None:
    truncate(root / "train" / "dog" / "3.jpg")
    data = load_dataset(DataConfig(data="folder", data_root=root, image_size=16, bad_images="error"))
    with pytest.raises(DataError, match=r"dog/3\.jpg"):
        describe_data(data)
    with pytest.raises(DataError, match=r"dog/3\.jpg"):
        data.train.load_readable(np.array([9]), AugmentKey(0, 0), torch.device("cpu"))
