"""`hybridpar train`: checks the request, starts the workers, and trains as one of them where they have been started."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Collection, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Annotated

import tyro

from hybridpar import __version__
from hybridpar.commands import COMMANDS, register_command
from hybridpar.config import TrainConfig
from hybridpar.config.data import OTHER_SETS, TORCHVISION_SETS, data_set_kind
from hybridpar.config.files import FileOptions
from hybridpar.config.sync import CODECS
from hybridpar.errors import HybridparError, UsageError, nearest, shortened
from hybridpar.machine.devices import default_workers, hide_gpus, require_gpu
from hybridpar.machine.launch import import_torchvision, in_job, launched_here, leaving_at_once, prepare_worker
from hybridpar.spec import Options


class StartOptions(Options):
    """What is started: workers on several machines, or nothing but the planning.

    Attributes:
        hosts: Print the torchrun lines for the machines in a file, a line each such as `gpu-a slots=4`; or with
            `ssh:FILE` start them, show what they say, and stop all at Ctrl-C or when one fails.
        dry_run: Plan, say why, and end before the first step, as `hybridpar plan` does.
    """

    hosts: Annotated[str | None, tyro.conf.arg(metavar="[ssh:]FILE")] = None
    dry_run: bool = False


class ModelArgument(Options):
    """What is trained.

    Attributes:
        model: A torchvision classification model such as resnet18, timm/NAME, or your own as package.module:factory.
    """

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]


class Train(ModelArgument, TrainConfig, FileOptions, StartOptions):
    """Train a vision model on all local workers, or as a worker of a torchrun job. More: --help-all."""


def check_request(command: TrainConfig) -> None:
    """Check the options, and before there are workers the names in them."""
    command.check()
    if command.device == "cpu":
        hide_gpus()
    if not in_job():
        check_names(command)


@register_command("train", Train)
def run_train(command: Train, arguments: Sequence[str]) -> int:
    """Train on this worker, or start the workers of this machine and wait for them."""
    check_request(command)
    if command.hosts is not None and not in_job():
        return _on_several_machines(command, command.hosts, arguments)
    require_gpu(command.device)
    if command.dry_run:
        plan, shared = COMMANDS.get("plan"), [*fields(ModelArgument), *fields(TrainConfig)]
        return plan.run(plan.options(**{field.name: getattr(command, field.name) for field in shared}), arguments)
    if not in_job():
        from hybridpar.run.directory import before_the_start, recall_options

        with before_the_start():
            # What follows depends on the options of the run that is resumed; every worker recalls them again.
            command, _ = recall_options(command, command.model)
            _announce(command)
        workers = command.nproc or command.workers_wanted or _workers_of_plan(command) or default_workers()
        servers, patient = 0, True
        if (sync := command.parameter_servers) is not None:
            sync.split_count(workers)
            servers, patient = sync.servers, sync.waits_for_all or not sync.servers
        if workers + servers > 1:
            from hybridpar.machine.supervise import launch_workers

            return launch_workers(arguments, workers, servers, patient=patient)
    elif not launched_here():
        check_workers(command)
        if os.environ["RANK"] == "0":
            with contextlib.suppress(HybridparError):  # all workers report an error together, once they are connected
                _announce(command)
    prepare_worker(command.tune_process)
    with leaving_at_once():
        if not command.compile:
            import_torchvision()
        from hybridpar.run.run import run_training
    gc.freeze()  # what was imported stays, and need not be searched for garbage

    return run_training(command, command.model)


def _workers_of_plan(command: Train) -> int | None:
    """Workers that the plan's file asks for; None if it leaves their number open, or no file is named."""
    if command.plan_file is None:
        return None
    from hybridpar.plan import read_plan

    plan = read_plan(command.plan_file)
    placed = plan.placement is not None and not plan.layout.is_usual
    return plan.workers if placed or plan.inputs is not None else None


def _announce(command: Train) -> None:
    """Say what is about to be trained, before the seconds that importing torch takes."""
    from hybridpar.run.directory import find_folder

    directory = find_folder(command, command.model).directory
    with contextlib.suppress(OSError):  # a closed pipe does not end the training
        print(f"hybridpar {__version__}: training {command.model} on {command.data}, in {directory}")
        print("loading torch ...", flush=True)


def _on_several_machines(command: Train, hosts: str, arguments: Sequence[str]) -> int:
    """Print or start what trains on the machines of a hosts file."""
    from hybridpar.machine.nodes import launch_by_ssh, read_hosts, torchrun_lines

    machines = read_hosts(Path(hosts.removeprefix("ssh:")))
    slots, words = command.nproc or default_workers(), without_options(arguments, ("hosts", "nproc"))
    if hosts.startswith("ssh:"):
        return launch_by_ssh(machines, slots, words)
    print(torchrun_lines(machines, slots, words))
    return 0


def check_workers(command: TrainConfig) -> None:
    """Refuse a number of workers that is not that of the job which a launcher started."""
    given = int(os.environ["WORLD_SIZE"]) - (sync.servers if (sync := command.parameter_servers) else 0)
    if command.nproc not in (None, given):
        raise UsageError(
            f"--nproc {command.nproc} in a job of {given}",
            "RANK and WORLD_SIZE are set, as a launcher sets them that starts the workers itself.",
            "Leave out --nproc, or unset both variables.",
        )


def without_options(arguments: Sequence[str], names: Collection[str]) -> list[str]:
    """A command line without some options and their values."""
    rest: list[str] = []
    words = iter(arguments)
    for word in words:
        option, joined, _ = word.partition("=")
        if not (option.startswith("--") and option[2:].replace("_", "-") in names):
            rest.append(word)
        elif not joined:
            next(words, None)
    return rest


def check_names(command: TrainConfig) -> None:
    """Check what can be known of names before there are workers, without the seconds that torch takes."""
    from hybridpar.models import parse_arguments

    parse_arguments(command.model_arg)
    if command.weights is not None and not command.resume:  # else they have been read
        from hybridpar.models.pretrained import is_file
        from hybridpar.models.weights import check_file

        if is_file(command.weights):
            check_file(Path(command.weights))
    _check_known("data set", data_set_kind(command.data), {*TORCHVISION_SETS, *OTHER_SETS}, "hybridpar.data")
    if not command.chooses and "->" not in command.compress:
        _check_known("codec", command.compress.strip().partition(":")[0], CODECS, "hybridpar.compress.codecs")


def _check_known(kind: str, name: str, names: Collection[str], registry: str) -> None:
    """Check a name, unless the module that registers such names is there: a program may have registered others."""
    if registry not in sys.modules and name not in names:
        raise UsageError(f"unknown {kind} {shortened(repr(name))}", fix=nearest(name, names))
