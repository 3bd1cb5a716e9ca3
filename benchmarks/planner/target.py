"""Why: what counts in the end is the time to an accuracy, planning included, against DDP with the best of its hooks.

ResNet-18 on digits, two workers, with weights, order and augmentation by seed. How many steps a method takes to 97 % of
the test images does not depend on the link, so that is found once per seed, on the loopback; how long a step takes on
the link is measured in turns. The time to the target is the one times the other, and for the planner's plan the
seconds of measuring and searching come on top. Each method has the learning rate of a grid at which it needs the fewest
steps.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.pipeline.checks import Check, write_checks
from benchmarks.planner.common import Setting as Planned
from benchmarks.planner.common import cluster_of, planner_inputs
from benchmarks.rig.network import LOOPBACK
from benchmarks.rig.rank import link, process_group
from benchmarks.sync.methods import Method, Setting, Workplace, make_method
from hybridpar.config import TrainConfig
from hybridpar.data import TestBatches, TrainBatches, load_dataset
from hybridpar.models import seed_everything
from hybridpar.pipeline.world import World
from hybridpar.plan_trials import FIRST_STEPS, config_of_plan, time_plans
from hybridpar.planner.explain import describe
from hybridpar.planner.fixed import Fixed
from hybridpar.planner.inputs import PlannerInputs
from hybridpar.planner.record import plan_of
from hybridpar.planner.search import find_plan
from hybridpar.trainer import Trainer

TARGET = 0.97
RATES = (0.005, 0.01)
PLANNED = "planned"
#: DDP as it is, and with torch's hooks.
DDP = ("ddp", "ddp-fp16", "ddp-psgd1", "ddp-psgd2", "ddp-psgd4")
#: By which factor the planner's plan is to be faster than the best of them.
AT_LEAST = {"1gbit": 1.8, "100mbit": 2.0}
MOST_EPOCHS, CHECKS_PER_EPOCH, ROUNDS = 8, 3, 7


class _Planned(Method):
    """The plan of `--fidelity lossy`, followed by the trainer."""

    def __init__(self, place: Workplace, config: TrainConfig) -> None:
        setting = place.setting
        world = place.world(config.sum_groups, shared_memory=config.shares_memory)
        self.model = setting.build()
        self._trainer = Trainer(self.model, setting.optimizer, nn.CrossEntropyLoss(), config, world=world)

    def step(self, images: Tensor, labels: Tensor) -> float:
        """See `Method`."""
        return self._trainer.step((images, labels)).loss

    def close(self) -> None:
        """See `Method`."""
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
        return DDP[:2] if self.quick else DDP

    def planned(self) -> dict[str, Any]:
        """What was chosen on this link."""
        noted: dict[str, Any] = json.loads((self.notes / f"plan-{link()}.json").read_text())
        return noted


def _plan(call: Call) -> None:
    world = World.join(lanes=2, timeout=900)
    began = time.perf_counter()
    inputs, _ = planner_inputs(Planned("resnet18", 32, 16 * call.ranks), world, cluster_of(world), "lossy")
    noted = world.from_main(lambda: _decide(inputs))
    noted["seconds"] = time.perf_counter() - began
    if call.rank == 0:
        (call.notes / f"plan-{link()}.json").write_text(json.dumps(noted))
        print(f"{link()}: {noted}", flush=True)
    world.close()


def _decide(inputs: PlannerInputs) -> dict[str, Any]:
    # A pipeline or one device is the right answer somewhere, but this table is about data parallelism.
    answer = find_plan(replace(inputs, fixed=Fixed(stages=1, replicas=inputs.workers)))
    chosen = answer.chosen
    config = config_of_plan(plan_of(answer, chosen), TrainConfig())
    options = {name: getattr(config, name) for name in ("compress", "memory_format", "kernels")}
    return {"options": options, "told": describe(chosen.candidate, answer)}


def _train_all(call: Call) -> None:
    found: dict[str, list[float]] = {}
    wanted = {name: (name, TrainConfig()) for name in call.methods}
    for path in sorted(call.notes.glob("plan-*.json")):
        options = json.loads(path.read_text())["options"]
        wanted[_key(options)] = (PLANNED, TrainConfig(**options))
    for key, (name, config) in wanted.items():
        trained = {
            rate: [_steps(name, config, seed, rate, call) for seed in range(call.seeds)]
            for rate in (RATES[:1] if call.quick else RATES)
        }
        found[key] = trained[min(trained, key=lambda one: statistics.median(trained[one]))]
        if call.rank == 0:
            print(f"{key}: steps to {TARGET:.0%} by rate and seed: {trained}", flush=True)
    if call.rank == 0:
        (call.notes / "steps.json").write_text(json.dumps(found))


def _key(options: dict[str, Any]) -> str:
    return f"{PLANNED} {json.dumps(options, sort_keys=True)}"


def _time(call: Call) -> None:
    world = World.join(lanes=2, timeout=900)
    noted, steps = call.planned(), json.loads((call.notes / "steps.json").read_text())
    steps = {PLANNED: steps[_key(noted["options"])], **{name: steps[name] for name in call.methods}}
    config = TrainConfig(**noted["options"])
    place = Workplace(Setting(rate=RATES[0]), call.rank, call.ranks)
    methods = {name: _made(name, place, config) for name in steps}
    batch = place.setting.noise(call.rank)
    runs = {name: (lambda method=method: method.step(*batch)) for name, method in methods.items()}
    for run in runs.values():
        for _ in range(FIRST_STEPS):
            run()
    times = time_plans(runs, world, rounds=3 if call.quick else ROUNDS)
    for method in methods.values():
        method.close()
    place.close()
    world.close()
    if call.rank == 0:
        write_checks(_rows(steps, times, noted["seconds"], noted["told"]), call.output, "target")


def _made(name: str, place: Workplace, config: TrainConfig) -> Method:
    return _Planned(place, config) if name == PLANNED else make_method(name, place)


def _steps(name: str, config: TrainConfig, seed: int, rate: float, call: Call) -> float:
    """Steps until the target, looked at three times an epoch; infinite where it is not reached. A collective."""
    setting, rank, ranks = Setting(rate=rate, seed=seed), call.rank, call.ranks
    data = load_dataset(TrainConfig(data="digits", seed=seed))
    batches = TrainBatches(data, seed=seed, batch_size=setting.batch * ranks, rank=rank, workers=ranks, micro_batches=1)
    test = TestBatches(data, batch_size=64, rank=rank, workers=ranks)
    place = Workplace(setting, rank, ranks)
    seed_everything(1000 * seed + rank)
    method = _made(name, place, config)
    every, done = max(1, batches.steps_per_epoch // CHECKS_PER_EPOCH), 0
    try:
        for epoch in range(1 if call.quick else MOST_EPOCHS):
            for batch in batches.epoch(epoch):
                method.step(*batch.micro_batches[0])
                done += 1
                if done % every == 0 and _accuracy(method.model, test) >= TARGET:
                    return float(done)
        return math.inf
    finally:
        method.close()
        place.close()


@torch.no_grad()
def _accuracy(model: nn.Module, test: TestBatches) -> float:
    """Over the test images of all workers; a collective."""
    model.eval()
    right = torch.zeros(2, dtype=torch.float64)
    for images, labels in test:
        right += torch.tensor([float((model(images).argmax(1) == labels).sum()), float(len(labels))])
    model.train()
    dist.all_reduce(right)
    return float(right[0] / right[1])


def _rows(steps: dict[str, list[float]], times: dict[str, list[float]], planning: float, told: str) -> list[Check]:
    seconds = {name: [one * statistics.median(times[name]) / 1e3 for one in own] for name, own in steps.items()}
    seconds[PLANNED] = [one + planning for one in seconds[PLANNED]]
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
        extra += f"; {told}; planning {planning:.1f} s" if name == PLANNED else ""
        rows.append(row(f"seconds, {name}", own, extra))
    best = min((name for name in seconds if name != PLANNED), key=lambda one: statistics.median(seconds[one]))
    gains = [theirs / ours for theirs, ours in zip(seconds[best], seconds[PLANNED], strict=True)]
    at_least = AT_LEAST.get(link()) if link() != LOOPBACK else None
    return [*rows, row("speed-up over the best of DDP and its hooks", gains, best, at_least)]
