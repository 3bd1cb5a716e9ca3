"""The first steps of a recipe are those of a loop made of timm's own parts, written after timm's train.py."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hybridpar import TrainConfig, Trainer
from hybridpar.commands import COMMANDS
from hybridpar.config.optimizer import Cosine
from hybridpar.data import mix
from hybridpar.models import build_model

pytest.importorskip("timm")

CLASSES, STEPS, PER_EPOCH = 10, 3, 4
COMMON = "timm/test_resnet --data synthetic --batch-size 16 --epochs 5 --plan none --amp none "
COMMON += "--lr-schedule cosine:min=1e-6,warmup_lr=1e-5 "
RECIPES = {
    "a3": "--preset a3 --lr 7e-4 --image-size 32",
    "ema": "--optimizer adamw --lr 1e-4 --weight-decay 0.05 --loss ce:smoothing=0.1 --mix mixup=0.2,cutmix=1 "
    "--model-ema 0.99,warmup",
}
Batches = list[tuple[Tensor, Tensor]]
Trained = tuple[list[float], dict[str, Tensor]]


def by_hybridpar(model: nn.Module, options: TrainConfig, batches: Batches) -> Trained:
    length = {"total_steps": options.epochs * PER_EPOCH, "steps_per_epoch": PER_EPOCH}
    with Trainer(model, config=options, classes=CLASSES, **length) as trainer:
        losses = [trainer.step(batch).loss for batch in batches]
        return losses, trainer.engine.average_state() or dict(trainer.model.state_dict())


def by_timm(model: nn.Module, options: TrainConfig, batches: Batches) -> Trained:
    """With `--sched-on-updates` and `--warmup-prefix`."""
    from timm.data.mixup import Mixup
    from timm.loss import BinaryCrossEntropy, SoftTargetCrossEntropy
    from timm.optim import create_optimizer_v2
    from timm.scheduler import CosineLRScheduler
    from timm.utils import ModelEmaV3

    decay, momentum = options.weight_decay, options.optim.momentum
    name = options.optim.name.removeprefix("timm/")
    optimizer = create_optimizer_v2(model, name, lr=options.peak_lr, weight_decay=decay, momentum=momentum)
    schedule = options.rate_schedule
    assert isinstance(schedule, Cosine)
    warmup = round(schedule.warmup * PER_EPOCH)
    scheduler = CosineLRScheduler(
        optimizer,
        t_initial=options.epochs * PER_EPOCH - warmup,
        lr_min=schedule.min,
        warmup_t=warmup,
        warmup_lr_init=schedule.warmup_lr or 0.0,
        warmup_prefix=True,
        t_in_epochs=False,
    )
    smoothing, mixing = options.criterion.smoothing, options.mixing
    mixup = Mixup(mixing.mixup, mixing.cutmix, switch_prob=0.5, label_smoothing=smoothing, num_classes=CLASSES)
    loss_fn: nn.Module = SoftTargetCrossEntropy()
    if options.loss.startswith("bce"):
        loss_fn = BinaryCrossEntropy(target_threshold=options.criterion.threshold)
    ema = ModelEmaV3(model, decay=options.ema.decay, use_warmup=True) if options.ema is not None else None
    model.train()
    losses = []
    for step, (images, labels) in enumerate(batches):
        scheduler.step_update(step)
        mixed, targets = mixed_by_timm(mixup, images, labels, options, step)
        loss = loss_fn(model(mixed), targets.to(mixed.dtype))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if ema is not None:
            ema.update(model, step=step + 1)
        losses.append(float(loss.detach()))
    return losses, dict((model if ema is None else ema.module).state_dict())


def mixed_by_timm(mixup: Any, images: Tensor, labels: Tensor, options: TrainConfig, step: int) -> tuple[Tensor, Tensor]:
    """timm's Mixup is handed hybridpar's draw; samples that are neighbours there are put where timm has partners."""
    order = torch.cat([torch.arange(0, len(labels), 2), torch.arange(1, len(labels), 2).flip(0)])
    lams: list[float] = []
    centres: list[int] = []
    cut_around = mix.cut_around

    def note(centre: int, lam: float, length: int) -> slice:
        lams.append(lam)
        centres.append(centre)
        return cut_around(centre, lam, length)

    with mock.patch.object(mix, "cut_around", note):
        draw = mix.draw_mix(options.mixing, options.seed, step, tuple(images.shape[-2:]))
    with (
        mock.patch.object(mixup, "_params_per_batch", return_value=((lams or [draw.lam])[0], bool(lams))),
        mock.patch.object(np.random, "randint", side_effect=centres),
    ):
        mixed, targets = mixup(images[order].clone(), labels[order])
    return mixed, targets


@pytest.mark.parametrize("recipe", RECIPES)
def test_first_steps_are_timms(recipe: str) -> None:
    options = COMMANDS.get("train").parse("train", (COMMON + RECIPES[recipe]).split())
    assert isinstance(options, TrainConfig)
    draw = torch.Generator().manual_seed(0)
    shape = (16, 3, 32, 32)
    batches = [
        (torch.randn(shape, generator=draw).double(), torch.randint(CLASSES, (16,), generator=draw))
        for _ in range(STEPS)
    ]
    torch.manual_seed(0)
    model = build_model("timm/test_resnet", classes=CLASSES).double()
    losses, state = by_hybridpar(copy.deepcopy(model), options, batches)
    expected, expected_state = by_timm(model, options, batches)
    assert losses == pytest.approx(expected, rel=1e-12)
    for name, tensor in expected_state.items():
        torch.testing.assert_close(state[name], tensor, rtol=1e-9, atol=1e-10)
