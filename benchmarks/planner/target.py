"""Measures the time to a target accuracy, planning included, against DDP with the best of its hooks.

ResNet-18 on digits, two workers, with weights, order and augmentation by seed. How many steps a method takes to 97 % of
the test images does not depend on the link, so that is found once per seed, on the loopback; how long a step takes on
the link is measured in turns, each method alone in its processes. The time to the target is the one times the other,
and what the method takes before its third step over two such steps: DDP sends the weights, and PowerSGD begins with two
steps in full precision. For the planner's plan the seconds come on top that `hybridpar train` takes to measure and to
search on a machine of which nothing is known; a row beside that says what it is the next time. Each method has the
learning rate of a grid at which it needs the fewest steps. An outer loop is timed by whole intervals.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import shutil
import statistics
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.planner.turns import Running, in_turns
from benchmarks.rig.checks import Check, check_of, write_checks
from benchmarks.rig.rank import link, process_group
from benchmarks.rig.task import CLASSES, Setting
from benchmarks.sync.methods import Job, make_method
from hybridpar.comm.world import World
from hybridpar.config import TrainConfig
from hybridpar.data import Batch, TestBatches, TrainBatches, load_dataset
from hybridpar.plan import Plan, parse_plan
from hybridpar.planner.planned_run import PlannedRun, plan_run
from hybridpar.planner.resolve import resolve
from hybridpar.planner.trials import random_batch
from hybridpar.run.part import sync_of
from hybridpar.train.trainer import Trainer, open_trial

TARGET = 0.97
#: Learning rates, and those of PowerSGD's hooks, which get to the target at none of the larger ones.
RATES, RATES_LOW_RANK = (0.005, 0.01), (0.0025, 0.005)
PLANNED = "planned"
#: DDP as it is, and with torch's hooks.
DDP = ("ddp", "ddp-fp16", "ddp-psgd1", "ddp-psgd2", "ddp-psgd4")
#: By which factor the planner's plan is to be faster than the best of them.
AT_LEAST = {"1gbit": 1.8, "100mbit": 2.0, "10mbit": 5.0}
#: Links on which a step in full precision takes half a minute, and the methods that are timed there.
SLOW, AT_SLOW = ("10mbit",), ("ddp-psgd1", "ddp-psgd4")
#: Steps that belong to the start of a method.
STARTS = 2
MOST_EPOCHS, CHECKS_PER_EPOCH = 8, 3
#: Steps of a method in each of its turns, and seconds after which no new round of turns begins.
ROUNDS, SECONDS = 7, 30.0


#: A rank's batch is half of it; the rate and the seed change.
SETTING = Setting("resnet18", 32, 16, RATES[0])


class _Hooked:
    """DDP, with a hook or without; see `benchmarks.sync.methods` for its name."""

    #: Into how many parts a batch is divided: parts that workers are given, and micro-batches of each.
    micro_batches = 1
    interval = 1

    def __init__(self, name: str, job: Job) -> None:
        self.part, self.parts = job.rank, job.ranks
        self._method = make_method(name, job)
        self.close = self._method.close

    def step(self, batch: Batch) -> None:
        """A step on this worker's part."""
        self._method.step(*batch.micro_batches[0])

    def accuracy(self, test: Iterable[tuple[Tensor, Tensor]]) -> float:
        """Over the test images of all workers; a collective."""
        model = self._method.model
        model.eval()
        with torch.no_grad():
            guesses = [(model(images).argmax(1) == labels).double() for images, labels in test]
        model.train()
        right = torch.cat(guesses)
        counts = torch.stack([right.sum(), torch.tensor(float(len(right)), dtype=torch.float64)])
        dist.all_reduce(counts)
        return float(counts[0] / counts[1])


class _Planned:
    """A plan of all workers, followed by the trainer."""

    def __init__(self, plan: Plan, job: Job) -> None:
        setting = job.setting
        config = TrainConfig(batch_size=setting.batch * job.ranks)
        run = resolve(config, plan.workers or 1, plan, ())
        config = replace(config, sync=sync_of(config, run))
        #: Steps after which it begins anew.
        self.interval = run.sync.outer or 1
        self.part, self.parts = run.layout.replica_of(job.rank), run.layout.replicas
        self.micro_batches = run.pipeline.micro_batches
        self._trainer = Trainer(
            setting.build(),
            setting.optimizer,
            nn.CrossEntropyLoss(),
            config,
            world=job.world(run.sync.groups),
            plan=PlannedRun(run),
            example=setting.noise()[0][: run.micro_batch_samples(config.samples_per_step)],
        )
        self.close = self._trainer.close

    def step(self, batch: Batch) -> None:
        """See `_Hooked`."""
        self._trainer.step(batch)
        self._trainer.wait()

    def accuracy(self, test: Iterable[tuple[Tensor, Tensor]]) -> float:
        """See `_Hooked`."""
        return self._trainer.evaluate(test).accuracy


def measure(phase: str, quick: bool, seeds: int, notes: str, output: str | None) -> None:
    """One of three phases; a collective.

    Args:
        phase: `plan`, on a link: measure and search, and note what was chosen. `train`, on the loopback: find out how
            many steps all methods take, those that were noted among them. `time`, on a link: measure steps, and write
            the rows.
        quick: One epoch, one rate, few methods.
        seeds: Trainings of each method.
        notes: Folder in which phases leave what the next ones need.
        output: The table.
    """
    phases = {"plan": _plan, "train": _train_all, "time": _time}
    with process_group(timeout=900) as (rank, ranks):
        phases[phase](Call(quick, seeds, Path(notes), output, rank, ranks))


@dataclass(frozen=True)
class Call:
    """What a phase was called with, and where it runs; see `measure`."""

    quick: bool
    seeds: int
    notes: Path
    output: str | None
    rank: int
    ranks: int

    @property
    def methods(self) -> tuple[str, ...]:
        """Those of DDP."""
        return DDP[:2] if self.quick else AT_SLOW if link() in SLOW else DDP

    @property
    def steps_file(self) -> Path:
        """Steps to the target by method and seed."""
        return self.notes / "steps.json"

    def plan_file(self, name: str) -> Path:
        """What was chosen on the link of that name."""
        return self.notes / f"plan-{name}.json"

    def made(self, name: str, job: Job) -> _Hooked | _Planned:
        """A method of DDP, or by the name of its link a plan."""
        if name in DDP:
            return _Hooked(name, job)
        return _Planned(parse_plan(json.loads(self.plan_file(name).read_text())["plan"]), job)


def _plan(call: Call) -> None:
    file = call.plan_file(link())
    if file.exists():
        return
    world = World.join(lanes=2, timeout=900)
    # Nothing is known of the machine: what is measured for it, and built, is in the seconds.
    cache = call.notes / f"cache-{link()}"
    if call.rank == 0:
        shutil.rmtree(cache, ignore_errors=True)
    os.environ["HYBRIDPAR_CACHE"] = str(cache)
    config = TrainConfig(data="digits", batch_size=SETTING.batch * call.ranks, fidelity="lossy")
    model, shape = SETTING.build(), (3, SETTING.side, SETTING.side)
    steps = MOST_EPOCHS * (len(load_dataset(config).train) // config.samples_per_step)
    notes: dict[str, Any] = {}
    for key in ("seconds", "again"):
        world.barrier()
        began = time.perf_counter()
        run = plan_run(model, config, world, sample_shape=shape, steps=steps, name="resnet18", open_trial=open_trial)
        notes[key] = time.perf_counter() - began
        notes = {"plan": json.loads(run.plan.to_json()), "line": run.lines[0]} | notes
    if call.rank == 0:
        file.write_text(json.dumps(notes))
        print(f"{link()}: {notes['line']}, {notes['seconds']:.1f} s, again {notes['again']:.1f} s", flush=True)
    world.close()


def _train_all(call: Call) -> None:
    steps_file = call.steps_file
    steps: dict[str, list[float]] = json.loads(steps_file.read_text()) if steps_file.exists() else {}
    files = {name: call.plan_file(name) for name in AT_LEAST}
    lines = {name: json.loads(file.read_text())["line"] for name, file in files.items() if file.exists()}
    dist.barrier()
    for name in (*call.methods, *lines):
        same = next((other for other in lines if other in steps and lines[other] == lines.get(name)), name)
        if same in steps:  # trained before, or for another link
            steps[name] = steps[same]
            continue
        rates = RATES_LOW_RANK if "psgd" in name else RATES
        trained = {rate: _steps_of_seeds(name, rate, call) for rate in (rates[:1] if call.quick else rates)}
        steps[name] = trained[min(trained, key=lambda rate: statistics.median(trained[rate]))]
        if call.rank == 0:
            what = name if name in DDP else f"planned for {name}"
            print(f"{what}: steps to {TARGET:.0%} by rate and seed: {trained}", flush=True)
            steps_file.write_text(json.dumps(steps))
    if call.rank == 0:
        steps_file.write_text(json.dumps(steps))


def _time(call: Call) -> None:
    world = World.join(lanes=2, timeout=900)
    notes, known = json.loads(call.plan_file(link()).read_text()), json.loads(call.steps_file.read_text())
    steps = {PLANNED: known[link()], **{name: known[name] for name in call.methods}}
    starts: dict[str, list[float]] = {name: [] for name in steps}
    made = {name: partial(_running, link() if name == PLANNED else name, call, starts[name]) for name in steps}
    times = in_turns(made, world, rounds=3 if call.quick else ROUNDS, seconds=SECONDS)
    world.close()
    if call.rank == 0:
        step_ms = {name: statistics.median(visits) for name, visits in times.items()}
        start = {name: max(0.0, statistics.median(starts[name]) - STARTS * step_ms[name] / 1e3) for name in steps}
        write_checks(_rows(steps, step_ms, start, notes), call.output, "target")


def _running(name: str, call: Call, starts: list[float]) -> Running:
    """A method that takes steps on noise, and notes the seconds until the first are done."""
    began, done = time.perf_counter(), itertools.count(1)
    job = Job(SETTING, call.rank, call.ranks)
    method = call.made(name, job)
    every = SETTING.batch * call.ranks
    images = random_batch((3, SETTING.side, SETTING.side), every, torch.device("cpu"))
    parts = (
        tensor.tensor_split(method.parts)[method.part].tensor_split(method.micro_batches)
        for tensor in (images, torch.arange(every) % CLASSES)
    )
    micro_batches = tuple(zip(*parts, strict=True))
    batch = Batch(micro_batches, sum(len(labels) for _, labels in micro_batches), every)

    def step() -> None:
        method.step(batch)
        if next(done) == STARTS:
            starts.append(time.perf_counter() - began)

    def close() -> None:
        method.close()
        job.close()

    return Running(step, close, method.interval)


def _steps_of_seeds(name: str, rate: float, call: Call) -> list[float]:
    """Steps until the target for each seed; no more are tried once the median cannot be finite. A collective."""
    steps: list[float] = []
    while len(steps) < call.seeds and 2 * steps.count(math.inf) < call.seeds:
        steps.append(_steps(name, len(steps), rate, call))
    return steps + [math.inf] * (call.seeds - len(steps))


def _steps(name: str, seed: int, rate: float, call: Call) -> float:
    """Steps until the target, looked at three times an epoch; infinite where it is not reached. A collective."""
    data = load_dataset(TrainConfig(data="digits", seed=seed))
    test = TestBatches(data, batch_size=64, rank=call.rank, workers=call.ranks)
    job = Job(replace(SETTING, rate=rate, seed=seed), call.rank, call.ranks)
    torch.manual_seed(1000 * seed + call.rank)
    method = call.made(name, job)
    batches = TrainBatches(
        data,
        seed=seed,
        batch_size=SETTING.batch * call.ranks,
        rank=method.part,
        workers=method.parts,
        micro_batches=method.micro_batches,
    )
    every, done = max(1, batches.steps_per_epoch // CHECKS_PER_EPOCH), 0
    try:
        for epoch in range(1 if call.quick else MOST_EPOCHS):
            for batch in batches.epoch(epoch):
                method.step(batch)
                done += 1
                if done % every == 0 and method.accuracy(test) >= TARGET:
                    return float(done)
        return math.inf
    finally:
        method.close()
        job.close()


def _rows(
    steps: dict[str, list[float]], step_ms: dict[str, float], starts: dict[str, float], notes: dict[str, Any]
) -> list[Check]:
    setting = f"resnet18, 32x32 images, batch 32, digits to {TARGET:.0%}"
    training = {name: [starts[name] + count * step_ms[name] / 1e3 for count in steps[name]] for name in steps}
    rows = []
    for name, seconds in training.items():
        planning = notes["seconds"] if name == PLANNED else 0.0
        extra = f"{statistics.median(steps[name]):g} steps of {step_ms[name]:.1f} ms after {starts[name]:.1f} s"
        if name == PLANNED:
            extra += f"; {notes['line']}; planning {planning:.1f} s, the next time {notes['again']:.1f}"
        totals = [planning + value for value in seconds]
        rows.append(check_of(setting, link(), f"seconds, {name}", totals, extra=extra))
    best = min((name for name in training if name != PLANNED), key=lambda name: statistics.median(training[name]))
    what = "speed-up over the best of DDP and its hooks"
    for words, planning, at_least in (
        (f"{what}, once the machine and the model have been measured", notes["again"], None),
        (what, notes["seconds"], AT_LEAST.get(link())),
    ):
        pairs = zip(training[best], training[PLANNED], strict=True)  # where neither got there none was faster
        gains = [theirs / (ours + planning) for theirs, ours in pairs if math.isfinite(min(theirs, ours))]
        rows.append(check_of(setting, link(), words, gains or [math.nan], at_least=at_least, extra=best))
    return rows
