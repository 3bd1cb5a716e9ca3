"""Options of `hybridpar bench`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from hybridpar.config.data import unless
from hybridpar.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class BenchCodecs:
    """Measure how fast one core encodes and decodes the gradients of a model, and how many bytes are sent."""

    model: str = "resnet18"
    """A torchvision model such as resnet18, timm/NAME, or your own as package.module:factory."""
    classes: int = 1000
    """Outputs of the model."""
    codec: Annotated[tuple[str, ...], tyro.conf.arg(name="compress")] = (
        *("onebit", "twobit", "qsgd_mn:meet=shard", "qsgd_mn", "powersgd:rank=4", "fp16"),
    )
    """Codecs, as `hybridpar train --compress` takes them."""
    workers: int = 2
    """Workers among which the bytes are counted."""
    repeats: int = 7
    """Passes over the model; the median counts."""
    csv: Path | None = None
    """Write the figures to this file, too."""

    def check(self) -> None:
        """Check the options.

        Raises:
            UsageError: One is out of range.
        """
        _at_least("--classes", self.classes, 1)
        _at_least("--workers", self.workers, 2)
        _at_least("--repeats", self.repeats, 1)
        if not self.codec:
            raise UsageError(
                "--compress without a codec", "There must be something to measure.", "Try --compress onebit."
            )


@dataclass(frozen=True, kw_only=True)
class BenchSync:
    """Measure training steps with and without compressed gradients on this machine, or as a worker of torchrun."""

    model: str = "resnet18"
    """A torchvision model such as resnet18, timm/NAME, or your own as package.module:factory."""
    workers: int = 2
    """Workers to start here; under torchrun they are those of the job."""
    compress: tuple[str, ...] = ("fp16", "onebit", "powersgd:rank=4")
    """Codecs, as `hybridpar train --compress` takes them. A step without compression is always measured."""
    batch_size: int = 32
    """Samples of a step, over all workers."""
    image_size: int = 32
    """Height and width of the images, which are noise."""
    classes: int = 10
    """Outputs of the model."""
    steps: int = 10
    """Steps of each codec, taken in turn; the median counts."""
    sync_lanes: int = 2
    """Lanes that gradients are sent on."""
    bucket_mb: float = 8.0
    """Gradients are sent in buckets of about this many MiB."""
    timeout: float = 120.0
    """Seconds after which a worker that does not answer is an error."""
    tune_process: Annotated[
        bool, unless("Leave the C allocator and thread counts as they are.", "set as for training")
    ] = True
    """Set allocator and threads of CPU workers before they start."""
    csv: Path | None = None
    """Write the figures to this file, too."""

    def check(self) -> None:
        """Check the options.

        Raises:
            UsageError: One is out of range.
        """
        if self.workers == 1:
            raise UsageError(
                "--workers 1",
                "A single worker exchanges no gradients.",
                "Use --workers 2, or start it by torchrun.",
            )
        _at_least("--workers", self.workers, 2)
        _at_least("--steps", self.steps, 1)
        _at_least("--image-size", self.image_size, 1)
        _at_least("--batch-size", self.batch_size, 2 * self.workers)


Bench = Annotated[BenchCodecs, tyro.conf.subcommand("codecs")] | Annotated[BenchSync, tyro.conf.subcommand("sync")]


def _at_least(option: str, value: int, least: int) -> None:
    if value < least:
        raise UsageError(f"{option} {value}", f"It is at least {least}.", f"Use {option} {least} or more.")
