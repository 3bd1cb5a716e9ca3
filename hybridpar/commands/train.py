"""`hybridpar train`: checks the request, starts the workers, and trains as one of them where they have been started."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

import tyro

from hybridpar import __version__
from hybridpar.commands import find_command, register_command
from hybridpar.config import TrainConfig
from hybridpar.config.files import FileOptions, read_sources
from hybridpar.config.train import GROUPS
from hybridpar.errors import HybridparError, UsageError, nearest, shortened
from hybridpar.machine.devices import hide_gpus
from hybridpar.machine.launch import import_torchvision, in_job, launched_here, leaving_at_once, prepare_worker
from hybridpar.machine.supervise import launch_workers

#: Options that `--help` shows; `--help-all` shows all.
SHOWN = (
    *("config", "preset"),
    *("model", "weights", "data", "data_root", "batch_size", "image_size", "augment"),
    *("epochs", "steps", "optimizer", "lr", "weight_decay", "lr_schedule"),
    *("nproc", "stages", "replicas", "micro_batches"),
    *("compress", "sync"),
    *("amp", "kernels"),
    *("plan", "fidelity"),
    *("run_dir", "resume", "checkpoints", "overwrite", "log"),
    "seed",
)


@dataclass(frozen=True, kw_only=True)
class NodeOptions:
    """Several machines: torchrun lines, ssh, Slurm."""

    hosts: Annotated[str | None, tyro.conf.arg(metavar="[ssh:|slurm:]FILE")] = None
    """Train on the machines that this file names, a line each such as `gpu-a slots=4`: print the torchrun lines, or
    with `ssh:FILE` start them, show what they say, and stop all at Ctrl-C or when one fails. `slurm:FILE` writes a
    batch script for Slurm's sbatch, with a torchrun per node."""


@dataclass(frozen=True, kw_only=True)
class DryRunOptions:
    """Planning without training."""

    dry_run: bool = False
    """Plan, say why, and end before the first step; `hybridpar plan` is the same, and writes the plan."""


@dataclass(frozen=True, kw_only=True)
class Train(TrainConfig, FileOptions, NodeOptions, DryRunOptions):
    """Train a vision model on all local workers, or as a worker of a torchrun job.

    For all options, such as --hosts for several machines: `hybridpar train --help-all`.
    """

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """A torchvision classification model such as resnet18, timm/NAME, or your own as package.module:factory."""


@register_command(
    "train",
    "Train a vision model on all local workers, or as a worker of a torchrun job.",
    Train,
    groups={
        "Configuration files": (FileOptions,),
        **GROUPS,
        "Parallelism": (*GROUPS["Parallelism"], NodeOptions),
        "Planning": (*GROUPS["Planning"], DryRunOptions),
    },
    shown=SHOWN,
    read=read_sources,
)
def run_train(command: Train, arguments: Sequence[str]) -> int:
    """Train on this worker, or start the workers of this machine and wait for them."""
    command.check()
    if command.device == "cpu":
        hide_gpus()
    if not in_job():
        check_names(command)
        if command.hosts is not None:
            return _on_several_machines(command, command.hosts, arguments)
    if command.dry_run:
        plan = find_command("plan")
        shared = {field.name for field in fields(plan.options)} & {field.name for field in fields(Train)}
        return plan.run(plan.options(**{name: getattr(command, name) for name in shared}), arguments)
    if not in_job():
        from hybridpar.machine.devices import default_workers, has_gpu_driver
        from hybridpar.run.directory import before_the_start, expected_directory, find_folder, recall_options

        with before_the_start():
            # What follows depends on the options of the run that is resumed; every worker recalls them again.
            command, _ = recall_options(command, command.model)
            folder = find_folder(command, command.model)
        planned = _workers_of_plan(command)  # and whether there is such a plan
        workers = command.nproc or command.workers_wanted or planned
        if not has_gpu_driver():
            workers = workers or default_workers()
        _announce(command, workers, str(expected_directory(folder)))
        workers = workers or default_workers()
        servers, patient = 0, True
        if (sync := command.parameter_servers) is not None:
            sync.split_count(workers)
            servers = sync.servers
            patient = sync.waits_for_all or not servers
        if workers + servers > 1:
            return launch_workers(arguments, workers, servers, patient=patient)
    elif not launched_here():
        check_workers(command)
        if os.environ["RANK"] == "0":
            from hybridpar.run.directory import expected_directory, find_folder

            with contextlib.suppress(HybridparError):  # all workers report an error together, once they are connected
                folder = find_folder(command, command.model)
                _announce(command, int(os.environ["WORLD_SIZE"]), str(expected_directory(folder)))
    prepare_worker(command.tune_process)
    with leaving_at_once():
        if not command.compile:
            import_torchvision()
        from hybridpar.run.run import run_training
    gc.freeze()  # what was imported stays, and need not be searched for garbage

    return run_training(command, command.model)


def _on_several_machines(command: Train, hosts: str, arguments: Sequence[str]) -> int:
    """Print or start what trains on the machines of a hosts file, or write the script for Slurm."""
    from hybridpar.machine.devices import default_workers, gpu_count
    from hybridpar.machine.nodes import launch_by_ssh, read_hosts, slurm_script, torchrun_lines

    how, _, name = hosts.rpartition(":")
    if how not in ("", "ssh", "slurm"):
        how, name = "", hosts
    file, words = Path(name), without_options(arguments, ("hosts", "nproc"))
    if how == "slurm":
        script = slurm_script(
            command.model.rpartition("/")[2],
            command.nproc or gpu_count() or None,
            words,
            servers=command.parameter_servers is not None,
        )
        try:
            file.write_text(script, encoding="utf-8")
        except OSError as error:
            raise UsageError(f"--hosts {hosts}: {error.strerror}", fix="Name a file that can be written.") from error
        print(f"written; look at its first lines, then: sbatch {file}")
        return 0
    machines, slots = read_hosts(file), command.nproc or default_workers()
    if not how:
        print(torchrun_lines(machines, slots, words))
        return 0
    total = sum(host.slots or slots for host in machines)
    names = ", ".join(host.name for host in machines)
    print(
        f"hybridpar {__version__}: training {command.model} on {command.data}, {total} workers on {names}", flush=True
    )
    return launch_by_ssh(machines, slots, words)


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
    kept: list[str] = []
    words = iter(arguments)
    for word in words:
        option, joined, _ = word.partition("=")
        if option.startswith("--") and option[2:].replace("_", "-") in names:
            if not joined:
                next(words, None)
        else:
            kept.append(word)
    return kept


def check_names(command: TrainConfig) -> None:
    """Check what can be known of names and codecs before there are workers; torch is imported for none.

    A codec with options, and a policy, is the exception: only the codec itself can check them.
    """
    from hybridpar.config.data import OTHER_SETS, TORCHVISION_SETS, data_name, data_set_kind
    from hybridpar.config.sync import CODECS
    from hybridpar.models import parse_arguments

    parse_arguments(command.model_arg)
    if command.weights is not None and not command.resume:  # else they have been read
        from hybridpar.models.weight_files import check_file, is_file

        if is_file(command.weights):
            check_file(Path(command.weights))
    _check_known("data set", data_set_kind(command.data), {*TORCHVISION_SETS, *OTHER_SETS}, "hybridpar.data")
    is_here = not isinstance(command, NodeOptions) or command.hosts is None
    data = data_name(command.data)
    if data in ("folder", "csv") and not command.resume and is_here and not command.data_root.exists():
        raise UsageError(
            f"--data-root {command.data_root}: there is no such folder",
            f"--data {data} reads the images there.",
            "Name the directory that holds train/CLASS/ and test/CLASS/ (or val/CLASS/)."
            if data == "folder"
            else "Name a table, as FILE.csv, or the directory that holds train.csv and test.csv.",
        )
    if command.log:
        from hybridpar.observe.logger import logger_names

        logger_names(command.log)
    codec = command.compress.strip()
    name, options, _ = codec.partition(":")
    if codec.endswith(".toml") or "->" in codec:
        from hybridpar.compress import read_policy

        read_policy(codec)
    elif codec != "auto":
        _check_known("codec", name, CODECS, "hybridpar.compress.codecs")
        if options:
            from hybridpar.compress import parse_codec

            parse_codec(codec)


def _check_known(kind: str, name: str, names: Collection[str], registry: str) -> None:
    """Check a name, unless the module that registers such names is there: a program may have registered others."""
    if registry not in sys.modules and name not in names:
        raise UsageError(f"unknown {kind} {shortened(repr(name))}", fix=nearest(name, names))


def _announce(command: Train, workers: int | None, directory: str) -> None:
    """Say what is about to be trained, before the seconds that importing torch takes."""
    count = "a worker per GPU" if workers is None else f"{workers} worker{'' if workers == 1 else 's'}"
    lines = f"hybridpar {__version__}: training {command.model} on {command.data}, {count}, in {directory}"
    with contextlib.suppress(OSError):  # a closed pipe does not end the training
        print(f"{lines}\nloading torch{'' if workers == 1 else ' and starting the workers'} ...", flush=True)


def _workers_of_plan(command: Train) -> int | None:
    """Workers that the plan's file asks for; None if it leaves their number open, or no file is named."""
    if command.plan_file is None:
        return None
    from hybridpar.plan import read_plan

    if not command.plan_file.exists():
        raise UsageError(
            f"--plan {command.plan_file}: there is no such file",
            "It is `auto`, which searches, `none`, or the file of a plan.",
            "Name the file of a plan, or write it: `hybridpar plan MODEL -o plan.json`.",
        )
    plan = read_plan(command.plan_file)
    placed = plan.placement is not None and not plan.layout.is_usual
    return plan.workers if placed or plan.inputs is not None else None
