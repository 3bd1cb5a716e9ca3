"""Why: `hybridpar plan`, behind one dataclass that imports nothing heavy."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from hybridpar.errors import UsageError

if TYPE_CHECKING:
    import torch

    from hybridpar.partition.cost import Link, Problem, Worker

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}


@dataclass(frozen=True)
class PlanConfig:
    """Cut a model into balanced stages and write the plan."""

    model: tyro.conf.Positional[str]
    """A torchvision classification model, or your own as package.module:factory."""
    stages: int = 2
    """Number of stages."""
    batch: int = 4
    """Samples per micro-batch."""
    input: str = "3x224x224"
    """Shape of one sample."""
    classes: int = 1000
    """Number of classes of the last layer."""
    devices: tuple[str, ...] = ()
    """One entry per worker: a device, then optionally *LANES and @SPEED, as cuda:0*2 or cpu@0.5; default: one worker
    per stage, all like the device that is measured."""
    memory: str | None = None
    """Memory cap per worker, as 8GB or 500MB; default: none."""
    co_run: float | None = None
    """How much slower each lane runs while all lanes of its device are busy; default: measured, and with --no-measure
    as many times as there are lanes."""
    link: str | None = None
    """Link between workers, as 1.2GB/s or 100MB/s@0.2ms; default: a link that costs nothing."""
    placement: Literal["linear", "loop", "v"] = "linear"
    """Linear: a stage per lane. Loop: stages dealt out round and round. V: up the lanes and down again."""
    in_flight: str = "1f1b"
    """Micro-batches that a stage keeps activations of: 1f1b, gpipe, or a number."""
    micro_batches: int | None = None
    """Micro-batches per step, for the memory in flight; default: 4 per lane."""
    optimizer_copies: int = 1
    """Tensors per parameter that the optimizer keeps: momentum 1, Adam 2."""
    strategy: str = "balanced"
    """How to cut: balanced, or for comparison time, block, flops, parameters, units, single-tensor."""
    measure: bool = True
    """Measure every unit; --no-measure estimates times from FLOPs and bytes."""
    passes: int = 5
    """Passes of the measurement; the minimum counts."""
    threads: int | None = None
    """Intra-op threads on CPU; default: torch's."""
    channels_last: bool = False
    """Measure in the channels_last memory format."""
    cache: bool = True
    """Use and keep profiles in ~/.cache/hybridpar."""
    seed: int = 0
    """Seed of weights and inputs."""
    output: Annotated[Path | None, tyro.conf.arg(aliases=["-o"])] = None
    """Write the plan to this JSON file."""
    draw: Path | None = None
    """Draw the partition into this .svg or .png file."""


def run_plan(config: PlanConfig) -> int:
    """Make a plan, print it, write what was asked for; returns the exit code.

    Raises:
        HybridparError: The request cannot be met; the message says why and what to do.
    """
    shape = parse_shape(config.input)
    problem = _problem(config)
    _check_targets(config)
    from rich.console import Console

    from hybridpar.models import build_model, seed_everything
    from hybridpar.partition.draw import draw_partition
    from hybridpar.partition.planning import partition_model
    from hybridpar.partition.profile_cache import cache_directory
    from hybridpar.partition.table import print_partition

    console = Console()
    seed_everything(config.seed)
    model, example = _on_device(config, build_model(config.model, config.classes), shape)
    with _Bar(console) as bar:
        result = partition_model(
            model,
            example,
            problem,
            strategy=config.strategy,
            measure=config.measure,
            passes=config.passes,
            threads=config.threads,
            cache=cache_directory() if config.cache else None,
            name=config.model,
            progress=bar.advance,
            announce=bar.announce,
        )
    print_partition(result.plan, console)
    if config.output is not None:
        result.plan.save(config.output)
        console.print(f"plan written to {config.output}")
    if config.draw is not None:
        draw_partition(result.graph, result.plan, config.draw)
        console.print(f"picture written to {config.draw}")
    return 0


def parse_shape(text: str) -> tuple[int, ...]:
    """The shape of one sample from text like 3x224x224.

    Raises:
        UsageError: The text is not a shape.
    """
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", text):
        raise UsageError(
            f"--input {text!r} is not a shape", "A shape is positive numbers with x between them.", "Use 3x224x224."
        )
    return tuple(int(part) for part in text.split("x"))


def parse_bytes(text: str, option: str = "--memory") -> int:
    """A number of bytes from text like 500MB; 1 MB is 10^6 bytes.

    Raises:
        UsageError: The text is not a size.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)b?", text.strip().lower())
    if not match or float(match[1]) <= 0:
        raise UsageError(
            f"{option} {text!r} is not a size", "A size is a positive number with B, kB, MB, GB or TB.", "Use 8GB."
        )
    return int(float(match[1]) * _UNITS[match[2]])


def parse_link(text: str | None) -> Link:
    """A link from text like 1.2GB/s or 100MB/s@0.2ms.

    Raises:
        UsageError: The text is not a link.
    """
    from hybridpar.partition.cost import Link

    if text is None:
        return Link()
    rate, _, latency = text.partition("@")
    wait = re.fullmatch(r"(\d+(?:\.\d+)?)ms", latency) if latency else None
    if not rate.endswith("/s") or (latency and not wait):
        raise UsageError(
            f"--link {text!r} is not a link", "A link is bytes per second, then optionally @ and milliseconds.",
            "Use 1.2GB/s or 100MB/s@0.2ms.",
        )  # fmt: skip
    return Link(float(parse_bytes(rate.removesuffix("/s"), "--link")), float(wait[1]) if wait else 0.0)


def parse_workers(config: PlanConfig) -> tuple[Worker, ...]:
    """The workers that --devices, --memory and --co-run describe; empty where no device is named.

    Raises:
        UsageError: An entry is not a device.
    """
    from hybridpar.partition.cost import Worker

    memory = parse_bytes(config.memory) if config.memory is not None else None
    entries = config.devices
    if not entries and memory is not None:
        count = config.stages // 2 if config.placement == "v" else config.stages
        entries = ("cpu",) * max(count, 1)
    workers = []
    for entry in entries:
        match = re.fullmatch(r"((?:cpu|cuda)(?::\d+)?)(?:\*(\d+))?(?:@(\d+(?:\.\d+)?))?", entry)
        if not match or match[2] == "0" or (match[3] is not None and float(match[3]) <= 0):
            raise UsageError(
                f"--devices {entry!r} is not a device",
                "An entry is cpu, cuda or cuda:N, then optionally *LANES from 1 and @SPEED above 0.",
                "Use cuda:0, cuda:1*2 or cpu@0.5.",
            )
        workers.append(Worker(match[1], int(match[2] or 1), float(match[3] or 1), memory, config.co_run))
    return tuple(workers)


def _problem(config: PlanConfig) -> Problem:
    from hybridpar.partition.cost import Problem

    return Problem(
        config.stages,
        parse_workers(config),
        config.placement,
        parse_link(config.link),
        int(config.in_flight) if config.in_flight.isdigit() else config.in_flight,
        config.micro_batches,
        config.optimizer_copies,
    )


def _check_targets(config: PlanConfig) -> None:
    """Find out before the long part whether what comes last can be written."""
    if config.batch < 1:
        raise UsageError(f"--batch {config.batch}", "A micro-batch has at least one sample.", "Use --batch 4.")
    for target in (config.output, config.draw):
        if target is not None and not target.absolute().parent.is_dir():
            raise UsageError(f"cannot write {target}: no such directory", fix=f"Create {target.absolute().parent}.")
    if config.draw is not None and config.draw.suffix not in (".svg", ".png", ".pdf"):
        raise UsageError(f"--draw {config.draw}", "A picture ends in .svg, .png or .pdf.", "Use --draw plan.svg.")
    if config.draw is not None:
        from hybridpar.partition.draw import require_matplotlib

        require_matplotlib()


def _on_device(
    config: PlanConfig, model: torch.nn.Module, shape: tuple[int, ...]
) -> tuple[torch.nn.Module, torch.Tensor]:
    import torch

    device = config.devices[0].partition("*")[0].partition("@")[0] if config.devices else "cpu"
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise UsageError(
            f"--devices {device}: this machine has no CUDA device that torch can use",
            "A model is measured on the first device named.",
            "Plan on the machine that has it, or name cpu.",
        )
    layout = torch.channels_last if config.channels_last and len(shape) == 3 else torch.contiguous_format
    example = torch.randn(config.batch, *shape, device=device).contiguous(memory_format=layout)
    model = model.to(device)
    return (model.to(memory_format=torch.channels_last) if config.channels_last else model), example


class _Bar:
    """A progress bar that names the step it is in."""

    def __init__(self, console: object) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        assert isinstance(console, Console)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
        )
        self._task = self._progress.add_task("", total=None)

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def announce(self, line: str) -> None:
        self._progress.update(self._task, description=line)

    def advance(self, done: int, total: int) -> None:
        self._progress.update(self._task, completed=done, total=total)
