"""What benchmarks train, and the loops that people write by hand, which hybridpar is compared with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.rig.rank import link, sent_bytes
from hybridpar.models import build_model

CLASSES = 10
#: For `--quick`: whether a table runs shows as well on a net of milliseconds.
TINY = "benchmarks.rig.task:tiny_net"


class _Block(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, images: Tensor) -> Tensor:
        return F.relu(images + self.norm(self.conv(images)))


def tiny_net(num_classes: int = CLASSES) -> nn.Module:
    """Eight residual blocks of 16 channels."""
    blocks = [_Block(16) for _ in range(8)]
    return nn.Sequential(
        nn.Conv2d(3, 16, 3), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, num_classes)
    )


@dataclass(frozen=True)
class Setting:
    """A model with the stem that it has for ImageNet, images and batch; SGD with momentum 0.9, fused, in float32.

    Attributes:
        model: Of torchvision, or `module:factory`.
        side: Height and width of the images.
        batch: Samples; a benchmark says whether of a rank or of all.
        rate: Learning rate.
        seed: Of the weights.
    """

    model: str
    side: int
    batch: int
    rate: float = 1e-3
    seed: int = 0

    def __str__(self) -> str:
        return f"{self.model.rpartition(':')[2]}, {self.side}x{self.side} images, batch {self.batch}"

    def build(self) -> nn.Module:
        """The model, with the same weights at every call.

        Dropout stays in it with probability 0: it then costs the same, and all methods find the same loss.
        """
        torch.manual_seed(self.seed)
        model = build_model(self.model, CLASSES)
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        return model

    def optimizer(self, *modules: nn.Module) -> torch.optim.Optimizer:
        """The optimizer that every method uses."""
        parameters = [parameter for module in modules for parameter in module.parameters()]
        return torch.optim.SGD(parameters, lr=self.rate, momentum=0.9, fused=True)

    def noise(self, seed: int = 1) -> tuple[Tensor, Tensor]:
        """Random images and labels, for timing."""
        generator = torch.Generator().manual_seed(seed)
        images = torch.randn(self.batch, 3, self.side, self.side, generator=generator)
        return images, torch.randint(0, CLASSES, (self.batch,), generator=generator)


class Loop:
    """A training loop by hand: forward, cross-entropy, backward, the optimizer.

    Args:
        setting: What is trained.
        wrap: Makes of the model what is called, such as DistributedDataParallel.
        model: The model; default: that of the setting.
    """

    def __init__(
        self,
        setting: Setting,
        wrap: Callable[[nn.Module], Callable[..., Any]] = lambda model: model,
        model: nn.Module | None = None,
    ) -> None:
        self.model = setting.build() if model is None else model
        self.optimizer = setting.optimizer(self.model)
        self.wrapped = wrap(self.model)

    def step(self, images: Tensor, labels: Tensor) -> Tensor:
        """One step; the loss before it, of this rank's samples."""
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.wrapped(images), labels)
        loss.backward()
        self.exchange()
        self.optimizer.step()
        return loss.detach()

    def exchange(self) -> None:
        """What happens between backward and the optimizer."""


def fast_ddp(model: nn.Module, **options: Any) -> DistributedDataParallel:
    """DDP in its fastest documented form: gradients are views of buckets, no buffers are sent, the graph is static."""
    return DistributedDataParallel(
        model, gradient_as_bucket_view=True, broadcast_buffers=False, static_graph=True, **options
    )


def bytes_of(step: Callable[[], object], steps: int = 1) -> int | None:
    """Bytes that this rank's node sends in a step; None on the loopback, whose counter all processes share."""
    if link() in ("none", "loopback"):
        return None
    dist.barrier()
    before = sent_bytes()
    for _ in range(steps):
        step()
    return (sent_bytes() - before) // steps
