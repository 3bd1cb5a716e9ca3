"""The measuring process: it holds all methods, so that their epochs can be timed in turn."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.rig.paired import Paired, meet, paired
from benchmarks.rig.rows import Row, append_rows, row
from benchmarks.thesis.ours import OURS, Choice, Ours, choose
from benchmarks.thesis.peers import COMPILED, GRAPHED, ONE_DEVICE, Peer, why_not
from benchmarks.thesis.task import Task, forget
from hybridpar.comm.rendezvous import initialise
from hybridpar.comm.world import World

#: Published speed-ups over "the traditional training method". What that is, on which and how many GPUs, at which batch,
#: the abstract does not say.
PUBLISHED = {"resnet18": 1.47, "resnet34": 1.39, "resnet50": 2.44}
#: Seconds that workers may wait for one that works alone: an epoch of a large model on one device.
PATIENCE = 4 * 3600.0


def measure(
    task: dict[str, Any], seeds: Sequence[int], methods: Sequence[str], device: str, most_stages: int, output: str
) -> None:
    """Train with every seed in this worker; rank 0 writes the rows of each seed as soon as it is done.

    Args:
        task: The fields of a `Task`.
        seeds: Seeds that the table lacks.
        methods: All methods that were asked for.
        device: What rows call the devices; "cpu" for this machine's processor.
        most_stages: Layouts of more stages are not tried.
        output: The table.
    """
    with _open_world(device) as world:
        choice: Choice | None = None
        kind, base = world.device.type, Task(**task)
        skipped = {method: why for method in methods if method != OURS and (why := why_not(method, kind, world.size))}
        for method in [method for method in methods if method in (*GRAPHED, *COMPILED) and method not in skipped]:
            if why := _try(method, base, world):
                skipped[method] = f"failed: {why}"
        for seed in seeds:
            trained = replace(base, seed=seed)
            if OURS in methods and choice is None:
                choice = choose(trained, world, kind == "cuda", most_stages)
            result, accuracies = _train([method for method in methods if method not in skipped], trained, world, choice)
            if world.is_main:
                name = None if device == "cpu" else device
                append_rows(Path(output), make_rows(trained, world, result, accuracies, choice, skipped, name))
                print(f"{trained}, seed {seed}: done", file=sys.stderr, flush=True)


def make_rows(
    task: Task,
    world: World,
    result: Paired,
    accuracies: Mapping[str, float],
    choice: Choice | None,
    skipped: Mapping[str, str],
    device: str | None,
) -> list[Row]:
    """The rows of one seed: every method over one device, and hybridpar over each other method."""
    rows = []
    names = list(result.milliseconds)
    over_peers = [(OURS, name) for name in names if name not in (OURS, ONE_DEVICE)] if OURS in names else []
    steps = {name: tuple(time / task.steps for time in times) for name, times in result.milliseconds.items()}
    for method, baseline in [*((name, ONE_DEVICE) for name in names), *over_peers]:
        published = PUBLISHED.get(task.model) if method == OURS else None
        is_promised = baseline == ONE_DEVICE and published is not None and world.device.type == "cuda"
        extra: dict[str, Any] = {
            "model": task.model,
            "data": task.data,
            "seed": task.seed,
            "epochs": task.epochs,
            "steps_per_epoch": task.steps,
            "epoch_s": round(result.median_ms(method) / 1e3, 4),
            "accuracy": round(accuracies[method], 5),
            "speedup": round(result.ratio(baseline, method).median, 4),
            "published_speedup": published,
            "skipped": dict(skipped),
            "cuda": torch.version.cuda if world.device.type == "cuda" else None,
            "transport": world.transport,
        }
        rows.append(
            row(
                replace(result, milliseconds=steps),
                method,
                baseline,
                claim="thesis",
                setting=str(task),
                link="none" if world.size == 1 else "loopback",
                ranks=world.size,
                target=1 / published if is_promised and published else None,
                device=device,
                extra=extra | (choice.facts if method == OURS and choice is not None else {}),
            )
        )
    return rows


def _train(methods: Sequence[str], task: Task, world: World, choice: Choice | None) -> tuple[Paired, dict[str, float]]:
    """Train all methods, an epoch of each in turn; their times, and their accuracies on rank 0.

    The first epoch finds shapes, compiles and captures; it trains, and is not timed. An epoch cannot be taken again, so
    busy ones count; rows then say `loaded`.
    """
    made: dict[str, Peer | Ours] = {}
    try:
        for method in methods:
            if method == OURS:
                assert choice is not None
                made[method] = Ours(task, world, choice.layout, choice.plan)
            else:
                made[method] = Peer(method, task, world)
        epochs = {name: partial(_next_epoch, trained.epoch, count()) for name, trained in made.items()}
        result = paired(epochs, task.epochs - 1, warmup=1, seed=task.seed, keep_busy=True)
        accuracies = {}
        for name, trained in made.items():
            meet()
            accuracies[name] = trained.accuracy()
        meet()
        return result, accuracies
    finally:
        for trained in made.values():
            trained.close()
        made.clear()
        forget(world.device)


def _next_epoch(epoch: Callable[[int], object], numbers: Iterator[int]) -> None:
    epoch(next(numbers))


def _try(method: str, task: Task, world: World) -> str:
    """Why a method does not run here, the same on all workers; empty where it does.

    Whatever torch raises while it compiles or captures is a reason, so everything is caught.
    """
    why = ""
    try:
        peer = Peer(method, task, world)
        peer.epoch(0, 1)
        peer.close()
    except Exception as error:
        why = f"{type(error).__name__}: {error}".splitlines()[0]
    forget(world.device)
    return next((str(reason) for reason in world.gather(why) if reason), "")


@contextmanager
def _open_world(device: str) -> Iterator[World]:
    """The workers, each with a device of its own."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    mine = torch.device("cpu") if device == "cpu" else torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    if mine.type == "cuda":
        torch.cuda.set_device(mine)
    if int(os.environ["WORLD_SIZE"]) > 1:
        # Before hybridpar's world, whose own groups keep their own, short time-out.
        initialise(mine, PATIENCE)
    world = World.join(device=mine)
    try:
        yield world
    finally:
        world.close()
        if dist.is_initialized():
            # Without it, gloo's threads are still alive at exit and abort the process now and then.
            dist.destroy_process_group()
