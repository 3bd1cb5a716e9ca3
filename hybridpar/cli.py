"""Why: the command `hybridpar`. It reads options, hands them to the package, and turns errors into exit codes.

No logic lives here, and nothing heavy is imported before a command runs: `hybridpar --help` answers at once.
Exit codes: 0 done; 1 the run failed after it had started; 2 the request was wrong; 130 or 143 stopped by Ctrl-C or
SIGTERM after saving.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

import tyro

from hybridpar import __version__
from hybridpar.commands.bench.request import Bench, BenchCodecs, BenchSync
from hybridpar.commands.plan.partition import run_plan
from hybridpar.commands.show import run_show
from hybridpar.config import TrainConfig
from hybridpar.errors import HybridparError, LaunchError, SyncError, UsageError, nearest
from hybridpar.machine.launch import (
    LEAVE_SECONDS,
    error_text,
    failure_recorded,
    follow_launcher,
    in_job,
    launch_workers,
    launched_here,
    leaving_at_once,
    record_failure,
    tell_interrupted,
)
from hybridpar.machine.process import tune_this_process
from hybridpar.planner.request import PlanRequest
from hybridpar.run.directory import before_the_start, expected_directory, find_place, recall_options
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
    """Print a run, a plan, a timeline or a schedule, and draw it."""

    file: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")]
    """A run directory, a plan of `hybridpar plan` or of a run, a trace of `hybridpar train --timeline`, or a schedule
    as CSV."""
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


#: What a command line begins with.
COMMANDS = ("train", "plan", "tune", "show", "bench", "doctor")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: What follows the program's name; default: `sys.argv`.

    Returns:
        The exit code.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments[:1] in (["--version"], ["-V"]):
        print(f"hybridpar {__version__}")
        return 0
    if arguments and not arguments[0].startswith("-") and arguments[0] not in COMMANDS:
        unknown = f"unknown command {arguments[0][:100]!r}"
        return _fail(UsageError(unknown, nearest(arguments[0], COMMANDS), "See `hybridpar --help`."), debug=False)
    with leaving_at_once():
        command = tyro.cli(
            Command,
            args=with_nested_options(arguments),
            prog="hybridpar",
            description="Train PyTorch vision models faster on the hardware you have. --version prints the version.",
            config=(tyro.conf.FlagCreatePairsOff,),
        )
    debug = getattr(command, "debug", False)
    _place_torchs_cache()
    try:
        if isinstance(command, Doctor):
            from hybridpar.commands.doctor import run_doctor

            return run_doctor(command.fresh, command.json)
        if isinstance(command, PlanRequest):
            return _plan(command, arguments)
        if isinstance(command, TuneConfig):
            return _tune(command)
        if isinstance(command, Show):
            return run_show(command.file, command.draw)
        if isinstance(command, Benchmark):
            return _bench(command.what, arguments)
        return _train(command, arguments)
    except HybridparError as error:
        return _fail(error, debug)
    except KeyboardInterrupt:
        tell_interrupted()
        return 130
    except Exception as error:
        return _fail(error, debug)


def with_nested_options(arguments: Sequence[str]) -> list[str]:
    """Join `--for` to its value, which begins with dashes itself and would be taken for an option."""
    joined: list[str] = []
    for argument in arguments:
        if joined and joined[-1] == "--for" and argument.startswith("-"):
            joined[-1] = f"--for={argument}"
        else:
            joined.append(argument)
    return joined


def _plan(command: PlanRequest, arguments: Sequence[str]) -> int:
    from hybridpar.machine.cluster import default_workers

    command.check()
    if command.is_here:  # planned by the workers of this machine, which are started where nobody else has started them
        workers = command.workers or default_workers()
        if workers > 1 and not in_job():
            return launch_workers(arguments, workers, restarts=0, patience=LEAVE_SECONDS)
        _tune_worker(command.tune_process)
        follow_launcher()
    elif command.wants_tuned_process:
        tune_this_process(1)
    if command.calibrate:
        from hybridpar.planner.calibrate import run_calibrate

        return run_calibrate(command.calibrate)
    if not command.searches:
        return run_plan(command)
    with leaving_at_once():
        from hybridpar.commands.plan.search import run_search

    return run_search(command)


def _tune(command: TuneConfig) -> int:
    command.check()
    if command.tune_process and command.show is None:
        tune_this_process(1)
    from hybridpar.commands.tune import run_tune

    return run_tune(command)


def _bench(request: Bench, arguments: Sequence[str]) -> int:
    request.check()
    if isinstance(request, BenchCodecs):
        from hybridpar.commands.bench.codecs import run_bench_codecs

        return run_bench_codecs(request)
    return _bench_sync(request, arguments)


def _bench_sync(request: BenchSync, arguments: Sequence[str]) -> int:
    if not in_job():
        return launch_workers(arguments, request.workers, restarts=0, patience=LEAVE_SECONDS)
    _tune_worker(request.tune_process)
    follow_launcher()
    with leaving_at_once():
        from hybridpar.commands.bench.sync import run_bench_sync

    return run_bench_sync(request)


def _train(command: Train, arguments: Sequence[str]) -> int:
    command.check()
    named = named_options(arguments)
    if not in_job():
        with before_the_start():
            # What follows reads the options of the run; the workers recall them again, and tell of it.
            command, _ = recall_options(command, command.model, named)
            place = find_place(command, command.model)
        from hybridpar.machine.cluster import default_workers, has_gpu, has_gpu_driver

        planned = _workers_of_plan(command)  # and whether there is such a plan
        workers = command.workers or command.workers_wanted or planned
        if not has_gpu_driver():
            workers = workers or default_workers()
        _announce(command, expected_directory(place), workers)
        workers = workers or default_workers()
        if command.uses_servers and workers + command.server_processes > 1:
            from hybridpar.server.supervise import launch_with_servers

            command.split_count(workers)
            program = ["-m", "hybridpar", *arguments]
            tune = command.tune_process and not has_gpu()
            return launch_with_servers(
                program, workers, command.server_processes, patient=command.waits_for_all, tune=tune
            )
        if workers > 1:
            return launch_workers(arguments, workers)
    elif os.environ["RANK"] == "0" and not launched_here():
        with contextlib.suppress(HybridparError):  # an error is told by all workers together, once they have met
            _announce(command, expected_directory(find_place(command, command.model)), int(os.environ["WORLD_SIZE"]))
    _tune_worker(command.tune_process)
    follow_launcher()
    with leaving_at_once():
        from hybridpar.run.run import run_training

    return run_training(command, command.model, named)


def _announce(command: Train, directory: Path, workers: int | None) -> None:
    """Say at once what is about to be trained, before the seconds that torch takes."""
    count = "a worker per GPU" if workers is None else f"{workers} worker{'' if workers == 1 else 's'}"
    lines = f"hybridpar {__version__}: training {command.model} on {command.data}, {count}, in {directory}"
    with contextlib.suppress(OSError):  # a reader that has left is no reason not to train
        print(f"{lines}\nloading torch{'' if workers == 1 else ' and starting the workers'} ...", flush=True)


def _place_torchs_cache() -> None:
    """Keep what torch compiles beside our own cache. Torch makes the directory in any case, else a temporary one."""
    from hybridpar.machine.cluster import cache_directory

    place = cache_directory() / "torchinductor"
    with contextlib.suppress(OSError):
        place.mkdir(parents=True, exist_ok=True)
        if os.access(place, os.W_OK):
            os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(place.resolve()))


def _tune_worker(wanted: bool) -> None:
    """Tune this worker of a CPU job for training, whoever started it, before it imports torch."""
    from hybridpar.machine.cluster import has_gpu

    if wanted and not has_gpu():
        tune_this_process(int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def _workers_of_plan(command: Train) -> int | None:
    """Workers that the plan's file was searched for, or names; a cut of a model alone leaves their number open."""
    from hybridpar.plan import read_plan

    if command.plan_file is not None and not command.plan_file.exists():
        raise UsageError(
            f"--plan {command.plan_file}: there is no such file",
            "It is `auto`, which searches, `none`, or the file of a plan.",
            "Correct it, or write a plan: `hybridpar plan MODEL --explain -o plan.json`.",
        )
    plan = read_plan(command.plan_file) if command.plan_file is not None else None
    placed = plan is not None and plan.placement is not None and not plan.placement.is_usual
    return plan.workers if plan is not None and (placed or plan.inputs is not None) else None


def named_options(arguments: Sequence[str]) -> frozenset[str]:
    """The options of a training run that a command line names, whatever value it gives them."""
    words = {word.partition("=")[0][2:].replace("-", "_") for word in arguments if word.startswith("--")}
    return frozenset(field.name for field in fields(TrainConfig) if {field.name, f"no_{field.name}"} & words)


def _fail(error: BaseException, debug: bool) -> int:
    """Report an error once for the whole job, and choose the exit code."""
    if isinstance(error, (SyncError, LaunchError)) and failure_recorded():
        return 0  # a peer failed first, and its message is the one to show
    if record_failure(error, debug=debug):
        return 0
    if isinstance(error, HybridparError) and error.is_repeated:
        return error.exit_code
    print(error_text(error, debug), file=sys.stderr)
    return error.exit_code if isinstance(error, HybridparError) else 1
