"""Random changes of training images by name: torchvision's transforms, and timm's policies.

All of them draw from torch's CPU generator, which a source seeds for each image, so that an image is the same for the
same (seed, epoch, index).
"""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torchvision.transforms import InterpolationMode, v2

from hybridpar.config.data import Augmentation, AugMix, AutoAugment, Images, RandAugment, TimmAugment, TrivialAugment
from hybridpar.data.decode import RandomCrop
from hybridpar.errors import UsageError, not_installed, shortened

#: How images are resized where neither options nor the weights say it.
DEFAULT_INTERPOLATION = "bilinear"


def interpolation_of(name: str) -> InterpolationMode:
    """The interpolation that an option names."""
    return InterpolationMode[name.upper()]


def random_crop(size: int, augmentation: Augmentation, images: Images) -> RandomCrop:
    """A random area at a random aspect ratio, resized (Szegedy et al. 2015)."""
    name = images.train_interpolation or images.interpolation or DEFAULT_INTERPOLATION
    return RandomCrop(size, scale=augmentation.scale, ratio=augmentation.ratio, interpolation=name)


def random_changes(
    augmentation: Augmentation,
    images: Images,
    flip: float,
    size: int,
    mean: Sequence[float],
) -> list[Any]:
    """What is done to an image after the crop: mirroring, a policy, colours."""
    flip = flip if augmentation.hflip is None else augmentation.hflip
    changes: list[Any] = [v2.RandomHorizontalFlip(flip)] if flip else []
    if augmentation.vflip:
        changes.append(v2.RandomVerticalFlip(augmentation.vflip))
    # Policies take no other ones for bytes.
    mode = interpolation_of("nearest" if images.interpolation == "nearest" else DEFAULT_INTERPOLATION)
    match augmentation:
        case TimmAugment(spec=spec):
            changes.append(TimmPolicy(spec, size, mean))
        case RandAugment(n=operations, m=magnitude):
            changes.append(v2.RandAugment(operations, magnitude, interpolation=mode))
        case TrivialAugment():
            changes.append(v2.TrivialAugmentWide(interpolation=mode))
        case AutoAugment(set=learned_on):
            changes.append(v2.AutoAugment(v2.AutoAugmentPolicy(learned_on), interpolation=mode))
        case AugMix():
            changes.append(v2.AugMix(interpolation=mode))
    if augmentation.color_jitter:
        changes.append(v2.ColorJitter(*(augmentation.color_jitter,) * 3))
    return changes


def random_erasing(augmentation: Augmentation, mean: Sequence[float]) -> list[v2.Transform]:
    """Erasing of a rectangle, which gets the mean colour (Zhong et al. 2020); empty where it is off.

    Noise is not for bytes, and comes later: see `hybridpar.data.erasing`.
    """
    if not augmentation.erase or augmentation.erase_mode != "const":
        return []
    return [v2.RandomErasing(augmentation.erase, value=[round(255 * one) for one in mean])]


class TimmPolicy:
    """A policy of timm, which draws from Python's generator and numpy's, seeded by torch's.

    Both are put back afterwards.
    """

    def __init__(self, spec: str, size: int, mean: Sequence[float]) -> None:
        try:
            module = importlib.import_module("timm.data.auto_augment")
        except ImportError as error:
            raise not_installed(f"the policy timm:{shortened(spec)} comes with timm", "timm") from error
        colour = tuple(min(255, round(255 * one)) for one in mean)
        moved: dict[str, Any] = {"translate_const": int(size * 0.45)}
        make = module.auto_augment_transform
        if spec.startswith("rand"):
            make = module.rand_augment_transform
        elif spec.startswith("augmix"):
            make = module.augment_and_mix_transform
            moved["translate_pct"] = 0.3
        try:
            self._policy: Callable[[Image.Image], Image.Image] = make(spec, {**moved, "img_mean": colour})
        except (AssertionError, KeyError, ValueError) as error:
            raise UsageError(
                f"timm does not know the policy {shortened(repr(spec))}",
                "It is what timm's --aa takes, such as rand-m9-mstd0.5-inc1, augmix-m5-w4-d2 or original.",
            ) from error

    def __call__(self, image: Any) -> Any:
        """Change an image."""
        states = random.getstate(), np.random.get_state()
        seed = int(torch.randint(2**31, ()))
        random.seed(seed)
        np.random.seed(seed)
        try:
            if isinstance(image, torch.Tensor):
                return v2.functional.pil_to_tensor(self._policy(v2.functional.to_pil_image(image)))
            return self._policy(image)
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
