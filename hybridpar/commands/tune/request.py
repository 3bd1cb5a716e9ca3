"""The options of `hybridpar tune`: those of `hybridpar train`, and those of the search."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from hybridpar.config import TrainConfig
from hybridpar.config.files import FileOptions
from hybridpar.errors import UsageError
from hybridpar.formats.output_files import check_writable

_SECONDS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}

#: The type of a convolution's tensors under each `--amp`.
_DTYPES = {"none": "float32", "bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """What is searched, for how long, and where it is kept."""

    shapes: Path | None = None
    """Instead of a model: a file with one shape per line, such as `8x96x56x56 k3x3 s1x1 p1x1 d1x1`."""
    threads: int | None = None
    """Threads that compute; default: one worker's share of the cores."""
    target: Literal["cpu", "cuda"] = "cpu"
    """What kernels are for: the CPU, or the GPU that torch uses."""
    budget: str = "10m"
    """Time for everything, as 90s, 10m or 2h; searches get parts of it by what torch takes for them in a step."""
    trials: int | None = None
    """Most candidates of one search; default: as many as there is time for."""
    again: bool = False
    """Search again where there is a record already."""
    output: Annotated[Path | None, tyro.conf.arg(aliases=["-o"])] = None
    """File that records are appended to; default: the one that `hybridpar train --kernels auto` reads."""
    show: Path | None = None
    """Tune nothing; print this database."""
    json: bool = False
    """Print JSON."""


@dataclass(frozen=True, kw_only=True)
class TuneRequest(TrainConfig, FileOptions, SearchOptions):
    """Search the fastest kernels for depthwise convolutions on this machine, and keep what was measured.

    It takes the options of `hybridpar train`, and tunes what each worker of that training computes. For all of them:
    `hybridpar tune --help-all`.
    """

    model: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")] = None
    """A torchvision model such as mobilenet_v2, timm/NAME, or your own as package.module:factory."""

    @property
    def seconds(self) -> float:
        """The budget in seconds."""
        return parse_seconds(self.budget)

    @property
    def dtype(self) -> str:
        """Type of all tensors, as `--amp` says."""
        return _DTYPES[self.amp]

    def check(self) -> None:
        """Check what can be checked without model and machine."""
        super().check()
        sources = [self.model is not None, self.shapes is not None, self.show is not None]
        if sum(sources) != 1:
            raise UsageError(
                "nothing to tune" if not any(sources) else "MODEL, --shapes and --show exclude each other",
                "What is tuned is a model's convolutions, or the shapes in a file; --show prints what was tuned.",
                "Use `hybridpar tune mobilenet_v2`, for instance.",
            )
        for option, value in {"--threads": self.threads, "--trials": self.trials}.items():
            if value is not None and value < 1:
                raise UsageError(f"{option} is {value}", "It is at least 1.")
        _ = self.seconds
        if self.batch_size == "auto":
            raise UsageError("--batch-size auto", "Kernels are tuned for one size.", "Name it, as --batch-size 32.")
        if self.target == "cpu" and self.amp != "none":
            raise UsageError(f"--amp {self.amp} on the CPU", "Kernels for the CPU are float32.", "Add --target cuda.")
        if self.target == "cuda" and self.threads is not None:
            raise UsageError("--threads with --target cuda", "They are threads of the CPU.", "Leave --threads out.")
        if self.output is not None:
            check_writable("--output", self.output)


def parse_seconds(budget: str) -> float:
    """Seconds of text like 90s, 10m or 2h."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", budget.strip().lower())
    seconds = float(match[1]) * _SECONDS[match[2]] if match else 0.0
    if seconds <= 0:
        raise UsageError(
            f"--budget {budget!r} is not a time", "A time is a positive number with s, m or h.", "Use 10m."
        )
    return seconds
