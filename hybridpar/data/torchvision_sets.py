"""torchvision's classification data sets by name, from its own files, through one adapter.

`hybridpar.config.data` has a line for each. Sets of arrays lie in memory; of sets of files the paths are
taken from torchvision and the files are decoded as those of any other set; the rest is read image by image.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import torch
import torchvision
from PIL import Image
from torch import Tensor

from hybridpar.config import DataConfig
from hybridpar.config.data import TORCHVISION_SETS, TorchvisionSet
from hybridpar.data.downloads import download_fix, one_download
from hybridpar.data.memory_sets import Statistics, four_of_five, in_memory
from hybridpar.data.sampling import IntArray
from hybridpar.data.sources import (
    DATA_SETS,
    DecodedImages,
    Decoding,
    FileImages,
    ImageData,
    MemoryImages,
    decoded_data,
)
from hybridpar.errors import DataError

#: Training images that mean and standard deviation of a set of arrays are taken from.
_MEASURED = 10_000

#: Where torchvision's classes keep paths (or pairs of path and label) and labels, and the names of classes.
_PATHS = ("_image_files", "_images", "_samples", "samples", "imgs", "data")
_LABELS = ("targets", "_labels", "labels", "y")
_NAMES = ("classes", "categories", "all_categories", "attr_names")


class TorchvisionImages(DecodedImages):
    """Images of a torchvision data set that are read through it, one by one."""

    def __init__(self, dataset: Any, indices: Sequence[int], labels: Tensor, **use: Unpack[Decoding]) -> None:
        super().__init__(labels, **use)
        self.dataset = dataset
        self.indices = np.array(indices, dtype=np.int64)

    def open(self, index: int) -> Image.Image:
        try:
            image: Image.Image = self.dataset[int(self.indices[index])][0]
            return image.convert("RGB")
        except Exception as error:
            raise DataError(
                f"cannot read the image {self.name(index)}: {error}", "Every image of the data set must be whole."
            ) from error

    def name(self, index: int) -> str:
        return f"{int(self.indices[index])} of {type(self.dataset).__name__}"


def _load(name: str, config: DataConfig) -> ImageData:
    made = TORCHVISION_SETS[name]
    parts = [_part(name, made, arguments, config) for arguments in (made.train, made.test) if arguments is not None]
    for part in parts:
        if len(part) == 0:
            raise DataError(f"{name} has no images in {config.data_root}", fix=download_fix("its files"))
    labels = [_labels(part) for part in parts]
    indices = [np.arange(len(part)) for part in parts]
    if made.test is None:
        parts, labels = parts * 2, labels * 2
        indices = list(four_of_five(labels[0]))
    names = _class_names(parts[0], labels)
    for which, found in zip(("training", "test"), labels, strict=True):
        if found.ndim == 1 and (int(found.min()) < 0 or int(found.max()) >= len(names)):
            raise DataError(
                f"{name} has a {which} label {int(found.min() if found.min() < 0 else found.max())}, "
                f"outside of its {len(names)} classes",
                fix="Its files in --data-root are damaged or incomplete; replace them.",
            )
    whole = [_pixels(part) for part in parts]
    if whole[0] is not None and whole[1] is not None:
        sources = [
            _memory_images(pixels, found, chosen, made)
            for pixels, found, chosen in zip(whole, labels, indices, strict=True)
            if pixels is not None
        ]
        statistics = measured_statistics(whole[0][torch.from_numpy(indices[0][:_MEASURED])])
        return in_memory(name, names, *sources, size=config.images.size or made.size, statistics=statistics)
    chosen = list(zip(parts, labels, indices, strict=True))
    return decoded_data(
        name, names, config, lambda use: [_decoded(*part, use) for part in chosen], size=made.size, flip=made.flip
    )


def _part(name: str, made: TorchvisionSet, arguments: dict[str, Any], config: DataConfig) -> Any:
    """One part of a data set, downloaded where that is wanted."""
    root = config.data_root.resolve()
    if not config.data_options.download and not root.is_dir():  # torchvision would make it
        raise DataError(f"{name} is not there: no directory {root}", fix=download_fix("its files"))
    cls = getattr(torchvision.datasets, made.cls)
    for package in made.needs.split() if config.data_options.download or made.needs != "gdown" else ():
        try:
            importlib.import_module(package)
        except ImportError as error:
            raise DataError(
                f"torchvision reads {name} with {package}, which cannot be imported: {error}",
                fix=f"Install it: pip install {package}",
            ) from error
    try:
        if not made.downloads:
            if config.data_options.download:
                raise DataError(
                    f"torchvision cannot download {name}",
                    f"How its files are laid out is told at torchvision.datasets.{made.cls}.",
                    "Leave out `download`, and name the directory that holds them with --data-root.",
                )
            return cls(root, **arguments)
        if config.data_options.download:
            with one_download(name, root):
                return cls(root, download=True, **arguments)
        return cls(root, download=False, **arguments)
    except (OSError, RuntimeError, ValueError, KeyError) as error:
        text = " ".join(str(error).split()).replace("You can use download=True to download it", "").strip(" .")
        fix = download_fix(f"the files of torchvision.datasets.{made.cls}")
        if not made.downloads:
            fix = f"Name the directory that holds the files of torchvision.datasets.{made.cls} with --data-root."
        raise DataError(f"{name} cannot be read from {root}: {text or type(error).__name__}", fix=fix) from error


def _labels(dataset: Any) -> Tensor:
    """Class of each sample, int64; or which attributes it has, bool of shape (samples, attributes)."""
    if (attributes := getattr(dataset, "attr", None)) is not None:
        return torch.as_tensor(np.asarray(attributes)) > 0
    if type(dataset).__name__ == "PCAM":  # one by one, each would open a file
        file = dataset._base_folder / dataset._FILES[dataset._split]["targets"][0]
        with dataset.h5py.File(file) as opened:
            return torch.as_tensor(opened["y"][:, 0, 0, 0]).long()
    found = next((getattr(dataset, one) for one in _LABELS if len(getattr(dataset, one, ())) == len(dataset)), None)
    if found is None and (index := getattr(dataset, "index", None)) and isinstance(index[0], tuple):
        found = [label for label, _ in index]  # INaturalist
    if found is None:
        pairs = next((getattr(dataset, one) for one in _PATHS if _has_pairs(getattr(dataset, one, None))), None)
        found = [label for _, label in pairs] if pairs is not None else [dataset[one][1] for one in range(len(dataset))]
    if any(one is None for one in found):
        raise DataError(f"a part of {type(dataset).__name__} has no labels", fix="Use the files that have them.")
    labels = torch.as_tensor(np.asarray(found)).long()
    labels = labels[:, 0] if labels.ndim == 2 else labels  # QMNIST: the class, and more on each digit
    if type(dataset).__name__ == "CLEVRClassification":
        labels = labels - 3  # three to ten objects
    return labels


def _class_names(dataset: Any, labels: list[Tensor]) -> tuple[str, ...]:
    if type(dataset).__name__ == "CLEVRClassification":
        return tuple(f"{number} objects" for number in range(3, 11))
    names = next((getattr(dataset, one) for one in _NAMES if getattr(dataset, one, None)), None)
    if names is None:
        names = getattr(dataset, "class_to_idx", None)
    if names is None:
        count = max(int(found.max()) + 1 for found in labels)
        return tuple(str(number) for number in range(count))
    names = [", ".join(one) if isinstance(one, tuple) else str(one) for one in names]
    return tuple(names[: labels[0].shape[1]]) if labels[0].ndim == 2 else tuple(names)


def _has_pairs(found: Any) -> bool:
    return isinstance(found, (list, tuple)) and len(found) > 0 and isinstance(found[0], tuple) and len(found[0]) == 2


def _paths(dataset: Any) -> list[str] | None:
    """The file of each sample; None where samples are no files of their own."""
    for one in _PATHS:
        found = getattr(dataset, one, None)
        if isinstance(found, list) and len(found) == len(dataset) > 0:
            first = [pair[0] for pair in found] if _has_pairs(found) else found
            if isinstance(first[0], (str, Path)):
                return [str(path) for path in first]
    name = type(dataset).__name__
    if name == "INaturalist":
        return [str(Path(dataset.root, dataset.all_categories[label], file)) for label, file in dataset.index]
    if name == "CelebA":
        return [str(Path(dataset.root, dataset.base_folder, "img_align_celeba", file)) for file in dataset.filename]
    if name == "Caltech256":
        folder = Path(dataset.root, "256_ObjectCategories")
        return [
            str(folder / dataset.categories[label] / f"{label + 1:03d}_{number:04d}.jpg")
            for label, number in zip(dataset.y, dataset.index, strict=True)
        ]
    return None


def _pixels(dataset: Any) -> Tensor | None:
    """All images, uint8 of shape (samples, 3, height, width); None where they are files."""
    data = getattr(dataset, "data", None)
    if not isinstance(data, (np.ndarray, Tensor)):
        return None
    pixels = torch.as_tensor(data)
    if pixels.ndim == 3:  # grey: one channel three times, without three times the memory
        return pixels[:, None].expand(-1, 3, -1, -1)
    return pixels if pixels.shape[1] == 3 else pixels.permute(0, 3, 1, 2)


def _memory_images(pixels: Tensor, labels: Tensor, chosen: IntArray, made: TorchvisionSet) -> MemoryImages:
    if len(chosen) != len(pixels):
        pixels, labels = pixels[torch.from_numpy(chosen)], labels[torch.from_numpy(chosen)]
    return MemoryImages(pixels, labels, pad=pixels.shape[-1] // 8, flip=made.flip)


def measured_statistics(images: Tensor) -> Statistics:
    """Mean and standard deviation of each channel of pixels in [0, 1]."""
    counts = torch.stack([torch.bincount(channel.flatten(), minlength=256) for channel in images.transpose(0, 1)])
    values = torch.arange(256, dtype=torch.float64) / 255
    share = counts.double() / counts.sum(1, keepdim=True)
    mean = share @ values
    std = (share @ values.square() - mean.square()).clamp_min(1e-4).sqrt()
    return tuple(mean.tolist()), tuple(std.tolist())


def _decoded(dataset: Any, labels: Tensor, chosen: IntArray, use: Decoding) -> DecodedImages:
    paths = _paths(dataset)
    if paths is None:
        return TorchvisionImages(dataset, chosen.tolist(), labels[torch.from_numpy(chosen)], **use)
    # torchvision lists some folders in the order of the file system, which another machine may have another of.
    order = sorted(chosen.tolist(), key=paths.__getitem__)
    return FileImages(Path("/"), [paths[one] for one in order], labels[order], **use)


def _register() -> None:
    for name, made in TORCHVISION_SETS.items():
        DATA_SETS.register(name, f"torchvision's {made.cls}: {made.about}")(partial(_load, name))


_register()
