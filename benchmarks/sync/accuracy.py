"""Measures the test accuracy of trainings with compressed gradients against full precision.

One run is too noisy to show a difference of one percentage point, so there are several per method.

ResNet-18 on all 1,797 digits in five folds, three seeds each: 15 runs per method, paired by fold and seed with full
precision. Learning rates are tuned per method on one fold with a seed of its own.

    python -m benchmarks.sync.accuracy --tune             # the grid of learning rates, on fold 0
    python -m benchmarks.sync.accuracy --jobs 2           # the table, at the best rate of each method
    python -m benchmarks.sync.accuracy --report           # what the rows that are there say

Two workers are emulated in one process: each computes the gradients of its half of the batch, with BatchNorm of its own
half as under DDP, and `run_together` exchanges them, so that a run says the same on any machine that computes alike.
Rows are written as runs end, and what is there is not done again.
"""

from __future__ import annotations

import itertools
import math
import multiprocessing
import os
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import tyro
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.rig.in_process import run_together
from benchmarks.rig.records import append_dicts, read_records
from benchmarks.rig.rows import commit, device
from hybridpar.comm.world import all_reduce_bytes
from hybridpar.compress import Exchange, TensorSpec, read_policy
from hybridpar.config import OptimizerConfig
from hybridpar.data.augment import normalise, shift_and_flip
from hybridpar.data.labels import FIXED_SEED
from hybridpar.data.memory_sets import DIGITS_STATISTICS, digit_images
from hybridpar.machine.process import worker_environment
from hybridpar.models import build_model, seed_everything
from hybridpar.optim.build import Rates, build_optimizer
from hybridpar.optim.schedule import rate_factor

RESULTS = Path(__file__).parent / "results"

#: What is compared, the first with all others.
METHODS = (
    "none",
    "fc.weight -> none; conv1.weight -> none; * -> onebit:decay=0.5",
    "hylo",
    "qsgd_mn:bits=4",
    "powersgd:rank=2,warmup=45",
)
RATES = (0.005, 0.01, 0.02, 0.05)
FOLDS = 5
SEEDS = (1, 2, 3)
TUNING_SEED = 100
WORKERS = 2
#: Per worker.
BATCH = 16
EPOCHS = 5

#: Share of a fold's test images, in per cent, that one of them is: accuracies that differ by no more count as equal.
ONE_IMAGE = 100 / 359

#: Mean difference, and lower end of its 95 % interval, in points, that a codec may lose.
MOST_LOST = 0.5
MOST_LOST_SURELY = 1.0
#: Quantile of Student's t at 97.5 % by degrees of freedom, for as many pairs as there may be here.
_T = {4: 2.776, 9: 2.262, 14: 2.145}


@dataclass(frozen=True, kw_only=True)
class Options:
    """Train ResNet-18 on digits with several codecs."""

    tune: bool = False
    """Try the grid of learning rates on fold 0."""
    report: bool = False
    """Print what the rows say, and train nothing."""
    methods: tuple[str, ...] = METHODS
    """Codecs or policies."""
    rates: tuple[float, ...] = RATES
    """Learning rates to try."""
    epochs: int = EPOCHS
    """Of each run; rates are tuned for each number of epochs."""
    jobs: int = 1
    """Runs at a time, one thread each."""
    output: Path = RESULTS
    """Folder of the rows."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training, and what came of it.

    Attributes:
        loss: Mean training loss of the last epoch.
        accuracy: Of the fold's test images after the last epoch, in per cent.
        ratio: Bytes that full precision would send over those that were sent, per step.
    """

    method: str
    lr: float
    fold: int
    seed: int
    epochs: int = EPOCHS
    loss: float = math.nan
    accuracy: float = math.nan
    ratio: float = math.nan
    commit: str = ""
    device: str = ""
    torch: str = ""

    @property
    def key(self) -> tuple[str, float, int, int, int]:
        """What makes it this run."""
        return self.method, self.lr, self.fold, self.seed, self.epochs


def main(options: Options) -> int:
    """Tune, train or report."""
    options.output.mkdir(parents=True, exist_ok=True)
    tuning, table = options.output / "accuracy_tuning.csv", options.output / "accuracy.csv"
    if options.report:
        for epochs in sorted({run.epochs for run in read_records(Run, table)}):
            report(of_length(read_records(Run, table), epochs))
        return 0
    if options.tune:
        wanted = [
            Run(method=m, fold=0, seed=TUNING_SEED, lr=lr, epochs=options.epochs)
            for lr in options.rates
            for m in options.methods
        ]
        train_all(wanted, tuning, options.jobs)
        for method, run in best_rates(of_length(read_records(Run, tuning), options.epochs)).items():
            print(f"{method:20} lr {run.lr:<6g} accuracy {run.accuracy:.2f} loss {run.loss:.4f}")
        return 0
    best = best_rates(of_length(read_records(Run, tuning), options.epochs))
    missing = [method for method in options.methods if method not in best]
    if missing:
        print(f"no learning rate was tuned for {', '.join(missing)}: run with --tune first", file=sys.stderr)
        return 2
    # All methods of one pair of fold and seed before the next pair: rows are comparable whenever one stops.
    pairs = itertools.product(SEEDS, range(FOLDS))
    wanted = [
        Run(method=m, lr=best[m].lr, fold=f, seed=s, epochs=options.epochs) for s, f in pairs for m in options.methods
    ]
    train_all(wanted, table, options.jobs)
    report(of_length(read_records(Run, table), options.epochs))
    return 0


def of_length(runs: Iterable[Run], epochs: int) -> list[Run]:
    """Those of so many epochs: only they are compared with each other."""
    return [run for run in runs if run.epochs == epochs]


def best_rates(runs: Iterable[Run]) -> dict[str, Run]:
    """For each method the run with the lowest loss among those whose accuracy is the best one, or an image from it."""
    by_method: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        by_method[run.method].append(run)
    best = {method: max(run.accuracy for run in own) for method, own in by_method.items()}
    return {
        method: min((run for run in own if run.accuracy >= best[method] - ONE_IMAGE), key=lambda run: run.loss)
        for method, own in by_method.items()
    }


def train_all(wanted: Sequence[Run], file: Path, jobs: int) -> None:
    """Train what is not in a file yet, and add it there."""
    done = {run.key for run in read_records(Run, file)}
    left = [run for run in wanted if run.key not in done]
    os.environ.update(worker_environment(max(jobs, 1), range(max(jobs, 1))))
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        for run in pool.imap_unordered(train, left):
            print(f"{run.method:20} lr {run.lr:<6g} fold {run.fold} seed {run.seed}: {run.accuracy:.2f} %", flush=True)
            append_dicts(file, [asdict(run)])


def train(run: Run) -> Run:
    """Train once."""
    torch.set_num_threads(1)
    seed_everything(run.seed)
    images, labels = digits()
    train_part, test_part = fold_of(labels, run.fold)
    model = build_model("resnet18", 10)
    config = OptimizerConfig(lr=run.lr)
    optimizer = build_optimizer(model, config)
    rates = Rates(optimizer)
    exchanges = [
        Exchange([read_policy(run.method).bind(spec) for spec in specs(model, rank, run.seed)])
        for rank in range(WORKERS)
    ]
    order = torch.Generator().manual_seed(run.seed)
    per_epoch = len(train_part) // (WORKERS * BATCH)
    losses: list[float] = []
    for step in range(run.epochs * per_epoch):
        if step % per_epoch == 0:
            shuffled = train_part[torch.randperm(len(train_part), generator=order)]
            losses = []
        rates.set(rate_factor(step, run.epochs * per_epoch, per_epoch, config))
        batch = shuffled[step % per_epoch * WORKERS * BATCH :][: WORKERS * BATCH]
        gradients = []
        model.train()
        for half in batch.chunk(WORKERS):
            shifts = torch.randint(0, 9, (len(half), 2), generator=order)
            inputs = shifted(images[half], shifts)
            loss = functional.cross_entropy(model(inputs), labels[half])
            model.zero_grad(set_to_none=True)
            loss.backward()
            gradients.append([_gradient(parameter) for parameter in model.parameters()])
            losses.append(loss.item())
        flat = [[gradient.view(-1) for gradient in worker] for worker in gradients]
        run_together(exchanges, flat, flat)
        for exchange in exchanges:
            exchange.commit()
        for parameter, gradient in zip(model.parameters(), gradients[0], strict=True):
            parameter.grad = gradient
        optimizer.step()
    full = all_reduce_bytes(4 * sum(parameter.numel() for parameter in model.parameters()), WORKERS)
    return Run(
        **{name: value for name, value in asdict(run).items() if name in ("method", "lr", "fold", "seed", "epochs")},
        loss=round(statistics.fmean(losses), 5),
        accuracy=round(accuracy(model, images[test_part], labels[test_part]), 3),
        ratio=round(full / exchanges[0].traffic.wire, 2),
        commit=commit(),
        device=device(),
        torch=torch.__version__,
    )


def specs(model: nn.Module, rank: int, seed: int) -> list[TensorSpec]:
    """What a worker's coders are bound to."""
    return [
        TensorSpec(name, tuple(parameter.shape), rank, WORKERS, seed) for name, parameter in model.named_parameters()
    ]


def digits() -> tuple[Tensor, Tensor]:
    """All images, uint8, and their labels."""
    images, labels = digit_images(32)
    return images, torch.from_numpy(labels)


def shifted(images: Tensor, shifts: Tensor) -> Tensor:
    """Training images at their own offsets, as the model takes them."""
    return prepared(shift_and_flip(images, shifts[:, 0], shifts[:, 1], None, 4))


def prepared(images: Tensor) -> Tensor:
    """Images as the model takes them."""
    mean, std = (torch.tensor(values) for values in DIGITS_STATISTICS)
    return normalise(images, mean, std, size=(32, 32), channels_last=False)


def fold_of(labels: Tensor, fold: int) -> tuple[Tensor, Tensor]:
    """Indices to train and to test on. Each fold tests on every fifth image of each digit, in a fixed random order."""
    generator = torch.Generator().manual_seed(FIXED_SEED)
    tested = torch.zeros(len(labels), dtype=torch.bool)
    for digit in range(10):
        members = torch.nonzero(labels == digit).flatten()
        tested[members[torch.randperm(len(members), generator=generator)][fold::FOLDS]] = True
    return torch.nonzero(~tested).flatten(), torch.nonzero(tested).flatten()


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Per cent of images that are recognised."""
    model.eval()
    guesses = torch.cat([model(prepared(part)).argmax(1) for part in torch.split(images, 128)])
    return float((guesses == labels).double().mean() * 100)


def report(runs: Sequence[Run]) -> None:
    """Print mean accuracy, and the difference to full precision over the pairs of fold and seed."""
    by_method: dict[str, dict[tuple[int, int], Run]] = defaultdict(dict)
    for run in runs:
        by_method[run.method][run.fold, run.seed] = run
    base = by_method.pop(METHODS[0], {})
    print(f"{runs[0].epochs if runs else EPOCHS} epochs")
    print("| method | lr | bytes saved | runs | accuracy % | difference, points [95 % interval] | target |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for method, own in {METHODS[0]: base, **by_method}.items():
        pairs = sorted(set(own) & set(base))
        differences = [own[pair].accuracy - base[pair].accuracy for pair in pairs]
        first = next(iter(own.values()), None)
        if first is None:
            continue
        mean = statistics.fmean(run.accuracy for run in own.values())
        line = f"| `{method}` | {first.lr:g} | {first.ratio:.1f}x | {len(own)} | {mean:.2f} |"
        print(line, f"{difference(differences)} |" if method != METHODS[0] else "- | - |")


def difference(values: Sequence[float]) -> str:
    """Mean of some differences, its interval, and whether that is close enough to full precision."""
    if len(values) - 1 not in _T:
        return f"{len(values)} pairs, and an interval takes {', '.join(str(freedom + 1) for freedom in _T)} | -"
    mean = statistics.fmean(values)
    half = _T[len(values) - 1] * statistics.stdev(values) / math.sqrt(len(values))
    met = mean > -MOST_LOST and mean - half > -MOST_LOST_SURELY
    return f"{mean:+.2f} [{mean - half:+.2f}, {mean + half:+.2f}] | {'met' if met else 'missed'}"


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options, description=__doc__)))
