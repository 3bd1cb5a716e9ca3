"""Torchvision's data sets by name: the table agrees with torchvision, and each kind of set is read from its format."""

from __future__ import annotations

import inspect
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image

from hybridpar.config import DataConfig
from hybridpar.config.data import TORCHVISION_SETS
from hybridpar.data import MemoryImages, TrainBatches, load_dataset
from hybridpar.errors import DataError


@pytest.mark.parametrize("name", TORCHVISION_SETS)
def test_torchvision_takes_the_arguments_of_the_table(name: str) -> None:
    made = TORCHVISION_SETS[name]
    known = inspect.signature(getattr(torchvision.datasets, made.cls)).parameters
    whatever = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in known.values())
    for arguments in (made.train, made.test or {}):
        assert whatever or set(arguments) <= set(known)
    assert whatever or not made.downloads or "download" in known


def write_idx(path: Path, values: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    header = struct.pack(f">BBBB{values.ndim}i", 0, 0, 8, values.ndim, *values.shape)
    path.write_bytes(header + values.astype(np.uint8).tobytes())


def test_a_set_of_arrays_is_held_in_memory(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (30, 28, 28), dtype=np.uint8)
    for part, count in (("train", 30), ("t10k", 20)):
        write_idx(tmp_path / f"FashionMNIST/raw/{part}-images-idx3-ubyte", pixels[:count])
        write_idx(tmp_path / f"FashionMNIST/raw/{part}-labels-idx1-ubyte", np.arange(count) % 10)
    data = load_dataset(DataConfig(data="fashionmnist", data_root=tmp_path))
    assert isinstance(data.train, MemoryImages)
    assert (len(data.train), len(data.test), data.classes, data.class_names[9]) == (30, 20, 10, "Ankle boot")
    assert torch.equal(data.train.images[:, 1], torch.from_numpy(pixels))
    assert data.train.labels.tolist() == [number % 10 for number in range(30)]
    assert data.mean == pytest.approx((pixels.mean() / 255,) * 3)
    assert data.std == pytest.approx((pixels.std() / 255,) * 3)
    batch = next(TrainBatches(data, seed=0, batch_size=8, rank=0, workers=1, micro_batches=1).epoch(0))
    assert batch.micro_batches[0][0].shape == (8, 3, 32, 32)


def save(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (24, 20), (len(path.name), 5, 9)).save(path, "JPEG")


def test_a_set_of_files_is_decoded_as_any_other(tmp_path: Path) -> None:
    for part, count in (("train", 3), ("val", 2)):
        for wnid in torchvision.datasets.Imagenette._WNID_TO_CLASS:
            for number in range(count):
                save(tmp_path / "imagenette2" / part / wnid / f"{number}.JPEG")
    (tmp_path / "imagenette2/train/n01440764/1.JPEG").write_bytes(b"broken")
    data = load_dataset(DataConfig(data="imagenette", data_root=tmp_path, image_size=16))
    assert (len(data.train), len(data.test), data.classes) == (30, 20, 10)
    assert data.class_names[0] == "tench, Tinca tinca"
    assert Path(data.train.dataset.name(1)).parent.name == "n01440764"
    loaded = data.test.load_readable(np.arange(20), None, torch.device("cpu"))
    assert loaded.images.shape == (20, 3, 16, 16)
    with pytest.raises(DataError, match=r"n01440764/1\.JPEG: it is no image"):
        data.train.load(np.array([1]), None, torch.device("cpu"))


def test_a_set_without_parts_is_divided_in_the_same_way_everywhere(tmp_path: Path) -> None:
    for name, count in (("Forest", 10), ("River", 5), ("Sea", 1)):
        for number in range(count):
            save(tmp_path / "eurosat" / "2750" / name / f"{name}_{number}.jpg")
    data, again = (load_dataset(DataConfig(data="eurosat", data_root=tmp_path)) for _ in range(2))
    assert torch.bincount(data.train.labels).tolist() == [8, 4, 1]
    assert torch.bincount(data.test.labels).tolist() == [2, 1]
    train, test = ({part.dataset.name(index) for index in range(len(part))} for part in (data.train, data.test))
    assert not train & test
    assert train == {again.train.dataset.name(index) for index in range(len(again.train))}
    assert all(
        data.class_names[label] == Path(data.train.dataset.name(index)).parent.name
        for index, label in enumerate(data.train.labels.tolist())
    )


@pytest.mark.parametrize("name", ["mnist", "eurosat", "caltech101"])
def test_missing_files_are_one_error(name: str, tmp_path: Path) -> None:
    for root in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(DataError) as caught:
            load_dataset(DataConfig(data=name, data_root=root))
        assert str(root) in caught.value.what
        assert ",download" in caught.value.fix


def test_what_torchvision_cannot_download_is_said(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="torchvision cannot download stanfordcars"):
        load_dataset(DataConfig(data="stanfordcars,download", data_root=tmp_path))
