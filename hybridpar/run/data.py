"""Why: what a run has before it trains: its data, a model that fits them, the number of steps, an example."""

from __future__ import annotations

import torch
from torch import nn

from hybridpar.comm.world import World
from hybridpar.config import TrainConfig
from hybridpar.data import ImageData, load_dataset
from hybridpar.data.sampling import FEWEST_PER_PART
from hybridpar.errors import UsageError
from hybridpar.models import build_model, require_trained
from hybridpar.planner.worker_share import micro_batch_samples
from hybridpar.train.model_check import check_outputs


def steps_of(config: TrainConfig, samples: int) -> int:
    """Steps of a run, before it is known how each is divided; see `hybridpar.data.sampling.cut_epoch`."""
    return config.steps if config.steps is not None else config.epochs * max(1, samples // config.batch_size)


def check_batch(config: TrainConfig, samples: int, workers: int) -> None:
    """Refuse a batch of more samples than there are; too few for the workers are refused by `cut_epoch`.

    Args:
        config: Options.
        samples: Of the training set.
        workers: Of the job.

    Raises:
        UsageError: The batch is larger than the training set.
    """
    if config.batch_size > samples >= FEWEST_PER_PART * workers * config.parts_per_step:
        raise UsageError(
            f"--batch-size is {config.batch_size:,}, and the training set has {samples:,} samples",
            "A step sees a sample once at most.",
            f"Use --batch-size {samples} or less.",
        )


def example_batch(data: ImageData, config: TrainConfig, replicas: int) -> torch.Tensor:
    """Something of the size of a micro-batch, for measuring the model."""
    samples = micro_batch_samples(config, replicas)
    return torch.randn(samples, *data.sample_shape, generator=torch.Generator().manual_seed(0))


def load_data(config: TrainConfig, world: World) -> ImageData:
    """Load the data set; where it may be downloaded, rank 0 goes first."""
    if not config.download or world.size == 1:
        return load_dataset(config)
    loaded: list[ImageData] = []
    world.from_main(lambda: loaded.append(load_dataset(config)))
    return loaded[0] if loaded else load_dataset(config)


def make_model(config: TrainConfig, name: str, data: ImageData, device: torch.device) -> nn.Module:
    """Build the model of a run on a device, and refuse one that cannot be trained on the data.

    Args:
        config: Options.
        name: What the user calls the model.
        data: The data.
        device: Where it will be trained.

    Raises:
        UsageError: See `build_model`, `require_trained` and `check_outputs`.
    """
    model = build_model(name, data.classes, stem=config.stem)
    require_trained(model, name)
    check_outputs(model, name, data.classes, data.sample_shape, config, device)
    return model


def untested(tested: int, total: int) -> str | None:
    """What to tell where an accuracy is not over all test images; None where it is."""
    if tested == total:
        return None
    return f"the accuracy is over {tested:,} of {total:,} test images: the others cannot be read"
