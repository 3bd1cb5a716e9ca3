"""What a run needs before it trains: the data set, a model that fits it, the number of steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import get_args

import torch
from torch import nn

from hybridpar.comm.replicate import broadcast_state
from hybridpar.comm.world import World
from hybridpar.config import TrainConfig
from hybridpar.config.data import Interpolation, images_over, is_of_any_size
from hybridpar.data import ImageData, TestBatches, load_dataset
from hybridpar.data.sampling import FEWEST_PER_PART
from hybridpar.errors import UsageError
from hybridpar.models import build_model, check_model_name, freeze, parse_arguments, require_trained
from hybridpar.models.deferred import MEASURED_BYTES, DeferredModel
from hybridpar.models.layers import freeze_batch_norm
from hybridpar.plan import ResolvedPlan
from hybridpar.train.model_check import check_outputs


def steps_of(config: TrainConfig, samples: int) -> int:
    """Steps of a run, before it is known how each is divided; see `hybridpar.data.sampling.cut_epoch`."""
    return config.steps if config.steps is not None else config.epochs * max(1, samples // config.samples_per_step)


def check_batch(config: TrainConfig, samples: int, workers: int) -> None:
    """Refuse a batch of more samples than there are; too few for the workers are refused by `cut_epoch`."""
    if config.samples_per_step > samples >= FEWEST_PER_PART * workers * config.parts_per_step(config.micro_batches):
        raise UsageError(
            f"--batch-size is {config.samples_per_step:,}, and the training set has {samples:,} samples",
            "A step sees a sample once at most.",
            f"Use --batch-size {samples} or less.",
        )


def example_batch(data: ImageData, config: TrainConfig, plan: ResolvedPlan) -> torch.Tensor:
    """Something of the size of a micro-batch, for measuring the model."""
    samples = plan.micro_batch_samples(config.samples_per_step)
    return torch.randn(samples, *data.sample_shape, generator=torch.Generator().manual_seed(0))


def batches_to_test(
    data: ImageData,
    config: TrainConfig,
    device: torch.device,
    rank: int = 0,
    workers: int = 1,
    shares: Sequence[float] | None = None,
) -> TestBatches:
    """The share of the test set of one of the workers that test it, in batches of as many samples as it trains on."""
    return TestBatches(
        data,
        batch_size=max(2, config.samples_per_step // workers),
        rank=rank,
        workers=workers,
        loader_workers=config.loader_workers,
        device=device,
        channels_last=config.uses_channels_last,
        shares=shares,
    )


def load_data(config: TrainConfig, world: World) -> ImageData:
    """Load the data set; where it may be downloaded, rank 0 goes first."""
    if not config.data_options.download or world.size == 1:
        return load_dataset(config)
    loaded: list[ImageData] = []
    with world.patient():
        world.from_main(lambda: loaded.append(load_dataset(config)))
    return loaded[0] if loaded else load_dataset(config)


def configured_model(config: TrainConfig, name: str, classes: int) -> nn.Module:
    """Build a model as the options of a run say."""
    return build_model(
        name,
        classes,
        args=parse_arguments(config.model_arg),
        drop_rate=config.drop_rates.rate,
        drop_path_rate=config.drop_rates.path,
        channels=config.images.channels,
    )


def with_images_of_model(config: TrainConfig, name: str) -> TrainConfig:
    """Let images be as published weights or the model want them, where options do not say otherwise.

    Without published weights, images of data sets that have a usual size of their own (digits, CIFAR, ...) stay as they
    are.
    """
    check_model_name(name)  # before any data set is loaded
    if config.weights is None and not is_of_any_size(config.data):
        return config
    from hybridpar.models.pretrained import is_published, model_input  # most runs need nothing of it

    published = config.weights is not None and is_published(config.weights)
    if not published and not is_of_any_size(config.data):
        return config
    wanted = model_input(name, config.weights, parse_arguments(config.model_arg))
    if wanted is None:
        return config
    known = f"{wanted.size},crop={wanted.crop_ratio}"
    if len(wanted.mean) == len(wanted.std) == config.images.channels:
        mean, std = ("/".join(map(str, values)) for values in (wanted.mean, wanted.std))
        known += f",mean={mean},std={std}"
    if wanted.interpolation in get_args(Interpolation):
        known += f",interpolation={wanted.interpolation}"
    return replace(config, image_size=images_over(known, config.image_size))


def read_weights(config: TrainConfig, name: str, model: nn.Module | DeferredModel, world: World) -> list[str]:
    """Give a model the weights that a new run starts from; lines to show."""
    if config.weights is None:
        return []
    from hybridpar.models.weights import load_weights

    source, arguments = config.weights, parse_arguments(config.model_arg)

    def read() -> list[str]:
        return [f"weights  {load_weights(model, source, name=name, args=arguments)}"]

    if isinstance(model, DeferredModel):  # each worker reads what it will hold
        return world.on_all(read)
    with world.patient():
        lines = world.from_main(read)
    if world.size > 1 and config.parameter_servers is None:  # else servers hand them out
        broadcast_state(model, 0, world)
    return lines


def open_model(
    config: TrainConfig, name: str, data: ImageData, world: World
) -> tuple[nn.Module | DeferredModel, str | None]:
    """The model of a run, whole or to be divided, and what to say of that; a collective.

    The same seed on every worker; a run on one worker must start from the same weights.
    """
    if config.batch_size == "auto" and ":" not in name:  # a user's factory is called once
        from hybridpar.planner.batch import require_room

        imagined = partial(configured_model, config, name, data.classes)
        world.on_all(lambda: require_room(imagined, config, world.device, world.size))
    torch.manual_seed(config.seed)
    with world.patient():  # others may be loading data still
        seen = all(world.gather(config.weights is None or _is_there(config.weights)))
    deferred, note = world.on_all(lambda: _make_deferred(config, name, data, world, seen))
    if deferred is not None:
        return deferred, note
    torch.manual_seed(config.seed)

    def build() -> nn.Module:
        model = configured_model(config, name, data.classes)
        _prepare(model, config, name, data, world.device)
        return model

    return world.on_all(build), note


def _is_there(weights: str) -> bool:
    """Whether weights are a file that this worker can read."""
    from hybridpar.models.pretrained import is_file

    return is_file(weights) and Path(weights).exists()


def _make_deferred(
    config: TrainConfig, name: str, data: ImageData, world: World, seen: bool
) -> tuple[DeferredModel | None, str | None]:
    """The model of a run in a pipeline over several workers, each of which is to hold its own stages only.

    `seen` says whether all workers can read the weights that the run starts from.
    """
    if world.size == 1 or not config.is_staged or config.needs_whole:
        return None, None
    try:
        deferred = DeferredModel(lambda: configured_model(config, name, data.classes))
    except UsageError as error:
        return None, f"memory   every worker holds the whole model: {error.what}"
    if deferred.nbytes <= MEASURED_BYTES:
        return None, None
    if not seen:
        return None, f"memory   every worker holds the whole model: --weights {config.weights} is no file that all see"
    _prepare(deferred.module, config, name, data, world.device)
    return deferred, None


def _prepare(model: nn.Module, config: TrainConfig, name: str, data: ImageData, device: torch.device) -> None:
    freeze(model, config.freeze)
    if config.batch_norm == "frozen":
        freeze_batch_norm(model)
    require_trained(model, name)
    check_outputs(model, name, data.classes, data.sample_shape, config, device)
