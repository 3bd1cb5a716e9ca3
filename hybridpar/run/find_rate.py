"""`hybridpar find-lr`: the learning-rate range test with the options of a run, on one worker; nothing is written."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import fields, replace
from typing import Any

import torch

from hybridpar.comm.world import World, default_device
from hybridpar.config import TrainConfig
from hybridpar.data import describe_data
from hybridpar.planner.resolve import resolve
from hybridpar.run.data import batch_maker, check_batch, load_data, make_model, start_from_weights, with_images_of_model
from hybridpar.run.worker import tune_worker
from hybridpar.train.rate_test import RateTest, check_range, range_test
from hybridpar.train.trainer import Trainer


def find_rate(
    config: TrainConfig,
    model_name: str,
    *,
    workers: int = 1,
    lowest: float,
    highest: float,
    steps: int,
    tell: Callable[[str], None] = print,
    on_step: Callable[[int, float], None] | None = None,
) -> RateTest:
    """Make a range test with the model, data and optimizer of a run.

    One worker computes what the replicas of the run would, one micro-batch after the other: memory and the batches of
    BatchNorm are as in the run, and so is the step.

    Args:
        config: Options of the run. Those on how it is divided, exchanged, planned and saved do not matter here.
        model_name: As on the command line.
        workers: Of the run.
        lowest: Learning rate of the first step.
        highest: That of the last.
        steps: Number of steps.
        tell: Called with lines on what is tested.
        on_step: As `range_test` takes it.

    Returns:
        What was found.

    Raises:
        UsageError: An option is wrong, or the model does not fit the data.
        DataError: The data are not there.
    """
    check_range(lowest, highest, steps)
    config.check()
    config = with_images_of_model(_alone(config, workers), model_name)
    world = World(device=default_device())
    tune_worker(config, world)
    data = load_data(config, world)
    check_batch(config, len(data.train), 1)
    torch.manual_seed(config.seed)
    model = make_model(config, model_name, data, world.device)
    for line in start_from_weights(config, model_name, model):
        tell(line)
    plan = resolve(config, 1, device=world.device.type)
    batches = batch_maker(data, config, plan, world.device, 0)(config.batch_size)
    tell(f"data     {describe_data(data)}")
    parts = config.parts_per_step(config.micro_batches)
    tell(f"batch    {config.batch_size:,} samples per step" + f", as {parts} micro-batches" * (parts > 1))
    optimizer = config.optimizer if config.recipe == "none" else config.recipe
    tell(f"rates    {lowest:g} to {highest:g} in {steps} steps of {optimizer}")
    trainer = Trainer(
        model,
        config=config,
        total_steps=steps,
        steps_per_epoch=batches.steps_per_epoch,
        world=world,
        name=model_name,
        classes=data.classes,
    )
    with closing(trainer):
        return range_test(trainer, batches.epoch, lowest=lowest, highest=highest, steps=steps, on_step=on_step)


def _alone(config: TrainConfig, workers: int) -> TrainConfig:
    """The options of one worker that makes the steps of all of them."""
    outer: dict[str, Any] = {one.name: one.default for one in fields(config) if one.name.startswith("outer_")}
    homes = config.homes
    replicas = len(homes) if homes is not None else config.replicas or max(1, workers // config.stages)
    return replace(
        config,
        workers=1,
        stages=1,
        replicas=None,
        micro_batches=replicas * config.micro_batches,
        schedule=None,
        placement=None,
        recompute=(),
        offload=(),
        plan="none",
        sync="allreduce",
        **outer,
        compress="none",
        double_buffer="off",
        select_batch=0,
        warm_start_steps=config.warm_start_steps if config.recipe != "none" else None,
        model_ema=False,
        compile=False,
        kernels="off",
        memory_format="channels_last" if config.uses_channels_last else config.memory_format,
        cuda_graph=False,
        timeline=None,
        batch_norm="pooled" if config.batch_norm in ("local", "sync") else config.batch_norm,
        lr_schedule="constant",
        keep_best="1",
        stop_early=None,
    )
