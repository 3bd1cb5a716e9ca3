"""Opens a run: data, model and directory, then its plan, the trainer, and the parts that look at its steps.

Every worker calls these functions in the same order, as many of them are collectives.
"""

from __future__ import annotations

import contextlib
import math
import socket
from dataclasses import asdict, replace
from itertools import chain
from typing import Any

import torch
from torch import nn

from hybridpar.comm.world import World
from hybridpar.config import TrainConfig
from hybridpar.config.sync import Exchange
from hybridpar.data import ImageData, describe_data
from hybridpar.data.sources import ImageFacts
from hybridpar.errors import CheckpointError, HybridparError
from hybridpar.formats.checkpoint_files import digest_of
from hybridpar.models.deferred import DeferredModel, module_of
from hybridpar.observe.loggers import logger_names
from hybridpar.optim.build import optimizer_by_name
from hybridpar.plan import ResolvedPlan
from hybridpar.planner.fixed import decided_options
from hybridpar.planner.planned_run import PlannedRun, plan_run
from hybridpar.planner.resolve import join_workers
from hybridpar.run.checkpoints import Checkpoints, is_finished, resume
from hybridpar.run.data import Samples, check_batch, example_batch, load_data, open_model, read_weights, steps_of
from hybridpar.run.directory import claim_folder, find_folder, recall_options, recorded_batch, was_restarted
from hybridpar.run.part import Part, Run, RunTrainer, sync_of
from hybridpar.run.reporting import Recorder, describe
from hybridpar.run.worker import MemoryMeter
from hybridpar.spec import with_options
from hybridpar.train.trainer import open_trial

#: The model of a run, whole or to be divided between the workers.
Model = nn.Module | DeferredModel


def recall(config: TrainConfig, model_name: str) -> tuple[TrainConfig, tuple[str, ...]]:
    """The options of a run that is resumed, and lines on them, for the worker that writes to the loggers."""
    config, changes = _recall_checked(config, model_name)
    logger_names(config.log)
    return config, changes


def _recall_checked(config: TrainConfig, model_name: str) -> tuple[TrainConfig, tuple[str, ...]]:
    config, changes = recall_options(config, model_name)
    config.check()
    return config, changes


def join(config: TrainConfig, model_name: str, job: contextlib.ExitStack) -> World | None:
    """Come to the other workers, until `job` ends; None on a server, once all workers have left."""
    with contextlib.suppress(HybridparError):  # worker 0 says it, once all have joined as they were asked to
        config, _ = _recall_checked(config, model_name)
    if config.parameter_servers is None:
        world: World | None = join_workers(config)
    else:
        from hybridpar.run.served_trainer import join_servers

        world = join_servers(config, job)
    if world is not None:
        job.callback(world.close)
    return world


def open_run(run: Run) -> None:
    """Open all that a run needs, its trainer last."""
    world = run.world
    optimizer_by_name([{"params": [nn.Parameter(torch.zeros(1, 1))]}], run.config)  # or refused, before data are loaded
    run.progress.prepare("loading the data set and the model")
    data = load_data(run.config, world)
    run.config = replace(run.config, data=with_options(run.config.data, download=None))  # it is there
    model, note = open_model(run.config, run.model_name, data, world)
    run.notes += [] if note is None else [note]
    run.data_line = world.from_main(lambda: describe_data(data))
    find_folder_together(run)
    if run.config.batch_size == "auto":
        choose_batch(run, module_of(model), data)
    check_batch(run.config, len(data.train), world.size)
    if run.folder.checkpoint is None:
        run.notes += read_weights(run.config, run.model_name, model, world)
    planned = open_plan(run, model, data)
    run.plan, run.notes = planned.plan, [*run.notes, *planned.lines]
    run.samples = Samples(data, run.config, run.plan, world, isinstance(model, DeferredModel))
    # What planning left behind is not for training; the model is, and is there already.
    state = chain(module_of(model).parameters(), module_of(model).buffers())
    run.memory = MemoryMeter(world.device, holding=sum(tensor.nbytes for tensor in state if not tensor.is_meta))
    run.total = run.config.steps if run.config.steps is not None else run.config.epochs * run.samples.per_epoch
    run.epochs = math.ceil(run.total / run.samples.per_epoch)
    run.trainer = open_trainer(run, model, planned)
    run.plan = run.trainer.plan  # as it is carried out


def find_folder_together(run: Run) -> None:
    """Find where the run writes, as worker 0 decides; every worker must see the checkpoint that it goes on from."""
    world = run.world
    # With a launcher on each host, only that of the worker that died counts the restart.
    restarted = any(world.gather(was_restarted()))
    run.folder = world.from_main(lambda: find_folder(run.config, run.model_name, restarted=restarted))
    seen: list[Any] = world.gather((digest_of(run.folder.checkpoint), socket.gethostname()))
    if (other := next((rank for rank, (digest, _) in enumerate(seen) if digest != seen[0][0]), None)) is not None:
        raise CheckpointError(
            f"worker {other} on {seen[other][1]} does not have the checkpoint {run.folder.checkpoint} of worker 0",
            "Every worker reads the checkpoint from the run directory.",
            "Have the run directory on a disk that all machines see, or copy it to that one.",
        )


def choose_batch(run: Run, model: nn.Module, data: ImageData) -> None:
    """Put a number for `--batch-size auto`: that of the run that goes on, or a new choice."""
    batch = run.world.from_main(lambda: recorded_batch(run.folder))
    if batch is None:
        from hybridpar.planner.batch import measure_batch

        asked = model, run.config, run.world, data.sample_shape, len(data.train)
        choice = measure_batch(*asked, open_trial=open_trial, announce=run.progress.prepare)
        batch, run.batch_line = choice.batch, choice.why
    run.config = replace(run.config, batch_size=batch)


def open_plan(run: Run, model: Model, data: ImageData) -> PlannedRun:
    """Find the plan of a run."""
    config, world = run.config, run.world
    serves = config.parameter_servers is not None  # no plan is searched for, and one worker has something to send, too
    return plan_run(
        module_of(model),
        replace(config, plan="none") if serves else config,
        world,
        sample_shape=data.sample_shape,
        steps=steps_of(config, len(data.train)),
        name=run.model_name,
        stored=run.folder.directory / "plan.json" if run.folder.continues else None,
        decided=decided_options(config) if serves else None,
        announce=run.progress.prepare,
        open_trial=None if isinstance(model, DeferredModel) else open_trial,
    )


def open_trainer(run: Run, model: Model, planned: PlannedRun) -> RunTrainer:
    """Make what trains: together with the other workers, or by parameter servers."""
    images = run.samples.images
    options: dict[str, Any] = {
        "config": run.config,
        "total_steps": run.total,
        "steps_per_epoch": run.samples.per_epoch,
        "world": run.world,
        "plan": planned,
        "name": run.model_name,
        "classes": images.classes,
        "several_labels": images.multi_label,
    }
    if run.config.parameter_servers is not None:
        from hybridpar.run.served_trainer import ServedTrainer

        return ServedTrainer(module_of(model), **options)
    example = example_batch(images, run.config, run.plan) if run.plan.is_staged else None
    return RunTrainer(model, example=example, **options)


# ------------------------------------------------------------------------------------------- once the trainer is open


def begin(run: Run) -> bool:
    """Make the parts, go on from the checkpoint, and claim the directory; False where nothing is left to train."""
    config, world, trainer, plan = run.config, run.world, run.trainer, run.plan
    run.parts = open_parts(run)
    # From here on the workers' generators (dropout) differ.
    torch.manual_seed(config.seed * 1000 + 1 + world.rank)
    if not trainer.joins:
        resume(run)
    if world.from_main(lambda: is_finished(run)):
        done = f"has done all of its {run.total:,} steps" if run.over is None else run.over
        run.progress.message(f"nothing left to train: the run in {run.folder.directory} {done}; see its summary.json")
        run.progress.message("a larger --epochs, --steps or stop= of --checkpoints goes on")
        return False
    # Only now is it sure that the run can start.
    images, follows = asdict(ImageFacts.of(run.samples.images)), None if plan.inputs is None else "plan.json"
    asked = as_asked(config, plan)
    run.folder = world.from_main(lambda: claim_folder(run.folder, asked, run.model_name, images, follows))
    if not trainer.enter(run.folder, run.state.resumed_from or 0):
        return False
    if trainer.joins:
        run.find_position()
    describe(run)
    return True


def open_parts(run: Run) -> list[Part]:
    """What looks at the steps of a run, in the order in which it does."""
    config, trainer, plan = run.config, run.trainer, run.plan
    parts: list[Part] = [Recorder()]
    if plan.kernels is not None:
        from hybridpar.run.kernel_use import open_kernels

        parts += open_kernels(run)
    if config.timeline is not None or plan.is_staged:
        from hybridpar.run.step_timeline import StepTimeline

        parts.append(StepTimeline(run))
    if config.profile:
        from hybridpar.run.step_profile import StepProfile

        parts.append(StepProfile())
    if config.select_batch > 0:
        from hybridpar.run.batch_search import BatchSelector

        parts.append(BatchSelector(run))
    if config.shares.strip() == "auto" and run.samples.replicas > 1:
        from hybridpar.run.shares import ShareTuner

        sizes = config.samples_per_step, config.parts_per_step(plan.pipeline.micro_batches)
        rules = {"idle": plan.sync.batch_norm != "sync", "in_pairs": config.mixing.is_on}
        parts.append(ShareTuner(run.world, plan.layout.ranks, *sizes, **rules, wait=trainer.wait))
    run.checkpoints = Checkpoints(config)
    return [*parts, run.checkpoints]  # a checkpoint has what the other parts made of the step


def as_asked(config: TrainConfig, plan: ResolvedPlan) -> TrainConfig:
    """The options of a run as a resumed run is to recall them, which does not recall a plan's file.

    Workers join by what the file says of the exchange, before they can read the run's own plan.
    """
    if config.plan_file is None:
        return config
    sync = plan.sync
    return replace(
        config,
        sync=with_options(sync_of(config, plan), lanes=None if sync.lanes == Exchange().lanes else sync.lanes),
        batch_norm=sync.batch_norm,
        compress=sync.codec,
        shard_optimizer=sync.shard_optimizer,
    )
