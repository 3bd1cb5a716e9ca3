"""Map-style data sets: torchvision's against its own files, and a user's: what a factory may return."""

from __future__ import annotations

import inspect
import struct
import urllib.error
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image
from torch.utils.data import Dataset, TensorDataset

from hybridpar.config import DataConfig
from hybridpar.config.data import TORCHVISION_SETS
from hybridpar.data import ImageData, MemoryImages, TrainBatches, load_dataset
from hybridpar.data.sampling import AugmentKey
from hybridpar.errors import DataError, UsageError

CPU = torch.device("cpu")


class Shades(Dataset):
    """Images whose shade is their number, every third of which is a tensor."""

    classes = ("even", "odd")

    def __init__(self, samples: int, broken: int = -1) -> None:
        self.samples, self.broken = samples, broken

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Image.Image | torch.Tensor, int]:
        if index == self.broken:
            raise RuntimeError("it is gone")
        if index % 3 == 0:
            return torch.full((3, 20, 20), index, dtype=torch.uint8), index % 2
        return Image.new("L" if index % 2 else "RGBA", (20, 20), index if index % 2 else (index,) * 4), index % 2


def both(root: Path) -> tuple[Shades, Shades]:
    assert root == Path("somewhere")
    return Shades(12), Shades(5)


class Several(Shades):
    """Images of no class, one or two."""

    def __getitem__(self, index: int) -> tuple[Image.Image | torch.Tensor, torch.Tensor]:
        return super().__getitem__(index)[0], torch.tensor([index % 2, index % 3 == 0])


def several() -> list[Several]:
    return [Several(8), Several(4)]


def column() -> list[Shades]:
    """Labels as a column, and classes that are named out of order."""
    parts = [Shades(8), Shades(4)]
    for part in parts:
        part.labels = np.arange(len(part))[:, None] % 2
        part.classes, part.class_to_idx = None, {"odd": 1, "even": 0}
    return parts


def tensors() -> list[TensorDataset]:
    return [TensorDataset(torch.zeros(8, 3, 20, 20, dtype=torch.uint8), torch.arange(8) % 2) for _ in range(2)]


class Marked(TensorDataset):
    """The label comes first in its tensors, and its images are made when they are asked for."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        label, images = (tensor[index] for tensor in self.tensors)
        return images + 7, int(label)


def derived() -> list[TensorDataset]:
    return [Marked(torch.arange(8, dtype=torch.uint8) % 2, torch.zeros(8, 3, 16, 16, dtype=torch.uint8))] * 2


def grey() -> list[TensorDataset]:
    return [TensorDataset(torch.full((8, 16, 16), 7, dtype=torch.uint8), torch.arange(8) % 2)] * 2


def transparent() -> list[TensorDataset]:
    return [TensorDataset(torch.full((8, 4, 16, 16), 7, dtype=torch.uint8), torch.arange(8) % 2)] * 2


def channels_last() -> list[TensorDataset]:
    return [TensorDataset(torch.zeros(8, 16, 16, 3, dtype=torch.uint8), torch.arange(8) % 2)] * 2


def none() -> int:
    return 3


def outside() -> Dataset:
    made = Shades(4)
    made.classes = ("even",)
    return made


def broken() -> Shades:
    made = Shades(10)
    _ = [made[index] for index in range(10)]
    made.targets, made.broken = [index % 2 for index in range(10)], 2
    return made


def load(factory: str) -> ImageData:
    name = f"tests.data.test_library_sets:{factory}"
    return load_dataset(DataConfig(data=name, data_root=Path("somewhere"), image_size=16))


def test_a_training_and_a_test_set() -> None:
    data = load("both")
    assert (len(data.train), len(data.test), data.class_names) == (12, 5, ("even", "odd"))
    assert data.train.labels.tolist() == [index % 2 for index in range(12)]
    images = data.test.load(np.arange(5), None, CPU).images
    assert images.shape == (5, 3, 16, 16)
    assert images[:, :, 3, 3].tolist() == [[index] * 3 for index in range(5)]
    batches = TrainBatches(data, seed=0, batch_size=4, rank=0, workers=1, micro_batches=1, loader_workers=1)
    labels = torch.cat([batch.micro_batches[0][1] for batch in batches.epoch(0)])
    assert torch.bincount(labels).tolist() == [6, 6]


def test_a_label_is_a_number_a_column_or_says_which_classes_an_image_has() -> None:
    data, several = load("column"), load("several")
    assert (data.multi_label, data.train.labels.tolist(), data.class_names) == (False, [0, 1] * 4, ("even", "odd"))
    assert several.multi_label
    assert isinstance(load("tensors").train, MemoryImages)
    assert several.train.labels[:4].int().tolist() == [[0, 1], [1, 0], [0, 0], [1, 1]]


@pytest.mark.parametrize("factory", ["derived", "grey", "transparent"])
def test_tensors_that_are_not_the_images_of_a_batch_are_read_item_by_item(factory: str) -> None:
    data = load(factory)
    assert data.train.labels.tolist() == data.test.labels.tolist() == [0, 1] * 4
    assert torch.equal(data.test.load(np.arange(8), None, CPU).images, torch.full((8, 3, 16, 16), 7, dtype=torch.uint8))


def test_images_whose_channels_come_last_are_one_error() -> None:
    with pytest.raises(DataError, match=r"cannot read the image .* of TensorDataset: .*16 channels"):
        load("channels_last").train.load(np.arange(8), AugmentKey(0, 0), CPU)


@pytest.mark.parametrize(
    ("factory", "said"),
    [
        ("none", "returned no data sets"),
        ("nothing", "has no factory 'nothing'"),
        ("outside", "label 1, outside of its 1 classes"),
    ],
)
def test_what_is_no_data_set_is_one_error(factory: str, said: str) -> None:
    with pytest.raises((UsageError, DataError), match=said):
        load(factory)


def test_a_sample_that_cannot_be_read_is_named_and_replaced() -> None:
    data = load("broken")
    sample = next(at for at in range(len(data.train)) if data.train.name(at).startswith("2 of"))
    loaded = data.train.load(np.array([sample]), (0, 0), CPU)
    assert loaded.images.shape == (1, 3, 16, 16)
    assert loaded.damaged == ("cannot read the image 2 of Shades: it is gone",)


@pytest.mark.parametrize("name", TORCHVISION_SETS)
def test_torchvision_takes_the_arguments_of_the_table(name: str) -> None:
    made = TORCHVISION_SETS[name]
    known = inspect.signature(getattr(torchvision.datasets, made.cls)).parameters
    whatever = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in known.values())
    for arguments in (made.train, made.test or {}):
        assert whatever or set(arguments) <= set(known)


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


def save(path: Path, mode: str = "RGB") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, (24, 20)).save(path, "JPEG")


def test_a_set_of_files_is_decoded_as_any_other(tmp_path: Path) -> None:
    for part, count in (("train", 3), ("val", 2)):
        for wnid in torchvision.datasets.Imagenette._WNID_TO_CLASS:
            for number in range(count):
                save(tmp_path / "imagenette2" / part / wnid / f"{number}.JPEG")
    (tmp_path / "imagenette2/train/n01440764/1.JPEG").write_bytes(b"broken")
    data = load_dataset(DataConfig(data="imagenette", data_root=tmp_path, image_size=16))
    assert (len(data.train), len(data.test), data.classes) == (30, 20, 10)
    assert data.class_names[0] == "tench, Tinca tinca"
    assert Path(data.train.name(1)).parent.name == "n01440764"
    loaded = data.test.load(np.arange(20), None, CPU)
    assert loaded.images.shape == (20, 3, 16, 16)
    (damaged,) = data.train.load(np.array([1]), None, CPU).damaged
    assert damaged.endswith("n01440764/1.JPEG: it is empty, or no image of a known format")


def test_a_set_without_parts_is_divided_in_the_same_way_everywhere(tmp_path: Path) -> None:
    for name, count in (("Forest", 10), ("River", 5), ("Sea", 1)):
        for number in range(count):
            save(tmp_path / "eurosat" / "2750" / name / f"{name}_{number}.jpg")
    data, again = (load_dataset(DataConfig(data="eurosat", data_root=tmp_path)) for _ in range(2))
    assert torch.bincount(data.train.labels).tolist() == [8, 4, 1]
    assert torch.bincount(data.test.labels).tolist() == [2, 1]
    train, test = ({part.name(index) for index in range(len(part))} for part in (data.train, data.test))
    assert not train & test
    assert train == {again.train.name(index) for index in range(len(again.train))}
    assert all(
        data.class_names[label] == Path(data.train.name(index)).parent.name
        for index, label in enumerate(data.train.labels.tolist())
    )


@pytest.mark.parametrize("name", ["mnist", "eurosat", "caltech101", "cifar10"])
def test_missing_files_are_one_error(name: str, tmp_path: Path) -> None:
    for root in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(DataError) as caught:
            load_dataset(DataConfig(data=name, data_root=root))
        assert str(root) in caught.value.what
        assert ":download" in caught.value.fix


def test_what_torchvision_cannot_download_is_said(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="torchvision cannot download imagenet"):
        load_dataset(DataConfig(data="imagenet:download", data_root=tmp_path))


class Colours:
    """Stands for torchvision's CIFAR10: arrays of rows of pixels, from a file that is fetched or refused."""

    classes = tuple(f"class-{number}" for number in range(10))

    def __init__(self, root: Path, train: bool, download: bool) -> None:
        file = root / "colours.npy"
        if download:
            np.save(file, np.random.default_rng(0).integers(0, 256, (20, 32, 32, 3), dtype=np.uint8))
        if not file.is_file():
            raise RuntimeError("Dataset not found or corrupted. You can use download=True to download it")
        self.data = np.load(file)[: None if train else 10]
        self.targets = [number % 10 for number in range(len(self.data))]

    def __len__(self) -> int:
        return len(self.data)


def test_a_set_is_downloaded_once_and_its_images_keep_their_pixels(tmp_path, monkeypatch):
    monkeypatch.setattr(torchvision.datasets, "CIFAR10", Colours)
    root = tmp_path / "new"
    first = load_dataset(DataConfig(data="cifar10:download", data_root=root))
    data = load_dataset(DataConfig(data="cifar10", data_root=root))
    assert (first.name, data.class_names[3], data.sample_shape) == ("cifar10", "class-3", (3, 32, 32))
    assert data.mean == (0.4914, 0.4822, 0.4465)  # as published, whatever these files hold
    pixels = np.load(root / "colours.npy")
    assert np.array_equal(data.train.images.permute(0, 2, 3, 1), pixels)
    assert np.array_equal(data.test.images.permute(0, 2, 3, 1), pixels[:10])
    assert data.test.labels.tolist() == list(range(10))
    assert data.train.flip == 0.5
    (root / "colours.npy").unlink()
    with pytest.raises(DataError, match=r"cannot read cifar10 from .*new: Dataset not found or corrupted\n"):
        load_dataset(DataConfig(data="cifar10", data_root=root))


def test_download_that_fails_says_why(tmp_path, monkeypatch):
    def unreachable(*args, **kwargs):
        raise urllib.error.URLError("no route to host")

    monkeypatch.setattr(torchvision.datasets.cifar, "download_and_extract_archive", unreachable)
    with pytest.raises(DataError, match="no route to host") as caught:
        load_dataset(DataConfig(data="cifar10:download", data_root=tmp_path / "new"))
    assert str(tmp_path / "new") in caught.value.what


def test_caltech101_has_30_training_images_of_each_class(tmp_path):
    """Three classes and the background in torchvision's layout; every fifth image is grey."""
    directory = tmp_path / "caltech101" / "101_ObjectCategories"
    for name, images in (("Faces", 34), ("accordion", 32), ("yin_yang", 3), ("BACKGROUND_Google", 3)):
        for number in range(1, images + 1):
            save(directory / name / f"image_{number:04d}.jpg", "L" if number % 5 == 0 else "RGB")
    data = load_dataset(DataConfig(data="caltech101", data_root=tmp_path))
    assert data.class_names == ("Faces", "accordion", "yin_yang")
    assert torch.bincount(data.train.labels).tolist() == [30, 30, 2]
    assert torch.bincount(data.test.labels).tolist() == [4, 2, 1]
    assert data.test.load(np.arange(7), None, CPU).images.shape == (7, 3, 224, 224)
