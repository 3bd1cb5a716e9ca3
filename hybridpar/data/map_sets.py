"""Map-style data sets of (image, label): torchvision's, and a user's by `--data package.module:factory`.

`hybridpar.config.data` has a line for each of torchvision's. Sets of arrays lie in memory. Where torchvision lets its
callers open the files, they are decoded as those of any other set; the other sets are read image by image.
"""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torchvision
from torch import Tensor
from torchvision.datasets import ImageFolder

from hybridpar.config import DataConfig
from hybridpar.config.data import TORCHVISION_SETS, samples_of
from hybridpar.data.images import ImageFiles
from hybridpar.data.sources import (
    DATA_SETS,
    IMAGENET,
    ImageArray,
    ImageData,
    Statistics,
    image_data,
    labels_of,
    listed_names,
)
from hybridpar.errors import DataError, HybridparError, UsageError, user_error
from hybridpar.formats.cache import locked
from hybridpar.registry import find_factory

#: Images that mean and standard deviation of a set of arrays are taken from: of the training part, where it has one.
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
    asked = [{**arguments, **options} for arguments in (row.train, row.test) if arguments is not None]
    parts = [_open(name, kind, arguments, config) for arguments in asked]
    names, statistics = listed_names(parts[0]), IMAGENET
    if by_path:
        # torchvision lists some folders in the order of the file system, which differs between machines.
        items = [sorted(part[index] for index in range(len(part))) for part in parts]
        if name == "clevr":  # labels are counts
            names = [f"{count} objects" for count in range(3, 11)]
            items = [[(path, count - 3) for path, count in files] for files in items]
        parts = [ImageFiles(Path("/"), *zip(*files, strict=True)) for files in items]
    elif isinstance(getattr(parts[0], "data", None), (np.ndarray, Tensor)):
        # Of QMNIST: the class, and more on each digit.
        labels = [part.targets[:, 0] if name == "qmnist" else labels_of(part) for part in parts]
        parts = [ImageArray(_pixels(part.data), numbers) for part, numbers in zip(parts, labels, strict=True)]
        statistics = _STATISTICS.get(name) or _measured(parts[0].images[:_MEASURED])
    form: dict[str, Any] = {"size": row.size, "flip": row.flip, "per_class": row.per_class}
    return image_data(config, parts, names=names, statistics=statistics, **form)


def _open(name: str, kind: Any, arguments: dict[str, Any], config: DataConfig) -> Any:
    """One part of a data set, downloaded where that is wanted."""
    root, download = config.data_root.resolve(), config.data_options.download
    can_download = "download" in inspect.signature(kind).parameters
    again = "Run again with --data NAME:download, or name" if can_download else "Name"
    fix = f"{again} the directory of the files of torchvision.datasets.{kind.__name__} with --data-root."
    if download and not can_download:
        raise DataError(f"torchvision cannot download {name}", fix=f"Leave out `download`. {fix}")
    if can_download:
        arguments = {**arguments, "download": download}
    try:
        if download:
            root.mkdir(parents=True, exist_ok=True)
        elif not root.is_dir():  # torchvision would make it
            raise FileNotFoundError("there is no such directory")
        with (
            locked(root / f".{name}.lock") if download else nullcontext()
        ):  # the workers that wait find the files there
            part = kind(root, **arguments)
        if not len(part):
            raise ValueError("it has no images")
        return part
    except (ImportError, OSError, RuntimeError, ValueError, KeyError) as error:
        text = " ".join(str(error).split()).replace("You can use download=True to download it", "").strip(" .")
        raise DataError(f"{name} cannot be read from {root}: {text or type(error).__name__}", fix=fix) from error


def _pixels(data: Any) -> Tensor:
    """Images of an array, uint8 of shape (samples, 1 or 3, height, width)."""
    pixels = torch.as_tensor(data)
    if pixels.ndim == 3:
        return pixels[:, None]
    return pixels if pixels.shape[1] == 3 else pixels.permute(0, 3, 1, 2).contiguous()


def _measured(images: Tensor) -> Statistics:
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
        needed = ("__getitem__", "__len__")
        if not 1 <= len(parts) <= 2 or not all(hasattr(part, name) for part in parts for name in needed):
            raise UsageError(
                f"{name} returned no data sets",
                "A factory returns one or two map-style data sets, whose items are (image, label).",
                "Return (training set, test set) from it.",
            )
        return image_data(config, parts)
    except HybridparError:
        raise
    except Exception as error:
        raise user_error(f"the factory {name} failed", error) from error
