"""Map-style data sets of a user's own: what a factory may return, and what is wrong with one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset

from hybridpar.config import DataConfig
from hybridpar.data import ImageData, TrainBatches, load_dataset
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
    sample = next(at for at in range(len(data.train)) if data.train.dataset.name(at).startswith("2 of"))
    loaded = data.train.load_readable(np.array([sample]), (0, 0), torch.device("cpu"))
    assert loaded.images.shape == (1, 3, 16, 16)
    assert loaded.damaged == ("cannot read the image 2 of Shades: it is gone",)
