"""Data sets of the Hugging Face library, from a copy on the disk: columns by type, parts, and labels."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from hybridpar.config import DataConfig
from hybridpar.data import ImageData, load_dataset
from hybridpar.errors import DataError, UsageError

datasets = pytest.importorskip("datasets")


def rows(count: int, **columns: list) -> dict[str, list]:
    return {"picture": [Image.new("RGB", (20, 20), (number * 9, 1, 2)) for number in range(count)], **columns}


def saved(root: Path, feature: object, *, column: str = "label", **parts: list) -> Path:
    features = datasets.Features({"picture": datasets.Image(), column: feature})
    made = {
        part: datasets.Dataset.from_dict(rows(len(labels), **{column: labels}), features=features)
        for part, labels in parts.items()
    }
    datasets.DatasetDict(made).save_to_disk(str(root))
    return root


def load(root: Path, name: str = "hf/mine") -> ImageData:
    return load_dataset(DataConfig(data=name, data_root=root, image_size=16))


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets.disable_progress_bars()
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


def test_columns_are_found_by_their_type(tmp_path: Path) -> None:
    kinds = datasets.ClassLabel(names=["cat", "dog"])
    data = load(saved(tmp_path, kinds, column="animal", train=[0, 1, 1], validation=[1, 0]))
    assert (data.name, data.class_names) == ("hf/mine", ("cat", "dog"))
    assert data.train.labels.tolist() == [0, 1, 1]
    assert data.test.labels.tolist() == [1, 0]
    images = data.train.load(np.array([2, 0]), None, torch.device("cpu"))
    assert images[:, 0, 3, 3].tolist() == [18, 0]


def test_one_part_is_divided_and_words_are_classes(tmp_path: Path) -> None:
    data = load(saved(tmp_path, datasets.Value("string"), train=["b", "a"] * 5))
    assert data.class_names == ("a", "b")
    assert torch.bincount(data.train.labels).tolist() == [4, 4]
    assert torch.bincount(data.test.labels).tolist() == [1, 1]
    assert data.test.load(np.array([0, 1]), None, torch.device("cpu")).shape == (2, 3, 16, 16)


def test_lists_of_classes_are_several_labels(tmp_path: Path) -> None:
    several = datasets.List(datasets.ClassLabel(names=["a", "b", "c"]))
    data = load(saved(tmp_path, several, column="tags", train=[[0, 2], []], test=[[1]]))
    assert data.multi_label
    assert data.train.labels.int().tolist() == [[1, 0, 1], [0, 0, 0]]


def test_a_label_that_is_no_class_is_one_error(tmp_path: Path) -> None:
    root = saved(tmp_path, datasets.ClassLabel(names=["a", "b"]), train=[0, 1], test=[-1, 1])
    with pytest.raises(DataError, match="row 0 of test of hf/mine has the label '-1'"):
        load(root)


def test_what_is_not_in_the_cache_is_not_looked_for_elsewhere(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot load hf/nobody/nothing-of-that-name") as caught:
        load(tmp_path, "hf/nobody/nothing-of-that-name")
    assert "--download" in caught.value.fix
    with pytest.raises(UsageError, match="--data hf"):
        load(tmp_path, "hf/")


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match="read with the package datasets") as caught:
        load(tmp_path)
    assert caught.value.fix == "Install it: pip install 'hybridpar[hf]'"
