"""Decodes image files of any kind to upright images of 8 bits, in RGB, grey or RGBA.

What becomes of the kinds:

- in RGB, grey and palette images get three equal or looked-up channels; 16-bit grey keeps its upper 8 bits;
- in RGB and grey, transparency (RGBA, LA, palettes) is dropped, as torchvision's loader does;
- CMYK is converted by Pillow's formula;
- an image is turned as the camera noted in its EXIF data; of an animation or several pages the first one counts;
- a file that is truncated, empty, broken or no image is a `DataError`.

A plain JPEG file is not decoded before its pixels are asked for, so that `RandomCrop` can have it decoded at a fraction
of its size.
"""

from __future__ import annotations

import io
import math
from pathlib import Path

import numpy as np
import torch
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError
from torch import Tensor, nn
from torch.nn import functional
from torchvision.transforms import RandomResizedCrop
from torchvision.transforms.functional import pil_to_tensor

from hybridpar.errors import DataError

#: Modes of Pillow by their number of channels.
MODES = {1: "L", 3: "RGB", 4: "RGBA"}

#: Fractions of its size that a JPEG can be decoded at, as divisors.
SCALES = (8, 4, 2)


def open_image(file: Path | bytes, name: str) -> Image.Image:
    """Open an image upright, in any mode."""
    try:
        content = file if isinstance(file, bytes) else file.read_bytes()
        image = Image.open(io.BytesIO(content))
        if image.format == "JPEG" and image.mode == "RGB" and _orientation(image) == 1:
            return image
        image.load()
        return _upright(image)
    except Exception as error:  # Pillow's decoders report damage by almost any
        raise _unreadable(file, name, error) from error


def decode(image: Image.Image, name: str) -> Image.Image:
    """Decode the pixels of an image that was opened."""
    try:
        image.load()
    except Exception as error:
        raise _unreadable(b".", name, error) from error
    return image


def read_image(path: Path) -> Image.Image:
    """Decode an image file to RGB, upright as its EXIF data say."""
    return as_mode(decode(open_image(path, str(path)), str(path)), "RGB")


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
        scale: tuple[float, float] = (0.08, 1.0),
        ratio: tuple[float, float] = (3 / 4, 4 / 3),
        interpolation: str = "bilinear",
        draft: bool = True,
    ) -> None:
        super().__init__()
        self.size = size
        self.scale = list(scale)
        self.ratio = list(ratio)
        self.interpolation = interpolation
        self.draft = draft

    def forward(self, image: Image.Image) -> Tensor:
        """Crop and resize."""
        top, left, height, width = RandomResizedCrop.get_params(image, self.scale, self.ratio)
        box = (left, top, left + width, top + height)
        if self.draft:
            whole = image.size
            divisor = next((by for by in SCALES if min(width, height) >= by * self.size), 1)
            if divisor > 1:
                image.draft(None, (whole[0] // divisor, whole[1] // divisor))  # nothing where it is decoded, or no JPEG
                across, down = image.size[0] / whole[0], image.size[1] / whole[1]
                box = (
                    math.floor(left * across),
                    math.floor(top * down),
                    math.ceil((left + width) * across),
                    math.ceil((top + height) * down),
                )
        mode = self.interpolation
        if mode == "random":
            mode = ("bilinear", "bicubic")[int(torch.randint(2, ()))]
        if mode not in ("bilinear", "bicubic"):
            resized = image.resize((self.size, self.size), Image.Resampling[mode.upper()], box)
            tensor: Tensor = pil_to_tensor(resized)
            return tensor
        area = image.crop(box)
        # Rows of pixels: the layout that torch resizes fastest.
        pixels = torch.frombuffer(bytearray(area.tobytes()), dtype=torch.uint8)
        pixels = pixels.view(1, area.height, area.width, -1).permute(0, 3, 1, 2)
        return functional.interpolate(pixels, (self.size, self.size), mode=mode, antialias=True)[0]


def _orientation(image: Image.Image) -> int:
    try:
        return int(image.getexif().get(ExifTags.Base.Orientation, 1))
    except Exception:  # the note is damaged, not the pixels
        return 1


def _upright(image: Image.Image) -> Image.Image:
    """Turn an image as the camera noted in its EXIF data."""
    try:
        return image if _orientation(image) == 1 else ImageOps.exif_transpose(image)
    except Exception:
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


def _unreadable(file: Path | bytes, name: str, error: Exception) -> DataError:
    reason = str(error) or type(error).__name__
    if isinstance(error, UnidentifiedImageError):
        empty = file == b"" if isinstance(file, bytes) else file.stat().st_size == 0
        reason = "it is empty" if empty else "it is no image of a known format"
    elif isinstance(error, OSError) and error.strerror:
        reason = error.strerror
    return DataError(
        f"cannot read the image {name}: {reason}",
        "Every file of the data set must be a whole image.",
        "Replace the file, or remove it from the data set.",
    )
