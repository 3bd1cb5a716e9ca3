"""What a model must know of images that are not in a data set: classes, size and statistics, and image files by name.

A run keeps `ImageFacts` in its `run.json`, so that images can be classified where the data set is not.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torchvision.datasets.folder import IMG_EXTENSIONS

from hybridpar.config import TrainConfig
from hybridpar.data.decode import MODES
from hybridpar.data.policies import eval_transform
from hybridpar.data.sources import DecodedImages, ImageData, ImageFiles
from hybridpar.errors import UsageError


@dataclass(frozen=True)
class ImageFacts:
    """What a model was trained to tell apart, and on which images.

    Attributes:
        class_names: Names of the classes, in the order of the model's outputs.
        sample_shape: (channels, height, width) of a training image.
        mean: Mean of each channel of pixels in [0, 1].
        std: Standard deviation of each channel.
        test_size: Side of the images in testing, in pixels.
        whole: Images are tested whole, as those of data sets in memory are, and not as a cut-out of their middle.
        multi_label: An image may have several classes, or none.
    """

    class_names: tuple[str, ...]
    sample_shape: tuple[int, int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    test_size: int
    whole: bool
    multi_label: bool

    @classmethod
    def of(cls, data: ImageData) -> ImageFacts:
        """The facts of a data set."""
        return cls(
            class_names=tuple(map(str, data.class_names)),
            sample_shape=data.sample_shape,
            mean=tuple(map(float, data.mean)),
            std=tuple(map(float, data.std)),
            test_size=data.test_size or data.sample_shape[-1],
            whole=data.test.in_memory,
            multi_label=data.multi_label,
        )

    @classmethod
    def read(cls, plain: Any) -> ImageFacts | None:
        """The facts that a file holds."""
        kinds: dict[str, type] = {"class_names": str, "sample_shape": int, "mean": float, "std": float}
        try:
            named: dict[str, Any] = {
                key: tuple(map(kinds[key], value)) if key in kinds else value for key, value in plain.items()
            }
            facts = cls(**named)
        except (ArithmeticError, AttributeError, TypeError, ValueError):
            return None
        channels = {len(facts.mean), len(facts.std), *facts.sample_shape[:1]}
        sound = len(channels) == 1 and len(facts.sample_shape) == 3 and min(facts.sample_shape) > 0
        sized = isinstance(facts.test_size, int) and facts.test_size > 0
        return facts if sound and sized and facts.class_names else None

    def plain(self) -> dict[str, Any]:
        """The facts as JSON has them."""
        return dataclasses.asdict(self)


def find_images(named: Sequence[Path]) -> list[Path]:
    """The image files that a user names; one that is not there is left to be refused as unreadable."""
    images: list[Path] = []
    for path in named:
        if not path.is_dir():
            images.append(path)
            continue
        inside: list[Path] = []
        for folder, folders, files in os.walk(path):
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            inside += [
                Path(folder, name)
                for name in sorted(files)
                if not name.startswith(".") and name.lower().endswith(IMG_EXTENSIONS)
            ]
        if not inside:
            raise UsageError(
                f"there is no image in {path}",
                f"The name of an image ends in {', '.join(IMG_EXTENSIONS)}.",
                "Name a folder with such files, or the files themselves.",
            )
        images += inside
    return images


def named_images(files: Sequence[Path], facts: ImageFacts, config: TrainConfig) -> ImageData:
    """Image files as a data set whose labels are their places in the list."""
    channels, size, images = facts.sample_shape[0], facts.test_size, config.images
    if channels not in MODES:
        raise UsageError(
            f"the model takes images of {channels} channels",
            "Image files are read in grey, RGB or RGBA.",
            "Call the model in a script of your own.",
        )
    prepare = eval_transform(size, replace(images, crop=1.0) if facts.whole else images)
    names = [os.path.abspath(file) for file in files]
    listed = ImageFiles(Path("/"), names, range(len(files)))
    source = DecodedImages(listed, augment=prepare, prepare=prepare, channels=channels)
    return ImageData(
        name="files",
        class_names=facts.class_names,
        sample_shape=facts.sample_shape,
        train=source,
        test=source,
        mean=facts.mean,
        std=facts.std,
        test_size=size,
    )
