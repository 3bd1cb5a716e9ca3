"""`hybridpar plan`: what `hybridpar train` decides before its first step, and why, without the training.

It takes the options of `hybridpar train`, and names of files that it reads and writes besides.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, ClassVar

import tyro

from hybridpar.commands import register_command
from hybridpar.commands.train import ModelArgument, check_request, check_workers
from hybridpar.config import TrainConfig
from hybridpar.config.files import FileOptions
from hybridpar.errors import check, refuse
from hybridpar.formats.output_files import check_writable
from hybridpar.machine.launch import import_torchvision, in_job, launched_here, leaving_at_once, prepare_worker
from hybridpar.machine.process import tune_this_process
from hybridpar.machine.supervise import LEAVE_SECONDS, launch_workers
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

    #: Nothing is trained, so nothing is saved.
    without_effect: ClassVar[tuple[str, ...]] = ("run_dir", "resume", "checkpoints", "log")

    def check(self) -> None:
        """Check what can be checked without the data and the machine."""
        super().check()
        for option, given in ((f"--plan {self.plan}", not self.searches), ("--resume", self.resume)):
            check(not given, f"{option} without training", "A plan is searched for here.", f"Leave out {option}.")
        if self.output is not None:
            check_writable("--output", self.output)
        if self.cluster is not None and self.nproc is not None:
            raise refuse(f"--nproc {self.nproc}", "--cluster", "The description of a cluster says how many there are.")


@register_command("plan", PlanRequest, Plan=PlanFiles)
def run_plan(command: PlanRequest, arguments: Sequence[str]) -> int:
    """Plan on this worker, or start the workers of this machine, which plan together."""
    check_request(command)
    if command.cluster is not None:
        if command.tune_process:
            tune_this_process(1)
    else:
        if not in_job():
            from hybridpar.machine.devices import default_workers

            workers = command.nproc or command.workers_wanted or default_workers()
            if workers > 1:
                return launch_workers(arguments, workers, restarts=0, patience=LEAVE_SECONDS)
        elif not launched_here():
            check_workers(command)
        prepare_worker(command.tune_process)
    with leaving_at_once():
        import_torchvision()
        from hybridpar.commands.plan.search import search

    return search(command, command.model, command.output, command.cluster)
