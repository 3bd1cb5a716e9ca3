"""What is done to images: torchvision's transforms, and timm's policies.

Random ones draw from the generators of torch, numpy and Python, which a source seeds for each image, so that an image
is the same for the same (seed, epoch, index).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import InterpolationMode, v2

from hybridpar.config import DataConfig
from hybridpar.config.data import Augmentation, AugMix, AutoAugment, Images, RandAugment, TimmAugment, TrivialAugment
from hybridpar.data.decode import RandomCrop
from hybridpar.errors import UsageError, not_installed, shortened

#: How images are resized where neither options nor the weights say it.
DEFAULT_INTERPOLATION = "bilinear"

#: Side of the square that is tested over the shorter side of the resized image, where nothing says it: 224 / 256.
CROP_RATIO = 0.875


def train_transform(
    size: int, config: DataConfig, mean: Sequence[float], std: Sequence[float], *, flip: bool = True
) -> v2.Compose:
    """The usual augmentation of ImageNet models (Szegedy et al. 2015; He et al. 2016), and what options add to it."""
    augmentation, images = config.augmentation, config.images
    mode = images.train_interpolation or images.interpolation or DEFAULT_INTERPOLATION
    crop = RandomCrop(size, scale=augmentation.scale, ratio=augmentation.ratio, interpolation=mode)
    changes = random_changes(augmentation, images, 0.5 if flip else 0.0, size, mean)
    return v2.Compose([crop, *changes, *random_erasing(augmentation, mean, std)])


def eval_transform(size: int, images: Images) -> v2.Compose:
    """The usual preparation of test images: resized, and cut out in the centre."""
    mode = InterpolationMode[(images.interpolation or DEFAULT_INTERPOLATION).upper()]
    resize = v2.Resize(round(size / (images.crop or CROP_RATIO)), mode, antialias=True)
    return v2.Compose([resize, v2.CenterCrop(size), v2.PILToTensor()])


def random_changes(
    augmentation: Augmentation, images: Images, flip: float, size: int, mean: Sequence[float]
) -> list[Any]:
    """What is done to an image after the crop: mirroring, a policy, colours."""
    flip = flip if augmentation.hflip is None else augmentation.hflip
    changes: list[Any] = [v2.RandomHorizontalFlip(flip)] if flip else []
    if augmentation.vflip:
        changes.append(v2.RandomVerticalFlip(augmentation.vflip))
    colours = len(mean)
    with_policy = type(augmentation) is not Augmentation or augmentation.color_jitter > 0
    if (colours == 4 and with_policy) or (colours != 3 and isinstance(augmentation, TimmAugment)):
        raise UsageError(
            f"--augment with a policy or color_jitter, for images of {colours} channel{'' if colours == 1 else 's'}",
            "Policies are for RGB, those of torchvision also for grey.",
            "Leave them out.",
        )
    # Policies take no other modes for bytes.
    mode = InterpolationMode.NEAREST if images.interpolation == "nearest" else InterpolationMode.BILINEAR
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


def random_erasing(augmentation: Augmentation, mean: Sequence[float], std: Sequence[float]) -> list[Any]:
    """Erasing of a rectangle (Zhong et al. 2020); empty where it is off.

    The mean colour is one of bytes. Random colours and noise are of images that have been normalised, as in timm.
    """
    if not augmentation.erase:
        return []
    if augmentation.erase_mode == "const":
        return [v2.RandomErasing(augmentation.erase, value=[round(255 * part) for part in mean])]
    erase: Any = v2.RandomErasing(augmentation.erase, value="random")
    if augmentation.erase_mode == "rand":
        module = _timm("data.random_erasing", "--augment erase_mode=rand")
        erase = module.RandomErasing(augmentation.erase, mode="rand", device="cpu")
    return [v2.ToDtype(torch.float32, scale=True), v2.Normalize(mean, std), erase]


class TimmPolicy:
    """A policy of timm, for images of Pillow and for tensors."""

    def __init__(self, spec: str, size: int, mean: Sequence[float]) -> None:
        module = _timm("data.auto_augment", f"the policy timm:{shortened(spec)}")
        options: dict[str, Any] = {
            "translate_const": int(size * 0.45),
            "img_mean": tuple(min(255, round(255 * part)) for part in mean),
        }
        make = module.auto_augment_transform
        if spec.startswith("rand"):
            make = module.rand_augment_transform
        elif spec.startswith("augmix"):
            make = module.augment_and_mix_transform
            options["translate_pct"] = 0.3
        try:
            self._policy: Callable[[Image.Image], Image.Image] = make(spec, options)
        except (AssertionError, KeyError, ValueError) as error:
            raise UsageError(
                f"timm does not know the policy {shortened(repr(spec))}",
                "It is what timm's --aa takes, such as rand-m9-mstd0.5-inc1, augmix-m5-w4-d2 or original.",
            ) from error

    def __call__(self, image: Any) -> Any:
        """Change an image."""
        if isinstance(image, Tensor):
            return v2.functional.pil_to_tensor(self._policy(v2.functional.to_pil_image(image)))
        return self._policy(image)


def _timm(module: str, what: str) -> Any:
    try:
        return importlib.import_module(f"timm.{module}")
    except ImportError as error:
        raise not_installed(f"{what} comes with timm", "timm") from error
