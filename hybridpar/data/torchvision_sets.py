"""torchvision's classification data sets by name, from its own files.

`hybridpar.config.data` has a line for each. Sets of arrays lie in memory. Where torchvision lets its callers open the
files, they are decoded as those of any other set; the other sets are read image by image.
"""

from __future__ import annotations

import importlib
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
from hybridpar.config.data import TORCHVISION_SETS, TorchvisionSet
from hybridpar.data.downloads import download_fix, one_download
from hybridpar.data.map_sets import MapImages, check_labels, class_names_of, labels_of
from hybridpar.data.memory_sets import Statistics, divided, in_memory
from hybridpar.data.sampling import IntArray
from hybridpar.data.sources import DATA_SETS, ImageData, ImageFiles, ImageSet, MemoryImages, decoded_data
from hybridpar.errors import DataError

#: Training images that mean and standard deviation of a set of arrays are taken from.
_MEASURED = 10_000


def _load(name: str, config: DataConfig) -> ImageData:
    made = TORCHVISION_SETS[name]
    cls = getattr(torchvision.datasets, made.cls)
    # With `str` to open them, items are (path, label).
    by_path = {"loader": str} if issubclass(cls, ImageFolder) or "loader" in inspect.signature(cls).parameters else {}
    parts = [
        _part(name, made, {**arguments, **by_path}, config)
        for arguments in (made.train, made.test)
        if arguments is not None
    ]
    for part in parts:
        if len(part) == 0:
            raise DataError(f"{name} has no images in {config.data_root}", fix=download_fix("its files"))
    # Of QMNIST: the class, and more on each digit.
    labels = [part.targets[:, 0] if made.cls == "QMNIST" else labels_of(part) for part in parts]
    listed: list[list[str]] = []
    orders: list[list[int]] = []
    if by_path:  # torchvision lists some folders in the order of the file system, which differs between machines
        listed = [[part[at][0] for at in range(len(part))] for part in parts]
        orders = [sorted(range(len(paths)), key=paths.__getitem__) for paths in listed]
        labels = [numbers[order] for numbers, order in zip(labels, orders, strict=True)]
    names = class_names_of(parts[0], labels)
    if made.cls == "CLEVRClassification":  # three to ten objects
        labels, names = [numbers - 3 for numbers in labels], tuple(f"{number} objects" for number in range(3, 11))
    check_labels(name, labels, len(names))
    chosen = divided(labels)
    arrays = [_pixels(parts[part], indices) for part, indices, _ in chosen]
    if arrays[0] is not None and arrays[1] is not None:
        sources = [
            MemoryImages(pixels, numbers, pad=pixels.shape[-1] // 8, flip=made.flip)
            for pixels, (_, _, numbers) in zip(arrays, chosen, strict=True)
            if pixels is not None
        ]
        statistics = measured_statistics(arrays[0][:_MEASURED])
        return in_memory(name, names, *sources, config=config, size=made.size, statistics=statistics)

    def images(part: int, indices: IntArray, numbers: Tensor) -> ImageSet:
        if not by_path:
            return MapImages(parts[part], indices, numbers)
        paths = [listed[part][orders[part][index]] for index in indices.tolist()]
        return ImageFiles(Path("/"), paths, numbers)

    return decoded_data(name, names, config, [images(*part) for part in chosen], size=made.size, flip=made.flip)


def _part(name: str, made: TorchvisionSet, arguments: dict[str, Any], config: DataConfig) -> Any:
    """One part of a data set, downloaded where that is wanted."""
    root, download = config.data_root.resolve(), config.data_options.download
    if not download and not root.is_dir():  # torchvision would make it
        raise DataError(f"{name} is not there: no directory {root}", fix=download_fix("its files"))
    for package in made.needs.split() if download or made.needs != "gdown" else ():
        try:
            importlib.import_module(package)
        except ImportError as error:
            raise DataError(
                f"torchvision reads {name} with {package}, which cannot be imported: {error}",
                fix=f"Install it: pip install {package}",
            ) from error
    if download and not made.downloads:
        raise DataError(
            f"torchvision cannot download {name}",
            f"The layout of its files is described at torchvision.datasets.{made.cls}.",
            "Leave out `download`, and name the directory that holds them with --data-root.",
        )
    asked = {"download": download} if made.downloads else {}
    try:
        with one_download(name, root) if download else nullcontext():
            return getattr(torchvision.datasets, made.cls)(root, **arguments, **asked)
    except (OSError, RuntimeError, ValueError, KeyError) as error:
        text = " ".join(str(error).split()).replace("You can use download=True to download it", "").strip(" .")
        fix = download_fix(f"the files of torchvision.datasets.{made.cls}")
        if not made.downloads:
            fix = f"Name the directory that holds the files of torchvision.datasets.{made.cls} with --data-root."
        raise DataError(f"{name} cannot be read from {root}: {text or type(error).__name__}", fix=fix) from error


def _pixels(dataset: Any, chosen: IntArray) -> Tensor | None:
    """Images, uint8 of shape (samples, 1 or 3, height, width); None where they are files."""
    data = getattr(dataset, "data", None)
    if not isinstance(data, (np.ndarray, Tensor)):
        return None
    pixels = torch.as_tensor(data)
    if len(chosen) != len(pixels):
        pixels = pixels[torch.from_numpy(chosen)]
    if pixels.ndim == 3:
        return pixels[:, None]
    return pixels if pixels.shape[1] == 3 else pixels.permute(0, 3, 1, 2)


def measured_statistics(images: Tensor) -> Statistics:
    """Mean and standard deviation of each channel of pixels in [0, 1]."""
    counts = torch.stack([torch.bincount(channel.flatten(), minlength=256) for channel in images.transpose(0, 1)])
    values = torch.arange(256, dtype=torch.float64) / 255
    share = counts.double() / counts.sum(1, keepdim=True)
    mean = share @ values
    std = (share @ values.square() - mean.square()).clamp_min(1e-4).sqrt()
    return tuple(mean.tolist()), tuple(std.tolist())


for _name, _made in TORCHVISION_SETS.items():
    DATA_SETS.register(_name, f"torchvision's {_made.cls}")(partial(_load, _name))
