"""Data sets of the Hugging Face library, from a copy on the disk or tar shards: columns by type, parts, and labels."""

from __future__ import annotations

import io
import json
import socket
import sys
import tarfile
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from PIL import Image

from hybridpar.config import DataConfig
from hybridpar.data import ImageData, TestBatches, TrainBatches, load_dataset
from hybridpar.errors import DataError, UsageError

datasets = pytest.importorskip("datasets")
constants = pytest.importorskip("huggingface_hub.constants")


def made(feature: object, column: str = "label", **parts: list) -> datasets.DatasetDict:
    features = datasets.Features({"picture": datasets.Image(), column: feature})
    rows = {}
    for part, labels in parts.items():
        pictures = [Image.new("RGB", (20, 20), (number * 9, 1, 2)) for number in range(len(labels))]
        rows[part] = datasets.Dataset.from_dict({"picture": pictures, column: labels}, features=features)
    return datasets.DatasetDict(rows)


def saved(root: Path, feature: object, **parts: list) -> Path:
    made(feature, **parts).save_to_disk(str(root))
    return root


def load(root: Path, name: str = "hf/mine") -> ImageData:
    return load_dataset(DataConfig(data=name, data_root=root, image_size=16))


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    datasets.disable_progress_bars()
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


def test_columns_are_found_by_their_type(tmp_path: Path) -> None:
    kinds = datasets.ClassLabel(names=["cat", "dog"])
    data = load(saved(tmp_path, kinds, column="animal", train=[0, 1, 1], test=[1, 0], validation=[1]))
    assert (data.name, data.class_names) == ("hf/mine", ("cat", "dog"))
    assert data.ignored == ("1 rows of the part validation",)
    assert data.train.labels.tolist() == [0, 1, 1]
    assert data.test.labels.tolist() == [1, 0]
    images = data.train.load(np.array([2, 0]), None, torch.device("cpu")).images
    assert images[:, 0, 3, 3].tolist() == [18, 0]


def test_one_part_is_divided_and_words_are_classes(tmp_path: Path) -> None:
    data = load(saved(tmp_path, datasets.Value("string"), train=["b", "a"] * 5))
    assert (data.class_names, len(data.train), len(data.test)) == (("a", "b"), 8, 2)


def test_lists_of_classes_are_several_labels(tmp_path: Path) -> None:
    several = datasets.List(datasets.ClassLabel(names=["a", "b", "c"]))
    data = load(saved(tmp_path, several, column="tags", train=[[0, 2], []], test=[[1]]))
    assert data.multi_label
    assert data.train.labels.int().tolist() == [[1, 0, 1], [0, 0, 0]]


def test_a_label_that_is_no_class_is_one_error(tmp_path: Path) -> None:
    root = saved(tmp_path, datasets.ClassLabel(names=["a", "b"]), train=[0, 1], test=[-1, 1])
    with pytest.raises(DataError, match="row 0 of test has the label '-1'"):
        load(root)


def test_what_is_not_in_the_cache_is_not_looked_for_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket, "getaddrinfo", asked := Mock(side_effect=OSError("asked the hub")))
    with pytest.raises(DataError, match="cannot read hf/nobody/nothing-of-that-name") as caught:
        load(tmp_path, "hf/nobody/nothing-of-that-name")
    asked.assert_not_called()
    assert not constants.HF_HUB_OFFLINE
    assert ":download" in caught.value.fix
    with pytest.raises(UsageError, match="--data hf"):
        load(tmp_path, "hf/")


def test_what_is_in_the_cache_is_read_without_asking_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made(datasets.ClassLabel(names=["a", "b"]), train=[0, 1] * 3)["train"].to_parquet(tmp_path / "train.parquet")
    datasets.load_dataset("parquet", data_files=str(tmp_path / "train.parquet"))
    cache = Path(datasets.config.HF_DATASETS_CACHE)
    (built,) = cache.glob("parquet/*/*/*/")
    (cache / "nobody___mine/default").mkdir(parents=True)
    built.parent.rename(cache / "nobody___mine/default/0.0.0")
    for file in cache.glob("nobody___mine/**/parquet-*"):
        file.rename(file.with_name(file.name.replace("parquet", "mine")))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket, "getaddrinfo", asked := Mock(side_effect=OSError("asked the hub")))
    assert load(tmp_path / "empty", "hf/nobody/mine").class_names == ("a", "b")
    asked.assert_not_called()


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UsageError, match="read with the package datasets") as caught:
        load(tmp_path)
    assert caught.value.fix == "Install it: pip install 'hybridpar[hf]'"


def test_a_package_that_cannot_be_imported_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "datasets")
    (tmp_path / "datasets.py").write_text("import a_package_that_it_needs")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UsageError, match=r"package datasets, which cannot be imported: .*'a_package_that_it_needs'"):
        load(tmp_path)


def shard(path: Path, numbers: range, end: str = "cls", *, damaged: int | None = None) -> None:
    """A tar file of grey images whose shade and label are their number."""
    labels = {"cls": str, "txt": "word{}".format, "json": lambda number: json.dumps({"label": [str(number), "many"]})}
    with tarfile.open(path, "w") as tar:
        for number in numbers:
            pixels = io.BytesIO()
            Image.new("RGB", (16, 16), (number * 8,) * 3).save(pixels, "PNG")
            image = b"no image" if number == damaged else pixels.getvalue()
            for name, content in (("png", image), (end, labels[end](number).encode())):
                member = tarfile.TarInfo(f"part/{number:05d}.{name}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))


def test_every_image_of_tar_shards_arrives_once(tmp_path: Path) -> None:
    for place, numbers in enumerate((range(16), range(16, 31))):
        shard(tmp_path / f"train-{place:03d}.tar", numbers)
    shard(tmp_path / "test-000.tar", range(5))
    data = load(tmp_path, "hf/webdataset")
    assert (len(data.train), len(data.test), data.classes) == (31, 5, 31)
    seen = []
    for rank in range(3):
        batches = TrainBatches(data, seed=3, batch_size=8, rank=rank, workers=3, micro_batches=1, loader_workers=rank)
        for images, labels in (batch.micro_batches[0] for batch in batches.epoch(1)):
            mean, std = (torch.tensor(values).view(3, 1, 1) for values in (data.mean, data.std))
            shades = (images * std + mean)[:, :, 4, 4] * 255
            assert torch.allclose(shades, labels[:, None].expand(-1, 3) * 8.0, atol=0.01)
            seen += labels.tolist()
    assert sorted(seen) == list(range(31))


def test_damaged_images_of_tar_shards_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shard(tmp_path / "train-000.tar", range(5))
    shard(tmp_path / "test-000.tar", range(5), damaged=3)
    batches = TestBatches(load(tmp_path, "hf/webdataset"), batch_size=5, rank=0, workers=1, loader_workers=1)
    assert [labels.tolist() for _, labels in batches] == [[0, 1, 2, 4]]
    assert (
        "row 3 of test: it is empty, or no image of a known format; it is left out (unreadable files so far: 1)"
        in caplog.text
    )


@pytest.mark.parametrize("lacks", ["image", "label"])
def test_rows_of_tar_shards_that_lack_something(tmp_path: Path, lacks: str) -> None:
    part = "train" if lacks == "label" else "test"
    shard(tmp_path / ("test.tar" if lacks == "label" else "train.tar"), range(9))
    shard(tmp_path / "whole.tar", range(9))
    with tarfile.open(tmp_path / "whole.tar") as whole, tarfile.open(tmp_path / f"{part}.tar", "w") as tar:
        for number, member in enumerate(whole.getmembers()):
            if number < 12 or member.name.endswith("png") != (lacks == "image"):
                tar.addfile(member, whole.extractfile(member))
    (tmp_path / "whole.tar").unlink()
    if lacks == "label":
        with pytest.raises(DataError, match="row 6 of train has no label"):
            load(tmp_path, "hf/webdataset")
        return
    loaded = load(tmp_path, "hf/webdataset").test.load(np.arange(9), None, torch.device("cpu"))
    assert loaded.indices.tolist() == list(range(6))
    assert loaded.damaged[0].endswith("row 6 of test: the row has no image")


def test_labels_of_tar_shards_may_be_words_or_lists(tmp_path: Path) -> None:
    for end in ("txt", "json"):
        (tmp_path / end).mkdir()
        shard(tmp_path / end / "train.tar", range(4), end)
        shard(tmp_path / end / "test.tar", range(2), end)
    words, lists = (load(tmp_path / end, "hf/webdataset") for end in ("txt", "json"))
    assert words.class_names == ("word0", "word1", "word2", "word3")
    assert lists.class_names == ("0", "1", "2", "3", "many")
    assert lists.multi_label
    assert lists.train.labels[:, 4].all()


def test_what_are_no_tar_shards_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"cannot read hf/webdataset .*{tmp_path}"):
        load(tmp_path, "hf/webdataset")
    shard(tmp_path / "train.tar", range(16))
    (tmp_path / "train.tar").write_bytes((tmp_path / "train.tar").read_bytes()[: 29 * 512 + 10])  # in an image
    with pytest.raises(DataError, match=r"cannot read hf/webdataset .*: unexpected end of data"):
        load(tmp_path, "hf/webdataset")


def test_parquet_files_are_read_from_the_data_root(tmp_path: Path) -> None:
    for part, rows in made(datasets.ClassLabel(names=["a", "b"]), train=[0, 1, 1], test=[1]).items():
        rows.to_parquet(tmp_path / f"{part}.parquet")
    data = load(tmp_path, "hf/parquet")
    assert (data.class_names, data.train.labels.tolist(), data.test.labels.tolist()) == (("a", "b"), [0, 1, 1], [1])
    assert data.train.load(np.array([2]), None, torch.device("cpu")).images[0, :, 3, 3].tolist() == [18, 1, 2]
    (tmp_path / "train.parquet").write_bytes(b"no table")
    with pytest.raises(DataError, match=f"cannot read hf/parquet .*{tmp_path}"):
        load(tmp_path, "hf/parquet")
