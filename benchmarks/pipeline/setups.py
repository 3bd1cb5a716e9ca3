"""Models, partitions, data and optimizers that all tables of the pipeline share.

A `Setting` says what is trained. `cut_on_main` cuts its model once, on rank 0, and all methods use that cut: hybridpar,
torch.distributed.pipelining, and a loop by hand.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hybridpar.comm.world import World
from hybridpar.models import build_model, seed_everything
from hybridpar.partition.planning import partition_model
from hybridpar.pipeline.local_stage import OptimizerStep
from hybridpar.plan import Placement, Plan, parse_plan
from hybridpar.schedule.layout import Layout
from hybridpar.sync.pieces import step_optimizer

CLASSES = 10
RATE, MOMENTUM = 1e-3, 0.9
#: For `--quick`: whether a table runs shows as well on a net of milliseconds.
TINY = "benchmarks.pipeline.setups:tiny_net"
#: What both sides do, for the table.
WORK = "forward, backward, SGD with momentum 0.9 (fused); fp32"


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
    """What is trained.

    Attributes:
        model: Name of a torchvision model, with the stem that it has for ImageNet.
        side: Height and width of the images.
        batch: Samples per step, over all workers.
        micro_batches: Micro-batches per step and replica.
    """

    model: str
    side: int
    batch: int
    micro_batches: int = 1

    def __str__(self) -> str:
        return f"{self.model}, {self.side}x{self.side} images, batch {self.batch}, {self.micro_batches} micro-batches"

    def build(self) -> nn.Module:
        """The model, always with the same weights.

        Dropout stays in it with probability 0: it then costs the same, and all methods must find the same loss.
        """
        seed_everything(0)
        model = build_model(self.model, CLASSES)
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        return model

    def data(self, share: int = 1, rank: int = 0) -> tuple[Tensor, Tensor]:
        """Images and labels of one of `share` equal parts of the batch; always the same."""
        generator = torch.Generator().manual_seed(1)
        images = torch.randn(self.batch, 3, self.side, self.side, generator=generator)
        labels = torch.randint(0, CLASSES, (self.batch,), generator=generator)
        return images.chunk(share)[rank].clone(), labels.chunk(share)[rank].clone()

    def micro_batch(self, replicas: int = 1) -> int:
        """Samples of a micro-batch."""
        return self.batch // (self.micro_batches * replicas)


def cut_on_main(
    setting: Setting,
    layout: Layout,
    world: World,
    *,
    replicas: int = 1,
    passes: int = 5,
    link_speed: float | None = None,
) -> Plan:
    """Measure and cut the model on rank 0; the plan is the same everywhere. A collective."""
    answer = ""
    if world.is_main:
        # A copy: what a stage saves is counted by storages, and a slice has that of the whole batch.
        example = setting.data()[0][: setting.micro_batch(replicas)].clone()
        made = partition_model(setting.build(), example, layout.stages, link_speed=link_speed, passes=passes, threads=1)
        placement = Placement(layout=layout, device="cpu")
        answer = made.plan.model_copy(update={"placement": placement}).to_json()
    return parse_plan(json.loads(str(world.gather(answer)[0])))


def optimizer_step(stage: nn.Module) -> OptimizerStep | None:
    """The optimizer of one stage, as the engine wants it."""
    if not any(True for _ in stage.parameters()):
        return None
    optimizer = optimizer_of(stage)
    return lambda factor, commit, unwritten: step_optimizer(optimizer, unwritten)


def optimizer_of(*modules: nn.Module) -> torch.optim.Optimizer:
    """The optimizer that every method uses."""
    parameters = [parameter for module in modules for parameter in module.parameters()]
    return torch.optim.SGD(parameters, lr=RATE, momentum=MOMENTUM, fused=True)
