"""Options of `hybridpar tune`, checked without the seconds that importing torch takes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from hybridpar.errors import UsageError
from hybridpar.formats.output_files import check_writable

_SECONDS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True, kw_only=True)
class TuneConfig:
    """Search the fastest kernels for depthwise convolutions on this machine, and keep what was measured."""

    model: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")] = None
    """A torchvision model such as mobilenet_v2, timm/NAME, or your own as package.module:factory."""
    shapes: Path | None = None
    """Instead of a model: a file with one shape per line, such as `8x96x56x56 k3x3 s1x1 p1x1 d1x1`."""
    for_: Annotated[str | None, tyro.conf.arg(name="for")] = None
    """Options of `hybridpar train`, as one word: --for "--data digits --workers 2". Shapes, threads and layout are then
    those that each worker of such a run has."""
    input: str = "3x224x224"
    """Shape of one sample."""
    batch: int = 32
    """Samples that are computed at a time: those of a micro-batch of one worker."""
    classes: int = 1000
    """Number of classes of the last layer."""
    layout: Annotated[Literal["channels_last", "contiguous"], tyro.conf.arg(name="memory-format")] = "channels_last"
    """Memory format of images and activations; kernels for the CPU are for channels_last."""
    threads: int | None = None
    """Threads that compute; default: one worker's share of the cores."""
    target: Literal["cpu", "cuda"] = "cpu"
    """What kernels are for: the CPU, or the GPU that torch uses."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of all tensors; others than float32 on cuda alone."""
    budget: str = "10m"
    """Time for everything, as 90s, 10m or 2h; searches get parts of it by what torch takes for them in a step."""
    trials: int | None = None
    """Most candidates of one search; default: as many as there is time for."""
    again: bool = False
    """Search again where there is a record already."""
    seed: int = 0
    """Seed of the search and of the operands."""
    output: Annotated[Path | None, tyro.conf.arg(aliases=["-o"])] = None
    """File that records are appended to; default: the one that `hybridpar train --kernels auto` reads."""
    show: Path | None = None
    """Tune nothing; print this database."""
    json: bool = False
    """Print JSON."""
    tune_process: Annotated[
        bool,
        tyro.conf.arg(
            help="Leave the C allocator and thread counts as they are.",
            help_behavior_hint="(default: set as for training)",
        ),
    ] = True
    """Whether the C allocator and thread counts are set as for training."""
    debug: bool = False
    """Show tracebacks."""

    @property
    def seconds(self) -> float:
        """The budget in seconds."""
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", self.budget.strip().lower())
        seconds = float(match[1]) * _SECONDS[match[2]] if match else 0.0
        if seconds <= 0:
            raise UsageError(
                f"--budget {self.budget!r} is not a time", "A time is a positive number with s, m or h.", "Use 10m."
            )
        return seconds

    @property
    def sample(self) -> tuple[int, int, int]:
        """Channels, rows and columns of one sample."""
        if not re.fullmatch(r"[1-9]\d*x[1-9]\d*x[1-9]\d*", self.input):
            raise UsageError(
                f"--input {self.input!r} is not an image", "An image is channels x rows x columns.", "Use 3x224x224."
            )
        channels, rows, columns = map(int, self.input.split("x"))
        return channels, rows, columns

    def check(self) -> None:
        """Check what can be checked without model and machine."""
        sources = [self.model is not None, self.shapes is not None, self.show is not None]
        if sum(sources) != 1:
            raise UsageError(
                "nothing to tune" if not any(sources) else "MODEL, --shapes and --show exclude each other",
                "What is tuned is a model's convolutions, or the shapes in a file; --show prints what was tuned.",
                "Use `hybridpar tune mobilenet_v2`, for instance.",
            )
        if self.for_ is not None and self.model is None:
            raise UsageError("--for without a model", "It says how a model is trained.", "Name the model.")
        numbers = {"--batch": self.batch, "--classes": self.classes, "--threads": self.threads, "--trials": self.trials}
        for option, value in numbers.items():
            if value is not None and value < 1:
                raise UsageError(f"{option} is {value}", "It is at least 1.")
        _ = self.seconds, self.sample
        if self.target == "cpu" and self.dtype != "float32":
            raise UsageError(
                f"--dtype {self.dtype} on the CPU", "Kernels for the CPU are float32.", "Add --target cuda."
            )
        if self.target == "cuda" and self.threads is not None:
            raise UsageError("--threads with --target cuda", "They are threads of the CPU.", "Leave --threads out.")
        if self.output is not None:
            check_writable("--output", self.output)
