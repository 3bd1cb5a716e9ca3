"""Random erasing by noise (Zhong et al. 2020), as timm does it: in images that have been normalised.

What is drawn for an image follows from the seed, the epoch and the image's number, and from nothing else.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from hybridpar.data.sampling import AugmentKey, Draw, IntArray, counter_hash

#: Least and largest part of an image's area that is erased, and logarithms of the rectangle's height over its width.
_AREA = (0.02, 1 / 3)
_RATIO = (math.log(0.3), math.log(1 / 0.3))

#: Draws of a rectangle, until one is smaller than the image.
_TRIES = 10


class Erased(NamedTuple):
    """What is erased in a batch.

    Attributes:
        boxes: Place of an image in the batch, top, left, height and width of its rectangle, for each that has one.
        values: What the rectangles get, one after the other; float32, shape (n,).
    """

    boxes: list[tuple[int, int, int, int, int]]
    values: Tensor


@dataclass(frozen=True)
class NoiseErasing:
    """Erases rectangles to normal noise of mean 0 and standard deviation 1.

    Attributes:
        probability: That a rectangle of an image is erased.
        per_pixel: Draw each pixel by itself, and not one colour for a rectangle.
        size: Channels, height and width of the images.
    """

    probability: float
    per_pixel: bool
    size: tuple[int, int, int]

    def draw(self, key: AugmentKey, indices: IntArray) -> Erased:
        """What is erased in some images."""
        boxes, values = [], []
        for place, seed in enumerate((counter_hash(*key, Draw.ERASE, indices) >> 1).tolist()):
            if (box := self._box(random.Random(seed))) is None:
                continue
            boxes.append((place, *box))
            shape = self._shape(*box[2:])
            values.append(torch.empty(shape).normal_(generator=torch.Generator().manual_seed(seed)).flatten())
        return Erased(boxes, torch.cat(values) if values else torch.empty(0))

    def apply(self, images: Tensor, erased: Erased) -> None:
        """Erase in place."""
        values = erased.values.to(images.device, non_blocking=True)
        start = 0
        for place, top, left, height, width in erased.boxes:
            shape = self._shape(height, width)
            stop = start + math.prod(shape)
            images[place, :, top : top + height, left : left + width] = values[start:stop].view(shape)
            start = stop

    def _shape(self, height: int, width: int) -> tuple[int, int, int]:
        return (self.size[0], height, width) if self.per_pixel else (self.size[0], 1, 1)

    def _box(self, numbers: random.Random) -> tuple[int, int, int, int] | None:
        """Top, left, height and width of a rectangle; None where nothing is erased. The draws are in timm's order."""
        if numbers.random() > self.probability:
            return None
        _, high, wide = self.size
        for _ in range(_TRIES):
            area = numbers.uniform(*_AREA) * high * wide
            ratio = math.exp(numbers.uniform(*_RATIO))
            height, width = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if height < high and width < wide:
                return numbers.randint(0, high - height), numbers.randint(0, wide - width), height, width
        return None
