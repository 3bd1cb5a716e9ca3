"""Trains a model that fits no worker: what four workers hold of it, beside what one process needs.

`python -m benchmarks.large.main` trains a network of few wide layers, and one of many narrow ones, in one process, then
as four stages on four workers, each under a limit of 0.35 of the memory that the one process took (`RLIMIT_DATA`, over
what imports alone take). The pipeline trains, saves, resumes in new processes, evaluates, and its checkpoint has the
weights of the one process. Losses must be equal. Peaks are resident memory over that after all imports.
"""

from __future__ import annotations

import importlib
import json
import resource
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.rig.launch import measure_in_ranks, run_command
from benchmarks.rig.network import Network
from benchmarks.rig.records import write_dicts
from hybridpar import TrainConfig
from hybridpar.formats.checkpoint_files import load_model_state
from hybridpar.models.deferred import DeferredModel, imagined, named_tensors
from hybridpar.train.trainer import Trainer

#: Width and number of its square layers: 255 MB in each.
SHAPES = ((2304, 12), (1152, 48))

#: Samples of a micro-batch, micro-batches of a step, steps of each half.
SAMPLES, MICRO_BATCHES, STEPS = 16, 2, 1

#: Part of what one process needs that a worker may take.
CAP = 0.35


def build(width: int, count: int) -> nn.Module:
    """The model: so many linear layers of that width."""
    layers: list[nn.Module] = [nn.Flatten()]
    for _ in range(count):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, 10))


def batch(width: int, step: int, samples: int = SAMPLES * MICRO_BATCHES) -> tuple[torch.Tensor, torch.Tensor]:
    """Random images and labels of a step."""
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


def measure(width: int, count: int, stages: int, directory: str, cap: int, output: str) -> None:
    """Train one half in this rank, which holds its stages; rank 0 writes losses, evaluation and memory in bytes.

    Args:
        width: Of layers.
        count: Of layers.
        stages: Stages, each on a worker.
        directory: For checkpoints; the newest is gone on from.
        cap: Bytes of memory that may be taken; 0 for no limit.
        output: File for what all ranks report.
    """
    prepare()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    base = status("VmRSS")
    if cap:
        resource.setrlimit(resource.RLIMIT_DATA, (status("VmData") + cap,) * 2)
    model: nn.Module | DeferredModel = (
        DeferredModel(partial(build, width, count)) if stages > 1 else build(width, count)
    )
    config = TrainConfig(stages=stages, micro_batches=MICRO_BATCHES, batch_size=SAMPLES * MICRO_BATCHES, plan="none")
    with Trainer(model, config=config, example=batch(width, 0, SAMPLES)[0], total_steps=2 * STEPS) as trainer:
        if any(Path(directory).iterdir()):
            trainer.load(directory)
        first = trainer.steps_done
        losses = [trainer.step(batch(width, step)).outcome.loss for step in range(first, first + STEPS)]
        trainer.save(directory)
        evaluation = trainer.evaluate([batch(width, 100 + index) for index in range(2)])
        held = [tensors[key] for _, tensors, key in named_tensors(trainer.model) if not tensors[key].is_meta]
        report = {
            "losses": losses,
            "test_loss": evaluation.loss,
            "parameters": sum(tensor.nbytes for tensor in held),
            "activations": trainer.engine.pipeline.peak_saved_bytes,
            "peak": status("VmHWM") - base,
        }
        reports = trainer.world.gather(report)
        if trainer.world.is_main:
            Path(output).write_text(json.dumps(reports))


def run(shape: tuple[int, int], stages: int, directory: str, cap: int = 0) -> list[dict[str, Any]]:
    """Run the workers of one half of the training, and return what each reports."""
    with tempfile.NamedTemporaryFile() as output, Network(stages) as network:
        arguments = {"width": shape[0], "count": shape[1], "stages": stages, "directory": directory, "cap": cap}
        # What is freed is given back, unlike in training, and no thread takes much for its stack.
        resource.setrlimit(resource.RLIMIT_STACK, (1 << 20, resource.getrlimit(resource.RLIMIT_STACK)[1]))
        variables = {"MALLOC_MMAP_MAX_": "65536", "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
        variables |= {"MALLOC_TRIM_THRESHOLD_": str(1 << 17), "LOCAL_WORLD_SIZE": str(stages)}
        measure_in_ranks(network, "benchmarks.large.main", arguments | {"output": output.name}, environment=variables)
        reports: list[dict[str, Any]] = json.loads(Path(output.name).read_text())
        return reports


@dataclass(frozen=True, kw_only=True)
class Options:
    """Train a model that fits no worker."""

    stages: int = 4
    """Stages, each on a worker."""
    output: Path = Path(__file__).parent / "results" / "large.csv"
    """Table to write."""


def main(options: Options) -> None:
    """Measure, compare, and write the table."""
    rows = [row for shape in SHAPES for row in rows_of(shape, options.stages)]
    print(*rows, sep="\n")
    write_dicts(options.output, rows)


def rows_of(shape: tuple[int, int], stages: int) -> list[dict[str, Any]]:
    """Train a network both ways; a row for each worker and half."""
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as several:
        alone = [run(shape, 1, one)[0] for _ in range(2)]
        need = max(half["peak"] for half in alone)
        cap = int(CAP * need)
        halves = [run(shape, stages, several, cap) for _ in range(2)]
        weights, expected = (load_model_state(Path(where, f"step-{2 * STEPS}")) for where in (several, one))
        apart = max(float((weights[name] - expected[name]).abs().max()) for name in expected)
    rows = []
    for half, (before, workers) in enumerate(zip(alone, halves, strict=True)):
        for rank, worker in enumerate(workers):
            assert worker["losses"] == workers[0]["losses"]
            predicted = 3 * worker["parameters"] + worker["activations"]  # parameters, gradients, momentum
            sizes = {"parameters": worker["parameters"], "predicted": predicted, "peak": worker["peak"]}
            sizes |= {"one_process": need, "cap": cap}
            rows.append(
                {
                    "layers": f"{shape[1]} of {shape[0]}",
                    "half": ("from the start", "resumed")[half],
                    "worker": rank,
                    **{f"{name}_mb": round(size / 1e6, 1) for name, size in sizes.items()},
                    "peak_over_predicted": round(worker["peak"] / predicted, 3),
                    "peak_over_one_process": round(worker["peak"] / need, 3),
                    "loss_apart": max(abs(a - b) for a, b in zip(worker["losses"], before["losses"], strict=True)),
                    "test_loss_apart": abs(worker["test_loss"] - before["test_loss"]),
                    "weights_apart": apart,
                }
            )
    return rows


if __name__ == "__main__":
    run_command(main, Options)
