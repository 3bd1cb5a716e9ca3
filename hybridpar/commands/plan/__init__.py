"""`hybridpar plan`: searches for the fastest way to train a model, without training it."""

from __future__ import annotations

from collections.abc import Sequence

from hybridpar.commands import named_options, register_command
from hybridpar.commands.plan.request import PlanRequest
from hybridpar.machine.launch import import_torchvision, in_job, leaving_at_once, prepare_worker
from hybridpar.machine.process import tune_this_process
from hybridpar.machine.supervise import LEAVE_SECONDS, launch_workers


@register_command("plan", "Search for the fastest way to train a model, say why, and write the plan.", PlanRequest)
def _run(command: PlanRequest, arguments: Sequence[str]) -> int:
    from hybridpar.machine.devices import default_workers

    command.check(named_options(arguments, PlanRequest))
    if command.is_here:  # planned by the workers of this machine, which are started here unless a launcher has done so
        workers = command.workers or default_workers()
        if workers > 1 and not in_job():
            return launch_workers(arguments, workers, restarts=0, patience=LEAVE_SECONDS)
        prepare_worker(command.tune_process)
    elif command.wants_tuned_process:
        tune_this_process(1)
    with leaving_at_once():
        import_torchvision()
        from hybridpar.commands.plan.search import run_plan

    return run_plan(command)
