"""Trains ResNet-18 on digits in an outer loop, with emulated workers, and notes accuracy and bytes of every run.

Runs are paired by fold and seed with synchronous training at the same number of samples: global batches of 64 whatever
the number of workers, at the options' defaults of `hybridpar train`. No learning rate is tuned.

    python -m benchmarks.outer.accuracy --set target      # outer:16 with 1 bit against synchronous, 2 and 4 workers
    python -m benchmarks.outer.accuracy --set grid        # H x workers x codec
    python -m benchmarks.outer.accuracy --set slow        # for 10 Mbit/s and 50 ms: more steps, and streamed
    python -m benchmarks.outer.accuracy --set lengths     # other lengths of run
    python -m benchmarks.outer.accuracy --set qsr         # H that grows as the learning rate falls
    python -m benchmarks.outer.accuracy --set models      # three models, also with gradients sent by a codec
    python -m benchmarks.outer.accuracy --report          # what the rows that are there say
    python -m benchmarks.outer.accuracy --table           # rows of hybridpar/planner/outer_steps.py

Rows are written as runs end, and what is there is not done again; several of these processes may add to one file. The
mean of the workers' models is tested after every epoch, so that rows say also when an accuracy was first reached.
"""

from __future__ import annotations

import copy
import fcntl
import itertools
import json
import math
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from torch import nn

from benchmarks.outer.emulated import run_emulated
from benchmarks.rig.records import append_dicts, read_records
from benchmarks.rig.rows import commit, device
from benchmarks.sync.accuracy import accuracy, digits, fold_of
from hybridpar.comm.world import World, all_reduce_bytes
from hybridpar.config import TrainConfig
from hybridpar.data import TrainBatches, load_dataset
from hybridpar.data.sources import ImageData, MemoryImages
from hybridpar.machine.process import worker_environment
from hybridpar.models import build_model, seed_everything
from hybridpar.planner.outer_steps import OuterSteps
from hybridpar.sync.statistics import average_model
from hybridpar.train.trainer import Trainer

RESULTS = Path(__file__).parent / "results"
FOLDS, SEEDS = 5, (1, 2, 3)
EPOCHS, BATCH = 10, 64
MODELS = ("resnet18", "resnet34", "timm/resnet10t")
#: Per cent of test images, in which the time to an accuracy is taken.
TARGET = 97.0
#: What the planner may count on rests on so many runs at least, which lose at most so many points on average.
LEAST_RUNS, MOST_LOST = 5, 1.0
SYNC = "sync"


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training, and what came of it.

    Attributes:
        method: `sync`, `mean`, `nesterov`, `qsr` (the mean, with H that grows), `streamed` (the mean, in
            four parts that arrive H / 8 steps later) or `codec` (no outer loop: gradients of every step by a codec).
        every: H; 1 for `sync`.
        workers: K.
        codec: What outer gradients are sent as.
        model: What is trained.
        steps: Of the run.
        exchanges: How often workers exchanged.
        loss: Mean training loss of the last epoch.
        accuracy: Of the fold's test images at the end, in per cent.
        by_epoch: The same after every epoch.
        bytes_per_step: That a worker sends, all steps counted.
        seconds: Of the training, on a machine that may do other things.
    """

    method: str
    every: int
    workers: int
    codec: str
    fold: int
    seed: int
    epochs: int = EPOCHS
    model: str = "resnet18"
    steps: int = 0
    exchanges: int = 0
    loss: float = math.nan
    accuracy: float = math.nan
    bytes_per_step: float = math.nan
    by_epoch: str = ""
    seconds: float = math.nan
    commit: str = ""
    device: str = ""
    torch: str = ""

    @property
    def key(self) -> tuple[object, ...]:
        """What makes it this run."""
        return (*self.kind, self.fold, self.seed)

    @property
    def kind(self) -> tuple[str, int, int, str, int, str]:
        """What it is a sample of."""
        return self.method, self.every, self.workers, self.codec, self.epochs, self.model


def wanted(what: str) -> Iterator[Run]:
    """The runs of a set, the most telling first."""
    pairs = list(itertools.product(SEEDS, range(FOLDS)))
    of_target = [(at, workers) for seed in SEEDS for workers in (2, 4) for at in pairs if at[0] == seed]
    for (seed, fold), workers in of_target if what == "target" else ():
        yield Run(method=SYNC, every=1, workers=workers, codec="none", fold=fold, seed=seed)
        yield Run(method="mean", every=16, workers=workers, codec="onebit", fold=fold, seed=seed)
    for seed, workers in itertools.product(SEEDS[:2], (2, 4, 8, 16)) if what == "grid" else ():
        yield Run(method=SYNC, every=1, workers=workers, codec="none", fold=0, seed=seed)
        for every, codec in itertools.product((64, 16, 4, 1), ("onebit", "none")):
            if (every, codec) != (1, "none"):  # by construction what `sync` is, and the suite shows it
                yield Run(method="mean", every=every, workers=workers, codec=codec, fold=0, seed=seed)
    for seed, epochs in itertools.product(SEEDS[:2], (5, 20)) if what == "lengths" else ():
        yield Run(method=SYNC, every=1, workers=2, codec="none", fold=0, seed=seed, epochs=epochs)
        for every in (16, 32, 64):
            yield Run(method="mean", every=every, workers=2, codec="onebit", fold=0, seed=seed, epochs=epochs)
    for (_, fold), workers in itertools.product(pairs[:FOLDS], (2, 4)) if what == "qsr" else ():
        yield Run(method="qsr", every=4, workers=workers, codec="none", fold=fold, seed=1)
    for _, fold in pairs[:FOLDS] if what == "slow" else ():
        yield Run(method=SYNC, every=1, workers=2, codec="none", fold=fold, seed=1, epochs=20)
        for method in ("mean", "streamed"):
            yield Run(method=method, every=40, workers=2, codec="onebit", fold=fold, seed=1, epochs=20)
    for (_, fold), model in itertools.product(pairs[:2], MODELS) if what == "models" else ():
        ways = ((SYNC, 1, "none"), ("mean", 16, "onebit"), ("mean", 16, "none"), ("codec", 1, "onebit:decay=0.9"))
        for method, every, codec in ways:
            yield Run(method=method, every=every, workers=2, codec=codec, fold=fold, seed=1, model=model)


@dataclass(frozen=True, kw_only=True)
class Options:
    """Train ResNet-18 on digits in an outer loop."""

    set: tuple[Literal["target", "slow", "grid", "qsr", "models", "lengths"], ...] = (
        *("target", "slow", "grid", "qsr", "models"),
        "lengths",
    )
    """What to train, in this order."""
    report: bool = False
    """Print what the rows say, and train nothing."""
    table: bool = False
    """Print the planner's table, and train nothing."""
    most_workers: int = 16
    """Leave out runs of more workers."""
    output: Path = RESULTS / "accuracy.csv"
    """The rows."""


def main(options: Options) -> int:
    """Train or report."""
    if options.report:
        report(read_records(Run, options.output))
        return 0
    if options.table:
        print(*(f"    {row}," for row in table_of(read_records(Run, options.output))), sep="\n")
        return 0
    torch.set_num_threads(1)
    for run in itertools.chain.from_iterable(wanted(what) for what in options.set):
        if run.workers > options.most_workers or run.key in {one.key for one in read_records(Run, options.output)}:
            continue
        with claimed(options.output, run) as mine:
            if not mine:
                continue
            done = train(run)
            append_dicts(options.output, [asdict(done)])
        print(
            f"{done.method:8} H {done.every:<3} K {done.workers:<3}{done.codec:8} fold {done.fold} seed {done.seed} "
            f"{done.epochs} epochs: {done.accuracy:.2f} %, {done.bytes_per_step:,.0f} B a step, {done.seconds:.0f} s",
            flush=True,
        )
    return 0


def configuration(run: Run) -> TrainConfig:
    """The options of a run."""
    given: dict[str, Any] = {"batch_size": BATCH, "epochs": run.epochs, "seed": run.seed, "plan": "none"}
    if run.method == SYNC:  # one process with as many micro-batches does what the workers do
        return TrainConfig(**given, micro_batches=run.workers)
    if run.method == "codec":
        return TrainConfig(**given, compress=run.codec)
    options = {"mean": "", "qsr": ",qsr=2", "streamed": f",fragments=4,delay={run.every // 8}"}
    sync = f"outer:{run.every}" + options.get(run.method, f",opt={run.method}")
    return TrainConfig(**given, sync=sync, compress=run.codec)


def fold_data(fold: int) -> ImageData:
    """Digits, divided as one fold says."""
    images, labels = digits()
    parts = [MemoryImages(images[part], labels[part], pad=4, flip=False) for part in fold_of(labels, fold)]
    return replace(load_dataset(TrainConfig(data="digits")), train=parts[0], test=parts[1])


def train(run: Run) -> Run:
    """Train once."""
    seed_everything(run.seed)
    model, data = build_model(run.model, 10), fold_data(run.fold)
    started = time.perf_counter()
    threads = 1 if run.method == SYNC else run.workers
    found = run_emulated(train_worker, threads, model, data, configuration(run))[0]
    sent = found["sent"] / found["steps"]
    if run.method == SYNC:
        sent = all_reduce_bytes(4 * sum(one.numel() for one in model.parameters()), run.workers)
    return replace(
        run,
        steps=found["steps"],
        exchanges=found["exchanges"],
        loss=round(found["loss"], 5),
        accuracy=found["by_epoch"][-1],
        bytes_per_step=round(sent, 1),
        by_epoch=json.dumps(found["by_epoch"]),
        seconds=round(time.perf_counter() - started, 1),
        commit=commit(),
        device=device(),
        torch=torch.__version__,
    )


def train_worker(world: World, turn: Any, model: nn.Module, data: ImageData, config: TrainConfig) -> dict[str, Any]:
    """Train on one worker's share of every batch."""
    batches = TrainBatches(
        data,
        seed=config.seed,
        batch_size=config.samples_per_step,
        rank=world.rank,
        workers=world.size,
        micro_batches=config.micro_batches,
        loader_workers=0,
    )
    each = batches.steps_per_epoch
    assert isinstance(data.test, MemoryImages)
    by_epoch: list[float] = []
    losses: list[float] = []
    sent = exchanges = 0
    with Trainer(
        copy.deepcopy(model), config=config, world=world, total_steps=config.epochs * each, steps_per_epoch=each
    ) as trainer:
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
                by_epoch.append(round(accuracy(tested, data.test.images, data.test.labels), 3))
            world.barrier()
        return {
            "by_epoch": by_epoch,
            "loss": statistics.fmean(losses),
            "sent": sent,
            "steps": config.epochs * each,
            "exchanges": exchanges,
        }


# --------------------------------------------------------------------- rows


@contextmanager
def claimed(file: Path, run: Run) -> Iterator[bool]:
    """Whether no other process trains this run at the moment."""
    place = Path(f"{file}.{'-'.join(map(str, run.key)).replace(':', '_').replace('/', '_')}.lock")
    with place.open("w") as lock:  # the lock goes with its process
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        try:
            yield run.key not in {one.key for one in read_records(Run, file)}
        finally:
            place.unlink(missing_ok=True)


def steps_to_target(run: Run, target: float = TARGET) -> float | None:
    """Training steps until an accuracy, on the line through the ends of epochs; None where it was not reached.

    Args:
        run: The run.
        target: In per cent.
    """
    each = run.steps / run.epochs
    before = 0.0
    for epoch, reached in enumerate(json.loads(run.by_epoch)):
        if reached >= target:
            return each * (epoch + (target - before) / max(reached - before, 1e-9))
        before = reached
    return None


def table_of(runs: Sequence[Run]) -> list[OuterSteps]:
    """What the planner may count on: runs of the plain mean, each over synchronous training of its pair.

    A row rests on at least `LEAST_RUNS`, all of which reached the target and lost at most `MOST_LOST` on average.

    Args:
        runs: All rows.
    """
    runs = [run for run in runs if run.model == MODELS[0]]
    synchronous = {(run.workers, run.epochs, run.fold, run.seed): run for run in runs if run.method == SYNC}
    pairs: dict[tuple[Any, ...], list[tuple[Run, Run]]] = defaultdict(list)
    for run in runs:
        base = synchronous.get((run.workers, run.epochs, run.fold, run.seed))
        if run.method == "mean" and base is not None:
            pairs[run.every, run.workers, run.codec, run.epochs].append((run, base))
    rows = []
    for (every, workers, codec, _), own in sorted(pairs.items()):
        took = [(steps_to_target(run), steps_to_target(base)) for run, base in own]
        ratios = [one / other for one, other in took if one is not None and other is not None]
        whole = len(ratios) == sum(other is not None for _, other in took) > 0
        lost = statistics.fmean(base.accuracy - run.accuracy for run, base in own)
        length = min(run.steps for run, _ in own)
        if whole and len(ratios) >= LEAST_RUNS and lost <= MOST_LOST:
            mean = statistics.fmean(ratios)
            high = mean + 2 * statistics.stdev(ratios) / math.sqrt(len(ratios))
            figures = round(lost, 3), round(mean, 3), round(high, 3)
            rows.append(OuterSteps(every, workers, codec, length, len(own), *figures))
    return rows


def report(runs: Sequence[Run]) -> None:
    """Print a row for each method, H, number of workers, codec and length."""
    by_kind: dict[tuple[Any, ...], list[Run]] = defaultdict(list)
    for run in runs:
        by_kind[run.kind].append(run)
    print("| method | H | workers | codec | epochs | model | runs | accuracy % | least | most | MB a step |")
    print("| --- " * 11 + "|")
    for kind, own in sorted(by_kind.items(), key=lambda one: (one[0][4], one[0][2], one[0][0], one[0][1], one[0][3])):
        scores = [run.accuracy for run in own]
        told = [*kind, len(own), f"{statistics.fmean(scores):.2f}", f"{min(scores):.2f}", f"{max(scores):.2f}"]
        print("| " + " | ".join(map(str, told)) + f" | {own[0].bytes_per_step / 1e6:.4f} |")


if __name__ == "__main__":
    os.environ.update(worker_environment(1, range(1)))
    sys.exit(main(tyro.cli(Options, description=__doc__)))
