"""Trains ResNet-18 on digits in an outer loop, with emulated workers, and notes accuracy and bytes of every run.

Runs are paired by fold and seed with synchronous training at the same number of samples: global batches of 64 whatever
the number of workers, at the options' defaults of `hybridpar train`. No learning rate is tuned.

    python -m benchmarks.outer.accuracy --sets target     # outer:16 with 1 bit against synchronous, 2 and 4 workers
    python -m benchmarks.outer.accuracy --sets grid       # H x workers x codec
    python -m benchmarks.outer.accuracy --sets slow       # for 10 Mbit/s and 50 ms: more steps, and streamed
    python -m benchmarks.outer.accuracy --sets lengths    # other lengths of run
    python -m benchmarks.outer.accuracy --sets qsr        # H that grows as the learning rate falls
    python -m benchmarks.outer.accuracy --sets models     # three models, also with gradients sent by a codec
    python -m benchmarks.outer.accuracy --report          # what the rows that are there say
    python -m benchmarks.outer.accuracy --table           # rows of hybridpar/planner/codecs.py

Rows are written as runs end, and what is there is not done again; several of these processes may add to one file. The
mean of the workers' models is tested after every epoch, so that rows say also when an accuracy was first reached.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from benchmarks.rig.folds import FOLDS, SEEDS, train_fold, train_missing
from benchmarks.rig.launch import run_command
from benchmarks.rig.records import print_markdown, read_records
from hybridpar.comm.world import all_reduce_bytes
from hybridpar.config import TrainConfig
from hybridpar.models import build_model, parameter_count
from hybridpar.planner.codecs import OuterSteps

RESULTS = Path(__file__).parent / "results" / "accuracy.csv"
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

    @property
    def key(self) -> tuple[object, ...]:
        """What makes it this run."""
        return (*self.kind, self.fold, self.seed)

    @property
    def kind(self) -> tuple[str, int, int, str, int, str]:
        """What it is a sample of."""
        return self.method, self.every, self.workers, self.codec, self.epochs, self.model


Which = Literal["target", "slow", "grid", "qsr", "models", "lengths"]


def wanted(which: Which) -> Iterator[Run]:
    """The runs of a set, the most telling first: those of a seed and fold begin with the synchronous one."""
    # Seeds, folds, workers, epochs, models; then method, H and codec of what is compared.
    outer = ("mean", 16, "onebit")
    grid = [("mean", every, codec) for every in (64, 16, 4, 1) for codec in ("onebit", "none")][:-1]
    one_fold = (0,)
    sets: dict[str, tuple[Any, ...]] = {
        "target": (SEEDS, range(FOLDS), (2, 4), (EPOCHS,), MODELS[:1], [outer]),
        "grid": (SEEDS[:2], one_fold, (2, 4, 8, 16), (EPOCHS,), MODELS[:1], grid),
        "lengths": (SEEDS[:2], one_fold, (2,), (5, 20), MODELS[:1], [("mean", H, "onebit") for H in (16, 32, 64)]),
        "qsr": (SEEDS[:1], range(FOLDS), (2, 4), (EPOCHS,), MODELS[:1], [("qsr", 4, "none")]),
        "slow": (
            (1,),
            range(FOLDS),
            (2,),
            (20,),
            MODELS[:1],
            [(method, 40, "onebit") for method in ("mean", "streamed")],
        ),
        "models": (
            *((1,), range(2), (2,), (EPOCHS,), MODELS),
            [outer, ("mean", 16, "none"), ("codec", 1, "onebit:decay=0.9")],
        ),
    }
    *where, methods = sets[which]
    for seed, fold, workers, epochs, model in itertools.product(*where):
        for method, every, codec in [(SYNC, 1, "none"), *methods]:
            yield Run(
                method=method,
                every=every,
                workers=workers,
                codec=codec,
                fold=fold,
                seed=seed,
                epochs=epochs,
                model=model,
            )


@dataclass(frozen=True, kw_only=True)
class Options:
    """Train ResNet-18 on digits in an outer loop."""

    sets: tuple[Which, ...] = ("target", "slow", "grid", "qsr", "models", "lengths")
    """What to train, in this order."""
    report: bool = False
    """Print what the rows say, and train nothing."""
    table: bool = False
    """Print the planner's table, and train nothing."""
    most_workers: int = 16
    """Leave out runs of more workers."""
    output: Path = RESULTS
    """The rows."""


def main(options: Options) -> None:
    """Train or report."""
    if options.report:
        report(read_records(Run, options.output))
    elif options.table:
        print(*(f"    {row}," for row in table_of(read_records(Run, options.output))), sep="\n")
    else:
        runs = (run for which in options.sets for run in wanted(which) if run.workers <= options.most_workers)
        train_missing(Run, runs, options.output, train)


def configuration(run: Run) -> TrainConfig:
    """The options of a run."""
    common: dict[str, Any] = {"batch_size": BATCH, "epochs": run.epochs, "seed": run.seed, "plan": "none"}
    if run.method == SYNC:  # one process with as many micro-batches does what the workers do
        return TrainConfig(**common, micro_batches=run.workers)
    if run.method == "codec":
        return TrainConfig(**common, compress=run.codec)
    options = {"mean": "", "qsr": ",qsr=2", "streamed": f",fragments=4,delay={run.every // 8}"}
    sync = f"outer:{run.every}" + options.get(run.method, f",opt={run.method}")
    return TrainConfig(**common, sync=sync, compress=run.codec)


def train(run: Run) -> Run:
    """Train once."""
    trained = train_fold(run.model, configuration(run), run.fold, 1 if run.method == SYNC else run.workers)
    sent = trained.sent / trained.steps
    if run.method == SYNC:
        sent = all_reduce_bytes(4 * parameter_count(build_model(run.model, 10)), run.workers)
    return replace(
        run,
        steps=trained.steps,
        exchanges=trained.exchanges,
        loss=trained.loss,
        accuracy=trained.by_epoch[-1],
        bytes_per_step=round(sent, 1),
        by_epoch=json.dumps(trained.by_epoch),
        seconds=trained.seconds,
    )


def steps_to_target(run: Run) -> float | None:
    """Training steps until the target, on the line through the ends of epochs; None where it was not reached."""
    each = run.steps / run.epochs
    before = 0.0
    for epoch, reached in enumerate(json.loads(run.by_epoch)):
        if reached >= TARGET:
            return each * (epoch + (TARGET - before) / max(reached - before, 1e-9))
        before = reached
    return None


def pairs_of(runs: Sequence[Run]) -> dict[tuple[Any, ...], list[tuple[Run, Run]]]:
    """By kind: runs, each with the synchronous one of its pair."""
    plain = {(run.model, run.workers, run.epochs, run.fold, run.seed): run for run in runs if run.method == SYNC}
    pairs: dict[tuple[Any, ...], list[tuple[Run, Run]]] = defaultdict(list)
    for run in runs:
        base = plain.get((run.model, run.workers, run.epochs, run.fold, run.seed))
        if base is not None:
            pairs[run.kind].append((run, base))
    return pairs


def table_of(runs: Sequence[Run]) -> list[OuterSteps]:
    """What the planner may count on: runs of the plain mean, each over synchronous training of its pair.

    A row rests on at least `LEAST_RUNS`, all of which reached the target and lost at most `MOST_LOST` on average.
    """
    rows = []
    for (method, every, workers, codec, _, model), pairs in sorted(pairs_of(runs).items()):
        if (method, model) != ("mean", MODELS[0]):
            continue
        steps = [(steps_to_target(run), steps_to_target(base)) for run, base in pairs]
        ratios = [taken / base for taken, base in steps if taken is not None and base is not None]
        all_arrived = len(ratios) == sum(base is not None for _, base in steps) > 0
        lost = statistics.fmean(base.accuracy - run.accuracy for run, base in pairs)
        if all_arrived and len(ratios) >= LEAST_RUNS and lost <= MOST_LOST:
            mean = statistics.fmean(ratios)
            high = mean + 2 * statistics.stdev(ratios) / math.sqrt(len(ratios))
            figures = round(lost, 3), round(mean, 3), round(high, 3)
            length = min(run.steps for run, _ in pairs)
            rows.append(OuterSteps(every, workers, codec, length, len(pairs), *figures))
    return rows


def report(runs: Sequence[Run]) -> None:
    """Print a row for each method, H, number of workers, codec and length."""
    titles = ("method", "H", "workers", "codec", "epochs", "model", "runs", "accuracy %", "least", "most", "MB a step")
    rows = []
    for kind, pairs in sorted(pairs_of(runs).items()):
        reached = [run.accuracy for run, _ in pairs]
        least, mean, most = min(reached), statistics.fmean(reached), max(reached)
        sent = statistics.fmean(run.bytes_per_step for run, _ in pairs) / 1e6
        rows.append((*kind, len(pairs), f"{mean:.2f}", f"{least:.2f}", f"{most:.2f}", f"{sent:.3g}"))
    print_markdown(titles, rows)


if __name__ == "__main__":
    run_command(main, Options)
