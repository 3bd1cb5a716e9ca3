"""What a run needs before it trains: the data set and its batches, a model that fits it, the number of steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import get_args

import torch
from torch import nn

from hybridpar.comm.world import World
from hybridpar.config import TrainConfig
from hybridpar.config.data import Interpolation, images_over, is_of_any_size
from hybridpar.data import ImageData, TestBatches, TrainBatches, load_dataset
from hybridpar.data.sampling import FEWEST_PER_PART
from hybridpar.errors import UsageError
from hybridpar.models import build_model, freeze, load_weights, parse_arguments, require_trained
from hybridpar.models.deferred import MEASURED_BYTES, DeferredModel
from hybridpar.models.freezing import freeze_batch_norm
from hybridpar.models.inputs import model_input
from hybridpar.models.weight_files import is_file, is_published
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


def batch_maker(
    data: ImageData,
    config: TrainConfig,
    plan: ResolvedPlan,
    device: torch.device,
    replica: int,
    shares: Sequence[float] | None = None,
) -> Callable[[int], TrainBatches]:
    """What makes this worker's batches of any batch size."""

    def make(batch_size: int) -> TrainBatches:
        return TrainBatches(
            data,
            seed=config.seed,
            batch_size=batch_size,
            rank=replica,
            workers=plan.layout.replicas,
            micro_batches=config.parts_per_step(plan.pipeline.micro_batches),
            loader_workers=config.loader_workers,
            device=device,
            channels_last=plan.channels_last,
            in_pairs=config.mixing.is_on,
            repeats=config.augmentation.repeats,
            shares=shares,
            idle=plan.sync.batch_norm != "sync",
        )

    return make


def shares_of(config: TrainConfig, plan: ResolvedPlan) -> tuple[float, ...] | None:
    """What each replica gets of a batch at first, as `--shares` says, or else the plan; None for equal parts."""
    shares, replicas = config.share_list, plan.layout.replicas
    if shares is None and config.shares.strip() == "equal":
        return plan.placement.shares
    if shares is not None and len(shares) != replicas:
        raise UsageError(
            f"--shares {config.shares} has {len(shares)} numbers, for {replicas} replica(s)",
            "Every replica has a share of the batch: every worker, where the model is not cut.",
            "Give as many numbers as there are replicas.",
        )
    return None if shares is None or len(set(shares)) == 1 else shares


def test_batches(
    data: ImageData,
    config: TrainConfig,
    plan: ResolvedPlan,
    device: torch.device,
    workers: int,
    share: int,
    count: int,
    shares: Sequence[float] | None,
) -> TestBatches:
    """This worker's share of the test set."""
    return TestBatches(
        data,
        batch_size=max(2, config.samples_per_step // workers),
        rank=share,
        workers=count,
        shares=shares if shares is not None and len(shares) == count else None,
        loader_workers=config.loader_workers,
        device=device,
        channels_last=plan.channels_last,
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
    published = config.weights is not None and is_published(config.weights)
    if not published and not is_of_any_size(config.data):
        return config
    found = model_input(name, config.weights, parse_arguments(config.model_arg))
    if found is None:
        return config
    known = f"{found.size},crop={found.crop_ratio}"
    if len(found.mean) == len(found.std) == config.images.channels:
        known += f",mean={_joined(found.mean)},std={_joined(found.std)}"
    if found.interpolation in get_args(Interpolation):
        known += f",interpolation={found.interpolation}"
    return replace(config, image_size=images_over(known, config.image_size))


def _joined(values: Sequence[float]) -> str:
    return "/".join(map(str, values))


def start_from_weights(config: TrainConfig, name: str, model: nn.Module | DeferredModel) -> list[str]:
    """Give a model the weights that its options name."""
    if config.weights is None:
        return []
    report = load_weights(model, config.weights, name=name, args=parse_arguments(config.model_arg))
    return [f"weights  {report}"]


def make_model(config: TrainConfig, name: str, data: ImageData, device: torch.device) -> nn.Module:
    """Build the model of a run on a device, and refuse one that cannot be trained on the data."""
    model = configured_model(config, name, data.classes)
    _prepare(model, config, name, data, device)
    return model


def open_model(
    config: TrainConfig, name: str, data: ImageData, world: World
) -> tuple[nn.Module | DeferredModel, str | None]:
    """The model of a run, whole or to be divided, and what to say of that; a collective.

    The same seed on every worker; a run on one worker must start from the same weights.
    """
    if config.batch_size == "auto" and ":" not in name:  # a user's factory is called once
        from hybridpar.planner.batch import require_room

        def build() -> nn.Module:
            return configured_model(config, name, data.classes)

        world.on_all(lambda: require_room(build, config, world.device, world.size))
    torch.manual_seed(config.seed)
    with world.patient():  # others may be loading data still
        deferred, said = world.on_all(lambda: make_deferred(config, name, data, world))
    if deferred is not None:
        return deferred, said
    torch.manual_seed(config.seed)
    return world.on_all(lambda: make_model(config, name, data, world.device)), said


def make_deferred(
    config: TrainConfig, name: str, data: ImageData, world: World
) -> tuple[DeferredModel | None, str | None]:
    """The model of a run in a pipeline over several workers, each of which is to hold its own stages only."""
    if world.size == 1 or not config.is_staged or config.needs_whole:
        return None, None
    try:
        deferred = DeferredModel(lambda: configured_model(config, name, data.classes))
    except UsageError as error:
        return None, f"memory   every worker holds the whole model: {error.what}"
    if deferred.nbytes <= MEASURED_BYTES:
        return None, None
    if config.weights is not None and not all(world.gather(is_file(config.weights) and Path(config.weights).exists())):
        return None, f"memory   every worker holds the whole model: --weights {config.weights} is no file that all see"
    _prepare(deferred.module, config, name, data, world.device)
    return deferred, None


def _prepare(model: nn.Module, config: TrainConfig, name: str, data: ImageData, device: torch.device) -> None:
    freeze(model, config.freeze)
    if config.batch_norm == "frozen":
        freeze_batch_norm(model)
    require_trained(model, name)
    check_outputs(model, name, data.classes, data.sample_shape, config, device)


def untested(tested: int, total: int) -> str | None:
    """What to tell where an accuracy is not over all test images; None where it is."""
    if tested == total:
        return None
    return f"the accuracy is over {tested:,} of {total:,} test images: the others cannot be read"
