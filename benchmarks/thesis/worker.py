"""The measuring process: it holds all methods, so that their epochs can be timed in turn."""

from __future__ import annotations

import dataclasses
import datetime
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from benchmarks.rig.paired import Paired
from benchmarks.rig.rows import Row, row
from benchmarks.rig.table import append_rows, check_csv
from benchmarks.thesis import cells
from benchmarks.thesis.cells import Job
from benchmarks.thesis.ours import Choice, Ours, choose, layouts
from benchmarks.thesis.peers import COMPILED, GRAPHED, Peer
from benchmarks.thesis.rounds import Meeting, train_in_turn
from benchmarks.thesis.task import Task, forget
from hybridpar.comm.rendezvous import initialise
from hybridpar.comm.world import World
from hybridpar.config import DataConfig
from hybridpar.data import ImageData, load_dataset

#: Seconds that workers may wait for one that works alone: an epoch of a large model on one device.
PATIENCE = 4 * 3600.0

#: What may fail for reasons of its own, and is then left out with its reason, so that the others are still measured.
FRAGILE = (*GRAPHED, *COMPILED)


class Method(Protocol):
    """What `Peer` and `Ours` are to this file."""

    def epoch(self, number: int) -> None:
        """Train for one epoch, to the end of its last step."""

    def accuracy(self) -> float:
        """Share of the test images that are classified rightly, on rank 0."""

    def close(self) -> None:
        """Release everything."""


def work(job: Job) -> None:
    """Measure what a job misses, in this worker; rank 0 writes the rows of each seed as soon as it is done."""
    with _place(job.place.device) as world:
        meeting = Meeting()
        setting = job.setting
        data = load_dataset(
            DataConfig(data=setting.data, data_root=Path(setting.data_root), image_size=setting.image_size)
        )
        tried: dict[str, str] = {}
        choice: Choice | None = None
        for seed, missing in job.missing:
            task = _task(job, data, seed, world)
            for method in missing:
                if method in FRAGILE and method not in tried:
                    tried[method] = _try(method, task, world, meeting)
                    if tried[method]:
                        _say(world, f"{method} failed: {tried[method]}")
            failed = {method: reason for method, reason in tried.items() if reason}
            wanted = [method for method in missing if method not in failed]
            if not wanted:
                continue
            needed = [method for method in cells.needed(wanted, job.methods, job.place) if method not in failed]
            if cells.OURS in needed and choice is None:
                graphs = job.cuda_graph and world.device.type == "cuda"
                candidates = layouts(world.size, setting.batch, graphs=graphs, most_stages=job.most_stages)
                choice = choose(task, world, candidates, job.probe_steps, meeting)
                _say(world, f"{setting.model} on {setting.data}: {choice.layout}")
            result, accuracies = _train(needed, task, world, meeting, choice)
            if world.is_main:
                _, skipped = cells.runnable(job.methods, job.place)
                reasons = skipped | {method: f"failed: {reason}" for method, reason in failed.items()}
                rows = make_rows(job, task, world, wanted, result, accuracies, choice, reasons)
                append_rows(Path(job.output), rows)
                check_csv(Path(job.output))


def make_rows(
    job: Job,
    task: Task,
    world: World,
    wanted: Sequence[str],
    result: Paired,
    accuracies: Mapping[str, float],
    choice: Choice | None,
    skipped: Mapping[str, str],
) -> list[Row]:
    """The rows of one seed.

    Args:
        job: What is measured.
        task: With which seed.
        world: The workers.
        wanted: Methods that need rows; others ran as baselines only.
        result: Milliseconds per epoch.
        accuracies: By method.
        choice: The layout of ours.
        skipped: Why other methods have no rows.
    """
    setting, place = job.setting, job.place
    rows = []
    for method, baseline in cells.comparisons(list(result.milliseconds), wanted):
        speedup = result.ratio(baseline, method).median
        extra: dict[str, Any] = {
            "model": setting.model,
            "data": setting.data,
            "seed": task.seed,
            "epochs": setting.epochs,
            "steps_per_epoch": task.steps,
            "epoch_s": round(result.median_ms(method) / 1e3, 4),
            "accuracy": round(accuracies[method], 5),
            "speedup": round(speedup, 4),
            "published_speedup": cells.PUBLISHED.get(setting.model) if method == cells.OURS else None,
            "skipped": dict(skipped),
            "code": place.code,
            "cuda": torch.version.cuda if place.device == "cuda" else None,
            "transport": world.transport,
        }
        if method == cells.OURS and choice is not None:
            extra |= choice.facts()
        entry = row(
            cells.per_step(result, task.steps),
            method,
            baseline,
            claim=cells.CLAIM,
            setting=str(setting),
            link="none" if place.workers == 1 else "loopback",
            ranks=place.workers,
            target=cells.target_of(setting.model, method, baseline, place.device),
            extra=extra,
        )
        rows.append(dataclasses.replace(entry, device=place.name, commit=place.commit))
    return rows


def _train(
    methods: Sequence[str], task: Task, world: World, meeting: Meeting, choice: Choice | None
) -> tuple[Paired, dict[str, float]]:
    """Train all methods in turn; their times, and their accuracies on rank 0."""
    made: dict[str, Method] = {}
    try:
        for method in methods:
            made[method] = _make(method, task, world, choice)
        epochs: dict[str, Callable[[int], object]] = {name: method.epoch for name, method in made.items()}
        title = f"{task.setting.model} on {task.setting.data}, seed {task.seed}"
        result = train_in_turn(
            epochs,
            task.setting.epochs,
            cells.WARMUP_EPOCHS,
            meeting,
            seed=task.seed,
            on_round=lambda done: _say(world, f"{title}: epoch {done} of {task.setting.epochs}"),
        )
        accuracies = {}
        for name, one in made.items():
            meeting.meet()
            accuracies[name] = one.accuracy()
        meeting.meet()
        return result, accuracies
    finally:
        for one in made.values():
            one.close()
        made.clear()
        forget(task.device)


def _make(method: str, task: Task, world: World, choice: Choice | None) -> Method:
    if method != cells.OURS:
        return Peer(method, task, world)
    assert choice is not None
    return Ours(task, world, choice.layout, choice.plan)


def _try(method: str, task: Task, world: World, meeting: Meeting) -> str:
    """Why a method does not run here, the same on all workers; empty where it does.

    Whatever torch raises while it compiles or captures is a reason, so everything is caught.
    """
    problem: BaseException | None = None
    try:
        peer = Peer(method, dataclasses.replace(task, steps=1), world)
        peer.epoch(0)
        peer.close()
    except Exception as error:
        problem = error
    forget(task.device)
    mine = "" if problem is None else (f"{type(problem).__name__}: {problem}".splitlines() or ["?"])[0]
    reasons: list[Any] = [mine]
    if meeting.together:
        reasons = [None] * world.size
        dist.all_gather_object(reasons, mine)
    return next((str(reason) for reason in reasons if reason), "")


def _task(job: Job, data: ImageData, seed: int, world: World) -> Task:
    setting = job.setting
    parts = max(layout.replicas * layout.micro_batches for layout in layouts(world.size, setting.batch))
    return Task(
        setting=setting,
        data=data,
        seed=seed,
        steps=cells.whole_steps(len(data.train), setting.batch, max(parts, world.size), setting.most_steps),
        workers=world.size,
        device=world.device,
    )


@contextmanager
def _place(kind: str) -> Iterator[World]:
    """This process's place among the workers."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if kind == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if int(os.environ["WORLD_SIZE"]) > 1:
        # Before hybridpar's world, whose own groups keep their own, short time-out.
        initialise(device, PATIENCE)
    world = World.join(device=device)
    try:
        yield world
    finally:
        world.close()
        if dist.is_initialized():
            # Without it, gloo's threads are still alive at exit and abort the process now and then.
            dist.destroy_process_group()


def _say(world: World, text: str) -> None:
    if world.is_main:
        print(f"{datetime.datetime.now():%H:%M:%S}  {text}", file=sys.stderr, flush=True)
