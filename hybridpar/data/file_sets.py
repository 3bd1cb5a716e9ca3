"""Why: data sets of photographs do not fit in memory; here are those that are read from image files."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torchvision
from torchvision.datasets.folder import IMG_EXTENSIONS, find_classes, make_dataset

from hybridpar.config import DataConfig
from hybridpar.data.downloads import download_fix, one_download
from hybridpar.data.memory_sets import FIXED_SEED
from hybridpar.data.sampling import split_by_class
from hybridpar.data.sources import DATA_SETS, FileImages, ImageData, imagenet_transforms
from hybridpar.errors import DataError

logger = logging.getLogger(__name__)

DEFAULT_SIZE = 224

#: Of pixels in [0, 1]; the statistics that torchvision's ImageNet weights expect.
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)

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
    if config.download:
        with one_download("caltech101", root):
            torchvision.datasets.Caltech101(root, download=True)
    if not directory.is_dir():
        raise DataError(
            f"caltech101 is not there: no directory {directory}",
            fix=download_fix("caltech101/101_ObjectCategories/"),
        )
    names, paths, labels = _scan(directory, excluded=(CALTECH101_BACKGROUND,))
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
            f"Remove {directory} and run again with --download.",
        )
    train_counts = [min(CALTECH101_TRAIN_PER_CLASS, int(size) - 1) for size in sizes]
    parts = split_by_class(np.array(labels), train_counts, FIXED_SEED)
    train, test = ([(paths[index], labels[index]) for index in part] for part in parts)
    return _from_files("caltech101", names, (directory, train), (directory, test), config)


@DATA_SETS.register("folder", "your own images: --data-root with train/CLASS/ and test/CLASS/ (or val/CLASS/), 224x224")
def _folder(config: DataConfig) -> ImageData:
    """The layout of torchvision's ImageFolder. Where there are both test/ and val/, test/ is used."""
    root = config.data_root.resolve()
    train_root = root / "train"
    test_root = root / "test" if (root / "test").is_dir() else root / "val"
    for directory, wanted in ((train_root, "train/"), (test_root, "test/ or val/")):
        if not directory.is_dir():
            raise DataError(
                f"the data set has no directory {wanted} in {root}",
                "A folder data set is laid out as train/CLASS/IMAGE and test/CLASS/IMAGE.",
                "Name the directory that holds train/ and test/ with --data-root.",
            )
    names, train_paths, train_labels = _scan(train_root)
    test_names, test_paths, test_labels = _scan(test_root)
    if names != test_names:
        differences = [
            f"only in {directory}: {_some(extra)}"
            for directory, extra in (
                (train_root, set(names) - set(test_names)),
                (test_root, set(test_names) - set(names)),
            )
            if extra
        ]
        raise DataError(
            f"training and test classes of {root} differ; {'; '.join(differences)}",
            "Both must have the same class directories, because their order numbers the classes.",
            "Rename or remove the directories that are only on one side.",
        )
    train = list(zip(train_paths, train_labels, strict=True))
    test = list(zip(test_paths, test_labels, strict=True))
    return _from_files("folder", names, (train_root, train), (test_root, test), config)


def _scan(directory: Path, excluded: Iterable[str] = ()) -> tuple[list[str], list[str], list[int]]:
    """Class names, paths relative to the directory, and labels, in torchvision's order: by class, then by path."""
    try:
        names = [name for name in find_classes(str(directory))[0] if name not in excluded]
        numbers = {name: number for number, name in enumerate(names)}
        if not names:
            raise FileNotFoundError(f"Couldn't find any class folder in {directory}.")
        found = make_dataset(str(directory), numbers, extensions=IMG_EXTENSIONS)
    except OSError as error:
        raise DataError(
            str(error), f"{directory} must hold a directory of images for each class.", "Check --data-root."
        ) from error
    return names, [str(Path(path).relative_to(directory)) for path, _ in found], [label for _, label in found]


def _some(names: set[str]) -> str:
    shown = ", ".join(sorted(names)[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"


def _from_files(
    name: str,
    class_names: list[str],
    train: tuple[Path, list[tuple[str, int]]],
    test: tuple[Path, list[tuple[str, int]]],
    config: DataConfig,
) -> ImageData:
    size = config.image_size or DEFAULT_SIZE
    augment, prepare = imagenet_transforms(size)
    sources = [
        FileImages(
            directory,
            [path for path, _ in samples],
            [label for _, label in samples],
            augment=augment,
            prepare=prepare,
        )
        for directory, samples in (train, test)
    ]
    return ImageData(
        name=name,
        class_names=tuple(class_names),
        sample_shape=(3, size, size),
        train=sources[0],
        test=sources[1],
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
    )
