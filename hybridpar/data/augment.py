"""Augmentation of a batch of images in memory.

Both functions work on any device and never make it wait for the host. What is random (offsets, flips) is drawn by the
caller.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def shift_and_flip(images: Tensor, rows: Tensor, columns: Tensor, flips: Tensor | None, pad: int) -> Tensor:
    """Crop every image at its own offset after padding with zeros, and mirror some of them (He et al.
    2016, sec. 4.2).
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
