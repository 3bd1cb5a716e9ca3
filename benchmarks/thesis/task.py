"""Model, data order, batches and learning rates that are the same for every method."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from torch import nn

from benchmarks.thesis.cells import Setting
from hybridpar.config import TrainConfig
from hybridpar.data import Batch, ImageData, TestBatches, TrainBatches
from hybridpar.models import build_model, seed_everything


@dataclass(frozen=True, kw_only=True)
class Task:
    """One setting with one seed, on the device of this worker.

    Attributes:
        setting: What is trained.
        data: The data set.
        seed: Seed of weights, order and augmentation.
        steps: Steps of an epoch; all have exactly `setting.batch` samples.
        workers: Workers of the job.
        device: Of this worker.
    """

    setting: Setting
    data: ImageData
    seed: int
    steps: int
    workers: int
    device: torch.device

    @property
    def config(self) -> TrainConfig:
        """Options of the optimizer and its rates, and of hybridpar without stages."""
        setting = self.setting
        return TrainConfig(
            data=setting.data,
            data_root=Path(setting.data_root),
            batch_size=setting.batch,
            lr=setting.lr,
            seed=self.seed,
            epochs=setting.epochs,
            nproc=self.workers,
            plan="none",  # layouts are compared that were chosen beforehand
        )

    @property
    def total_steps(self) -> int:
        """Steps of the whole training."""
        return self.steps * self.setting.epochs

    def build(self) -> nn.Module:
        """The model; the same weights for every method and worker."""
        seed_everything(self.seed)
        args = {"stem": self.setting.stem} if self.setting.stem == "cifar" else {}
        return build_model(self.setting.model, self.data.classes, args=args)

    def batches(self, epoch: int, part: int, parts: int, readers: int, micro_batches: int = 1) -> Iterator[Batch]:
        """The batches of an epoch, without what does not fill a batch.

        Args:
            epoch: From 0.
            part: Which part of each batch.
            parts: Parts that a batch is divided into.
            readers: Workers that read at the same time; they share the loader processes.
            micro_batches: Micro-batches of a part.
        """
        batches = TrainBatches(
            self.data,
            seed=self.seed,
            batch_size=self.setting.batch,
            rank=part,
            workers=parts,
            micro_batches=micro_batches,
            loader_workers=self._loaders(readers),
            device=self.device,
        )
        return islice(batches.epoch(epoch), self.steps)

    def test(self, part: int = 0, parts: int = 1) -> TestBatches:
        """A part of the test images."""
        return TestBatches(
            self.data,
            batch_size=max(2, self.setting.batch // parts),
            rank=part,
            workers=parts,
            loader_workers=self._loaders(parts),
            device=self.device,
        )

    def _loaders(self, readers: int) -> int | None:
        return None if self.data.train.in_memory else max(1, self.setting.loaders // readers)


def settle(device: torch.device) -> None:
    """Wait for everything that was issued to a device. A CPU has done it already."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def forget(device: torch.device) -> None:
    """Give back the memory of what was just closed."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
