"""Opens a run: data, model and directory, then its plan, the trainer, and the parts that look at its steps.

Every worker calls these functions in the same order, as many of them are collectives.
"""

from __future__ import annotations

import math
import socket
from dataclasses import asdict, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hybridpar.comm.replicate import broadcast_state
from hybridpar.compress import format_codec
from hybridpar.config import TrainConfig
from hybridpar.config.data import without_download
from hybridpar.config.sync import Exchange
from hybridpar.data import ImageData, describe_data
from hybridpar.data.sources import ImageFacts
from hybridpar.errors import CheckpointError
from hybridpar.formats.output_files import replace_file
from hybridpar.models.deferred import DeferredModel
from hybridpar.observe.records import RunInfo
from hybridpar.observe.summary import read_summary
from hybridpar.plan import ResolvedPlan, SyncRule
from hybridpar.planner.fixed import decided_options
from hybridpar.planner.planned_run import PlannedRun, plan_run
from hybridpar.run.checkpoints import Checkpoints
from hybridpar.run.closing import expected_lines
from hybridpar.run.data import check_batch, example_batch, load_data, open_model, start_from_weights, steps_of
from hybridpar.run.directory import RunFolder, claim_folder, find_folder, recorded_batch, was_restarted
from hybridpar.run.memory import MemoryMeter
from hybridpar.run.part import Job, Part, Run, RunTrainer, sync_of
from hybridpar.run.recorder import Recorder
from hybridpar.run.samples import Samples
from hybridpar.run.worker import device_name
from hybridpar.spec import with_options
from hybridpar.sync.compression_table import WireFormat
from hybridpar.train.checkpoint import usable
from hybridpar.train.checkpoint_files import digest_of
from hybridpar.train.trainer import open_trial

if TYPE_CHECKING:
    from hybridpar.run.kernel_use import KernelUse

#: The model of a run, whole or to be divided between the workers.
Model = nn.Module | DeferredModel


def open_run(job: Job) -> Run:
    """Open all that a run needs, its trainer last."""
    world = job.world
    job.progress.prepare("loading the data set and the model")
    data = load_data(job.config, world)
    job.config = replace(job.config, data=without_download(job.config.data))  # it is there
    model, said = open_model(job.config, job.model_name, data, world)
    job.notes += [] if said is None else [said]
    job.data_line = world.from_main(lambda: describe_data(data))
    folder = find_folder_together(job)
    if job.config.batch_size == "auto":
        choose_batch(job, _module(model), data, folder)
    check_batch(job.config, len(data.train), world.size)
    if folder.checkpoint is None and job.config.weights is not None:
        job.notes += read_weights(job, model)
    planned = open_plan(job, model, data, folder)
    job.notes += planned.lines
    samples = Samples(data, job.config, planned.plan, world, isinstance(model, DeferredModel))
    # What planning left behind is not for training; the model is, and is there already.
    state = chain(_module(model).parameters(), _module(model).buffers())
    memory = MemoryMeter(world.device, holding=sum(tensor.nbytes for tensor in state if not tensor.is_meta))
    total = job.config.steps if job.config.steps is not None else job.config.epochs * samples.per_epoch
    return Run(
        **vars(job),
        folder=folder,
        planned=planned,
        trainer=open_trainer(job, model, planned, samples, total),
        samples=samples,
        memory=memory,
        total=total,
        epochs=math.ceil(total / samples.per_epoch),
    )


def _module(model: Model) -> nn.Module:
    return model.module if isinstance(model, DeferredModel) else model


def find_folder_together(job: Job) -> RunFolder:
    """Where a run writes, as worker 0 decides; every worker must see the checkpoint that it goes on from."""
    world = job.world
    # With a launcher on each host, only that of the worker that died counts the restart.
    restarted = any(world.gather(was_restarted()))

    def find() -> tuple[RunFolder, str]:
        folder = find_folder(job.config, job.model_name, restarted=restarted)
        return folder, digest_of(folder.checkpoint)

    folder, digest = world.from_main(find)

    def check() -> None:
        if digest_of(folder.checkpoint) != digest:
            raise CheckpointError(
                f"worker {world.rank} on {socket.gethostname()} does not have the checkpoint "
                f"{folder.checkpoint} of worker 0",
                "Every worker reads the checkpoint from the run directory.",
                "Have the run directory on a disk that all machines see, or copy it to that one.",
            )

    world.on_all(check)
    return folder


def choose_batch(job: Job, model: nn.Module, data: ImageData, folder: RunFolder) -> None:
    """Put a number for `--batch-size auto`: that of the run that goes on, or a new choice."""
    batch = job.world.from_main(lambda: recorded_batch(folder))
    if batch is None:
        from hybridpar.planner.batch import measure_batch

        choice = measure_batch(
            *(model, job.config, job.world, data.sample_shape, len(data.train)),
            open_trial=open_trial,
            announce=job.progress.prepare,
        )
        batch, job.batch_line = choice.batch, choice.why
    job.config = replace(job.config, batch_size=batch)


def read_weights(job: Job, model: Model) -> list[str]:
    """Give a model the weights that a new run starts from; lines to show."""
    config, world = job.config, job.world
    if isinstance(model, DeferredModel):  # each worker reads what it will hold
        return world.on_all(lambda: start_from_weights(config, job.model_name, model))
    with world.patient():
        lines = world.from_main(lambda: start_from_weights(config, job.model_name, model))
    if world.size > 1 and config.parameter_servers is None:  # else servers hand them out
        broadcast_state(model, 0, world)
    return lines


def open_plan(job: Job, model: Model, data: ImageData, folder: RunFolder) -> PlannedRun:
    """Find the plan of a run."""
    config, world = job.config, job.world
    serves = config.parameter_servers is not None  # no plan is searched for, and one worker has something to send, too
    planned = plan_run(
        _module(model),
        replace(config, plan="none") if serves else config,
        world,
        sample_shape=data.sample_shape,
        steps=steps_of(config, len(data.train)),
        name=job.model_name,
        stored=folder.directory / "plan.json" if folder.continues else None,
        decided=decided_options(config) if serves else None,
        announce=job.progress.prepare,
        open_trial=None if isinstance(model, DeferredModel) else open_trial,
    )
    if config.timeline is not None:
        from hybridpar.run.step_timeline import check_timeline

        alone_on_gpus = world.device.type == "cuda" and world.size == 1
        world.from_main(lambda: check_timeline(config, torch.cuda.device_count() if alone_on_gpus else 1))
    return planned


def open_trainer(job: Job, model: Model, planned: PlannedRun, samples: Samples, total: int) -> RunTrainer:
    """Make what trains: together with the other workers, or by parameter servers."""
    config, images = job.config, samples.images
    options: dict[str, Any] = {
        "config": config,
        "total_steps": total,
        "steps_per_epoch": samples.per_epoch,
        "world": job.world,
        "plan": planned,
        "name": job.model_name,
        "classes": images.classes,
        "several_labels": images.multi_label,
    }
    if config.parameter_servers is not None:
        from hybridpar.run.served_trainer import ServedTrainer

        return ServedTrainer(_module(model), **options)
    example = example_batch(images, config, planned.plan) if planned.plan.is_staged else None
    return RunTrainer(model, example=example, **options)


# ------------------------------------------------------------------------------------------- once the trainer is open


def begin(run: Run) -> bool:
    """Make the parts, go on from the checkpoint, and claim the directory; False where nothing is left to train."""
    config, world, trainer, plan = run.config, run.world, run.trainer, run.planned.plan
    kernels = open_kernels(run)
    run.parts = open_parts(run) if kernels is None else [kernels, *open_parts(run)]
    # From here on the workers' generators (dropout) differ.
    torch.manual_seed(config.seed * 1000 + 1 + world.rank)
    if not trainer.joins:
        resume(run)
    if world.from_main(lambda: is_finished(run)):
        trainer.dismiss()
        return False
    # Only now is it sure that the run can start; what stood in its directory before may go.
    run.folder = world.from_main(
        lambda: claim_folder(
            run.folder,
            as_asked(config, plan),
            run.model_name,
            {"torch": torch.__version__},
            follows_plan=plan.inputs is not None,
            images=asdict(ImageFacts.of(run.samples.images)),
        )
    )
    if not trainer.enter(run.folder, run.state, partial(begin_instead, run)):
        return False
    if trainer.joins:
        run.find_position()
    describe(run, kernels)
    return True


def open_parts(run: Run) -> list[Part]:
    """What looks at the steps of a run, in the order in which it does."""
    config, trainer, plan = run.config, run.trainer, run.planned.plan
    parts: list[Part] = [Recorder()]
    if config.timeline is not None or plan.is_staged:
        from hybridpar.run.step_timeline import StepTimeline

        parts.append(StepTimeline())
    if config.profile:
        from hybridpar.run.step_profile import StepProfile

        parts.append(StepProfile())
    if config.select_batch > 0:
        from hybridpar.run.batch_search import BatchSelector

        parts.append(BatchSelector(trainer, config, run.samples))
    if config.shares.strip() == "auto" and run.samples.replicas > 1:
        from hybridpar.run.shares import ShareTuner

        parts.append(
            ShareTuner(
                run.world,
                plan.layout.ranks,
                config.samples_per_step,
                config.parts_per_step(plan.pipeline.micro_batches),
                idle=plan.sync.batch_norm != "sync",
                in_pairs=config.mixing.is_on,
                wait=trainer.wait,
            )
        )
    return [*parts, Checkpoints(config)]  # a checkpoint has what the other parts made of the step


def open_kernels(run: Run) -> KernelUse | None:
    """Decide what depthwise convolutions and norms run on."""
    plan = run.planned.plan
    if plan.kernels is None:
        return None
    from hybridpar.run.kernel_use import prepare_kernels

    # A run that is resumed goes on with the same kernels, bit for bit.
    confirm, shape = run.folder.checkpoint is None, run.samples.images.sample_shape
    return prepare_kernels(run.trainer.model, run.config, plan, run.world, shape, confirm)


def resume(run: Run) -> None:
    """Go on from the checkpoint of a run, if there is any."""
    checkpoint = run.folder.checkpoint
    if checkpoint is None:
        return
    extra = run.trainer.load(checkpoint)
    with usable(checkpoint):
        run.state.go_on_from(extra, run.config, checkpoint)
        for part in run.parts:
            if part.key:
                part.restore(run, extra.get(part.key))
        # An epoch of another number of workers may be a step shorter, see `cut_epoch`.
        run.state.epoch_step = min(run.state.epoch_step, run.samples.per_epoch)
    run.state.resumed_from = run.trainer.steps_done


def begin_instead(run: Run) -> int:
    """Load what worker 0 died before it brought to the servers; the step that is then done."""
    run.state.resumed_from = None
    resume(run)
    if run.folder.checkpoint is None:
        run.notes += start_from_weights(run.config, run.model_name, run.trainer.model)
    return run.state.resumed_from or 0


def is_finished(run: Run) -> bool:
    """Whether a run that is resumed has nothing left to train, and its result is there."""
    result = read_summary(run.folder.directory) if run.folder.continues else None
    return (
        result is not None
        and result["exit"] == "finished"
        and run.state.resumed_from == result["steps"]
        and (result["steps"] >= run.total or run.state.epoch >= run.epochs or run.over is not None)
    )


def describe(run: Run, kernels: KernelUse | None) -> None:
    """Write down what the run does, and find what to show of it at the start."""
    config, trainer, directory = run.config, run.trainer, run.folder.directory
    is_main, device = run.world.is_main, device_name(run.world.device)
    if (shares := run.samples.batches.shares) is not None:
        run.notes.append(f"shares   {' : '.join(f'{share:g}' for share in shares)} of every batch")
    if run.folder.restarted:
        since = f"step {run.state.resumed_from}" if run.state.resumed_from else "the start"
        run.notes.append(f"a worker died; all workers were restarted and go on from {since}")
    wire_format = trainer.engine.wire_format()
    if wire_format.layers:
        from hybridpar.run.wire_table import wire_format_lines

        run.notes += wire_format_lines(wire_format, directory if is_main else None)
    run.notes += trainer.notes
    run.plan = plan = plan_of_run(trainer, device, wire_format)
    if kernels is not None:
        run.notes += kernels.notes()
        run.plan = plan = plan.model_copy(update={"kernels": kernels.section()})
    run.notes += expected_lines(plan.predicted, run.total - trainer.steps_done)
    if is_main:
        replace_file(directory / "plan.json", [plan.to_json().encode()])
    run.info = RunInfo(
        model=run.model_name,
        data=config.data,
        data_line=run.data_line,
        batch_line=run.batch_line,
        device=device,
        epochs=run.epochs,
        steps_total=run.total,
        steps_per_epoch=run.samples.per_epoch,
        parameters=plan.model.parameters,
        batch_size=config.samples_per_step,
        run_dir=directory,
        notes=tuple(run.notes),
        stages=len(plan.partition.stages),
        replicas=run.samples.replicas,
        micro_batches=plan.pipeline.micro_batches,
        schedule=plan.pipeline.schedule,
        **trainer.facts(wire_format),
    )


def plan_of_run(trainer: RunTrainer, device: str, wire_format: WireFormat) -> ResolvedPlan:
    """The plan of a run as it is written down."""
    plan, rules = trainer.plan, wire_format.applied.rules
    update: dict[str, object] = {}
    if plan.inputs is None:  # a search has said of every parameter what it is sent as
        policy = tuple(SyncRule(pattern=rule.pattern, codec=format_codec(rule.codec)) for rule in rules)
        update["sync"] = plan.sync.model_copy(update={"policy": policy})
    if plan.measured.profile is None:  # else it says what the times of stages are from, which may be another machine
        here = {"device": device, "threads": torch.get_num_threads(), "versions": {"torch": torch.__version__}}
        update["measured"] = plan.measured.model_copy(update=here)
    return plan.model_copy(update=update)


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
