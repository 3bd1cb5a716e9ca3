"""`hybridpar plan`: cuts a model into stages, or searches for the fastest way to train it."""

from __future__ import annotations

from collections.abc import Sequence

from hybridpar.commands import register_command
from hybridpar.machine.launch import LEAVE_SECONDS, in_job, launch_workers, leaving_at_once, prepare_worker
from hybridpar.machine.process import tune_this_process
from hybridpar.planner.request import PlanRequest


@register_command(
    "plan", "Cut a model into balanced stages, or search for the fastest way to train it; write the plan.", PlanRequest
)
def _run(command: PlanRequest, arguments: Sequence[str]) -> int:
    from hybridpar.machine.cluster import default_workers

    if command.is_here and (in_job() or command.verify or (command.workers or default_workers()) > 1):
        return _plan_with_workers(command, arguments)
    if command.wants_tuned_process:
        tune_this_process(1)
    command.check()
    if command.calibrate:
        from hybridpar.planner.calibrate import run_calibrate

        return run_calibrate(command.calibrate)
    if command.searches:
        from hybridpar.commands.plan.search import run_search

        return run_search(command)
    from hybridpar.commands.plan.partition import run_plan

    return run_plan(command)


def _plan_with_workers(command: PlanRequest, arguments: Sequence[str]) -> int:
    """Plan in the workers of this machine, which are started here unless a launcher has started them."""
    from hybridpar.machine.cluster import default_workers

    command.check()
    if not in_job():
        workers = command.workers or default_workers()
        if workers > 1:
            return launch_workers(arguments, workers, restarts=0, patience=LEAVE_SECONDS)
    prepare_worker(command.tune_process)
    with leaving_at_once():
        from hybridpar.commands.plan.job import run_plan_job

    return run_plan_job(command)
