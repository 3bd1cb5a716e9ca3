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
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import ExifTags, Image, ImageOps
from torch import Tensor, nn
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
    content = file if isinstance(file, bytes) else file.read_bytes()
    image = Image.open(io.BytesIO(content))
    turned = 1
    with suppress(Exception):  # the camera's note is damaged, not the pixels
        turned = int(image.getexif().get(ExifTags.Base.Orientation, 1))
    if image.format == "JPEG" and image.mode == "RGB" and turned == 1:
        return image
    image.load()
    with suppress(Exception):
        return image if turned == 1 else ImageOps.exif_transpose(image)
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


class RandomCrop(nn.Module):
    """Cuts a random area out of an image and resizes it to a square: Szegedy et al. 2015, "Inception" sec. 6.

    The area is that of torchvision's RandomResizedCrop. A JPEG that is not decoded yet is decoded at 1/2, 1/4
    or 1/8 of its size, where the area still has at least `size` pixels on each side then. Such an image differs a
    little from one that is decoded in full and scaled down, as any two ways of scaling do.
    """

    def __init__(
        self,
        size: int,
        *,
        scale: Sequence[float] = (0.08, 1.0),
        ratio: Sequence[float] = (3 / 4, 4 / 3),
        interpolation: str = DEFAULT_INTERPOLATION,
    ) -> None:
        super().__init__()
        self.size = size
        self.scale = list(scale)
        self.ratio = list(ratio)
        self.interpolation = interpolation

    def forward(self, image: Image.Image) -> Tensor:
        """Crop and resize."""
        top, left, height, width = RandomResizedCrop.get_params(image, self.scale, self.ratio)
        box = (left, top, left + width, top + height)
        full = image.size
        divisor = next((by for by in SCALES if min(width, height) >= by * self.size), 1)
        if divisor > 1:
            image.draft(None, (full[0] // divisor, full[1] // divisor))  # nothing where it is decoded, or no JPEG
            across, down = image.size[0] / full[0], image.size[1] / full[1]
            low = math.floor(left * across), math.floor(top * down)
            box = (*low, math.ceil((left + width) * across), math.ceil((top + height) * down))
        mode = self.interpolation
        if mode == "random":
            mode = ("bilinear", "bicubic")[int(torch.randint(2, ()))]
        if mode not in ("bilinear", "bicubic"):
            resized = image.resize((self.size, self.size), Image.Resampling[mode.upper()], box)
            tensor: Tensor = v2.functional.pil_to_tensor(resized)
            return tensor
        crop = image.crop(box)
        # Rows of pixels: the layout that torch resizes fastest.
        pixels = torch.frombuffer(bytearray(crop.tobytes()), dtype=torch.uint8)
        pixels = pixels.view(1, crop.height, crop.width, -1).permute(0, 3, 1, 2)
        return functional.interpolate(pixels, (self.size, self.size), mode=mode, antialias=True)[0]


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
            f"--augment with a policy or color_jitter, for images of {colours} channels",
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
            self._policy = make(spec, options)
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
