"""Image files: folders against torchvision's ImageFolder, tables, and files that a user names."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image

from hybridpar.config import DataConfig, TrainConfig
from hybridpar.data import ImageData, TestBatches, describe_data, load_dataset
from hybridpar.data.file_sets import find_images, named_images
from hybridpar.data.sources import ImageFacts
from hybridpar.errors import DataError, UsageError
from tests.data.test_loader import as_tested, train_batches


def save_image(path: Path, mode: str = "RGB") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    seed = int.from_bytes(hashlib.md5(path.name.encode()).digest()[:4], "big")
    pixels = np.random.default_rng(seed).integers(0, 256, (16, 20, len(mode)), dtype=np.uint8)
    Image.fromarray(pixels).save(path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for part, images in (("train", 3), ("test", 2)):
        for name in ("cat", "dog"):
            for number in range(images):
                save_image(tmp_path / part / name / f"{number}.png", "RGBA" if number else "RGB")
    return tmp_path


def load(root: Path, data: str = "folder") -> ImageData:
    return load_dataset(DataConfig(data=data, data_root=root, image_size=16))


def samples(source) -> list[tuple[str, int]]:
    return [(source.name(index), int(source.labels[index])) for index in range(len(source))]


@pytest.mark.parametrize("test", ["test", "val"])
def test_folder_agrees_with_image_folder(folder: Path, test: str) -> None:
    for name in ("UPPER.PNG", "b/Mixed.Jpeg", "a/z.bmp", "a.b/x.webp", "a/b/y.tif"):
        save_image(folder / "train" / "cat" / name)
    save_image(folder / "train" / "cat-2" / "0.png")
    (folder / "test").rename(folder / test)
    data = load(folder)
    assert data.class_names == ("cat", "cat-2", "dog")
    assert load_dataset(DataConfig(data="folder", data_root=folder)).sample_shape == (3, 224, 224)
    theirs = torchvision.datasets.ImageFolder(str(folder / "train")).samples
    assert samples(data.train) == theirs
    assert [name for name, _ in samples(data.test)] == [
        name for name, _ in torchvision.datasets.ImageFolder(str(folder / test)).samples
    ]


@pytest.mark.parametrize("kind", ["png", "jpg"])
def test_a_folder_of_classes_without_parts_is_divided_in_the_same_way_everywhere(tmp_path: Path, kind: str) -> None:
    for name, count in (("cat", 10), ("dog", 5)):
        for number in range(count):
            save_image(tmp_path / name / f"{number}.{kind}")
    data, again = load(tmp_path), load(tmp_path)
    assert torch.bincount(data.train.labels).tolist() == [8, 4]
    assert torch.bincount(data.test.labels).tolist() == [2, 1]
    assert len({*samples(data.train), *samples(data.test)}) == 15
    assert samples(data.train) == samples(again.train)


def test_a_set_that_cannot_be_divided_is_refused(tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        save_image(tmp_path / name / "0.png")
    with pytest.raises(DataError, match="the data set folder has 2 training and 0 test images"):
        load(tmp_path)


def test_hidden_and_other_files_are_ignored_and_other_parts_are_named(folder: Path) -> None:
    for directory in (folder / "train", folder / "train" / "cat" / "deeper"):
        save_image(directory / ".ipynb_checkpoints" / "copy.png")
    (folder / "train" / "cat" / "notes.txt").write_text("x")
    save_image(folder / "train" / "lost.png")
    save_image(folder / "val" / "cow" / "0.png")
    data = load(folder)
    assert (len(data.train), len(data.test)) == (6, 4)
    assert describe_data(data) == "folder, 6 training and 4 test images, 2 classes, 16x16; ignored: val/"


def test_folder_follows_links_but_not_in_circles(folder: Path) -> None:
    cat = folder / "train" / "cat"
    save_image(folder / "elsewhere" / "more.png")
    (cat / "more").symlink_to(folder / "elsewhere")
    (cat / "itself").symlink_to(cat)
    (folder / "train" / "dog" / "up").symlink_to("..")
    (folder / "elsewhere" / "back").symlink_to(cat)
    assert torch.bincount(load(folder).train.labels).tolist() == [4, 3]


def test_folders_that_are_no_data_set_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "deep").mkdir()
    (folder / "train").rename(folder / "deep" / "train")
    (folder / "test").rename(folder / "deep" / "test")
    with pytest.raises(DataError, match=r"no images in folders of .*: deep"):
        load(folder)  # the directory above the one that is meant
    folder /= "deep"
    (folder / "train" / "fish").mkdir()
    with pytest.raises(DataError, match=r"no images in folders of .*train: fish"):
        load(folder)
    (folder / "train" / "fish").rmdir()
    (folder / "test" / "dog").rename(folder / "test" / "wolf")
    with pytest.raises(DataError, match=r"test has classes that .*train has not: wolf"):
        load(folder)
    (folder / "test").rename(folder / "other")
    with pytest.raises(DataError, match=r"cannot read .*val: No such file"):
        load(folder)
    listed = os.scandir

    def refuse(path):
        if str(path).endswith("dog"):
            raise PermissionError(13, "Permission denied", str(path))
        return listed(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(DataError, match=r"cannot read .*dog: Permission denied"):
        load(folder)


def test_names_of_classes_that_are_not_utf8_are_refused(folder: Path) -> None:
    for part in ("train", "test"):
        os.rename(folder / part / "dog", os.fsencode(folder / part) + b"/\xe9l\xe9phant")
    with pytest.raises(UsageError, match=r"the name '\\udce9l\\udce9phant' .* is not UTF-8"):
        load(folder)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "images").mkdir()
    for number in range(10):
        Image.new("RGB", (20, 20), (number * 20, 0, 0)).save(tmp_path / "images" / f"{number}.png")
    return tmp_path


def table(path: Path, header: str, *rows: str) -> Path:
    path.write_text("\n".join([header, *rows]) + "\n")
    return path


def test_one_table_with_a_column_for_the_split(root: Path) -> None:
    rows = [f"images/{n}.png,{'cat' if n % 2 else 'dog'},{'test' if n > 6 else 'train'}" for n in range(10)]
    data = load(table(root / "all.csv", "path,label,split", *rows), "csv")
    assert data.class_names == ("cat", "dog")
    assert not data.multi_label
    assert data.train.labels.tolist() == [1, 0, 1, 0, 1, 0, 1]
    assert data.test.labels.tolist() == [0, 1, 0]
    assert data.test.load(np.array([0]), None, torch.device("cpu")).images[0, 0, 3, 3] == 140


def test_two_tables_and_numbers_as_classes(root: Path) -> None:
    table(root / "train.csv", "path,label", *(f"images/{n}.png,{n}" for n in range(10)), "images/1.png,10")
    table(root / "val.csv", "path,label", "images/3.png,10")
    data = load(root, "csv")
    assert data.class_names == tuple(str(n) for n in range(11))
    assert (len(data.train), data.test.labels.tolist(), data.ignored) == (11, [10], ())
    table(root / "test.csv", "path,label", "images/3.png,3")
    data = load(root, "csv")
    assert (data.test.labels.tolist(), data.ignored) == ([3], ("1 images of the split val",))


def test_several_labels_become_float_targets(root: Path) -> None:
    rows = [f"images/{number}.png,{labels}" for number, labels in enumerate(("a;c", "b|a", "", "c"))]
    table(root / "train.csv", "path,label", *rows)
    table(root / "test.csv", "path,label", "images/4.png,b")
    data = load(root, "csv")
    assert data.multi_label
    assert data.class_names == ("a", "b", "c")
    assert data.train.labels.int().tolist() == [[1, 0, 1], [1, 1, 0], [0, 0, 0], [0, 0, 1]]
    batch = next(train_batches(data, batch_size=4).epoch(0))
    assert batch.micro_batches[0][1].dtype == torch.float32
    assert batch.micro_batches[0][1].sum(0).tolist() == [2, 1, 2]
    ((_, targets),) = TestBatches(data, batch_size=2, rank=0, workers=1, loader_workers=0)
    assert targets.tolist() == [[0.0, 1.0, 0.0]]


@pytest.mark.parametrize(
    ("header", "rows", "text"),
    [
        ("file,label", ("images/0.png,a",), "line 2 of train.csv has"),
        ("path,name", ("images/0.png,a",), "line 2 of train.csv has"),
        ("path,label", ("images/0.png,", "images/1.png,a"), "line 2 of train.csv has no label"),
        ("path,label,split", ("images/0.png,a,dev",), "line 2 of train.csv has .*dev"),
        ("path,label,split", ("images/0.png,a,", "images/1.png,x,test"), "line 3 of train.csv has the label 'x'"),
    ],
)
def test_what_is_wrong_with_a_table_is_named_with_its_line(
    root: Path, header: str, rows: tuple[str, ...], text: str
) -> None:
    table(root / "train.csv", header, *rows)
    with pytest.raises(DataError, match=text):
        load(root, "csv")


def test_a_missing_table_is_named(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none.csv"):
        with pytest.raises(DataError, match=r"cannot read the table .*\.csv: No such file"):
            load(path, "csv")


@pytest.mark.parametrize("size", [None, 48])
def test_images_of_a_set_in_memory_are_tested_whole(tmp_path: Path, size: int | None) -> None:
    config = TrainConfig(data="digits", image_size=size)
    data = load_dataset(config)
    for number in range(3):
        Image.fromarray(data.test.images[number].permute(1, 2, 0).numpy()).save(tmp_path / f"{number}.png")
    named = named_images(find_images([tmp_path]), ImageFacts.of(data), config)
    assert torch.equal(as_tested(named), as_tested(data)[:3])


def test_named_folders_are_searched_and_hidden_ones_are_not(folder: Path) -> None:
    save_image(folder / "test/.hidden/6.png")
    (folder / "test/dog/readme.txt").write_text("no image")
    found = [str(file.relative_to(folder)) for file in find_images([folder / "test", folder / "train/cat/1.png"])]
    assert found == ["test/cat/0.png", "test/cat/1.png", "test/dog/0.png", "test/dog/1.png", "train/cat/1.png"]
    (folder / "empty").mkdir()
    with pytest.raises(UsageError, match=r"there is no image in .*empty"):
        find_images([folder / "empty"])
