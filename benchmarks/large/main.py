"""Trains a model that fits no worker: what four workers hold of it, beside what one process needs.

`python -m benchmarks.large.main` trains a network of few wide layers, and one of many narrow ones, in one process, then
as four stages on four workers, each under a limit of 0.35 of the memory that the one process took (`RLIMIT_DATA`, over
what imports alone take). The pipeline trains, saves, resumes in new processes, evaluates, and its checkpoint is loaded
by one plain `torch.load`. Losses must be equal. `--plan` cuts a network of 1 B parameters for eight workers, as
`hybridpar plan` does, and has the memory that this takes. Peaks are resident memory over that after all imports.
`--use` evaluates, predicts with and exports a network of 1 GB of weights, and has the private memory that each command
took at most (`RssAnon`, looked at every 2 ms); pages of a file, which the system may drop, are not in it.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import importlib
import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import nn

from hybridpar import TrainConfig
from hybridpar.comm.world import World
from hybridpar.commands.plan.partition import run_plan
from hybridpar.commands.plan.request import PlanRequest
from hybridpar.models import model_fingerprint
from hybridpar.models.deferred import DeferredModel, imagined, places
from hybridpar.train.checkpoint import CheckpointData, save_checkpoint
from hybridpar.train.trainer import Trainer

#: Width and number of its square layers: 255 MB in each.
SHAPES = ((2304, 12), (1152, 48))

#: Width and number of the layers of a network that is only planned, and for how many workers.
PLANNED, PLANNED_FOR = (4224, 57), 8

#: Width and number of the layers of a network that is only used.
USED = 3072, 28

#: Samples of a micro-batch, micro-batches of a step, steps of each half.
SAMPLES, MICRO_BATCHES, STEPS = 16, 2, 1

#: Formats that it is exported in, and names of files.
EXPORTED = ("safetensors", "net.safetensors"), ("torch-export", "net.pt2")

#: Part of what one process needs that a worker may take.
CAP = 0.35


def build(width: int, count: int) -> nn.Module:
    """The model: linear layers.

    Args:
        width: Of each.
        count: How many.
    """
    layers: list[nn.Module] = [nn.Flatten()]
    for _ in range(count):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, 10))


def billion() -> nn.Module:
    """The network that is only planned."""
    return build(*PLANNED)


def used(num_classes: int = 10) -> nn.Module:
    """The network that is only used, for images of 32x32."""
    return build(*USED)


def tiny(num_classes: int = 10) -> nn.Module:
    """One that shows what a command takes without weights."""
    return build(USED[0], 0)


def batch(width: int, step: int, samples: int = SAMPLES * MICRO_BATCHES) -> tuple[torch.Tensor, torch.Tensor]:
    """Random images and labels of a step.

    Args:
        width: Values of an image.
        step: Number of the step.
        samples: How many.
    """
    generator = torch.Generator().manual_seed(step)
    images = torch.randn(samples, 3, width // 96, 32, generator=generator)
    return images, torch.randint(0, 10, (samples,), generator=generator)


def status(key: str, process: int | str = "self") -> int:
    """Bytes that the kernel counts for a process.

    Args:
        key: Such as `VmHWM`.
        process: Its number; default: this one.
    """
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{key}:"))


def use() -> list[dict[str, Any]]:
    """Use a checkpoint in every way, and return what each took."""
    small = ["--model", "benchmarks.large.main:tiny", "--data", "synthetic"]
    large = ["--model", "benchmarks.large.main:used", "--data", "synthetic"]
    rows = []
    with tempfile.TemporaryDirectory() as place:
        folder, image = Path(place), Path(place, "image.png")
        Image.new("RGB", (32, 32), (90, 20, 200)).save(image)
        steps = {}
        for name, model in (("small", tiny()), ("large", used())):
            data = CheckpointData(1, model_fingerprint(model), model.state_dict(), {}, None)
            steps[name] = str(save_checkpoint(folder / name, data, World()))
        weights = sum(one.nbytes for one in model.parameters())
        ways: list[tuple[str, list[str]]] = [
            ("evaluate", ["--json"]),
            ("evaluate", ["--json", "--amp", "bf16"]),
            ("predict", [str(image)]),
            *(("export", ["--format", form, "-o", str(folder / name), "--force"]) for form, name in EXPORTED),
        ]
        for command, words in ways:
            (base, _, _), (peak, seconds, _) = (
                private([command, steps[name], *words, *options])
                for name, options in (("small", small), ("large", large))
            )
            rows.append(
                {
                    "command": " ".join([command, *(word for word in words if not word.startswith(("/", "-o")))]),
                    "weights_mb": round(weights / 1e6, 1),
                    "peak_mb": round((peak - base) / 1e6, 1),
                    "peak_over_weights": round((peak - base) / weights, 3),
                    "seconds": round(seconds, 1),
                }
            )
    return rows


def private(words: Sequence[str]) -> tuple[int, float, str]:
    """Run a command of hybridpar: its most private memory in bytes, its seconds, and what it printed.

    Args:
        words: Of the command line.
    """
    began, peak = time.perf_counter(), 0
    names = {"OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryFile("w+") as out:
        process = subprocess.Popen([sys.executable, "-m", "hybridpar", *words], stdout=out, env=os.environ | names)
        while process.poll() is None:
            with contextlib.suppress(OSError, StopIteration):  # it has just ended
                peak = max(peak, status("RssAnon", process.pid))
            time.sleep(0.002)
        if process.returncode:
            raise SystemExit(f"{words[0]} ended with {process.returncode}")
        out.seek(0)
        return peak, time.perf_counter() - began, out.read()


def prepare() -> None:
    """Import what is imported later: it is no memory of the model."""
    for name in ("networkx", "torch.utils.flop_counter", "hybridpar.partition.planning", "rich.console"):
        importlib.import_module(name)
    small = DeferredModel(lambda: nn.Linear(64, 64))
    small.fill(["weight"])
    with imagined(small.module, torch.device("cpu")) as mode:
        small.module(mode.from_tensor(torch.zeros(1, 64))).sum().backward()


def plan() -> dict[str, Any]:
    """Plan a network as `hybridpar plan` does, with everything measured, and return what that took."""
    prepare()
    base, began = status("VmRSS"), time.perf_counter()
    shape = f"3x{PLANNED[0] // 96}x32"
    run_plan(PlanRequest("benchmarks.large.main:billion", stages=PLANNED_FOR, input=shape, cache=False, threads=1))
    parameters = DeferredModel(billion).nbytes
    peak = status("VmHWM") - base
    return {
        "parameters_mb": round(parameters / 1e6, 1),
        "workers": PLANNED_FOR,
        "share_mb": round(parameters / PLANNED_FOR / 1e6, 1),
        "peak_mb": round(peak / 1e6, 1),
        "peak_over_share": round(peak * PLANNED_FOR / parameters, 3),
        "seconds": round(time.perf_counter() - began, 1),
    }


def work(width: int, count: int, stages: int, directory: Path, cap: int | None) -> dict[str, Any]:
    """What one worker does.

    Args:
        width: Of layers.
        count: Of layers.
        stages: Stages, each on a worker.
        directory: For checkpoints; the newest is gone on from.
        cap: Bytes of memory that may be taken; None for no limit.

    Returns:
        Losses, evaluation, and memory in bytes.
    """
    prepare()
    torch.manual_seed(1)
    base = status("VmRSS")
    if cap is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (status("VmData") + cap,) * 2)
    model: nn.Module | DeferredModel = (
        DeferredModel(partial(build, width, count)) if stages > 1 else build(width, count)
    )
    config = TrainConfig(stages=stages, micro_batches=MICRO_BATCHES, batch_size=SAMPLES * MICRO_BATCHES, plan="none")
    with Trainer(model, config=config, example=batch(width, 0, SAMPLES)[0], total_steps=2 * STEPS) as trainer:
        if any(directory.iterdir()):
            trainer.load(directory)
        first = trainer.steps_done
        losses = [trainer.step(batch(width, step)).outcome.loss for step in range(first, first + STEPS)]
        trainer.save(directory)
        evaluation = trainer.evaluate([batch(width, 100 + index) for index in range(2)])
        own = [held[key] for _, held, key in places(trainer.model) if not held[key].is_meta]
        return {
            "losses": losses,
            "accuracy": evaluation.accuracy,
            "test_loss": evaluation.loss,
            "parameters": sum(one.nbytes for one in own),
            "activations": trainer.engine.pipeline.peak_saved_bytes,
            "peak": status("VmHWM") - base,
        }


def run(shape: tuple[int, int], stages: int, directory: Path, cap: int | None = None) -> list[dict[str, Any]]:
    """Run the workers of one half of the training, and return what each did.

    Args:
        shape: Width and number of layers.
        stages: Stages, each on a worker.
        directory: For checkpoints.
        cap: Bytes that each may take.
    """
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    started = []
    for rank in range(stages):
        place = {"RANK": rank, "WORLD_SIZE": stages, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": stages}
        where = {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "OMP_NUM_THREADS": 1, "MALLOC_ARENA_MAX": 1}
        where["MALLOC_MMAP_THRESHOLD_"] = 1 << 20  # what is freed is given back
        names = {name: str(value) for name, value in (place | where).items()}
        given = [*map(str, shape), str(stages), str(directory), str(cap or 0)]
        command = [sys.executable, "-m", "benchmarks.large.main", "--worker", *given]
        resource.setrlimit(resource.RLIMIT_STACK, (1 << 20, resource.getrlimit(resource.RLIMIT_STACK)[1]))
        started.append(subprocess.Popen(command, env=os.environ | names, stdout=subprocess.PIPE, text=True))
    answers = [one.communicate()[0] for one in started]
    if any(one.returncode for one in started):
        raise SystemExit(1)
    return [json.loads(answer.splitlines()[-1]) for answer in answers]


def main(command_line: Sequence[str] | None = None) -> None:
    """Measure, compare, and write a table into `results`.

    Args:
        command_line: Arguments; default: those of the process.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worker", nargs=5, help=argparse.SUPPRESS)
    parser.add_argument("--stages", type=int, default=4, help="stages, each on a worker")
    parser.add_argument("--plan", action="store_true", help="plan a network of 1 B parameters instead")
    parser.add_argument("--use", action="store_true", help="use a network of 1 GB instead")
    options = parser.parse_args(command_line)
    if options.worker is not None:
        width, count, stages, directory, cap = options.worker
        print(json.dumps(work(int(width), int(count), int(stages), Path(directory), int(cap) or None)))
        return
    if options.plan:
        write("plan", [plan()])
        return
    if options.use:
        write("use", use())
        return
    write("large", [row for shape in SHAPES for row in measure(shape, options.stages)])


def write(name: str, rows: list[dict[str, Any]]) -> None:
    """Write a table of results.

    Args:
        name: Of the file.
        rows: Of the table.
    """
    print(*rows, sep="\n")
    results = Path(__file__).parent / "results"
    results.mkdir(exist_ok=True)
    with (results / f"{name}.csv").open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, rows[0].keys(), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def measure(shape: tuple[int, int], stages: int) -> list[dict[str, Any]]:
    """Train a network both ways.

    Args:
        shape: Width and number of layers.
        stages: Stages, each on a worker.

    Returns:
        A row for each worker and half.
    """
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as many:
        whole = [run(shape, 1, Path(one))[0] for _ in range(2)]
        need = max(half["peak"] for half in whole)
        cap = int(CAP * need)
        halves = [run(shape, stages, Path(many), cap) for _ in range(2)]
        exported, plain = (
            torch.load(Path(where, f"step-{2 * STEPS}", "model.pt"), weights_only=True) for where in (many, one)
        )
        apart = max(float((exported[name] - plain[name]).abs().max()) for name in plain)
    rows = []
    for half, (before, workers) in enumerate(zip(whole, halves, strict=True)):
        for rank, worker in enumerate(workers):
            assert worker["losses"] == workers[0]["losses"]
            predicted = 3 * worker["parameters"] + worker["activations"]  # parameters, gradients, momentum
            rows.append(
                {
                    "layers": f"{shape[1]} of {shape[0]}",
                    "half": ("from the start", "resumed")[half],
                    "worker": rank,
                    "parameters_mb": round(worker["parameters"] / 1e6, 1),
                    "predicted_mb": round(predicted / 1e6, 1),
                    "peak_mb": round(worker["peak"] / 1e6, 1),
                    "peak_over_predicted": round(worker["peak"] / predicted, 3),
                    "one_process_mb": round(need / 1e6, 1),
                    "cap_mb": round(cap / 1e6, 1),
                    "peak_over_one_process": round(worker["peak"] / need, 3),
                    "loss_apart": max(abs(a - b) for a, b in zip(worker["losses"], before["losses"], strict=True)),
                    "test_loss_apart": abs(worker["test_loss"] - before["test_loss"]),
                    "weights_apart": apart,
                }
            )
    return rows


if __name__ == "__main__":
    main()
