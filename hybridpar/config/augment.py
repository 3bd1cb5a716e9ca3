"""Options of augmentation: how training images are changed at random, and how they are mixed."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from hybridpar.config.rule import Rule

Interpolation = Literal["nearest", "bilinear", "bicubic", "lanczos"]

#: What `--augment` may be: a policy, and what it takes behind a colon.
_POLICY = re.compile(r"none|ra(:\d+,\d+)?|ta|aa(:(imagenet|cifar10|svhn))?|augmix|timm/.+")


@dataclass(frozen=True, kw_only=True)
class AugmentConfig:
    """Augmentation: how training images are changed at random, and how they are mixed."""

    augment: str = "none"
    """Policy: ra:N,M (RandAugment), ta (TrivialAugment), aa (AutoAugment), augmix, or one of timm as timm/SPEC."""
    hflip: float | None = None
    """Probability of mirroring an image left to right; default: 0.5, and 0 for digits and synthetic."""
    vflip: float = 0.0
    """Probability of mirroring an image upside down."""
    color_jitter: float = 0.0
    """How far brightness, contrast and saturation are changed at most, as a part of them."""
    scale: tuple[float, float] = (0.08, 1.0)
    """Least and largest part of an image's area that a random crop takes; of images from files."""
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    """Least and largest aspect ratio of a random crop; of images from files."""
    random_erasing: float = 0.0
    """Probability of erasing a rectangle of an image."""
    erase_mode: Literal["const", "rand", "pixel"] = "const"
    """What a rectangle is erased to, in timm's words: the mean colour (const), a random colour (rand), or noise that is
    drawn for each pixel (pixel)."""
    interpolation: Interpolation | None = None
    """How images from files are resized; default: as of --image-size, else bilinear."""
    train_interpolation: Interpolation | Literal["random"] | None = None
    """The same in training; `random`: bilinear or bicubic; default: --interpolation."""
    crop_ratio: float | None = None
    """Side of the square that is tested over the shorter side of the resized image; of images from files; default: as
    of --image-size, else 0.875."""
    repeats: int = 1
    """Copies of a sample in a batch, each augmented by itself; an epoch then has that many times fewer samples."""
    mixup: float = 0.0
    """Alpha of mixup: pairs of images are blended; 0: off."""
    cutmix: float = 0.0
    """Alpha of cutmix: a rectangle is taken from the other image of the pair; 0: off."""
    mix_prob: float = 1.0
    """Probability that a batch is mixed."""
    mix_switch: float = 0.5
    """Probability of cutmix where both are on."""
    mix_off_epoch: int = 0
    """Do not mix from this epoch on; 0: always mix."""

    @property
    def mixes(self) -> bool:
        """Whether batches may be mixed, so that samples have neighbours and targets are soft."""
        return self.mixup > 0 or self.cutmix > 0


def augment_rules(config: AugmentConfig) -> list[Rule]:
    """What the values of these options must be.

    Args:
        config: The options.

    Returns:
        The rules, each with whether it holds.
    """
    parts = [
        ("--hflip", config.hflip or 0.0),
        ("--vflip", config.vflip),
        ("--random-erasing", config.random_erasing),
        ("--mix-prob", config.mix_prob),
        ("--mix-switch", config.mix_switch),
    ]
    (low, high), (narrow, wide) = config.scale, config.ratio
    return [
        Rule(
            "--augment",
            config.augment,
            _POLICY.fullmatch(config.augment) is not None,
            "none, ra, ra:N,M, ta, aa, aa:imagenet, aa:cifar10, aa:svhn, augmix, or timm/SPEC",
        ),
        *(Rule(option, value, 0 <= value <= 1, "at least 0 and at most 1") for option, value in parts),
        Rule("--color-jitter", config.color_jitter, 0 <= config.color_jitter <= 1, "at least 0 and at most 1"),
        Rule("--scale", config.scale, 0 < low <= high <= 1, "two numbers from 0 to 1, the smaller one first"),
        Rule("--ratio", config.ratio, 0 < narrow <= wide, "two numbers of more than 0, the smaller one first"),
        Rule("--crop-ratio", config.crop_ratio, 0 < (config.crop_ratio or 1) <= 1, "greater than 0 and at most 1"),
        Rule("--repeats", config.repeats, config.repeats >= 1, "at least 1"),
        Rule("--mixup", config.mixup, config.mixup >= 0, "at least 0"),
        Rule("--cutmix", config.cutmix, config.cutmix >= 0, "at least 0"),
        Rule("--mix-off-epoch", config.mix_off_epoch, config.mix_off_epoch >= 0, "at least 0"),
    ]
