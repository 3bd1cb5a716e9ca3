"""What is trained: model, data order, batches and learning rates that are the same for every method."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path

import torch
from torch import nn

from hybridpar.config import TrainConfig
from hybridpar.data import Batch, ImageData, TestBatches, TrainBatches, load_dataset
from hybridpar.models import build_model

#: Most parts that a batch is divided into: replicas times micro-batches.
MOST_PARTS = 16


@dataclass(frozen=True, kw_only=True)
class Task:
    """A model on a data set with a seed; equal for all methods.

    Attributes:
        model: Name of the model, see `hybridpar.models.build_model`.
        data: Name of the data set.
        data_root: Directory of its files.
        batch: Samples per step, over all workers.
        epochs: Epochs of training, the warm-up epoch included.
        most_steps: Steps after which an epoch is cut off; None for whole epochs.
        lr: Peak learning rate: SGD with momentum 0.9, one epoch of warm-up, half a cosine.
        stem: "cifar" or "imagenet".
        seed: Of weights, order and augmentation.
    """

    model: str
    data: str
    data_root: str
    batch: int
    epochs: int
    most_steps: int | None
    lr: float
    stem: str
    seed: int = 0

    def __str__(self) -> str:
        """In words, for the table: everything but the seed that speed or accuracy depend on."""
        cut = f" of {self.most_steps} steps" if self.most_steps else ""
        stem = f" ({self.stem} stem)" if self.model.startswith("resnet") else ""
        data = self.data.partition(",")[0]
        return f"{self.model}{stem}, {data}, batch {self.batch}, {self.epochs} epochs{cut}, lr {self.lr:g}"

    @property
    def config(self) -> TrainConfig:
        """Options of the optimizer and its rates, and of hybridpar without stages."""
        return TrainConfig(
            data=self.data,
            data_root=Path(self.data_root),
            batch_size=self.batch,
            lr=self.lr,
            seed=self.seed,
            epochs=self.epochs,
            plan="none",  # layouts are compared that were chosen beforehand
        )

    @cached_property
    def images(self) -> ImageData:
        """The data set."""
        return load_dataset(self.config)

    @property
    def steps(self) -> int:
        """Steps of an epoch that have exactly `batch` samples, however a step is divided.

        The rest of an epoch is dropped for all methods: graphs and compiled models are made for one shape. Where the
        rest is too small for its parts, hybridpar joins it to the step before, which then is not whole either.
        """
        steps, rest = divmod(len(self.images.train), self.batch)
        if 0 < rest < 2 * MOST_PARTS:
            steps -= 1
        return steps if self.most_steps is None else min(steps, self.most_steps)

    @property
    def total_steps(self) -> int:
        """Steps of the whole training."""
        return self.steps * self.epochs

    def build(self) -> nn.Module:
        """The model; the same weights for every method and worker."""
        torch.manual_seed(self.seed)
        return build_model(self.model, self.images.classes, args={"stem": "cifar"} if self.stem == "cifar" else {})

    def batches(
        self, epoch: int, device: torch.device, part: int, parts: int, readers: int, micro_batches: int = 1
    ) -> Iterator[Batch]:
        """A part of the batches of an epoch; workers that read at the same time share the loader processes."""
        batches = TrainBatches(
            self.images,
            seed=self.seed,
            batch_size=self.batch,
            rank=part,
            workers=parts,
            micro_batches=micro_batches,
            loader_workers=self._loaders(readers),
            device=device,
        )
        return islice(batches.epoch(epoch), self.steps)

    def test(self, device: torch.device, part: int = 0, parts: int = 1) -> TestBatches:
        """A part of the test images."""
        return TestBatches(
            self.images,
            batch_size=max(2, self.batch // parts),
            rank=part,
            workers=parts,
            loader_workers=self._loaders(parts),
            device=device,
        )

    def _loaders(self, readers: int) -> int | None:
        return None if self.images.train.in_memory else max(1, 16 // readers)


def settle(device: torch.device) -> None:
    """Wait for everything that was issued to a device. A CPU has done it already."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def forget(device: torch.device) -> None:
    """Give back the memory of what was just closed."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
