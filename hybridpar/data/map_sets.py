"""Map-style data sets of (image, label): torchvision's, and a user's by `--data package.module:factory`.

`hybridpar.config.data` has a line for each of torchvision's. Sets of arrays lie in memory. Where torchvision lets its
callers open the files, they are decoded as those of any other set; the other sets are read image by image.
"""

from __future__ import annotations

import inspect
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torchvision
from torch import Tensor
from torchvision.datasets import ImageFolder

from hybridpar.config import DataConfig
from hybridpar.config.data import TORCHVISION_SETS, TorchvisionSet, samples_of
from hybridpar.data.labels import class_names_of, divided, labels_of
from hybridpar.data.sources import (
    DATA_SETS,
    ImageData,
    ImageFiles,
    MemoryImages,
    Statistics,
    decoded_data,
    in_memory,
)
from hybridpar.errors import DataError, UsageError, user_error
from hybridpar.formats.cache import locked
from hybridpar.registry import find_factory

#: Training images that mean and standard deviation of a set of arrays are taken from.
_MEASURED = 10_000

#: Those that are published.
_STATISTICS: dict[str, Statistics] = {
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
}


def _load(name: str, config: DataConfig) -> ImageData:
    row = TORCHVISION_SETS[name]
    kind = getattr(torchvision.datasets, row.cls)
    # With `str` to open them, items are (path, label).
    by_path = issubclass(kind, ImageFolder) or "loader" in inspect.signature(kind).parameters
    options = {"loader": str} if by_path else {}
    parts = [
        _part(name, row, {**arguments, **options}, config)
        for arguments in (row.train, row.test)
        if arguments is not None
    ]
    if not all(len(part) for part in parts):
        raise DataError(f"{name} has no images in {config.data_root}", fix=_fix(row))
    datasets: list[Any] = parts
    if by_path:
        # torchvision lists some folders in the order of the file system, which differs between machines.
        items = [sorted(part[index] for index in range(len(part))) for part in parts]
        datasets = [ImageFiles(Path("/"), *zip(*part, strict=True)) for part in items]
    # Of QMNIST: the class, and more on each digit.
    labels = [part.targets[:, 0] if row.cls == "QMNIST" else labels_of(part) for part in datasets]
    if row.cls == "CLEVRClassification":  # three to ten objects
        labels = [numbers - 3 for numbers in labels]
        parts[0].classes = [f"{number} objects" for number in range(3, 11)]
    names = class_names_of(parts[0], labels)
    chosen = divided(labels, row.per_class)
    arrays = [_pixels(parts[part], indices) for part, indices in chosen]
    if any(pixels is None for pixels in arrays):
        return decoded_data(
            name, names, config, datasets, labels, size=row.size, flip=row.flip, per_class=row.per_class
        )
    train, test = (
        MemoryImages(pixels, labels[part][torch.from_numpy(indices)], pad=pixels.shape[-1] // 8, flip=row.flip)
        for pixels, (part, indices) in zip(arrays, chosen, strict=True)
        if pixels is not None
    )
    statistics = _STATISTICS.get(name) or measured_statistics(train.images[:_MEASURED])
    return in_memory(name, names, config, train, test, size=row.size, statistics=statistics)


def _part(name: str, row: TorchvisionSet, arguments: dict[str, Any], config: DataConfig) -> Any:
    """One part of a data set, downloaded where that is wanted."""
    root, download = config.data_root.resolve(), config.data_options.download
    if not download and not root.is_dir():  # torchvision would make it
        raise DataError(f"{name} is not there: no directory {root}", fix=_fix(row))
    if download and not row.downloads:
        raise DataError(f"torchvision cannot download {name}", fix=f"Leave out `download`. {_fix(row)}")
    options = {"download": download} if row.downloads else {}
    try:
        if not download:
            return getattr(torchvision.datasets, row.cls)(root, **arguments, **options)
        root.mkdir(parents=True, exist_ok=True)
        with locked(root / f".{name}.lock"):  # the workers that wait find the files there
            return getattr(torchvision.datasets, row.cls)(root, **arguments, **options)
    except (ImportError, OSError, RuntimeError, ValueError, KeyError) as error:
        text = " ".join(str(error).split()).replace("You can use download=True to download it", "").strip(" .")
        raise DataError(f"{name} cannot be read from {root}: {text or type(error).__name__}", fix=_fix(row)) from error


def _fix(row: TorchvisionSet) -> str:
    needs = f" It needs the package {row.needs}." if row.needs else ""
    again = "Run again with --data NAME:download, or name" if row.downloads else "Name"
    return f"{again} the directory of the files of torchvision.datasets.{row.cls} with --data-root.{needs}"


def _pixels(dataset: Any, chosen: np.ndarray[Any, Any]) -> Tensor | None:
    """Images, uint8 of shape (samples, 1 or 3, height, width); None where they are files."""
    data = getattr(dataset, "data", None)
    if not isinstance(data, (np.ndarray, Tensor)):
        return None
    pixels = torch.as_tensor(data)
    if len(chosen) != len(pixels):
        pixels = pixels[torch.from_numpy(chosen)]
    if pixels.ndim == 3:
        return pixels[:, None]
    return pixels if pixels.shape[1] == 3 else pixels.permute(0, 3, 1, 2).contiguous()


def measured_statistics(images: Tensor) -> Statistics:
    """Mean and standard deviation of each channel of pixels in [0, 1]."""
    counts = torch.stack([torch.bincount(channel.flatten(), minlength=256) for channel in images.transpose(0, 1)])
    values = torch.arange(256, dtype=torch.float64) / 255
    share = counts.double() / counts.sum(1, keepdim=True)
    mean = share @ values
    std = (share @ values.square() - mean.square()).clamp_min(1e-4).sqrt()
    return tuple(mean.tolist()), tuple(std.tolist())


for _name, _row in TORCHVISION_SETS.items():
    DATA_SETS.register(_name, f"torchvision's {_row.cls}")(partial(_load, _name))


@DATA_SETS.register("package.module:factory", "your own map-style data sets of (image, label)")
def _user(config: DataConfig) -> ImageData:
    """What a factory returns: a training and a test set, or one set of which four of five images are for training.

    It is called with `root=`, the value of --data-root, where it takes that.
    """
    name = samples_of(config.data)
    factory = find_factory(name, "data set")
    takes_root = "root" in inspect.signature(factory).parameters
    try:
        result = factory(root=config.data_root) if takes_root else factory()
        parts = list(result) if isinstance(result, (tuple, list)) else [result]
        sized = all(hasattr(part, "__len__") and hasattr(part, "__getitem__") for part in parts)
        labels = [labels_of(part) for part in parts] if sized else []
    except Exception as error:
        raise error if isinstance(error, DataError) else user_error(f"the factory {name} failed", error) from error
    if not sized or not 1 <= len(parts) <= 2:
        raise UsageError(
            f"{name} returned no data sets",
            "A factory returns one or two map-style data sets, whose items are (image, label).",
            "Return (training set, test set) from it.",
        )
    return decoded_data(name, class_names_of(parts[0], labels), config, parts, labels)
