"""Trains emulated workers on a fold of the digits, for tables of accuracies.

All 1,797 images are divided into five folds; each fold tests on every fifth image of each digit. Workers are threads of
one process (`emulated.py`), each a whole Trainer, so a run says the same on any machine that computes alike.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from benchmarks.rig.emulated import run_emulated
from benchmarks.rig.records import append_dicts, claimed, read_records
from benchmarks.rig.rows import commit, processor
from hybridpar.comm.world import World
from hybridpar.config import TrainConfig
from hybridpar.data import ImageData, MemoryImages, TrainBatches, load_dataset
from hybridpar.data.augment import normalise
from hybridpar.data.memory_sets import DIGITS_STATISTICS, digit_images
from hybridpar.data.sources import FIXED_SEED
from hybridpar.models import build_model
from hybridpar.sync.statistics import average_model
from hybridpar.train.trainer import Trainer

FOLDS, SEEDS = 5, (1, 2, 3)


class Run(Protocol):
    """A training and what came of it, a dataclass that is a row of a table; `key` is what makes it this run."""

    @property
    def key(self) -> tuple[object, ...]:
        """Its values that were known before."""


AnyRun = TypeVar("AnyRun", bound=Run)


@dataclass(frozen=True)
class Trained:
    """What came of a training.

    Attributes:
        by_epoch: Per cent of the fold's test images that the mean of the workers' models recognises, after each epoch.
        loss: Mean training loss of the last epoch.
        sent: Bytes that a worker sent.
        steps: Of the run.
        exchanges: Steps in which something was sent.
        seconds: Of the training, on a machine that may do other things.
    """

    by_epoch: list[float]
    loss: float
    sent: int
    steps: int
    exchanges: int
    seconds: float = 0.0


def train_missing(kind: type[AnyRun], wanted: Iterable[AnyRun], path: Path, train: Callable[[AnyRun], AnyRun]) -> None:
    """Train what a table lacks, and add it there; several processes may do so at the same time."""
    torch.set_num_threads(1)
    path.parent.mkdir(parents=True, exist_ok=True)
    for run in wanted:
        with claimed(path, run.key) as is_mine:
            if is_mine and run.key not in {row.key for row in read_records(kind, path)}:
                row = asdict(train(run))  # type: ignore[call-overload]
                append_dicts(path, [row | {"commit": commit(), "device": processor(), "torch": torch.__version__}])
                print(row, flush=True)


def train_fold(name: str, config: TrainConfig, fold: int, workers: int) -> Trained:
    """Train a model of ten classes with some workers."""
    torch.manual_seed(config.seed)
    model, data = build_model(name, 10), fold_data(fold)
    began = time.perf_counter()
    trained = run_emulated(_train_worker, workers, model, data, config)[0]
    return replace(trained, seconds=round(time.perf_counter() - began, 1))


def _train_worker(world: World, turn: Any, model: nn.Module, data: ImageData, config: TrainConfig) -> Trained:
    batches = TrainBatches(
        data,
        seed=config.seed,
        batch_size=config.samples_per_step,
        rank=world.rank,
        workers=world.size,
        micro_batches=config.micro_batches,
        loader_workers=0,
    )
    length: dict[str, Any] = {
        "steps_per_epoch": batches.steps_per_epoch,
        "total_steps": config.epochs * batches.steps_per_epoch,
    }
    by_epoch, losses = list[float](), list[float]()
    sent = exchanges = 0
    with Trainer(copy.deepcopy(model), config=config, world=world, **length) as trainer:
        for epoch in range(config.epochs):
            losses = []
            for batch in batches.epoch(epoch):
                with turn:
                    outcome = trainer.step(batch).outcome
                losses.append(outcome.loss)
                sent += outcome.bytes_sent
                exchanges += outcome.bytes_sent > 0
            state = average_model(trainer.model, world)
            if world.rank == 0:
                tested = copy.deepcopy(model)
                tested.load_state_dict(state)
                by_epoch.append(round(accuracy(tested, data.test), 3))
            world.barrier()
    return Trained(by_epoch, round(statistics.fmean(losses), 5), sent, length["total_steps"], exchanges)


def fold_data(fold: int) -> ImageData:
    """The digits at 32x32, divided as one fold says."""
    images, numbers = digit_images(32)
    images, labels = images.expand(-1, 3, -1, -1), torch.from_numpy(numbers)
    train, test = (MemoryImages(images[part], labels[part]) for part in fold_of(labels, fold))
    return replace(load_dataset(TrainConfig(data="digits")), train=train, test=test)


def fold_of(labels: Tensor, fold: int) -> tuple[Tensor, Tensor]:
    """Indices to train and to test on. Each fold tests on every fifth image of each digit, in a fixed random order."""
    generator = torch.Generator().manual_seed(FIXED_SEED)
    tested = torch.zeros(len(labels), dtype=torch.bool)
    for digit in range(10):
        members = torch.nonzero(labels == digit).flatten()
        tested[members[torch.randperm(len(members), generator=generator)][fold::FOLDS]] = True
    return torch.nonzero(~tested).flatten(), torch.nonzero(tested).flatten()


@torch.no_grad()
def accuracy(model: nn.Module, test: Any) -> float:
    """Per cent of images that are recognised."""
    model.eval()
    mean, std = (torch.tensor(values) for values in DIGITS_STATISTICS)
    parts = (normalise(part, mean, std, size=(32, 32), channels_last=False) for part in test.images.split(128))
    guesses = torch.cat([model(part).argmax(1) for part in parts])
    return float((guesses == test.labels).double().mean() * 100)
