"""The options of `hybridpar plan`, for one cut of a model and for a search, and how they are read.

Everything that can be known without the model is checked here, before the minutes that measuring takes.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from hybridpar.config.data import unless
from hybridpar.errors import UsageError
from hybridpar.formats.output_files import check_picture, check_writable

if TYPE_CHECKING:
    from hybridpar.partition.cost import Link, Problem, Worker

#: Options that say how to cut, which the search decides itself.
_DECIDED = ("stages", "batch", "devices", "co_run", "link", "placement", "in_flight", "micro_batches")
#: Options that say what is measured.
_RECORDED = ("batch_size", "workers", "classes", "optimizer_copies", "passes", "threads", "memory_format", "seed")

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}


@dataclass(frozen=True)
class PlanRequest:
    """Cut a model into balanced stages, or search for the fastest way to train it; write the plan."""

    model: tyro.conf.Positional[str] = ""
    """A torchvision classification model, timm/NAME, or your own as package.module:factory."""
    stages: int = 2
    """Number of stages."""
    batch: int = 4
    """Samples per micro-batch."""
    input: Annotated[str, tyro.conf.arg(metavar="CxHxW")] = "3x224x224"
    """Shape of one sample."""
    classes: int = 1000
    """Number of classes of the last layer."""
    devices: tuple[str, ...] = ()
    """One entry per worker: a device, then optionally *LANES and @SPEED, as cuda:0*2 or cpu@0.5. The model is measured
    on the first. Default: one worker per stage, each with a CPU like this one."""
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
    measure: Annotated[bool, unless("Estimate times from FLOPs and bytes.", "every unit is measured")] = True
    """Whether every unit is measured; else times are estimated from FLOPs and bytes."""
    passes: int = 5
    """Passes of the measurement; the minimum counts."""
    threads: int | None = None
    """Intra-op threads on CPU; default: torch's."""
    memory_format: Literal["contiguous", "channels_last"] = "contiguous"
    """Memory format that the model is measured in."""
    cache: Annotated[
        bool, unless("Measure anew, and keep nothing.", "profiles are used from and kept in ~/.cache/hybridpar")
    ] = True
    """Whether profiles are used from and kept in ~/.cache/hybridpar."""
    seed: int = 0
    """Seed of weights and inputs."""
    output: Annotated[Path | None, tyro.conf.arg(aliases=["-o"])] = None
    """Write the plan to this JSON file."""
    draw: Path | None = None
    """Draw the partition into this .svg or .png file."""
    tune_process: Annotated[
        bool, unless("Leave the C allocator and thread counts as they are.", "set as for training")
    ] = True
    """Whether the C allocator and thread counts are set as for training before anything is measured on a CPU."""
    debug: bool = False
    """Show tracebacks."""
    explain: bool = False
    """Search for the fastest plan on this machine or on --cluster: stages, replicas, lanes, micro-batches, schedule,
    cut, codecs, memory format, kernels. Say why the others lost, and what would help."""
    cluster: Path | None = None
    """Plan for the cluster that this TOML file describes; implies --explain. Default: this machine, measured."""
    inputs: Path | None = None
    """Plan again from what this plan recorded, without measuring; implies --explain."""
    workers: int | None = None
    """Workers on this machine; default: all GPUs, else 2 on the CPU. Not with --cluster."""
    batch_size: int = 64
    """Samples per step over all workers together, for the search."""
    fidelity: Literal["exact", "close", "lossy"] | None = None
    """What the search may change: exact: nothing in the result; close: also casts; lossy: also codecs, by time to the
    same loss. Default: exact, or with --inputs what was recorded."""
    verify: int = 0
    """Run so many of the best plans, and plain data parallelism, for some steps each, in turns, and choose by the
    clock; on the workers of this machine, or of torchrun. Implies --explain."""
    verify_seconds: float = 60.0
    """Of that, at most, after each plan's first steps; three rounds are taken in any case."""

    @property
    def measured_device(self) -> str:
        """The device that the model is measured on."""
        return re.split(r"[*@]", self.devices[0])[0] if self.devices else "cpu"

    @property
    def wants_tuned_process(self) -> bool:
        """Whether this process should be started again with the environment that CPU workers train in.

        The allocator's defaults alone can change a CPU's times by a third; nothing of a GPU's depends on them.
        """
        measures = self.measure and self.inputs is None and bool(self.model)
        return self.tune_process and measures and not self.measured_device.startswith("cuda")

    @property
    def searches(self) -> bool:
        """Whether the fastest plan is wanted, rather than one cut."""
        return self.explain or self.cluster is not None or self.inputs is not None or self.verify > 0

    @property
    def is_here(self) -> bool:
        """Whether the search is for the machine at hand, whose links are measured."""
        return self.searches and self.cluster is None and self.inputs is None

    def check(self, named: Collection[str] = ()) -> None:
        """Check what can be checked without the model; `named` are options that count as given at any value."""
        images = len(parse_shape(self.input)) == 3
        rules: list[tuple[str, object, bool, str, str]] = [
            ("--batch", self.batch, self.batch >= 1, "A micro-batch has at least one sample.", "--batch 4"),
            ("--classes", self.classes, self.classes >= 1, "A model has at least one class.", "--classes 10"),
            ("--passes", self.passes, self.passes >= 2, "Two halves of the passes tell the noise.", "--passes 5"),
            (
                "--threads",
                self.threads,
                self.threads is None or self.threads >= 1,
                "One at least works.",
                "--threads 1",
            ),
            ("--seed", self.seed, 0 <= self.seed < 2**63, "A seed is a number from 0 to 2^63 - 1.", "--seed 0"),
            (
                "--memory-format",
                "channels_last",
                images or self.memory_format == "contiguous",
                "Only images have it.",
                "--input 3x224x224",
            ),
        ]
        for option, value, holds, rule, use in rules:
            if not holds:
                raise UsageError(f"{option} is {value}", rule, f"Use {use}.")
        for option, target in (("--output", self.output), ("--draw", self.draw)):
            if target is not None:
                check_writable(option, target)
        if self.draw is not None:
            check_picture("--draw", self.draw)
        self._check_search(named)

    def _check_search(self, named: Collection[str]) -> None:
        """Refuse options that contradict a search, or only have a meaning for one."""
        if not self.model and self.inputs is None:
            raise UsageError("no model was named", "A plan is of a model.", "Name one: `hybridpar plan resnet18`.")
        given = {*named, *(field.name for field in fields(self) if getattr(self, field.name) != field.default)}
        if not self.searches:
            for name in ("workers", "batch_size", "fidelity"):
                if name in given:
                    option = f"--{name.replace('_', '-')}"
                    raise UsageError(f"{option} without --explain", "It is an option of the search.", "Add --explain.")
            return
        if decided := [name for name in _DECIDED if name in given]:
            option = f"--{decided[0].replace('_', '-')}"
            raise UsageError(
                f"{option} with a search", "The search decides it.", f"Leave out {option}, or --explain and --cluster."
            )
        if self.draw is not None:
            raise UsageError("--draw with a search", "It draws one cut of a model.", "Leave it out, or give --stages.")
        if self.batch_size < 1:
            raise UsageError(f"--batch-size is {self.batch_size}", "A step has at least one sample.", "Use 64.")
        if self.workers is not None and (self.workers < 1 or self.cluster is not None):
            rule = "It is 1 or more." if self.workers < 1 else "A described cluster says how many there are."
            raise UsageError(f"--workers is {self.workers}", rule, "Leave it out, or correct it.")
        if self.verify < 0 or self.verify_seconds <= 0:
            raise UsageError(
                f"--verify {self.verify} --verify-seconds {self.verify_seconds}", "Both are above 0.", "Try --verify 3."
            )
        if self.verify and not (self.is_here and self.measure):
            raise UsageError(
                "--verify with --cluster, --inputs or --no-measure",
                "Plans are run on the machine at hand, which is measured.",
                "Leave out one of them.",
            )
        recorded = [name for name in _RECORDED if name in given]
        if self.inputs is not None and recorded:
            option = f"--{recorded[0].replace('_', '-')}"
            raise UsageError(
                f"--inputs with {option}",
                "What was recorded says it.",
                f"Leave {option} out, or measure again: leave out --inputs.",
            )


def parse_shape(text: str) -> tuple[int, ...]:
    """The shape of one sample from text like 3x224x224."""
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", text):
        raise UsageError(
            f"--input {text!r} is not a shape", "A shape is positive numbers with x between them.", "Use 3x224x224."
        )
    return tuple(int(part) for part in text.split("x"))


def parse_bytes(text: str, option: str = "--memory") -> int:
    """A number of bytes from text like 500MB; 1 MB is 10^6 bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)b?", text.strip().lower())
    size = int(float(match[1]) * _UNITS[match[2]]) if match else 0
    if size < 1:
        raise UsageError(
            f"{option} {text!r} is not a size", "A size is a positive number with B, kB, MB, GB or TB.", "Use 8GB."
        )
    return size


def parse_link(text: str | None) -> Link:
    """A link from text like 1.2GB/s or 100MB/s@0.2ms."""
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


def parse_workers(config: PlanRequest) -> tuple[Worker, ...]:
    """The workers that --devices, --memory and --co-run describe; empty where no device is named."""
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


def read_problem(config: PlanRequest) -> Problem:
    """What the options ask of a partition."""
    from hybridpar.partition.cost import Problem

    return Problem(
        config.stages,
        parse_workers(config),
        config.placement,
        parse_link(config.link),
        int(config.in_flight) if config.in_flight.isdecimal() else config.in_flight,
        config.micro_batches,
        config.optimizer_copies,
    )
