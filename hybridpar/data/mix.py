"""Mixup and cutmix of a batch, alike for every layout of workers and micro-batches.

One draw holds for the whole global batch and follows from (seed, step) alone. A sample's partner is its neighbour in
the order of the global batch, (0, 1), (2, 3), and so on, so any share of the batch that is cut at even positions can be
mixed by itself. In timm, where the batch is mixed with itself in reverse order, partners are as random: the order of
samples is shuffled anyhow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hybridpar.config.data import Mixing
from hybridpar.data.sampling import Draw, counter_hash


class Box(NamedTuple):
    """A rectangle of pixels: rows [top, bottom), columns [left, right)."""

    top: int
    bottom: int
    left: int
    right: int

    @property
    def area(self) -> int:
        """Number of pixels."""
        return (self.bottom - self.top) * (self.right - self.left)


class MixDraw(NamedTuple):
    """How a batch is mixed.

    Attributes:
        lam: Lambda, the part of a sample that stays; 1 for a batch that is not mixed.
        box: The rectangle that is taken from the partner (cutmix); None blends whole images (mixup).
    """

    lam: float = 1.0
    box: Box | None = None


def draw_mix(mixing: Mixing, seed: int, step: int, size: tuple[int, int]) -> MixDraw:
    """The draw of a global batch.

    Args:
        mixing: How much, how often, and which of the two.
        seed: Seed of the run.
        step: Number of the step, from 0.
        size: Height and width of the images.

    Returns:
        Mixup draws lambda from Beta(mixup, mixup) (Zhang et al. 2018, equation 1); cutmix from Beta(cutmix, cutmix)
        and takes a rectangle of that part of the area, whose clipped area then says lambda (Yun et al. 2019, equation
        2 and Algorithm A1).
    """
    key = counter_hash(seed, step, Draw.MIX, np.arange(2))
    random = np.random.Generator(np.random.Philox(key=key))
    if not mixing.is_on or random.random() >= mixing.prob:
        return MixDraw()
    cuts = mixing.cutmix > 0 and (mixing.mixup <= 0 or random.random() < mixing.switch)
    alpha = mixing.cutmix if cuts else mixing.mixup
    lam = float(random.beta(alpha, alpha))
    if not cuts:
        return MixDraw(lam)
    box = box_around(lam, int(random.integers(size[0])), int(random.integers(size[1])), size)
    return MixDraw(1.0 - box.area / (size[0] * size[1]), box)


def box_around(lam: float, row: int, column: int, size: tuple[int, int]) -> Box:
    """A rectangle of 1 - lambda of the area of an image around a pixel, clipped to the image."""
    part = math.sqrt(1.0 - lam)
    bounds = []
    for centre, length in zip((row, column), size, strict=True):
        cut = int(length * part)
        bounds += [min(max(centre - cut // 2, 0), length), min(max(centre + (cut + 1) // 2, 0), length)]
    return Box(*bounds)


def mix(images: Tensor, targets: Tensor, draw: MixDraw) -> tuple[Tensor, Tensor]:
    """Mix a batch, or a share of it that was cut at even positions of the global batch; nothing is changed in place.

    Args:
        images: Normalised images, shape (n, channels, height, width).
        targets: A target for each class, shape (n, classes); see `hybridpar.optim.losses.soft_targets`.
        draw: Of the global batch.

    Returns:
        The mixed images and targets. An odd last sample is not mixed.
    """
    lam, box = draw
    if lam == 1.0:
        return images, targets
    if box is None:
        images = images.mul(lam).add_(_partners(images).mul_(1.0 - lam))
    else:
        partners = _partners(images[:, :, box.top : box.bottom, box.left : box.right])
        images = images.clone()
        images[:, :, box.top : box.bottom, box.left : box.right] = partners
    return images, targets * lam + _partners(targets) * (1.0 - lam)


def mix_step(
    micro_batches: Sequence[tuple[Tensor, Tensor]], mixing: Mixing, seed: int, step: int, epoch: float
) -> list[tuple[Tensor, Tensor]]:
    """Mix this worker's share of a global batch, by one draw for the step."""
    if not micro_batches or (mixing.off and epoch >= mixing.off):
        return [*micro_batches]
    height, width = micro_batches[0][0].shape[-2:]
    draw = draw_mix(mixing, seed, step, (height, width))
    return [mix(images, targets, draw) for images, targets in micro_batches]


def _partners(values: Tensor) -> Tensor:
    """The neighbour of each sample, as a copy; an odd last one is its own."""
    even = len(values) // 2 * 2
    swapped = values[:even].reshape(-1, 2, *values.shape[1:]).flip(1).flatten(0, 1)
    return swapped if even == len(values) else torch.cat([swapped, values[even:]])
