"""Map-style data sets of (image, label): torchvision's, and a user's by `--data package.module:factory`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms.v2 import functional

from hybridpar.config import DataConfig
from hybridpar.config.data import samples_of
from hybridpar.data.memory_sets import divided
from hybridpar.data.sampling import IntArray
from hybridpar.data.sources import DATA_SETS, ImageData, ImageSet, decoded_data
from hybridpar.errors import DataError, UsageError, user_error
from hybridpar.registry import find_factory

#: Where data sets have the label of each sample, and the names of classes, without reading images.
_LABELS = ("targets", "labels", "y", "attr")
_NAMES = ("classes", "categories", "all_categories", "attr_names", "class_to_idx")


class MapImages(ImageSet):
    """Images of a map-style data set, which are read one by one."""

    def __init__(self, dataset: Any, indices: IntArray, labels: Tensor) -> None:
        super().__init__(labels)
        self.dataset = dataset
        self.indices = indices

    def open(self, index: int) -> Image.Image:
        try:
            image = self.dataset[int(self.indices[index])][0]
            return image if isinstance(image, Image.Image) else functional.to_pil_image(image)
        except Exception as error:
            raise DataError(
                f"cannot read the image {self.name(index)}: {error}", "Every image of the data set must be whole."
            ) from error

    def name(self, index: int) -> str:
        return f"{int(self.indices[index])} of {type(self.dataset).__name__}"


def labels_of(dataset: Any) -> Tensor:
    """Class of each sample, int64; or which classes it has, bool of shape (samples, classes)."""
    as_listed = getattr(dataset, "target_transform", None) is None
    listed = [getattr(dataset, name, ()) for name in _LABELS] if as_listed else []
    labels = next((each for each in listed if each is not None and len(each) == len(dataset)), None)
    if labels is None:
        labels = [dataset[index][1] for index in range(len(dataset))]
    if any(label is None for label in labels):
        raise DataError(f"a part of {type(dataset).__name__} has no labels", fix="Use the files that have them.")
    numbers = torch.as_tensor(np.asarray(labels))
    if numbers.ndim == 2 and numbers.shape[1] == 1:  # a column of classes
        numbers = numbers[:, 0]
    return numbers > 0 if numbers.ndim == 2 else numbers.long()


def class_names_of(dataset: Any, labels: Sequence[Tensor]) -> tuple[str, ...]:
    """Names of the classes; numbers where the data set has none."""
    listed = (getattr(dataset, name, None) for name in _NAMES)
    names = next((names for names in listed if names is not None and len(names)), None)
    if isinstance(names, Mapping):  # of class_to_idx
        names = sorted(names, key=names.__getitem__)
    several = labels[0].ndim == 2
    count = labels[0].shape[1] if several else max(int(part.max()) + 1 for part in labels)
    if names is None:
        return tuple(map(str, range(count)))
    words = tuple(", ".join(name) if isinstance(name, tuple) else str(name) for name in names)
    return words[:count] if several else words


def check_labels(name: str, labels: Sequence[Tensor], classes: int) -> None:
    """Refuse numbers that are of no class."""
    for which, numbers in zip(("training", "test"), labels, strict=False):
        outside = numbers[(numbers < 0) | (numbers >= classes)]
        if numbers.ndim == 1 and len(outside):
            raise DataError(
                f"{name} has a {which} label {int(outside[0])}, outside of its {classes} classes",
                fix="Its files are damaged or incomplete; replace them.",
            )


@DATA_SETS.register("package.module:factory", "your own map-style data sets of (image, label)")
def _user(config: DataConfig) -> ImageData:
    """What a factory returns: a training and a test set, or one set of which four of five images are for training.

    It is called with `root=`, the value of --data-root, where it takes that.
    """
    name = samples_of(config.data)
    factory = find_factory(name, "data set")
    takes_root = "root" in inspect.signature(factory).parameters
    try:
        made = factory(root=config.data_root) if takes_root else factory()
    except Exception as error:
        raise user_error(f"the factory {name} failed", error) from error
    parts = list(made) if isinstance(made, (tuple, list)) else [made]
    if not 1 <= len(parts) <= 2 or not all(hasattr(part, "__len__") and hasattr(part, "__getitem__") for part in parts):
        raise UsageError(
            f"{name} returned no data sets",
            "A factory returns one or two map-style data sets, whose items are (image, label).",
            "Return (training set, test set) from it.",
        )
    try:
        labels = [labels_of(part) for part in parts]
    except Exception as error:
        raise error if isinstance(error, DataError) else user_error(f"reading {name} failed", error) from error
    names = class_names_of(parts[0], labels)
    check_labels(name, labels, len(names))
    images = [MapImages(parts[part], indices, numbers) for part, indices, numbers in divided(labels)]
    return decoded_data(name, names, config, images)
