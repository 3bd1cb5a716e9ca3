"""Trains a model that fits no worker: what four workers hold of it, beside what one process needs.

`python -m benchmarks.large.main` trains a network of few wide layers, and one of many narrow ones, in one process, then
as four stages on four workers, each under a limit of 0.35 of the memory that the one process took (`RLIMIT_DATA`, over
what imports alone take). The pipeline trains, saves, resumes in new processes, evaluates, and its checkpoint has the
weights of the one process. Losses must be equal. Peaks are resident memory over that after all imports.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.rig.records import write_dicts
from hybridpar import TrainConfig
from hybridpar.models.deferred import DeferredModel, imagined, places
from hybridpar.train.checkpoint import load_model_state
from hybridpar.train.trainer import Trainer

#: Width and number of its square layers: 255 MB in each.
SHAPES = ((2304, 12), (1152, 48))

#: Samples of a micro-batch, micro-batches of a step, steps of each half.
SAMPLES, MICRO_BATCHES, STEPS = 16, 2, 1

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


def status(key: str) -> int:
    """Bytes that the kernel counts for this process under a key such as `VmHWM`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{key}:"))


def prepare() -> None:
    """Import what is imported later: it is no memory of the model."""
    for name in ("networkx", "torch.utils.flop_counter", "hybridpar.partition.planning", "rich.console"):
        importlib.import_module(name)
    small = DeferredModel(lambda: nn.Linear(64, 64))
    small.fill(["weight"])
    with imagined(small.module, torch.device("cpu")) as mode:
        small.module(mode.from_tensor(torch.zeros(1, 64))).sum().backward()


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
    options = parser.parse_args(command_line)
    if options.worker is not None:
        width, count, stages, directory, cap = options.worker
        print(json.dumps(work(int(width), int(count), int(stages), Path(directory), int(cap) or None)))
        return
    rows = [row for shape in SHAPES for row in measure(shape, options.stages)]
    print(*rows, sep="\n")
    write_dicts(Path(__file__).parent / "results" / "large.csv", rows)


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
        exported, plain = (load_model_state(Path(where, f"step-{2 * STEPS}")) for where in (many, one))
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
