"""The options of `hybridpar plan`: those of `hybridpar train`, and the files that it reads and writes besides."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from hybridpar.config import TrainConfig
from hybridpar.config.files import FileOptions
from hybridpar.errors import UsageError
from hybridpar.formats.output_files import check_writable


@dataclass(frozen=True, kw_only=True)
class PlanFiles:
    """Files of a plan."""

    output: Annotated[Path | None, tyro.conf.arg(aliases=["-o"])] = None
    """Write the plan to this JSON file, which `hybridpar train --plan FILE` follows."""
    cluster: Path | None = None
    """Plan for the machines that this TOML file describes; default: this one, measured by all of its workers."""


@dataclass(frozen=True, kw_only=True)
class PlanRequest(TrainConfig, FileOptions, PlanFiles):
    """Plan a training without making it: measure the model, search for the fastest way, say why the others lose.

    It takes the options of `hybridpar train`, and decides what `hybridpar train` would decide. For all of them:
    `hybridpar plan --help-all`.
    """

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """A torchvision classification model such as resnet18, timm/NAME, or your own as package.module:factory."""

    def check(self) -> None:
        """Check what can be checked without the data and the machine."""
        super().check()
        for option, given in ((f"--plan {self.plan}", not self.searches), ("--resume", self.resume)):
            if given:
                raise UsageError(f"{option} without training", "A plan is searched for here.", f"Leave out {option}.")
        if self.output is not None:
            check_writable("--output", self.output)
        if self.cluster is not None and self.nproc is not None:
            raise UsageError(
                f"--nproc {self.nproc} with --cluster",
                "The description of a cluster says how many workers there are.",
                "Leave out --nproc.",
            )
