"""The options of `hybridpar tune`: those of `hybridpar train`, and those of the search."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

import tyro

from hybridpar.config import TrainConfig
from hybridpar.config.files import FileOptions
from hybridpar.errors import UsageError, check
from hybridpar.formats.output_files import check_writable
from hybridpar.spec import AT_LEAST_1, Options

_SECONDS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


class SearchOptions(Options):
    """What is searched, for how long, and where it is kept.

    Attributes:
        shape: Instead of a model: a convolution such as "8x96x56x56 k3x3 s1x1 p1x1 d1x1"; may be repeated.
        threads: Threads that compute; default: one worker's share of the cores.
        target: What kernels are for: the CPU, or the GPU that torch uses.
        budget: Time for everything, as 90s, 10m or 2h; searches get parts of it by what torch takes for them in a step.
        trials: Most candidates of one search; default: as many as there is time for.
        again: Search again where there is a record already.
        output: File that records are appended to; default: the one that `hybridpar train --kernels auto` reads.
        show: Tune nothing; print this database.
    """

    shape: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    threads: Annotated[int | None, AT_LEAST_1] = None
    target: Literal["cpu", "cuda"] = "cpu"
    budget: str = "10m"
    trials: Annotated[int | None, AT_LEAST_1] = None
    again: bool = False
    output: Annotated[Path | None, tyro.conf.arg(aliases=["-o"])] = None
    show: Path | None = None


class TuneRequest(TrainConfig, FileOptions, SearchOptions):
    """Search the fastest kernels for depthwise convolutions on this machine, and keep what was measured.

    It takes the options of `hybridpar train`, and tunes what each worker of that training computes. For all of them:
    `hybridpar tune --help-all`.

    Attributes:
        model: A torchvision model such as mobilenet_v2, timm/NAME, or your own as package.module:factory.
    """

    model: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")] = None

    def check(self) -> None:
        """Check what can be checked without model and machine."""
        super().check()
        sources = [source for source in (self.model, self.shape, self.show) if source]
        check(
            len(sources) == 1,
            "MODEL, --shape and --show exclude each other" if sources else "nothing to tune",
            "What is tuned is a model's convolutions, or those that --shape names; --show prints what was tuned.",
            "Use `hybridpar tune mobilenet_v2`, for instance.",
        )
        parse_seconds(self.budget)
        check(self.batch_size != "auto", "--batch-size auto", "Kernels are tuned for one size.", "Name it.")
        if self.target == "cpu":
            check(self.amp != "fp16", "--amp fp16 on the CPU", "Its kernels are float32 and bf16.", "Use --amp bf16.")
            check(
                self.memory_format != "contiguous",
                "--memory-format contiguous on the CPU",
                "Kernels for the CPU are for channels_last, in which they are as fast or faster.",
                "Leave --memory-format out, here and in the training.",
            )
        elif self.threads is not None:
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
