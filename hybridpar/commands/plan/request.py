"""The options of `hybridpar plan`, and how they are read.

Everything that can be known without the model is checked here, before the minutes that measuring takes.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Literal

import tyro

from hybridpar.config.data import unless
from hybridpar.errors import UsageError
from hybridpar.formats.output_files import check_picture, check_writable
from hybridpar.schedule.schedules import SCHEDULES

#: Options that decide a part of the plan, as those of `hybridpar train` do.
DECIDING = ("stages", "replicas", "micro_batches", "schedule", "placement")
#: Options that say what is measured.
_RECORDED = ("batch_size", "workers", "classes", "optimizer_copies", "passes", "threads", "memory_format", "seed")

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}


@dataclass(frozen=True)
class PlanRequest:
    """Search for the fastest way to train a model: stages, replicas, micro-batches, schedule, cut, codecs. Say why the
    others lost, and what would help; write the plan.
    """

    model: tyro.conf.Positional[str] = ""
    """A torchvision classification model, timm/NAME, or your own as package.module:factory."""
    stages: int | None = None
    """Stages that the model is cut into; default: searched for, as with all options down to --placement."""
    replicas: int | None = None
    """Copies of the whole pipeline, which share each batch."""
    micro_batches: int | None = None
    """Micro-batches per replica and step."""
    schedule: str | None = None
    """Order of passes: 1f1b, gpipe, greedy, interleaved, looped_bfs, or another registered one."""
    placement: Literal["linear", "loop", "v"] | None = None
    """Linear: a stage per lane. Loop: stages dealt out round and round. V: up the lanes and down again."""
    input: Annotated[str, tyro.conf.arg(metavar="CxHxW")] = "3x224x224"
    """Shape of one sample."""
    classes: int = 1000
    """Number of classes of the last layer."""
    batch_size: int = 64
    """Samples per step over all workers together."""
    memory: str | None = None
    """Memory cap per device, as 8GB or 500MB; default: what it has."""
    optimizer_copies: int = 1
    """Tensors per parameter that the optimizer keeps: momentum 1, Adam 2."""
    measure: Annotated[bool, unless("Estimate times from FLOPs and bytes.", "every unit is measured")] = True
    """Whether every unit is measured; else times are estimated from FLOPs and bytes."""
    passes: int = 5
    """Passes of the measurement; the minimum counts."""
    threads: int | None = None
    """Intra-op threads on CPU; default: torch's."""
    memory_format: Literal["contiguous", "channels_last"] | None = None
    """Memory format that the model is trained in; default: the faster one."""
    cache: Annotated[
        bool, unless("Measure anew, and keep nothing.", "profiles are used from and kept in ~/.cache/hybridpar")
    ] = True
    """Whether profiles are used from and kept in ~/.cache/hybridpar."""
    seed: int = 0
    """Seed of weights and inputs."""
    output: Annotated[Path | None, tyro.conf.arg(aliases=["-o"])] = None
    """Write the plan to this JSON file."""
    draw: Path | None = None
    """Draw the cut of the plan into this .svg or .png file."""
    tune_process: Annotated[
        bool, unless("Leave the C allocator and thread counts as they are.", "set as for training")
    ] = True
    """Whether the C allocator and thread counts are set as for training before anything is measured on a CPU."""
    debug: bool = False
    """Show tracebacks."""
    cluster: Path | None = None
    """Plan for the cluster that this TOML file describes. Default: this machine, measured."""
    inputs: Path | None = None
    """Plan again from what this plan recorded, without measuring."""
    workers: int | None = None
    """Workers on this machine; default: all GPUs, else 2 on the CPU. Not with --cluster."""
    fidelity: Literal["exact", "close", "lossy"] | None = None
    """What the search may change: exact: nothing in the result; close: also casts; lossy: also codecs, by time to the
    same loss. Default: exact, or with --inputs what was recorded."""
    verify: int = 0
    """Run so many of the best plans, and plain data parallelism, for some steps each, in turns, and choose by the
    clock; on the workers of this machine, or of torchrun."""
    verify_seconds: float = 60.0
    """Of that, at most, after each plan's first steps; three rounds are taken in any case."""

    @property
    def wants_tuned_process(self) -> bool:
        """Whether this process should be started again with the environment that CPU workers train in.

        The allocator's defaults alone can change a CPU's times by a third.
        """
        return self.tune_process and self.measure and self.inputs is None and bool(self.model)

    @property
    def is_here(self) -> bool:
        """Whether the plan is for the machine at hand, whose links are measured."""
        return self.cluster is None and self.inputs is None

    def check(self, named: Collection[str] = ()) -> None:
        """Check what can be checked without the model; `named` are options that count as given at any value."""
        images = len(parse_shape(self.input)) == 3
        rules: list[tuple[str, object, bool, str, str]] = [
            (
                "--batch-size",
                self.batch_size,
                self.batch_size >= 1,
                "A step has at least one sample.",
                "--batch-size 64",
            ),
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
                images or self.memory_format != "channels_last",
                "Only images have it.",
                "--input 3x224x224",
            ),
        ]
        for option, value, holds, rule, use in rules:
            if not holds:
                raise UsageError(f"{option} is {value}", rule, f"Use {use}.")
        for name in ("stages", "replicas", "micro_batches"):
            if (count := getattr(self, name)) is not None and count < 1:
                option = f"--{name.replace('_', '-')}"
                raise UsageError(f"{option} is {count}", "There is at least one.", f"Use {option} 1 or more.")
        if self.schedule is not None:
            SCHEDULES.get(self.schedule)
        for option, target in (("--output", self.output), ("--draw", self.draw)):
            if target is not None:
                check_writable(option, target)
        if self.draw is not None:
            check_picture("--draw", self.draw)
        if self.memory is not None:
            parse_bytes(self.memory)
        if not self.model and self.inputs is None:
            raise UsageError("no model was named", "A plan is of a model.", "Name one: `hybridpar plan resnet18`.")
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
        given = {*named, *(field.name for field in fields(self) if getattr(self, field.name) != field.default)}
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


def parse_bytes(text: str) -> int:
    """A number of bytes from text like 500MB; 1 MB is 10^6 bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)b?", text.strip().lower())
    size = int(float(match[1]) * _UNITS[match[2]]) if match else 0
    if size < 1:
        raise UsageError(
            f"--memory {text!r} is not a size", "A size is a positive number with B, kB, MB, GB or TB.", "Use 8GB."
        )
    return size
