"""Map-style data sets: torchvision's against its own files, and a user's: what a factory may return."""

from __future__ import annotations

import hashlib
import inspect
import os
import pickle
import struct
import urllib.error
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image
from torch.utils.data import Dataset

from hybridpar.config import DataConfig
from hybridpar.config.data import TORCHVISION_SETS
from hybridpar.data import ImageData, MemoryImages, TrainBatches, load_dataset
from hybridpar.errors import DataError, UsageError


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


def one() -> Shades:
    return Shades(20)


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
    name = f"tests.data.test_map_sets:{factory}"
    return load_dataset(DataConfig(data=name, data_root=Path("somewhere"), image_size=16))


def test_a_training_and_a_test_set() -> None:
    data = load("both")
    assert (len(data.train), len(data.test), data.class_names) == (12, 5, ("even", "odd"))
    assert data.train.labels.tolist() == [index % 2 for index in range(12)]
    images = data.test.load(np.arange(5), None, torch.device("cpu"))
    assert images.shape == (5, 3, 16, 16)
    assert images[:, :, 3, 3].tolist() == [[index] * 3 for index in range(5)]
    batches = TrainBatches(data, seed=0, batch_size=4, rank=0, workers=1, micro_batches=1, loader_workers=1)
    labels = torch.cat([batch.micro_batches[0][1] for batch in batches.epoch(0)])
    assert torch.bincount(labels).tolist() == [6, 6]


def test_one_set_is_divided() -> None:
    data = load("one")
    assert (torch.bincount(data.train.labels).tolist(), torch.bincount(data.test.labels).tolist()) == ([8, 8], [2, 2])


def test_a_column_of_labels_is_one_class_each() -> None:
    data = load("column")
    assert (data.multi_label, data.train.labels.tolist()) == (False, [0, 1] * 4)
    assert data.class_names == ("even", "odd")


def test_a_label_may_say_which_classes_an_image_has() -> None:
    data = load("several")
    assert data.multi_label
    assert data.train.labels[:4].int().tolist() == [[0, 1], [1, 0], [0, 0], [1, 1]]


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
    loaded = data.train.load_readable(np.array([sample]), (0, 0), torch.device("cpu"))
    assert loaded.images.shape == (1, 3, 16, 16)
    assert loaded.damaged == ("cannot read the image 2 of Shades: it is gone",)


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
    assert Path(data.train.name(1)).parent.name == "n01440764"
    loaded = data.test.load_readable(np.arange(20), None, torch.device("cpu"))
    assert loaded.images.shape == (20, 3, 16, 16)
    with pytest.raises(DataError, match=r"n01440764/1\.JPEG: it is empty, or no image"):
        data.train.load(np.array([1]), None, torch.device("cpu"))


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
    with pytest.raises(DataError, match="torchvision cannot download stanfordcars"):
        load_dataset(DataConfig(data="stanfordcars:download", data_root=tmp_path))


CIFARS = {"cifar10": torchvision.datasets.CIFAR10, "cifar100": torchvision.datasets.CIFAR100}


@pytest.fixture
def cifar(tmp_path, monkeypatch, request):
    """Write a small CIFAR in the published format, and make torchvision expect the checksums of these files."""
    name = request.param
    dataset = CIFARS[name]
    folder = tmp_path / dataset.base_folder
    folder.mkdir()
    rng = np.random.default_rng(0)
    labels_key = "labels" if name == "cifar10" else "fine_labels"
    classes = int(name.removeprefix("cifar"))
    written = {}

    def write(file: str, content: dict) -> str:
        payload = pickle.dumps(content, protocol=2)
        (folder / file).write_bytes(payload)
        return hashlib.md5(payload).hexdigest()

    def batch(file: str) -> list[str]:
        pixels = rng.integers(0, 256, (12, 3072), dtype=np.uint8)
        labels = rng.integers(0, classes, 12).tolist()
        written[file] = pixels.reshape(-1, 3, 32, 32), labels
        return [file, write(file, {"data": pixels, labels_key: labels, "batch_label": file})]

    for part in ("train_list", "test_list"):
        monkeypatch.setattr(dataset, part, [batch(file) for file, _ in getattr(dataset, part)])
    names = [f"class-{number}" for number in range(classes)]
    md5 = write(dataset.meta["filename"], {dataset.meta["key"]: names})
    monkeypatch.setattr(dataset, "meta", {**dataset.meta, "md5": md5})
    return name, tmp_path, folder, written


both_cifars = pytest.mark.parametrize("cifar", CIFARS, indirect=True)


@both_cifars
def test_cifar_is_read_from_the_published_format(cifar):
    name, root, _, written = cifar
    data = load_dataset(DataConfig(data=name, data_root=root))
    train_files = [file for file, _ in CIFARS[name].train_list]
    assert data.classes == int(name.removeprefix("cifar"))
    assert data.class_names[3] == "class-3"
    assert data.sample_shape == (3, 32, 32)
    assert np.array_equal(data.train.images, np.concatenate([written[file][0] for file in train_files]))
    assert data.train.labels.tolist() == [label for file in train_files for label in written[file][1]]
    (test_file, _), *_ = CIFARS[name].test_list
    assert np.array_equal(data.test.images, written[test_file][0])
    assert data.test.labels.tolist() == written[test_file][1]


@both_cifars
@pytest.mark.parametrize("damaged", ["images", "meta"])
def test_damaged_cifar_is_never_unpickled(cifar, damaged, tmp_path):
    name, root, folder, _ = cifar
    dataset = CIFARS[name]
    file = folder / (dataset.train_list[0][0] if damaged == "images" else dataset.meta["filename"])

    exploded = tmp_path / "exploded"

    class Bomb:
        def __reduce__(self):
            return os.mkdir, (str(exploded),)

    file.write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(DataError, match="corrupted") as caught:
        load_dataset(DataConfig(data=name, data_root=root))
    assert ":download" in caught.value.fix
    assert not exploded.exists()
    pickle.loads(file.read_bytes())
    assert exploded.exists(), "the file would have done harm"


def test_download_that_fails_says_why(tmp_path, monkeypatch):
    def unreachable(*args, **kwargs):
        raise urllib.error.URLError("no route to host")

    monkeypatch.setattr(torchvision.datasets.cifar, "download_and_extract_archive", unreachable)
    monkeypatch.setattr(torchvision.datasets.caltech, "download_and_extract_archive", unreachable)
    for name in ("cifar10", "caltech101"):
        with pytest.raises(DataError, match="no route to host") as caught:
            load_dataset(DataConfig(data=f"{name}:download", data_root=tmp_path / name))
        assert str(tmp_path / name) in caught.value.what


@both_cifars
def test_download_puts_the_files_into_the_data_root(cifar, tmp_path, monkeypatch):
    name, _, folder, _ = cifar
    root = tmp_path / "new"

    def transfer(url, download_root, **kwargs):
        assert url == CIFARS[name].url
        folder.rename(Path(download_root) / folder.name)

    monkeypatch.setattr(torchvision.datasets.cifar, "download_and_extract_archive", transfer)
    assert len(load_dataset(DataConfig(data=f"{name}:download", data_root=root)).test) == 12


def save_image(path: Path, mode: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, (20, 16)).save(path)


@pytest.fixture
def caltech(tmp_path):
    """Three classes and the background in torchvision's layout; every fifth image is grey."""
    directory = tmp_path / "caltech101" / "101_ObjectCategories"
    for name, images in (("Faces", 34), ("accordion", 32), ("yin_yang", 31), ("BACKGROUND_Google", 3)):
        for number in range(1, images + 1):
            save_image(directory / name / f"image_{number:04d}.jpg", "L" if number % 5 == 0 else "RGB")
    return tmp_path, directory


def test_caltech101_has_30_training_images_of_each_class(caltech):
    root, directory = caltech
    data = load_dataset(DataConfig(data="caltech101", data_root=root))
    assert data.class_names == ("Faces", "accordion", "yin_yang")
    assert torch.bincount(data.train.labels).tolist() == [30, 30, 30]
    assert torch.bincount(data.test.labels).tolist() == [4, 2, 1]
    images = data.test.load(np.arange(7), None, torch.device("cpu"))
    assert images.shape == (7, 3, 224, 224)
    for number in range(4, 32):
        (directory / "yin_yang" / f"image_{number:04d}.jpg").unlink()
    data = load_dataset(DataConfig(data="caltech101", data_root=root))
    assert torch.bincount(data.train.labels).tolist() == [30, 30, 2]
    assert torch.bincount(data.test.labels).tolist() == [4, 2, 1]


def test_caltech101_is_split_as_documented(caltech):
    root, directory = caltech
    data = load_dataset(DataConfig(data="caltech101", data_root=root))
    assert data.class_names == ("Faces", "accordion", "yin_yang")
    assert data.ignored == ("1 directory that is not read (BACKGROUND_Google/)",)
    assert torch.bincount(data.train.labels).tolist() == [30, 30, 30]
    assert torch.bincount(data.test.labels).tolist() == [4, 2, 1]
    samples = {
        (source.dataset.path(index), int(source.labels[index]))
        for source in (data.train, data.test)
        for index in range(len(source))
    }
    theirs = torchvision.datasets.Caltech101(root)
    assert samples == {
        (directory / theirs.categories[label] / f"image_{number:04d}.jpg", label)
        for number, label in zip(theirs.index, theirs.y, strict=True)
    }
