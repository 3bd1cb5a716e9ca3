"""Models that train in milliseconds, and a fault that can be set for one step of one rank.

The models are named on command lines as `tests.small_nets:NAME`. `SMALL_NET_FAULT` in the environment makes one of
them misbehave: `TERM@1:9` sends SIGTERM to the process of rank 1 in its ninth training forward, `KILL@...` kills it,
`NAN@...` makes its outputs NaN from then on. A job that was restarted after a worker died is left alone.
"""

from __future__ import annotations

import math
import os
import signal

import torch
import torch.distributed as dist
from torch import Tensor, nn

FAULT_VARIABLE = "SMALL_NET_FAULT"


class SmallNet(nn.Module):
    """Convolutions, BatchNorm, and dropout where it is asked for."""

    def __init__(self, num_classes: int = 10, *, width: int = 8, dropout: float = 0.0) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, stride=2, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
        )
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(width * 16, num_classes)
        self._forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.dropout(self.body(x).flatten(1)))
        if self.training and FAULT_VARIABLE in os.environ:
            self._forwards += 1
            return _misbehave(os.environ[FAULT_VARIABLE], self._forwards, logits)
        return logits


def _misbehave(fault: str, forwards: int, logits: Tensor) -> Tensor:
    kind, _, place = fault.partition("@")
    rank, when = (int(number) for number in place.split(":"))
    me = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))
    if me != rank or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        return logits
    if kind == "NAN":
        return logits * math.nan if forwards >= when else logits
    if forwards == when:
        os.kill(os.getpid(), signal.Signals["SIG" + kind])
    return logits


def plain(num_classes: int = 10) -> nn.Module:
    """Nothing random in its forward."""
    return SmallNet(num_classes)


def wide(num_classes: int = 10) -> nn.Module:
    """The same layers with other shapes."""
    return SmallNet(num_classes, width=12)


def dropping(num_classes: int = 10) -> nn.Module:
    """With dropout, so that results depend on every worker's random numbers."""
    return SmallNet(num_classes, dropout=0.3)


def separable(num_classes: int = 10) -> nn.Module:
    """With depthwise convolutions, one of which has a bias."""
    net = SmallNet(num_classes)
    net.body.insert(3, nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False))
    net.body.insert(4, nn.Conv2d(8, 8, 5, padding=2, groups=8))
    return net


def fixed() -> nn.Module:
    """A factory that knows no other number of classes than its own."""
    return SmallNet(1000)


def broken(num_classes: int = 10) -> nn.Module:
    """A factory with a bug."""
    return nn.Linear(num_classes, torch.zeros(3)[7])  # type: ignore[arg-type]
