"""The options of `hybridpar plan`: those of `hybridpar train`, and names of files that it reads and writes besides."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro

from hybridpar.commands.train import ModelArgument
from hybridpar.config import TrainConfig
from hybridpar.config.files import FileOptions
from hybridpar.errors import UsageError, check
from hybridpar.formats.output_files import check_writable
from hybridpar.spec import Options


class PlanFiles(Options):
    """Files of a plan.

    Attributes:
        output: Write the plan to this JSON file, which `hybridpar train --plan FILE` follows.
        cluster: Plan for the machines that this TOML file describes; default: this one, measured by all of its workers.
    """

    output: Annotated[Path | None, tyro.conf.arg(aliases=["-o"])] = None
    cluster: Path | None = None


class PlanRequest(ModelArgument, TrainConfig, FileOptions, PlanFiles):
    """Plan a training without making it: measure the model, search for the fastest way, say why the others lose.

    It takes the options of `hybridpar train`, and decides what `hybridpar train` would decide. For all of them:
    `hybridpar plan --help-all`.
    """

    def check(self) -> None:
        """Check what can be checked without the data and the machine."""
        super().check()
        for option, given in ((f"--plan {self.plan}", not self.searches), ("--resume", self.resume)):
            check(not given, f"{option} without training", "A plan is searched for here.", f"Leave out {option}.")
        if self.output is not None:
            check_writable("--output", self.output)
        if self.cluster is not None and self.nproc is not None:
            why = "The description of a cluster says how many workers there are."
            raise UsageError(f"--nproc {self.nproc} with --cluster", why, "Leave out --nproc.")
