"""Tar shards: which files are taken, that every image is seen once over some workers, and resumption in mid-epoch."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from hybridpar.config import DataConfig
from hybridpar.data import ImageData, TrainBatches, describe_data, load_dataset, tar_sets
from hybridpar.errors import DataError


def shard(path: Path, numbers: range, label: str = "cls", *, classes: int = 31) -> Path:
    """A tar file of grey images whose shade and label are their number."""
    with tarfile.open(path, "w") as tar:
        for number in numbers:
            pixels = io.BytesIO()
            Image.new("RGB", (16, 16), (number * 8,) * 3).save(pixels, "PNG")
            text = str(number % classes)
            found = {"cls": text, "txt": f"word{text}", "json": json.dumps({"label": [text, "many"]})}[label]
            for end, content in (("png", pixels.getvalue()), (label, found.encode()), ("__key__", b"x")):
                member = tarfile.TarInfo(f"part/{number:05d}.{end}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    return path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for place, numbers in enumerate((range(16), range(16, 31))):
        shard(tmp_path / f"train-{place:03d}.tar", numbers)
    shard(tmp_path / "test-000.tar", range(5))
    return tmp_path


def load(root: Path | str, **options: object) -> ImageData:
    return load_dataset(DataConfig(data="webdataset", data_root=Path(root), image_size=16, **options))  # type: ignore[arg-type]


def steps_of(data: ImageData, workers: int, start: int = 0, loader_workers: int = 0) -> list[torch.Tensor]:
    """Labels of each step, those of all workers in order; every image must be the one of its label."""
    views = []
    for rank in range(workers):
        made = TrainBatches(
            data,
            seed=3,
            batch_size=8,
            rank=rank,
            workers=workers,
            micro_batches=1,
            loader_workers=loader_workers if rank == 0 else 0,
        )
        views.append([batch.micro_batches[0] for batch in made.epoch(1, start)])
    for images, labels in (part for view in views for part in view):
        mean, std = (torch.tensor(values).view(3, 1, 1) for values in (data.mean, data.std))
        shades = (images * std + mean) * 255
        assert torch.allclose(shades[:, :, 4, 4], labels[:, None].expand(-1, 3) * 8.0, atol=0.01)
    return [torch.cat([labels for _, labels in parts]) for parts in zip(*views, strict=True)]


def test_two_shards_over_three_workers_are_seen_once_and_go_on_in_mid_epoch(root: Path) -> None:
    data = load(str(root / "train-{000..001}.tar"))
    assert (len(data.train), len(data.test), data.classes) == (31, 5, 31)
    alone = steps_of(data, 1)
    three = steps_of(data, 3, loader_workers=2)
    assert sorted(torch.cat(three).tolist()) == list(range(31))
    again = load(str(root / "train-{000..001}.tar"))  # from what is kept beside the shards
    resumed = steps_of(again, 2, start=2)
    for one, other in ((alone, three), (alone[2:], resumed)):
        assert [step.tolist() for step in one] == [step.tolist() for step in other]


def test_a_directory_is_divided_by_the_names_of_its_shards(root: Path) -> None:
    data = load(root)
    assert (len(data.train), len(data.test)) == (31, 5)
    assert describe_data(data) == "webdataset, 31 training and 5 test images, 31 classes, 16x16"
    (root / "test-000.tar").unlink()
    shard(root / "train-000.tar", range(10), classes=1)
    shard(root / "train-001.tar", range(10, 20), classes=1)
    assert (len(load(root).train), len(load(root).test)) == (16, 4)


def test_where_images_are_is_looked_up_once(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = load(root)
    monkeypatch.setattr(tar_sets, "_look_up", lambda path: pytest.fail("looked up again"))
    again = load(root)
    assert np.array_equal(first.train.offsets, again.train.offsets)
    assert again.train.name(0).endswith("train-000.tar/part/00000.png")
    monkeypatch.undo()
    shard(root / "train-000.tar", range(12))  # another file, another size
    (root / ".train-001.tar.index").write_text("{}")
    assert len(load(root).train) == 12 + 15


def test_labels_may_be_words_or_lists(tmp_path: Path) -> None:
    shard(tmp_path / "a.tar", range(4), "txt", classes=2)
    assert load(tmp_path / "a.tar").class_names == ("word0", "word1")
    shard(tmp_path / "b.tar", range(4), "json", classes=2)
    data = load(tmp_path / "b.tar")
    assert data.multi_label
    assert data.class_names == ("0", "1", "many")
    shard(tmp_path / "c.tar", range(4), classes=2)
    (tmp_path / "classes.txt").write_text("cat\ndog\ncow\n")
    assert load(tmp_path / "c.tar").class_names == ("cat", "dog", "cow")
    (tmp_path / "classes.txt").write_text("cat\n")
    with pytest.raises(DataError, match=r"c\.tar/part/00001\.png has the label '1', which is none of the 1 classes"):
        load(tmp_path / "c.tar")


def test_a_shard_that_ends_too_early_gives_what_is_whole_or_an_error(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = root / "train-001.tar"
    path.write_bytes(path.read_bytes()[:9000])
    data = load(root)
    assert 16 < len(data.train) < 31
    assert "train-001.tar ends too early" in caplog.text
    with pytest.raises(DataError, match=r"train-001\.tar ends too early"):
        load(root, bad_images="error")


def test_what_are_no_shards_is_one_error(root: Path) -> None:
    with pytest.raises(DataError, match=r"1 of 3 shards are missing, such as .*train-002\.tar"):
        load(str(root / "train-{000..002}.tar"))
    (root / "sub").mkdir()
    with pytest.raises(DataError, match="there are no shards"):
        load(root / "sub")
    (root / "zip.tar").write_bytes(b"no tar file at all" * 100)
    with pytest.raises(DataError, match=r"cannot read the shard .*zip\.tar"):
        load(root / "zip.tar")
    with tarfile.open(root / "packed.tar.gz", "w:gz") as tar:
        tar.add(root / "zip.tar", "x.png")
    with pytest.raises(DataError, match=r"packed\.tar\.gz") as caught:
        load(root / "packed.tar.gz")
    assert "gunzip" in caught.value.fix
