"""Options of a run: model, data, and batches."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hybridpar.config.rule import Rule


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Model and data: what is trained, on which images, in batches of which size."""

    data: str = "digits"
    """Data set: digits, photos, cifar10, cifar100, caltech101, folder, csv, webdataset, hf/NAME, synthetic, or
    another of torchvision in lower case (mnist, food101, imagenet, ...)."""
    data_root: Path = Path("data")
    """Directory of the data set's files; for `folder` it holds train/ and test/ (or val/), for `csv` it may be the
    table, and for `webdataset` a pattern of shards."""
    download: bool = False
    """Let torchvision download the data set into --data-root."""
    batch_size: int = 64
    """Samples per step, over all workers and micro-batches."""
    loader_workers: int | None = None
    """Loader processes per worker; default: 0 for data held in memory, else 2."""
    image_size: int | None = None
    """Side of the square images, in pixels; default: that of the weights or of the model of timm, else the usual
    one of the data set."""
    test_image_size: int | None = None
    """Side of the images in testing, in pixels; default: --image-size."""
    mean: tuple[float, float, float] | None = None
    """Mean of each channel of pixels in [0, 1], taken off; default: as of --image-size."""
    std: tuple[float, float, float] | None = None
    """Standard deviation of each channel, divided by; default: as of --image-size."""
    synthetic_samples: int = 1024
    """Number of training samples of `--data synthetic`."""
    bad_images: Literal["skip", "error"] = "skip"
    """What an image that cannot be read does: named in the log, another takes its place in training and it is left out
    of the test (skip); or the run ends (error)."""
    cache_images: bool = False
    """Keep decoded images in memory after they were first read, in half of the memory that is free; images that find no
    room are decoded every time. For images from files."""
    stem: Literal["imagenet", "cifar"] = "imagenet"
    """First layers of a ResNet: 7x7 stride 2 with pooling, or 3x3 stride 1 for small images."""


def data_rules(config: DataConfig) -> list[Rule]:
    """What the values of these options must be.

    Args:
        config: The options.

    Returns:
        The rules, each with whether it holds.
    """
    return [
        Rule("--batch-size", config.batch_size, config.batch_size >= 1, "at least 1"),
        Rule("--loader-workers", config.loader_workers, (config.loader_workers or 0) >= 0, "at least 0"),
        Rule("--image-size", config.image_size, config.image_size is None or config.image_size >= 8, "at least 8"),
        Rule("--test-image-size", config.test_image_size, (config.test_image_size or 8) >= 8, "at least 8"),
        Rule("--mean", config.mean, all(0 <= one <= 1 for one in config.mean or ()), "three numbers from 0 to 1"),
        Rule("--std", config.std, all(one > 0 for one in config.std or ()), "three numbers of more than 0"),
        Rule("--synthetic-samples", config.synthetic_samples, config.synthetic_samples >= 2, "at least 2"),
    ]


def data_set_kind(name: str) -> str:
    """The registered name of a data set.

    Args:
        name: What the user typed.

    Returns:
        The name; `hf/NAME` for any name of the Hugging Face hub.
    """
    return "hf/NAME" if name == "hf" or name.startswith("hf/") else name
