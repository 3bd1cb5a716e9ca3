"""Opens a run: data, model and directory, then its plan, the trainer, and the parts that look at its steps.

Every worker calls these functions in the same order, as many of them are collectives.
"""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Collection
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hybridpar.comm.replicate import broadcast_state
from hybridpar.comm.world import World
from hybridpar.config import TrainConfig
from hybridpar.config.data import without_download
from hybridpar.data import ImageData, describe_data
from hybridpar.data.image_facts import ImageFacts
from hybridpar.errors import CheckpointError
from hybridpar.machine.process import TUNED_VARIABLE
from hybridpar.machine.process import describe as describe_process
from hybridpar.models.deferred import DeferredModel
from hybridpar.observe.files import replace_file
from hybridpar.observe.progress import Progress
from hybridpar.observe.records import RunInfo
from hybridpar.observe.summary import read_summary
from hybridpar.planner.fixed import decided_options
from hybridpar.planner.planned_run import PlannedRun, plan_run, set_aside
from hybridpar.run.checkpoints import Checkpoints
from hybridpar.run.closing import expected_lines
from hybridpar.run.data import (
    check_batch,
    example_batch,
    load_data,
    open_model,
    start_from_weights,
    steps_of,
)
from hybridpar.run.directory import RunPlace, claim_place, find_place, recorded_batch, was_restarted
from hybridpar.run.memory import MemoryMeter
from hybridpar.run.part import Part, Run
from hybridpar.run.recorded_plan import as_asked, plan_of_run
from hybridpar.run.recorder import Recorder
from hybridpar.run.run_trainer import RunTrainer
from hybridpar.run.samples import Samples
from hybridpar.run.shares import ShareTuner
from hybridpar.run.step_profile import StepProfile
from hybridpar.run.step_timeline import StepTimeline, check_timeline
from hybridpar.run.wire_table import wire_format_lines
from hybridpar.run.worker import device_name
from hybridpar.train.checkpoint import usable
from hybridpar.train.checkpoint_files import digest_of, resolve_checkpoint
from hybridpar.train.trainer import open_trial

if TYPE_CHECKING:
    from hybridpar.run.kernel_use import KernelUse

#: The model of a run, whole or to be divided between the workers.
Model = nn.Module | DeferredModel


def open_run(
    config: TrainConfig,
    model_name: str,
    world: World,
    progress: Progress,
    changes: Collection[str] = (),
) -> Run:
    """Open all that a run needs, its trainer last."""
    progress.prepare("loading the data set and the model")
    data = load_data(config, world)
    config = replace(config, data=without_download(config.data))  # it is there
    model, said = open_model(config, model_name, data, world)
    data_line = world.from_main(lambda: describe_data(data))
    place = find_place_together(config, model_name, world)
    config, batch_line = with_batch(config, _module(model), data, place, world, progress)
    check_batch(config, len(data.train), world.size)
    notes = [*_notes_of_process(config), *changes, *([] if said is None else [said])]
    if place.checkpoint is None:
        notes += read_weights(config, model_name, model, world)
    planned = open_plan(config, model_name, model, data, place, world, progress)
    samples = Samples(data, config, planned.plan, world, isinstance(model, DeferredModel))
    # What planning left behind is not for training; the model is, and is there already.
    state = chain(_module(model).parameters(), _module(model).buffers())
    memory = MemoryMeter(world.device, holding=sum(tensor.nbytes for tensor in state if not tensor.is_meta))
    total = config.steps if config.steps is not None else config.epochs * samples.per_epoch
    trainer = open_trainer(config, model_name, model, planned, samples, total, world)
    return Run(
        config=config,
        model_name=model_name,
        world=world,
        progress=progress,
        place=place,
        planned=planned,
        trainer=trainer,
        samples=samples,
        memory=memory,
        notes=[*notes, *planned.lines],
        data_line=data_line,
        batch_line=batch_line,
        total=total,
        epochs=math.ceil(total / samples.per_epoch),
    )


def _module(model: Model) -> nn.Module:
    return model.module if isinstance(model, DeferredModel) else model


def _notes_of_process(config: TrainConfig) -> list[str]:
    tuned = [describe_process()] if os.environ.get(TUNED_VARIABLE) == "1" else []
    compiled = ["compile  the first step compiles the model, which may take minutes"] if config.compile else []
    return [*tuned, *compiled]


def find_place_together(config: TrainConfig, model: str, world: World) -> RunPlace:
    """Where a run writes, as worker 0 decides; every worker must see the checkpoint that it goes on from."""
    # With a launcher on each host, only that of the worker that died counts the restart.
    restarted = any(world.gather(was_restarted()))

    def find() -> tuple[RunPlace, Path | None, str]:
        place = find_place(config, model, restarted=restarted)
        path = None if place.checkpoint is None else resolve_checkpoint(place.checkpoint)
        return place, path, digest_of(path)

    place, path, digest = world.from_main(find)

    def check() -> None:
        if digest_of(path) != digest:
            raise CheckpointError(
                f"worker {world.rank} on {socket.gethostname()} does not have the checkpoint {path} of worker 0",
                "Every worker reads the checkpoint from the run directory.",
                "Have the run directory on a disk that all machines see, or copy it to that one.",
            )

    world.on_all(check)
    return place


def with_batch(
    config: TrainConfig,
    model: nn.Module,
    data: ImageData,
    place: RunPlace,
    world: World,
    progress: Progress,
) -> tuple[TrainConfig, str]:
    """The options with a number for `--batch-size auto`, and why: that of the run that goes on, or a new choice."""
    if config.batch_size != "auto":
        return config, ""
    batch, why = world.from_main(lambda: recorded_batch(place)), ""
    if batch is None:
        from hybridpar.planner.batch import measure_batch

        samples, announce = len(data.train), progress.prepare
        choice = measure_batch(
            model, config, world, data.sample_shape, samples, open_trial=open_trial, announce=announce
        )
        batch, why = choice.batch, choice.why
    return replace(config, batch_size=batch), why


def read_weights(config: TrainConfig, model_name: str, model: Model, world: World) -> list[str]:
    """Give a model the weights that a new run starts from; lines to show."""
    if config.weights is None:
        return []
    if isinstance(model, DeferredModel):  # each worker reads what it will hold
        return world.on_all(lambda: start_from_weights(config, model_name, model))
    with world.patient():
        lines = world.from_main(lambda: start_from_weights(config, model_name, model))
    if world.size > 1 and config.parameter_servers is None:  # else servers hand them out
        broadcast_state(model, 0, world)
    return lines


def open_plan(
    config: TrainConfig,
    model_name: str,
    model: Model,
    data: ImageData,
    place: RunPlace,
    world: World,
    progress: Progress,
) -> PlannedRun:
    """Find the plan of a run."""
    asked, decided = config, None
    if config.parameter_servers is not None:  # no plan is searched for, and one worker has something to send, too
        asked, decided = replace(config, plan="none"), decided_options(config)
    planned = plan_run(
        _module(model),
        asked,
        world,
        sample_shape=data.sample_shape,
        steps=steps_of(config, len(data.train)),
        name=model_name,
        stored=place.directory / "plan.json" if place.continues else None,
        decided=decided,
        announce=progress.prepare,
        open_trial=None if isinstance(model, DeferredModel) else open_trial,
    )
    alone_on_gpus = world.device.type == "cuda" and world.size == 1
    world.from_main(lambda: check_timeline(config, torch.cuda.device_count() if alone_on_gpus else 1))
    return planned


def open_trainer(
    config: TrainConfig,
    model_name: str,
    model: Model,
    planned: PlannedRun,
    samples: Samples,
    total: int,
    world: World,
) -> RunTrainer:
    """Make what trains: together with the other workers, or by parameter servers."""
    options: dict[str, Any] = {
        "config": config,
        "total_steps": total,
        "steps_per_epoch": samples.per_epoch,
        "world": world,
        "plan": planned,
        "name": model_name,
        "classes": samples.images.classes,
        "several_labels": samples.images.multi_label,
    }
    if config.parameter_servers is not None:
        from hybridpar.run.served_trainer import ServedTrainer

        return ServedTrainer(_module(model), **options)
    example = example_batch(samples.images, config, planned.plan) if planned.plan.is_staged else None
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
    run.place = world.from_main(
        lambda: claim_place(
            run.place,
            as_asked(config, plan),
            run.model_name,
            {"torch": torch.__version__},
            follows_plan=plan.inputs is not None,
            images=ImageFacts.of(run.samples.images).plain(),
        )
    )
    if not trainer.enter(run.place, run.state, partial(begin_instead, run)):
        return False
    if trainer.joins:
        run.find_position()
    describe(run, kernels)
    return True


def open_parts(run: Run) -> list[Part]:
    """What looks at the steps of a run, in the order in which it does."""
    config, trainer, plan = run.config, run.trainer, run.planned.plan
    parts: list[Part] = [Recorder(), StepTimeline()]
    if config.profile:
        parts.append(StepProfile())
    if config.select_batch > 0:
        from hybridpar.run.batch_search import BatchSelector

        parts.append(BatchSelector(trainer, config, run.samples))
    if config.shares.strip() == "auto" and run.samples.replicas > 1:
        micro_batches = config.parts_per_step(plan.pipeline.micro_batches)
        rules: dict[str, Any] = {
            "idle": plan.sync.batch_norm != "sync",
            "in_pairs": config.mixing.is_on,
            "wait": trainer.wait,
        }
        parts.append(ShareTuner(run.world, plan.layout.ranks, config.samples_per_step, micro_batches, **rules))
    return [*parts, Checkpoints(config)]  # a checkpoint has what the other parts made of the step


def open_kernels(run: Run) -> KernelUse | None:
    """Decide what depthwise convolutions and norms run on."""
    plan = run.planned.plan
    if plan.kernels is None:
        return None
    from hybridpar.run.kernel_use import prepare_kernels

    # A run that is resumed goes on with the same kernels, bit for bit.
    confirm, shape = run.place.checkpoint is None, run.samples.images.sample_shape
    return prepare_kernels(run.trainer.model, run.config, plan, run.world, shape, confirm)


def resume(run: Run) -> None:
    """Go on from the checkpoint of a run, if there is any."""
    checkpoint = run.place.checkpoint
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
    resume(run)
    if run.place.checkpoint is None:
        run.notes += start_from_weights(run.config, run.model_name, run.trainer.model)
    return run.state.resumed_from or 0


def is_finished(run: Run) -> bool:
    """Whether a run that is resumed has nothing left to train, and its result is there."""
    result = read_summary(run.place.directory) if run.place.continues else None
    return (
        result is not None
        and result["exit"] == "finished"
        and run.state.resumed_from == result["steps"]
        and (result["steps"] >= run.total or run.over is not None)
    )


def describe(run: Run, kernels: KernelUse | None) -> None:
    """Write down what the run does, and find what to show of it at the start."""
    config, trainer, directory = run.config, run.trainer, run.place.directory
    is_main, device = run.world.is_main, device_name(run.world.device)
    if (shares := run.samples.batches.shares) is not None:
        run.notes.append(f"shares   {' : '.join(f'{share:g}' for share in shares)} of every batch")
    if run.place.restarted:
        since = f"step {run.state.resumed_from}" if run.state.resumed_from else "the start"
        run.notes.append(f"a worker died; all workers were restarted and go on from {since}")
    wire_format = trainer.engine.wire_format()
    run.notes += wire_format_lines(wire_format, directory if is_main else None)
    run.notes += trainer.notes
    run.plan = plan = plan_of_run(trainer, device, wire_format)
    if kernels is not None:
        run.notes += kernels.notes()
        run.plan = plan = plan.model_copy(update={"kernels": kernels.section()})
    run.notes += expected_lines(plan.predicted, run.total - trainer.steps_done)
    if is_main:
        if plan.checksum is None and run.place.continues:
            set_aside(directory / "plan.json")
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
