"""A model of your own for the command line: a function that builds it.

    hybridpar train examples.user_model:small_net --data digits

The factory is called with `num_classes=` because it takes that argument. The model is an ordinary module: it imports
nothing of hybridpar.
"""

from __future__ import annotations

from torch import Tensor, nn


class Residual(nn.Module):
    """Two convolutions around a shortcut."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Same shape in and out: (samples, channels, height, width)."""
        return nn.functional.relu(images + self.body(images))


def small_net(num_classes: int = 10, width: int = 16) -> nn.Module:
    """A residual network small enough to learn digits within seconds on a CPU.

    Args:
        num_classes: Number of classes.
        width: Channels of the first stage; the second has twice as many.
    """
    return nn.Sequential(
        nn.Conv2d(3, width, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
        Residual(width),
        nn.Conv2d(width, 2 * width, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(2 * width),
        nn.ReLU(inplace=True),
        Residual(2 * width),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(2 * width, num_classes),
    )
