"""Data sets that are read from image files."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
import torchvision
from torchvision.datasets.folder import IMG_EXTENSIONS

from hybridpar.config import DataConfig
from hybridpar.data.downloads import download_fix, one_download
from hybridpar.data.memory_sets import FIXED_SEED, divided
from hybridpar.data.sampling import IntArray, split_by_class
from hybridpar.data.sources import DATA_SETS, ImageData, ImageFiles, decoded_data
from hybridpar.errors import DataError

logger = logging.getLogger(__name__)

#: The usual protocol of Caltech-101 (Fei-Fei, Fergus and Perona 2004): 30 training images per class.
CALTECH101_TRAIN_PER_CLASS = 30
CALTECH101_CLASSES = 101
CALTECH101_IMAGES = 8677

#: The folder of Caltech-101 that is not a class; torchvision leaves it out as well.
CALTECH101_BACKGROUND = "BACKGROUND_Google"


@DATA_SETS.register("caltech101", "Caltech-101: 8,677 photographs of 101 classes, 224x224; 30 per class for training")
def _caltech101(config: DataConfig) -> ImageData:
    """Thirty images of each class are for training, chosen once and for all, and all others for testing.

    In an incomplete copy, a class of 30 images or fewer keeps one for testing. Read from torchvision's layout,
    ROOT/caltech101/101_ObjectCategories/CLASS/image_NNNN.jpg; annotations are not needed. Some images are grey.
    """
    root = config.data_root.resolve()
    directory = root / "caltech101" / "101_ObjectCategories"
    if config.data_options.download:
        with one_download("caltech101", root):
            torchvision.datasets.Caltech101(root, download=True)
    if not directory.is_dir():
        raise DataError(
            f"caltech101 is not there: no directory {directory}",
            fix=download_fix("caltech101/101_ObjectCategories/"),
        )
    ignored = _Ignored()
    names, paths, labels = _scan(directory, ignored, excluded=(CALTECH101_BACKGROUND,))
    if (len(names), len(paths)) != (CALTECH101_CLASSES, CALTECH101_IMAGES):
        logger.warning(
            "caltech101 in %s has %d classes and %d images; the published set has %d and %d",
            *(directory, len(names), len(paths), CALTECH101_CLASSES, CALTECH101_IMAGES),
        )
    sizes = np.bincount(labels)
    if sizes.min() < 2:
        raise DataError(
            f"the class {names[int(sizes.argmin())]!r} of caltech101 has 1 image in {directory}",
            "A class needs one image for training and one for testing.",
            f"Remove {directory} and run again with --data caltech101,download.",
        )
    train_counts = [min(CALTECH101_TRAIN_PER_CLASS, int(size) - 1) for size in sizes]
    chosen = split_by_class(np.array(labels), train_counts, FIXED_SEED)
    parts = [_files(directory, paths, labels, part) for part in chosen]
    return decoded_data("caltech101", names, config, parts, ignored=_described(ignored))


@DATA_SETS.register(
    "folder", "your own images: --data-root with train/CLASS/ and test/CLASS/ (or val/CLASS/), or CLASS/; 224x224"
)
def _folder(config: DataConfig) -> ImageData:
    """The layout of torchvision's ImageFolder, without hidden files and directories.

    Where there are both test/ and val/, test/ is used. Folders beside those that are used are named. Without any of the
    three the folders are the classes, and 80 % of the images of each are for training, always the same ones.
    """
    root, ignored = config.data_root.resolve(), _Ignored()
    train_root = root / "train"
    test_root = root / "test" if (root / "test").is_dir() else root / "val"
    if root.is_dir() and not train_root.is_dir() and not test_root.is_dir():
        names, paths, labels = _scan(root, ignored)
        if all(len(Path(path).parts) > 2 for path in paths):
            raise DataError(
                f"the folders in {root} hold folders, and no images",
                "A folder data set is laid out as train/CLASS/IMAGE and test/CLASS/IMAGE, or as CLASS/IMAGE.",
                "Name the directory above the classes, or above train/ and test/, with --data-root.",
            )
        parts = [_files(root, paths, labels, part) for _, part, _ in divided([torch.tensor(labels)])]
        return decoded_data("folder", names, config, parts, ignored=_described(ignored))
    for directory, wanted in ((train_root, "train/"), (test_root, "test/ or val/")):
        if not directory.is_dir():
            raise DataError(
                f"the data set has no directory {wanted} in {root}",
                "A folder data set is laid out as train/CLASS/IMAGE and test/CLASS/IMAGE, or as CLASS/IMAGE.",
                "Name the directory that holds train/ and test/ with --data-root.",
            )
    with suppress(OSError):
        for entry in os.scandir(root):
            if entry.is_dir() and not entry.name.startswith(".") and Path(entry) not in (train_root, test_root):
                ignored["beside", f"{entry.name}/"] += 1
    names, train_paths, train_labels = _scan(train_root, ignored)
    test_names, test_paths, test_labels = _scan(test_root, ignored)
    if extra := set(test_names) - set(names):
        raise DataError(
            f"{test_root} has classes that {train_root} has not: {some(extra)}",
            "The classes are those of the training images.",
            "Rename or remove the directories, or add training images of these classes.",
        )
    numbers = [names.index(name) for name in test_names]
    test_labels = [numbers[at] for at in test_labels]
    parts = [_files(train_root, train_paths, train_labels), _files(test_root, test_paths, test_labels)]
    return decoded_data("folder", names, config, parts, ignored=_described(ignored))


def _files(root: Path, paths: Sequence[str], labels: Sequence[int], chosen: IntArray | None = None) -> ImageFiles:
    """Some of the files, or all."""
    indices = range(len(paths)) if chosen is None else chosen.tolist()
    return ImageFiles(root, [paths[at] for at in indices], [labels[at] for at in indices])


#: What lies in a data set and is not used, in the order in which it is told.
_IGNORED = {
    "beside": ("directory that is not read", "directories that are not read"),
    "hidden": ("hidden directory", "hidden directories"),
    "hidden file": ("hidden file", "hidden files"),
    "file": ("file that is no image", "files that are no images"),
    "outside": ("image in no class directory", "images in no class directory"),
    "loop": ("link to a directory above it", "links to directories above them"),
}

#: How often each kind of `_IGNORED` was found, by the kind and a name that tells more, which may be empty.
_Ignored = Counter[tuple[str, str]]


def _described(ignored: _Ignored) -> tuple[str, ...]:
    """Each kind in words, with its number."""
    texts = []
    for kind, words in _IGNORED.items():
        counts = {name: count for (what, name), count in ignored.items() if what == kind}
        if count := sum(counts.values()):
            names = [name for name in counts if name]
            texts.append(f"{count:,} {words[count > 1]}" + (f" ({some(names)})" if names else ""))
    return tuple(texts)


def _no_image(name: str) -> tuple[str, str]:
    """The kind of a file that is not used because of its name."""
    return ("hidden file", "") if name.startswith(".") else ("file", Path(name).suffix.lower() or "no extension")


def _scan(directory: Path, ignored: _Ignored, excluded: Iterable[str] = ()) -> tuple[list[str], list[str], list[int]]:
    """Class names, paths relative to the directory, and labels, in torchvision's order: by class, then by path."""
    names: list[str] = []
    paths: list[str] = []
    labels: list[int] = []
    empty: dict[str, tuple[str, ...]] = {}
    try:
        for entry in sorted(os.scandir(directory), key=lambda entry: entry.name):
            if not entry.is_dir():
                ignored[("outside", "") if _is_image(entry.name) else _no_image(entry.name)] += 1
            elif entry.name.startswith("."):
                ignored["hidden", entry.name] += 1
            elif entry.name in excluded:
                ignored["beside", f"{entry.name}/"] += 1
            else:
                before = _Ignored()
                images = _images(entry.path, before)
                if not images:
                    empty[entry.name] = _described(before)
                paths += [os.path.relpath(path, directory) for path in images]
                labels += [len(names)] * len(images)
                names.append(entry.name)
                ignored.update(before)
    except OSError as error:
        raise DataError(
            f"cannot read {error.filename or directory}: {error.strerror or error}",
            f"{directory} must hold a directory of images for each class.",
            "Check --data-root, and the rights of its files.",
        ) from error
    if not names:
        raise DataError(
            f"there is no class folder in {directory}",
            "It must hold a directory of images for each class.",
            "Check --data-root.",
        )
    if empty:
        first, others = next(iter(empty.items()))
        raise DataError(
            f"no images in {len(empty)} of the {len(names)} class directories of {directory}: {some(empty)}",
            f"{first} holds {', '.join(others) or 'nothing'}; an image ends in {', '.join(IMG_EXTENSIONS)}.",
            "Add images of these classes, or remove the directories.",
        )
    return names, paths, labels


def _images(directory: str, ignored: _Ignored) -> list[str]:
    """The image files in and below a directory, in torchvision's order. Links are followed, but not in circles."""
    images, deeper = [], []
    with os.scandir(directory) as entries:
        for entry in entries:
            if not entry.is_dir():
                if _is_image(entry.name):
                    images.append(entry.path)
                else:
                    ignored[_no_image(entry.name)] += 1
            elif entry.name.startswith("."):
                ignored["hidden", entry.name] += 1
            elif entry.is_symlink() and _leads_up(entry.path):
                ignored["loop", ""] += 1
            else:
                deeper.append(entry.path)
    images += [path for inner in deeper for path in _images(inner, ignored)]
    return sorted(images, key=os.path.split)


def _leads_up(link: str) -> bool:
    """Whether a link leads to a directory above it."""
    return os.path.realpath(link) in {os.path.realpath(parent) for parent in Path(link).parents}


def _is_image(name: str) -> bool:
    return not name.startswith(".") and name.lower().endswith(IMG_EXTENSIONS)


def some(names: Iterable[str]) -> str:
    """The first names of many, and how many others there are."""
    every = sorted(names)
    shown = ", ".join(every[:5])
    return shown if len(every) <= 5 else f"{shown} and {len(every) - 5} more"
