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


class MixDraw(NamedTuple):
    """How a batch is mixed.

    Attributes:
        lam: Lambda, the part of a sample that stays; 1 for a batch that is not mixed.
        box: Rows and columns of the rectangle that is taken from the partner (cutmix); None blends all (mixup).
    """

    lam: float = 1.0
    box: tuple[slice, slice] | None = None


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
    rows, columns = (cut_around(int(random.integers(length)), lam, length) for length in size)
    area = (rows.stop - rows.start) * (columns.stop - columns.start)
    return MixDraw(1.0 - area / (size[0] * size[1]), (rows, columns))


def cut_around(centre: int, lam: float, length: int) -> slice:
    """One side of a rectangle of 1 - lambda of the area of an image around a pixel, clipped to the image."""
    cut = int(length * math.sqrt(1.0 - lam))
    return slice(max(centre - cut // 2, 0), min(centre + (cut + 1) // 2, length))


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
        rows, columns = box
        partners = _partners(images[:, :, rows, columns])
        images = images.clone()
        images[:, :, rows, columns] = partners
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
