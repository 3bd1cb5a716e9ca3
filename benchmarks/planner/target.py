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

from benchmarks.pipeline.checks import Check, write_checks
from benchmarks.planner.common import CLASSES
from benchmarks.planner.predicted import Running, in_turns
from benchmarks.rig.network import LOOPBACK
from benchmarks.rig.rank import link, process_group
from benchmarks.sync.methods import Setting, Workplace, make_method
from hybridpar.comm.world import World
from hybridpar.config import TrainConfig
from hybridpar.data import Batch, TestBatches, TrainBatches, load_dataset
from hybridpar.models import seed_everything
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


class _Hooked:
    """DDP, with a hook or without.

    Args:
        name: See `benchmarks.sync.methods`.
        place: Where.
    """

    #: Into how many parts a batch is divided: parts that workers are given, and micro-batches of each.
    micro_batches = 1
    interval = 1

    def __init__(self, name: str, place: Workplace) -> None:
        self.part, self.parts = place.rank, place.ranks
        self._method = make_method(name, place)

    def step(self, batch: Batch) -> None:
        """A step on this worker's part."""
        self._method.step(*batch.micro_batches[0])

    def accuracy(self, test: Iterable[tuple[Tensor, Tensor]]) -> float:
        """Over the test images of all workers; a collective."""
        model = self._method.model
        model.eval()
        right = torch.zeros(2, dtype=torch.float64)
        with torch.no_grad():
            for images, labels in test:
                right += torch.tensor([float((model(images).argmax(1) == labels).sum()), float(len(labels))])
        model.train()
        dist.all_reduce(right)
        return float(right[0] / right[1])

    def close(self) -> None:
        """End what it holds."""
        self._method.close()


class _Planned:
    """A plan, followed by the trainer.

    Args:
        plan: The plan, of all workers.
        place: Where.
    """

    def __init__(self, plan: Plan, place: Workplace) -> None:
        setting = place.setting
        config = TrainConfig(batch_size=setting.batch * place.ranks)
        run = resolve(config, plan.workers or 1, plan, ())
        config = replace(config, sync=sync_of(config, run))
        #: Steps after which it begins anew.
        self.interval = run.sync.outer or 1
        replicas, parts = run.layout.replicas, run.pipeline.micro_batches
        self.part, self.parts, self.micro_batches = run.layout.replica_of(place.rank), replicas, parts
        self._trainer = Trainer(
            setting.build(),
            setting.optimizer,
            nn.CrossEntropyLoss(),
            config,
            world=place.world(run.sync.groups),
            plan=PlannedRun(run),
            example=torch.zeros(config.samples_per_step // (replicas * parts), 3, setting.side, setting.side),
        )

    def step(self, batch: Batch) -> None:
        """See `_Hooked`."""
        self._trainer.step(batch)
        self._trainer.wait()

    def accuracy(self, test: Iterable[tuple[Tensor, Tensor]]) -> float:
        """See `_Hooked`."""
        return self._trainer.evaluate(test).accuracy

    def close(self) -> None:
        """See `_Hooked`."""
        self._trainer.close()


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

    def noted(self, name: str) -> Path:
        """What was chosen on the link of that name."""
        return self.notes / f"plan-{name}.json"

    def made(self, name: str, place: Workplace) -> _Hooked | _Planned:
        """A method of DDP, or by the name of its link a plan."""
        if name in DDP:
            return _Hooked(name, place)
        return _Planned(parse_plan(json.loads(self.noted(name).read_text())["plan"]), place)


def _plan(call: Call) -> None:
    if call.noted(link()).exists():
        return
    world = World.join(lanes=2, timeout=900)
    # Nothing is known of the machine: what is measured for it, and built, is in the seconds.
    cache = call.notes / f"cache-{link()}"
    if call.rank == 0:
        shutil.rmtree(cache, ignore_errors=True)
    os.environ["HYBRIDPAR_CACHE"] = str(cache)
    setting = Setting(rate=RATES[0])
    config = TrainConfig(data="digits", batch_size=setting.batch * call.ranks, fidelity="lossy")
    model = setting.build()
    shape = (3, setting.side, setting.side)
    steps = MOST_EPOCHS * (len(load_dataset(config).train) // config.samples_per_step)

    def planned() -> dict[str, Any]:
        world.barrier()
        began = time.perf_counter()
        found = plan_run(model, config, world, sample_shape=shape, steps=steps, name="resnet18", open_trial=open_trial)
        seconds = time.perf_counter() - began
        return {"plan": json.loads(found.plan.to_json()), "told": found.lines[0], "seconds": seconds}

    noted = planned()
    noted["again"] = planned()["seconds"]
    if call.rank == 0:
        call.noted(link()).write_text(json.dumps(noted))
        print(f"{link()}: {noted['told']}, {noted['seconds']:.1f} s, again {noted['again']:.1f} s", flush=True)
    world.close()


def _train_all(call: Call) -> None:
    steps = call.notes / "steps.json"
    found: dict[str, list[float]] = json.loads(steps.read_text()) if steps.exists() else {}
    told = {one: json.loads(call.noted(one).read_text())["told"] for one in AT_LEAST if call.noted(one).exists()}
    dist.barrier()
    for name in (*call.methods, *told):
        same = next((one for one in told if one in found and told[one] == told.get(name)), None)
        if name in found or same is not None:  # found before, or for the other link
            found[name] = found[same or name]
            continue
        rates = RATES_LOW_RANK if "psgd" in name else RATES
        trained = {rate: _steps_of_seeds(name, rate, call) for rate in (rates[:1] if call.quick else rates)}
        found[name] = trained[min(trained, key=lambda one: statistics.median(trained[one]))]
        if call.rank == 0:
            what = name if name in DDP else f"planned for {name}"
            print(f"{what}: steps to {TARGET:.0%} by rate and seed: {trained}", flush=True)
            steps.write_text(json.dumps(found))
    if call.rank == 0:
        steps.write_text(json.dumps(found))


def _time(call: Call) -> None:
    world = World.join(lanes=2, timeout=900)
    noted, found = json.loads(call.noted(link()).read_text()), json.loads((call.notes / "steps.json").read_text())
    steps = {PLANNED: found[link()], **{name: found[name] for name in call.methods}}
    starts: dict[str, list[float]] = {name: [] for name in steps}
    made = {name: partial(_running, link() if name == PLANNED else name, call, starts[name]) for name in steps}
    times = in_turns(made, world, rounds=3 if call.quick else ROUNDS, seconds=SECONDS)
    world.close()
    if call.rank == 0:
        start = {
            name: max(0.0, statistics.median(own) - STARTS * statistics.median(times[name]) / 1e3)
            for name, own in starts.items()
        }
        write_checks(_rows(steps, times, start, noted), call.output, "target")


def _running(name: str, call: Call, starts: list[float]) -> Running:
    """A method that takes steps on noise, and notes the seconds until the first are done."""
    began, done = time.perf_counter(), itertools.count(1)
    place = Workplace(Setting(rate=RATES[0]), call.rank, call.ranks)
    method = call.made(name, place)
    every = place.setting.batch * call.ranks
    images = random_batch((3, place.setting.side, place.setting.side), every, torch.device("cpu"))
    labels = torch.arange(every) % CLASSES
    own = (
        whole.tensor_split(method.parts)[method.part].tensor_split(method.micro_batches) for whole in (images, labels)
    )
    micro_batches = tuple(zip(*own, strict=True))
    batch = Batch(micro_batches, sum(len(one) for _, one in micro_batches), every)

    def step() -> None:
        method.step(batch)
        if next(done) == STARTS:
            starts.append(time.perf_counter() - began)

    def close() -> None:
        method.close()
        place.close()

    return Running(step, close, method.interval)


def _steps_of_seeds(name: str, rate: float, call: Call) -> list[float]:
    """Steps until the target for each seed; no more are tried once the median cannot be finite. A collective."""
    found: list[float] = []
    while len(found) < call.seeds and 2 * found.count(math.inf) < call.seeds:
        found.append(_steps(name, len(found), rate, call))
    return found + [math.inf] * (call.seeds - len(found))


def _steps(name: str, seed: int, rate: float, call: Call) -> float:
    """Steps until the target, looked at three times an epoch; infinite where it is not reached. A collective."""
    setting, rank, ranks = Setting(rate=rate, seed=seed), call.rank, call.ranks
    data = load_dataset(TrainConfig(data="digits", seed=seed))
    test = TestBatches(data, batch_size=64, rank=rank, workers=ranks)
    place = Workplace(setting, rank, ranks)
    seed_everything(1000 * seed + rank)
    method = call.made(name, place)
    batches = TrainBatches(
        data,
        seed=seed,
        batch_size=setting.batch * ranks,
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
        place.close()


def _rows(
    steps: dict[str, list[float]], times: dict[str, list[float]], starts: dict[str, float], noted: dict[str, Any]
) -> list[Check]:
    seconds = {
        name: [starts[name] + one * statistics.median(times[name]) / 1e3 for one in own] for name, own in steps.items()
    }
    training, planning, again = seconds[PLANNED], noted["seconds"], noted["again"]
    seconds[PLANNED] = [one + planning for one in training]
    setting = f"resnet18, 32x32 images, batch 32, digits to {TARGET:.0%}"

    def row(what: str, values: list[float], extra: str, at_least: float | None = None) -> Check:
        ordered = sorted(values)
        middle = statistics.median(ordered)
        return Check(
            setting=setting,
            link=link(),
            what=what,
            value=middle,
            low=ordered[0],
            high=ordered[-1],
            at_least=at_least,
            extra=extra,
        )

    rows = []
    for name, own in seconds.items():
        extra = f"{statistics.median(steps[name]):g} steps of {statistics.median(times[name]):.1f} ms"
        extra += f" after {starts[name]:.1f} s"
        extra += f"; {noted['told']}; planning {planning:.1f} s, the next time {again:.1f}" if name == PLANNED else ""
        rows.append(row(f"seconds, {name}", own, extra))
    best = min((name for name in seconds if name != PLANNED), key=lambda one: statistics.median(seconds[one]))
    what = "speed-up over the best of DDP and its hooks"

    def gains(planning: float) -> list[float]:
        pairs = zip(seconds[best], training, strict=True)  # where neither got there none was faster
        found = [theirs / (ours + planning) for theirs, ours in pairs if math.isfinite(min(theirs, ours))]
        return found or [math.nan]

    at_least = AT_LEAST.get(link()) if link() != LOOPBACK else None
    rows.append(row(f"{what}, once the machine and the model have been measured", gains(again), best))
    return [*rows, row(what, gains(planning), best, at_least)]
