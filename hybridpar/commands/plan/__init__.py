"""`hybridpar plan`: what `hybridpar train` decides before its first step, and why, without the training.

It takes the options of `hybridpar train`, and names of files that it reads and writes besides.
"""

from __future__ import annotations

from collections.abc import Sequence

from hybridpar.commands import register_command
from hybridpar.commands.plan.request import PlanFiles, PlanRequest
from hybridpar.commands.train import SHOWN, check_names, check_workers
from hybridpar.config.files import FileOptions, read_sources
from hybridpar.config.train import GROUPS
from hybridpar.machine.devices import hide_gpus
from hybridpar.machine.launch import import_torchvision, in_job, launched_here, leaving_at_once, prepare_worker
from hybridpar.machine.process import tune_this_process
from hybridpar.machine.supervise import LEAVE_SECONDS, launch_workers


@register_command(
    "plan",
    "Search for the fastest way to train a model, say why, and write the plan.",
    PlanRequest,
    groups={"Plan": (PlanFiles,), "Configuration files": (FileOptions,), **GROUPS},
    shown=("output", "cluster", *SHOWN),
    read=read_sources,
)
def run_plan_command(command: PlanRequest, arguments: Sequence[str]) -> int:
    """Plan on this worker, or start the workers of this machine, which plan together."""
    command.check()
    if command.device == "cpu":
        hide_gpus()
    if not in_job():
        check_names(command)
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
        from hybridpar.commands.plan.search import run_plan

    return run_plan(command)
