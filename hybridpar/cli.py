"""Why: the command `hybridpar`. It reads options, hands them to the package, and turns errors into exit codes.

No logic lives here, and nothing heavy is imported before a command runs: `hybridpar --help` answers at once.
Exit codes: 0 done; 1 the run failed; 2 the request was wrong; 130 or 143 stopped by Ctrl-C or SIGTERM after saving.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

import tyro

from hybridpar.bench.request import Bench, BenchCodecs, BenchSync
from hybridpar.config import TrainConfig
from hybridpar.errors import HybridparError, LaunchError, SyncError, UsageError
from hybridpar.launch import (
    LEAVE_SECONDS,
    error_text,
    follow_launcher,
    in_job,
    launch_workers,
    leave_verdict,
    leaving_at_once,
    restart_with_environment,
    verdict_exists,
)
from hybridpar.partition.command import run_plan
from hybridpar.planner.request import PlanRequest
from hybridpar.show import run_show
from hybridpar.tvm_kernels.request import TuneConfig


@dataclass(frozen=True, kw_only=True)
class Train(TrainConfig):
    """Train a vision model on all local workers, or as a worker of a torchrun job."""

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """A torchvision classification model such as resnet18, or your own as package.module:factory."""


@dataclass(frozen=True, kw_only=True)
class Doctor:
    """Show what this machine offers, what hybridpar will use, and how to mend what is missing."""

    fresh: bool = False
    """Measure again instead of using cached figures."""
    json: bool = False
    """Print JSON."""


@dataclass(frozen=True, kw_only=True)
class Show:
    """Print a plan, a timeline or a schedule, and draw it."""

    file: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")]
    """A plan of `hybridpar plan` or of a run, a trace of `hybridpar train --timeline`, or a schedule as CSV."""
    draw: Path | None = None
    """Draw it into this .svg, .png or .pdf file; of a plan, the schedule with its predicted times."""


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """Measure on this machine what compressing gradients costs and gains."""

    what: Bench


Command = Annotated[
    Annotated[Train, tyro.conf.subcommand("train")]
    | Annotated[PlanRequest, tyro.conf.subcommand("plan")]
    | Annotated[TuneConfig, tyro.conf.subcommand("tune")]
    | Annotated[Show, tyro.conf.subcommand("show")]
    | Annotated[Benchmark, tyro.conf.subcommand("bench")]
    | Annotated[Doctor, tyro.conf.subcommand("doctor")],
    tyro.conf.OmitSubcommandPrefixes,
]


def main(arguments: Sequence[str] | None = None, *, program: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: What follows the program's name; default: `sys.argv`.
        program: What Python must run to come here again with the same arguments, for a process that starts itself
            anew with other settings; default: `-m hybridpar` with the arguments.

    Returns:
        The exit code.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    program = ["-m", "hybridpar", *arguments] if program is None else program
    with leaving_at_once():
        command = tyro.cli(
            Command,
            args=with_nested_options(arguments),
            prog="hybridpar",
            description="Train PyTorch vision models faster on the hardware you have.",
            config=(tyro.conf.FlagCreatePairsOff,),
        )
    debug = getattr(command, "debug", False)
    try:
        if isinstance(command, Doctor):
            from hybridpar.doctor import run_doctor

            return run_doctor(command.fresh, command.json)
        if isinstance(command, PlanRequest):
            return _plan(command, arguments, program)
        if isinstance(command, TuneConfig):
            return _tune(command, program)
        if isinstance(command, Show):
            return run_show(command.file, command.draw)
        if isinstance(command, Benchmark):
            return _bench(command.what, arguments)
        return _train(command, arguments, program)
    except HybridparError as error:
        return _fail(error, debug)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        if "RANK" not in os.environ:
            raise
        return _fail(error, debug=True)


def with_nested_options(arguments: Sequence[str]) -> list[str]:
    """Join `--for` to its value, which begins with dashes itself and would be taken for an option."""
    joined: list[str] = []
    for argument in arguments:
        if joined and joined[-1] == "--for" and argument.startswith("-"):
            joined[-1] = f"--for={argument}"
        else:
            joined.append(argument)
    return joined


def _plan(command: PlanRequest, arguments: Sequence[str], program: Sequence[str]) -> int:
    from hybridpar.cluster import default_workers

    if command.is_here and (in_job() or command.verify or (command.workers or default_workers()) > 1):
        return _plan_with_workers(command, arguments, program)
    if command.wants_tuned_process:
        restart_with_environment(program)
    if command.calibrate:
        from hybridpar.planner.calibrate import run_calibrate

        command.check()
        return run_calibrate(command.calibrate)
    if command.searches:
        from hybridpar.planner.command import run_search

        return run_search(command)
    command.check()
    return run_plan(command)


def _plan_with_workers(command: PlanRequest, arguments: Sequence[str], program: Sequence[str]) -> int:
    """Plan in the workers of this machine, which are started where nobody else has started them."""
    from hybridpar.cluster import default_workers, has_gpu

    command.check()
    if not in_job():
        workers = command.workers or default_workers()
        if workers > 1:
            tune = command.tune_process and not has_gpu()
            return launch_workers(arguments, workers, tune=tune, restarts=0, patience=LEAVE_SECONDS)
        if command.wants_tuned_process:
            restart_with_environment(program)
    follow_launcher()
    with leaving_at_once():
        from hybridpar.plan_job import run_plan_job

    return run_plan_job(command)


def _tune(command: TuneConfig, program: Sequence[str]) -> int:
    command.check()
    if command.tune_process and command.show is None:
        restart_with_environment(program)
    from hybridpar.tune_command import run_tune

    return run_tune(command)


def _bench(request: Bench, arguments: Sequence[str]) -> int:
    request.check()
    if isinstance(request, BenchCodecs):
        from hybridpar.bench.codecs import run_bench_codecs

        return run_bench_codecs(request)
    return _bench_sync(request, arguments)


def _bench_sync(request: BenchSync, arguments: Sequence[str]) -> int:
    if not in_job():
        from hybridpar.cluster import has_gpu

        tune = request.tune_process and not has_gpu()
        return launch_workers(arguments, request.workers, tune=tune, restarts=0, patience=LEAVE_SECONDS)
    follow_launcher()
    with leaving_at_once():
        from hybridpar.bench.sync import run_bench_sync

    return run_bench_sync(request)


def _train(command: Train, arguments: Sequence[str], program: Sequence[str]) -> int:
    command.check()
    if not in_job():
        from hybridpar.cluster import default_workers, has_gpu

        tune = command.tune_process and not has_gpu()
        planned = _workers_of_plan(command)
        workers = command.workers or command.workers_wanted or planned or default_workers()
        if command.uses_servers and workers + command.server_processes > 1:
            from hybridpar.server.supervise import launch_with_servers

            command.split_count(workers)
            return launch_with_servers(
                program, workers, command.server_processes, patient=command.waits_for_all, tune=tune
            )
        if workers > 1:
            return launch_workers(arguments, workers, tune=tune)
        if tune:
            restart_with_environment(program)
    follow_launcher()
    with leaving_at_once():
        from hybridpar.run import run_training

    return run_training(command, command.model, named_options(arguments))


def _workers_of_plan(command: Train) -> int | None:
    """Workers that the plan's file was searched for; one that merely cuts a model leaves their number open."""
    from hybridpar.plan import read_plan

    if command.plan_file is not None and not command.plan_file.exists():
        raise UsageError(
            f"--plan {command.plan_file}: there is no such file",
            "It is `auto`, which searches, `none`, or the file of a plan.",
            "Correct it, or write a plan: `hybridpar plan MODEL --explain -o plan.json`.",
        )
    plan = read_plan(command.plan_file) if command.plan_file is not None else None
    return plan.workers if plan is not None and plan.inputs is not None else None


def named_options(arguments: Sequence[str]) -> frozenset[str]:
    """The options of a training run that a command line names, whatever value it gives them."""
    words = {word.partition("=")[0][2:].replace("-", "_") for word in arguments if word.startswith("--")}
    return frozenset(field.name for field in fields(TrainConfig) if {field.name, f"no_{field.name}"} & words)


def _fail(error: BaseException, debug: bool) -> int:
    """Report an error once for the whole job, and choose the exit code."""
    if isinstance(error, (SyncError, LaunchError)) and verdict_exists():
        return 0  # a peer failed first, and its message is the one to show
    if leave_verdict(error, debug=debug):
        return 0
    print(error_text(error, debug), file=sys.stderr)
    return error.exit_code if isinstance(error, HybridparError) else 1
