"""Images listed in a table: columns, parts, several labels, and what is wrong with a table."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from hybridpar.config import DataConfig
from hybridpar.data import ImageData, TestBatches, load_dataset
from hybridpar.errors import DataError
from tests.data.test_loader import train_batches


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "images").mkdir()
    for number in range(10):
        Image.new("RGB", (20, 20), (number * 20, 0, 0)).save(tmp_path / "images" / f"{number}.png")
    return tmp_path


def table(path: Path, header: str, *rows: str) -> Path:
    path.write_text("\n".join([header, *rows]) + "\n")
    return path


def load(root: Path) -> ImageData:
    return load_dataset(DataConfig(data="csv", data_root=root, image_size=16))


def test_one_table_with_a_column_for_the_split(root: Path) -> None:
    rows = [f"images/{n}.png,{'cat' if n % 2 else 'dog'},{'test' if n > 6 else 'train'}" for n in range(10)]
    data = load(table(root / "all.csv", "path,label,split", *rows))
    assert data.class_names == ("cat", "dog")
    assert not data.multi_label
    assert data.train.labels.tolist() == [1, 0, 1, 0, 1, 0, 1]
    assert data.test.labels.tolist() == [0, 1, 0]
    assert data.test.load(np.array([0]), None, torch.device("cpu"))[0, 0, 3, 3] == 140


def test_a_folder_with_two_tables_and_numbers_as_classes(root: Path) -> None:
    table(root / "train.csv", "path,label", *(f"images/{n}.png,{n}" for n in range(10)), "images/1.png,10")
    table(root / "val.csv", "path,label", "images/3.png,10")
    data = load(root)
    assert data.class_names == tuple(str(n) for n in range(11))
    assert (len(data.train), data.test.labels.tolist(), data.ignored) == (11, [10], ())
    table(root / "test.csv", "path,label", "images/3.png,3")
    data = load(root)
    assert (data.test.labels.tolist(), data.ignored) == ([3], ("the table val.csv",))


def test_a_table_without_test_images_is_divided_by_class(root: Path) -> None:
    data = load(table(root / "all.csv", "path,label", *(f"images/{n}.png,{n % 2}" for n in range(10))))
    assert torch.bincount(data.train.labels).tolist() == [4, 4]
    assert torch.bincount(data.test.labels).tolist() == [1, 1]


JOINED = ("path,label", ("a;c", "b|a", "", "c"), "b")
COLUMNS = ("path,a,b,c", ("1,0,1", "1,1,0", "0,0,0", "0,0,1"), "0,1,0")


@pytest.mark.parametrize(("header", "rows", "tested"), [JOINED, COLUMNS], ids=["joined", "columns"])
def test_several_labels_become_float_targets(root: Path, header: str, rows: tuple[str, ...], tested: str) -> None:
    table(root / "train.csv", header, *(f"images/{number}.png,{row}" for number, row in enumerate(rows)))
    table(root / "test.csv", header, f"images/4.png,{tested}")
    data = load(root)
    assert data.multi_label
    assert data.class_names == ("a", "b", "c")
    assert data.train.labels.int().tolist() == [[1, 0, 1], [1, 1, 0], [0, 0, 0], [0, 0, 1]]
    batch = next(train_batches(data, batch_size=4).epoch(0))
    assert batch.micro_batches[0][1].dtype == torch.float32
    assert batch.micro_batches[0][1].sum(0).tolist() == [2, 1, 2]
    ((_, targets),) = TestBatches(data, batch_size=2, rank=0, workers=1, loader_workers=0)
    assert targets.tolist() == [[0.0, 1.0, 0.0]]


@pytest.mark.parametrize(
    ("header", "row", "said"),
    [
        ("file,label", "images/0.png,a", "has no column 'path'; it has file, label"),
        ("path,label", "images/0.png,", "line 2 of train.csv has no label"),
        ("path,label,split", "images/0.png,a,dev", "line 2 of train.csv has the split 'dev'"),
        ("path,a,b", "images/0.png,1,2", "line 2 of train.csv has '2' in the column 'b'"),
    ],
)
def test_what_is_wrong_with_a_table_is_told_with_its_line(root: Path, header: str, row: str, said: str) -> None:
    table(root / "train.csv", header, row, *(["images/1.png,a"] if header == "path,label" else []))
    with pytest.raises(DataError, match=said):
        load(root)


def test_a_test_label_outside_of_the_classes_is_named(root: Path) -> None:
    table(root / "train.csv", "path,label", "images/0.png,a", "images/1.png,b")
    table(root / "test.csv", "path,label", "images/2.png,a", "images/3.png,x")
    with pytest.raises(DataError, match=r"line 3 of test\.csv has the label 'x', which is none of the 2 classes"):
        load(root)


def test_a_missing_table_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no file train\.csv"):
        load(tmp_path)
    with pytest.raises(DataError, match=r"cannot read the table .*none\.csv: No such file"):
        load(tmp_path / "none.csv")
