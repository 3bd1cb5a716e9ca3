"""The losses of a recipe in hybridpar and in a training loop made of timm's own parts.

    python -m benchmarks.recipes.timm_parity [--steps 50]

Both sides get the same weights, and the same images in the same order: crops and policies are those of timm or of
torchvision, drawn once. Mixing is drawn by hybridpar, and timm's Mixup is handed the draw; samples that are neighbours
for hybridpar are put where timm looks for partners. Everything else is timm's on one side and hybridpar's on the other:
mixing, targets, loss, optimizer and its parameter groups, schedule, moving average.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from timm import create_model
from timm.data.mixup import Mixup
from timm.loss import BinaryCrossEntropy, SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from timm.utils import ModelEmaV3
from torch import Tensor, nn

from benchmarks.rig.photographs import photographs
from benchmarks.rig.records import write_dicts
from hybridpar import TrainConfig, Trainer
from hybridpar.commands import find_command
from hybridpar.commands.train import Train
from hybridpar.config.optimizer import Automatic, Binary
from hybridpar.config.rates import Cosine
from hybridpar.data import TrainBatches, load_dataset
from hybridpar.data.mix import draw_mix
from hybridpar.models import build_model

RESULTS = Path(__file__).parent / "results" / "timm_parity.csv"

#: Images of the data set, and those of them that are for testing.
IMAGES, TESTED = 200, 16

#: Both recipes on small images and batches, in float32, with rates by step, so that they run on a laptop.
SMALL = (
    "--batch-size 16 --image-size 64,test=96 --epochs 5 --plan none --amp none "
    "--lr-schedule cosine:min=1e-6,warmup_lr=1e-5"
)

RECIPES = {
    "a3": f"timm/resnet18 --preset a3 {SMALL} --lr 7e-4",
    "ema": f"timm/resnet18 {SMALL} --optimizer adamw --lr 1e-4 --weight-decay 0.05 --loss ce:smoothing=0.1 "
    "--augment timm:rand-m9-mstd0.5-inc1 --mix mixup=0.2,cutmix=1 "
    "--model-ema 0.99,warmup",
}


def options_of(recipe: str, root: Path) -> TrainConfig:
    """The options of a recipe on the images in a directory."""
    command = find_command("train")
    words = [*RECIPES[recipe].split(), "--data", "folder", "--data-root", str(root)]
    options = command.parse("train", words)
    assert isinstance(options, Train)
    return options


def write_images(root: Path, images: int = IMAGES, pixels: int = 96) -> None:
    """Write some crops of photographs as an ImageFolder of JPEGs, whose classes are the photographs."""
    rng, originals = np.random.default_rng(0), photographs()
    for number in range(images):
        label = number % len(originals)
        side = int(rng.uniform(0.2, 0.4) * min(originals[label].size))
        left, top = (int(rng.integers(length - side)) for length in originals[label].size)
        folder = root / ("test" if number < TESTED else "train") / f"{label:02d}"
        folder.mkdir(parents=True, exist_ok=True)
        crop = originals[label].resize((pixels, pixels), box=(left, top, left + side, top + side))
        crop.save(folder / f"{number}.jpg", quality=95)


def batches_of(options: TrainConfig, steps: int) -> tuple[list[tuple[Tensor, Tensor]], int, int]:
    """The first batches of a run, before they are mixed; steps of an epoch; classes."""
    data = load_dataset(options)
    train = TrainBatches(
        data,
        seed=options.seed,
        batch_size=options.samples_per_step,
        rank=0,
        workers=1,
        micro_batches=1,
        loader_workers=0,
        in_pairs=options.mixing.is_on,
        repeats=options.augmentation.repeats,
    )
    made: list[tuple[Tensor, Tensor]] = []
    for epoch in range(options.epochs):
        made += [batch.micro_batches[0] for batch in train.epoch(epoch)]
        if len(made) >= steps:
            break
    return made[:steps], train.steps_per_epoch, data.classes


def hybridpars(
    model: nn.Module, options: TrainConfig, batches: list[tuple[Tensor, Tensor]], per_epoch: int, classes: int
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of all steps, and the model or its moving average after them."""
    total = options.epochs * per_epoch
    with Trainer(model, config=options, total_steps=total, steps_per_epoch=per_epoch, classes=classes) as trainer:
        losses = [trainer.step(batch).loss for batch in batches]
        return losses, trainer.engine.average_state() or dict(trainer.model.state_dict())


def timms(
    model: nn.Module, options: TrainConfig, batches: list[tuple[Tensor, Tensor]], per_epoch: int, classes: int
) -> tuple[list[float], dict[str, Tensor]]:
    """The same of a loop as in timm's train.py, with `--sched-on-updates` and `--warmup-prefix`."""
    optimizer = create_optimizer_v2(
        model,
        options.optim.name.removeprefix("timm/"),
        lr=options.peak_lr,
        weight_decay=options.weight_decay,
        momentum=options.momentum,
    )
    schedule = options.rate_schedule
    assert isinstance(schedule, Cosine)
    scheduler = CosineLRScheduler(
        optimizer,
        t_initial=(options.epochs * per_epoch) - round(options.rate_schedule.warmup * per_epoch),
        lr_min=schedule.min,
        warmup_t=round(options.rate_schedule.warmup * per_epoch),
        warmup_lr_init=schedule.warmup_lr or 0.0,
        warmup_prefix=True,
        t_in_epochs=False,
    )
    asked = options.criterion
    mixup = Mixup(
        *(options.mixing.mixup, options.mixing.cutmix),
        switch_prob=0.5,
        label_smoothing=asked.smoothing,
        num_classes=classes,
    )
    loss_fn: nn.Module = SoftTargetCrossEntropy()
    if isinstance(asked, Binary) and not isinstance(asked, Automatic):
        loss_fn = BinaryCrossEntropy(target_threshold=asked.threshold)
    ema = ModelEmaV3(model, decay=options.ema.decay, use_warmup=True) if options.ema is not None else None
    model.train()
    losses = []
    for step, (images, labels) in enumerate(batches):
        scheduler.step_update(step)
        mixed, targets = mix_by_timm(mixup, images, labels, options, step)
        loss = loss_fn(model(mixed), targets.to(mixed.dtype))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if ema is not None:
            ema.update(model, step=step + 1)
        losses.append(float(loss.detach()))
    return losses, dict((model if ema is None else ema.module).state_dict())


def mix_by_timm(mixup: Any, images: Tensor, labels: Tensor, options: TrainConfig, step: int) -> tuple[Tensor, Tensor]:
    """Mix a batch by timm's Mixup, by the draw of hybridpar."""
    order = torch.cat([torch.arange(0, len(labels), 2), torch.arange(1, len(labels), 2).flip(0)])
    draws = recorded_draw(options, step, images.shape[-2:])
    with (
        mock.patch.object(mixup, "_params_per_batch", return_value=draws[:2]),
        mock.patch.object(np.random, "randint", side_effect=draws[2]),
    ):
        mixed, targets = mixup(images[order].clone(), labels[order])
    return mixed, targets


def recorded_draw(options: TrainConfig, step: int, size: Any) -> tuple[float, bool, tuple[int, ...]]:
    """Lambda before the rectangle was clipped, whether it is cutmix, and the row and column of the rectangle."""
    from hybridpar.data import mix as module

    seen: list[tuple[float, bool, tuple[int, ...]]] = []
    box_around = module.box_around

    def note(own: float, row: int, column: int, size: tuple[int, int]) -> Any:
        seen.append((own, True, (row, column)))
        return box_around(own, row, column, size)

    with mock.patch.object(module, "box_around", note):
        draw = draw_mix(options.mixing, options.seed, step, tuple(size))
    return seen[0] if seen else (draw.lam, False, ())


def main() -> None:
    """Run the recipes on both sides and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--output", type=Path, default=RESULTS)
    given = parser.parse_args()
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as folder:
        write_images(Path(folder))
        for recipe, precision in product(RECIPES, ("float32", "float64")):
            options = options_of(recipe, Path(folder))
            batches, per_epoch, classes = batches_of(options, given.steps)
            dtype = getattr(torch, precision)
            batches = [(images.to(dtype), labels) for images, labels in batches]
            torch.manual_seed(options.seed)
            theirs = create_model("resnet18", num_classes=classes).to(dtype)
            ours = build_model("timm/resnet18", classes=classes).to(dtype)
            ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
            mine, my_state = hybridpars(ours, options, batches, per_epoch, classes)
            other, their_state = timms(theirs, options, batches, per_epoch, classes)
            pairs = list(zip(other, mine, strict=True))
            for step, (one, two) in enumerate(pairs, start=1):
                row = {"recipe": recipe, "precision": precision, "step": step}
                row |= {"timm": f"{one:.7f}", "hybridpar": f"{two:.7f}", "difference": f"{abs(one - two):.1e}"}
                rows.append(row)
            write_dicts(given.output, rows)
            apart = max(
                float((my_state[name].double() - tensor.double()).abs().max()) for name, tensor in their_state.items()
            )
            kind = "moving average" if options.ema is not None else "model"
            worst = max(abs(one - two) for one, two in pairs)
            print(
                f"{recipe} in {precision}: {len(pairs)} steps, {per_epoch} in an epoch; loss {other[0]:.4f} to "
                f"{other[-1]:.4f}; largest difference of a loss {worst:.1e}, of the {kind} {apart:.1e}",
                flush=True,
            )


if __name__ == "__main__":
    main()
