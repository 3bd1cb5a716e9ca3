"""What becomes of an image: it is decoded, changed at random in training or resized in testing, and normalised.

An image file may be of any kind:

- in RGB, grey and palette images get three equal or looked-up channels; 16-bit grey keeps its upper 8 bits;
- in RGB and grey, transparency (RGBA, LA, palettes) is dropped, as torchvision's loader does;
- CMYK is converted by Pillow's formula;
- an image is turned as the camera noted in its EXIF data; of an animation or several pages the first one counts.

A plain JPEG file is not decoded before its pixels are asked for, so that `RandomCrop` can have it decoded at a fraction
of its size. Random transforms are torchvision's and timm's. They draw from the generators of torch, numpy and Python,
which a source seeds for each image, so that an image is the same for the same (seed, epoch, index).
"""

from __future__ import annotations

import importlib
import io
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import ExifTags, Image, ImageOps
from torch import Tensor
from torch.nn import functional
from torchvision.transforms import InterpolationMode, RandomResizedCrop, v2

from hybridpar.config import DataConfig
from hybridpar.config.data import Augmentation, AugMix, AutoAugment, Images, RandAugment, TimmAugment, TrivialAugment
from hybridpar.errors import UsageError, not_installed, shortened

#: Modes of Pillow by their number of channels.
MODES = {1: "L", 3: "RGB", 4: "RGBA"}

#: Fractions of its size that a JPEG can be decoded at, as divisors.
SCALES = (8, 4, 2)

#: How images are resized where neither options nor the weights say it.
DEFAULT_INTERPOLATION = "bilinear"

#: Side of the square that is tested over the shorter side of the resized image, where nothing says it: 224 / 256.
CROP_RATIO = 0.875


def open_image(file: Path | bytes) -> Image.Image:
    """Open an image upright, in any mode; what is wrong with it may be found when its pixels are first used."""
    image = Image.open(io.BytesIO(file if isinstance(file, bytes) else file.read_bytes()))
    with suppress(Exception):  # the camera's note is damaged, not the pixels
        if image.getexif().get(ExifTags.Base.Orientation, 1) != 1:
            return ImageOps.exif_transpose(image)
    return image


def as_mode(image: Image.Image, mode: str) -> Image.Image:
    """An image of any mode in one of 8 bits for each channel."""
    if image.mode == mode:  # the pixels need not be decoded yet
        return image
    if image.mode == "I" or image.mode.startswith("I;16"):  # 16-bit grey, which Pillow would cut off at 255
        image = Image.fromarray((np.asarray(image).astype(np.int64) >> 8).clip(0, 255).astype(np.uint8))
    elif image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")  # what Pillow asks for, in a warning
    return image.convert(mode)


@dataclass
class RandomCrop:
    """Cuts a random area out of an image and resizes it to a square: Szegedy et al. 2015, "Inception" sec. 6.

    The area is that of torchvision's RandomResizedCrop. A JPEG that is not decoded yet is decoded at 1/2, 1/4
    or 1/8 of its size, where the area still has at least `size` pixels on each side then. Such an image differs a
    little from one that is decoded in full and scaled down, as any two ways of scaling do.
    """

    size: int
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    interpolation: str = DEFAULT_INTERPOLATION

    def __call__(self, image: Image.Image) -> Tensor:
        """Crop and resize."""
        top, left, height, width = RandomResizedCrop.get_params(image, self.scale, self.ratio)
        box = (left, top, left + width, top + height)
        full = image.size
        divisor = next((by for by in SCALES if min(width, height) >= by * self.size), 1)
        if divisor > 1:
            image.draft(None, (full[0] // divisor, full[1] // divisor))  # nothing where it is decoded, or no JPEG
            across, down = image.size[0] / full[0], image.size[1] / full[1]
            low = math.floor(left * across), math.floor(top * down)
            high = math.ceil((left + width) * across), math.ceil((top + height) * down)
            box = (*low, *map(min, high, image.size))  # the products may round to just above the size
        mode = self.interpolation
        if mode == "random":
            mode = ("bilinear", "bicubic")[int(torch.randint(2, ()))]
        crop = image.crop(box)
        # Rows of pixels: the layout that torch resizes fastest.
        pixels = torch.frombuffer(bytearray(crop.tobytes()), dtype=torch.uint8)
        pixels = pixels.view(1, crop.height, crop.width, -1).permute(0, 3, 1, 2)
        return functional.interpolate(pixels, (self.size, self.size), mode=mode, antialias=True)[0]


def train_transform(
    size: int, config: DataConfig, mean: Sequence[float], std: Sequence[float], *, flip: float
) -> v2.Compose:
    """The usual augmentation of ImageNet models (Szegedy et al. 2015; He et al. 2016), and what options add to it."""
    augmentation, images = config.augmentation, config.images
    mode = images.train_interpolation or images.interpolation or DEFAULT_INTERPOLATION
    crop = RandomCrop(size, scale=augmentation.scale, ratio=augmentation.ratio, interpolation=mode)
    return v2.Compose([crop, *random_changes(size, config, mean, std, flip=flip)])


def eval_transform(size: int, images: Images) -> v2.Compose:
    """The usual preparation of test images: resized, and cut out in the centre."""
    mode = InterpolationMode[(images.interpolation or DEFAULT_INTERPOLATION).upper()]
    resize = v2.Resize(round(size / (images.crop or CROP_RATIO)), mode, antialias=True)
    return v2.Compose([resize, v2.CenterCrop(size), v2.PILToTensor()])


def random_changes(
    size: int, config: DataConfig, mean: Sequence[float], std: Sequence[float], *, flip: float
) -> list[Any]:
    """What is done to an image after the crop: mirroring, a policy, colours, erasing (Zhong et al. 2020).

    `flip` is the probability of mirroring left to right.
    """
    augmentation = config.augmentation
    changes: list[Any] = [v2.RandomHorizontalFlip(flip)] if flip else []
    if augmentation.vflip:
        changes.append(v2.RandomVerticalFlip(augmentation.vflip))
    with_policy = type(augmentation) is not Augmentation or augmentation.color_jitter > 0
    if (len(mean) == 4 and with_policy) or (len(mean) != 3 and isinstance(augmentation, TimmAugment)):
        raise UsageError(
            f"--augment with a policy or color_jitter, for images of {len(mean)} channels",
            "Policies are for RGB, those of torchvision also for grey.",
            "Leave them out.",
        )
    mode = InterpolationMode.BILINEAR  # policies take no bicubic for bytes
    match augmentation:
        case TimmAugment(spec=spec):
            changes += [v2.ToPILImage(), _timm_policy(spec, size, mean), v2.PILToTensor()]
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
    erase, how = augmentation.erase, augmentation.erase_mode
    if erase and how == "const":
        changes.append(v2.RandomErasing(erase, value=[round(255 * part) for part in mean]))
    elif erase:
        # As in timm, random colours and noise are of images that have been normalised, in their final size.
        changes += [v2.Resize(size, antialias=True), v2.ToDtype(torch.float32, scale=True), v2.Normalize(mean, std)]
        erasing = _timm(f"--augment erase_mode={how}").random_erasing
        changes.append(erasing.RandomErasing(erase, mode=how, device="cpu"))
    return changes


def _timm_policy(spec: str, size: int, mean: Sequence[float]) -> Any:
    """A policy of timm, for images of Pillow."""
    create = _timm(f"the policy timm:{shortened(spec)}").create_transform
    others = {"color_jitter": None, "interpolation": "random"}  # for the policy: bilinear or bicubic
    try:
        _, policy, _ = create(size, is_training=True, auto_augment=spec, mean=mean, separate=True, **others)
    except (AssertionError, KeyError, ValueError) as error:
        raise UsageError(
            f"timm does not know the policy {shortened(repr(spec))}",
            "It is what timm's --aa takes, such as rand-m9-mstd0.5-inc1, augmix-m5-w4-d2 or original.",
        ) from error
    return policy


def _timm(what: str) -> Any:
    try:
        return importlib.import_module("timm.data")
    except ImportError as error:
        raise not_installed(f"{what} comes with timm", "timm") from error


def shift_and_flip(images: Tensor, rows: Tensor, columns: Tensor, flips: Tensor | None, pad: int) -> Tensor:
    """Crop every image of a batch at its own offset after padding with zeros, and mirror some of them (He et al. 2016,
    sec. 4.2); on any device, without a wait for the host.
    """
    channels, height, width = images.shape[1:]
    padded = functional.pad(images, (pad, pad, pad, pad))
    taken_rows = rows[:, None] + torch.arange(height, device=images.device)
    taken_columns = columns[:, None] + torch.arange(width, device=images.device)
    if flips is not None:
        taken_columns = torch.where(flips[:, None], taken_columns.flip(1), taken_columns)
    # One gather of pixels, counted along a whole padded image, both crops and mirrors.
    pixels = taken_rows[:, :, None] * padded.shape[-1] + taken_columns[:, None, :]
    return padded.flatten(2).gather(2, pixels.flatten(1)[:, None].expand(-1, channels, -1)).view_as(images)


def normalise(images: Tensor, mean: Tensor, std: Tensor, *, size: tuple[int, int], channels_last: bool) -> Tensor:
    """Turn pixels into what the model is fed: (pixel / 255 - mean) / std."""
    layout = torch.channels_last if channels_last else torch.contiguous_format
    # Bytes are reordered before they become floats, four times as large.
    pixels = images.contiguous(memory_format=layout).to(torch.float32)
    if pixels.shape[-2:] != size:
        pixels = functional.interpolate(pixels, size, mode="bilinear", antialias=True)
        pixels = pixels.contiguous(memory_format=layout)
    return pixels.mul_((1 / (255 * std)).view(-1, 1, 1)).sub_((mean / std).view(-1, 1, 1))
