"""Measures the test accuracy of trainings with compressed gradients against full precision.

One run is too noisy to show a difference of one percentage point, so there are several per method: ResNet-18 on all
1,797 digits in five folds, three seeds each, paired by fold and seed with full precision. Two emulated workers, with
BatchNorm of their own half of a batch as under DDP. Learning rates are tuned per method on one fold with a seed of its
own.

    python -m benchmarks.sync.accuracy --tune             # the grid of learning rates, on fold 0
    python -m benchmarks.sync.accuracy                    # the table, at the best rate of each method
    python -m benchmarks.sync.accuracy --report           # what the rows that are there say

Rows are written as runs end, and what is there is not done again; several of these processes may add to one file.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.rig.folds import FOLDS, SEEDS, train_fold, train_missing
from benchmarks.rig.launch import run_command
from benchmarks.rig.records import print_markdown, read_records
from hybridpar.comm.world import all_reduce_bytes
from hybridpar.config import TrainConfig
from hybridpar.errors import UsageError
from hybridpar.models import build_model, parameter_count

MODEL = "resnet18"
#: What is compared, the first with all others.
METHODS = (
    "none",
    "fc.weight -> none; conv1.weight -> none; * -> onebit:decay=0.5",
    "hylo",
    "qsgd_mn:bits=4",
    "powersgd:rank=2,warmup=45",
)
RATES = (0.005, 0.01, 0.02, 0.05)
TUNING_SEED = 100
WORKERS, BATCH, EPOCHS = 2, 32, 5

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
    epochs: int = EPOCHS
    """Of each run; rates are tuned for each number of epochs."""
    output: Path = Path(__file__).parent / "results"
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

    @property
    def key(self) -> tuple[object, ...]:
        """What makes it this run."""
        return self.method, self.lr, self.fold, self.seed, self.epochs


def main(options: Options) -> None:
    """Tune, train or report."""
    tuning, table = options.output / "accuracy_tuning.csv", options.output / "accuracy.csv"
    pairs = [(TUNING_SEED, 0)] if options.tune else list(itertools.product(SEEDS, range(FOLDS)))
    if not options.report:
        best = best_rates(run for run in read_records(Run, tuning) if run.epochs == options.epochs)
        lacking = [method for method in options.methods if method not in best]
        if lacking and not options.tune:
            raise UsageError(f"no learning rate was tuned for {', '.join(lacking)}", fix="Run with --tune first.")
        rates = {method: RATES if options.tune else (best[method].lr,) for method in options.methods}
        # All methods of a fold and seed before the next ones: rows are comparable whenever it is stopped.
        wanted = [
            Run(method=method, fold=fold, seed=seed, lr=rate, epochs=options.epochs)
            for seed, fold in pairs
            for method in options.methods
            for rate in rates[method]
        ]
        train_missing(Run, wanted, tuning if options.tune else table, train)
    if options.tune:
        runs = [run for run in read_records(Run, tuning) if run.epochs == options.epochs]
        for method, run in best_rates(runs).items():
            print(f"{method:20} lr {run.lr:<6g} accuracy {run.accuracy:.2f} loss {run.loss:.4f}")
        return
    runs = read_records(Run, table)
    for epochs in sorted({run.epochs for run in runs}):
        report([run for run in runs if run.epochs == epochs])


def best_rates(runs: Iterable[Run]) -> dict[str, Run]:
    """For each method the run with the lowest loss among those whose accuracy is the best one, or an image from it."""
    by_method: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        by_method[run.method].append(run)
    best = {method: max(run.accuracy for run in tried) for method, tried in by_method.items()}
    return {
        method: min((run for run in tried if run.accuracy >= best[method] - ONE_IMAGE), key=lambda run: run.loss)
        for method, tried in by_method.items()
    }


def train(run: Run) -> Run:
    """Train once."""
    config = TrainConfig(
        batch_size=BATCH,
        epochs=run.epochs,
        seed=run.seed,
        lr=run.lr,
        compress=run.method,
        batch_norm="local",
        plan="none",
    )
    trained = train_fold(MODEL, config, run.fold, WORKERS)
    full = all_reduce_bytes(4 * parameter_count(build_model(MODEL, 10)), WORKERS)
    ratio = round(full * trained.steps / trained.sent, 2)
    return replace(run, loss=trained.loss, accuracy=trained.by_epoch[-1], ratio=ratio)


def report(runs: Sequence[Run]) -> None:
    """Print mean accuracy, and the difference to full precision over the pairs of fold and seed."""
    by_method: dict[str, dict[tuple[int, int], Run]] = {METHODS[0]: {}}
    for run in runs:
        by_method.setdefault(run.method, {})[run.fold, run.seed] = run
    base = by_method[METHODS[0]]
    rows = []
    for method, tried in by_method.items():
        mean = statistics.fmean(run.accuracy for run in tried.values())
        differences = [tried[pair].accuracy - base[pair].accuracy for pair in sorted(set(tried) & set(base))]
        first = next(iter(tried.values()))
        columns = f"`{method}`", f"{first.lr:g}", f"{first.ratio:.1f}x", len(tried), f"{mean:.2f}"
        rows.append((*columns, *(difference(differences) if method != METHODS[0] else ("-", "-"))))
    print(f"{runs[0].epochs} epochs")
    titles = ("method", "lr", "bytes saved", "runs", "accuracy %", "difference, points [95 % interval]", "target")
    print_markdown(titles, rows)


def difference(values: Sequence[float]) -> tuple[str, str]:
    """Mean of some differences with its interval, and whether that is close enough to full precision."""
    if len(values) - 1 not in _T:
        return f"{len(values)} pairs, and an interval takes {', '.join(str(freedom + 1) for freedom in _T)}", "-"
    mean = statistics.fmean(values)
    half = _T[len(values) - 1] * statistics.stdev(values) / math.sqrt(len(values))
    is_met = mean > -MOST_LOST and mean - half > -MOST_LOST_SURELY
    return f"{mean:+.2f} [{mean - half:+.2f}, {mean + half:+.2f}]", "met" if is_met else "missed"


if __name__ == "__main__":
    run_command(main, Options)
