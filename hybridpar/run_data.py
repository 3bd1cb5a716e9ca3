"""Why: what a run must know of its data before it trains: the data themselves, how many steps they make, an example."""

from __future__ import annotations

import torch

from hybridpar.config import TrainConfig
from hybridpar.data import ImageData, load_dataset
from hybridpar.pipeline.world import World
from hybridpar.worker_share import micro_batch_samples


def steps_of(config: TrainConfig, samples: int) -> int:
    """Steps of a run, before it is known how each is divided; see `hybridpar.data.sampling.cut_epoch`."""
    return config.steps if config.steps is not None else config.epochs * max(1, samples // config.batch_size)


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
