"""What a run needs before it trains: the data set, a model that fits it, and what each worker sees of the samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
from hybridpar.data import Batch, ImageData, TestBatches, TrainBatches, load_dataset
from hybridpar.data.sampling import FEWEST_PER_PART
from hybridpar.errors import UsageError, check
from hybridpar.models import build_model, check_model_name, freeze, parse_arguments, require_trained
from hybridpar.models.deferred import MEASURED_BYTES, DeferredModel, module_of
from hybridpar.plan import ResolvedPlan
from hybridpar.run.state import RunState
from hybridpar.train.model_check import check_outputs


def steps_of(config: TrainConfig, samples: int) -> int:
    """Steps of a run, before it is known how each is divided; see `hybridpar.data.sampling.cut_epoch`."""
    return config.steps if config.steps is not None else config.epochs * max(1, samples // config.samples_per_step)


def check_batch(config: TrainConfig, samples: int, workers: int) -> None:
    """Refuse a batch of more samples than there are; too few for the workers are refused by `cut_epoch`."""
    enough = samples >= FEWEST_PER_PART * workers * config.parts_per_step(config.micro_batches)
    check(
        config.samples_per_step <= samples or not enough,
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
    step_workers: int | None = None,
) -> TestBatches:
    """The share of the test set of one of the workers that test it, in batches of as many samples as it trains on.

    `step_workers` are those that divide a step, where they are not the ones that test.
    """
    return TestBatches(
        data,
        batch_size=max(2, config.samples_per_step // (step_workers or workers)),
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
    with world.patient():  # others may be loading data still
        seen = all(world.gather(config.weights is None or _is_there(config.weights)))

    def build() -> tuple[nn.Module | DeferredModel, str | None]:
        torch.manual_seed(config.seed)
        note, made = None, partial(configured_model, config, name, data.classes)
        model: nn.Module | DeferredModel | None = None
        if world.size > 1 and config.is_staged and not config.needs_whole:
            model, note = _deferred(made, seen, config)
        torch.manual_seed(config.seed)
        model = model or made()
        whole = module_of(model)
        freeze(whole, config.freeze, batch_norm=config.batch_norm == "frozen")
        require_trained(whole, name)
        check_outputs(whole, name, data.classes, data.sample_shape, config, world.device)
        return model, note

    return world.on_all(build)


def _is_there(weights: str) -> bool:
    """Whether weights are a file that this worker can read."""
    from hybridpar.models.pretrained import is_file

    return is_file(weights) and Path(weights).exists()


def _deferred(
    make: Callable[[], nn.Module], seen: bool, config: TrainConfig
) -> tuple[DeferredModel | None, str | None]:
    """The model of a run in a pipeline over several workers, each of which is to hold its own stages only.

    `seen` says whether all workers can read the weights that the run starts from.
    """
    try:
        deferred = DeferredModel(make)
    except UsageError as error:
        return None, f"memory   every worker holds the whole model: {error.what}"
    if deferred.nbytes <= MEASURED_BYTES:
        return None, None
    if not seen:
        return None, f"memory   every worker holds the whole model: --weights {config.weights} is no file that all see"
    return deferred, None


# -------------------------------------------------------------------------------------------------------- the samples


class Samples:
    """This worker's batches, and its share of the test set."""

    def __init__(
        self, images: ImageData, config: TrainConfig, plan: ResolvedPlan, world: World, own_only: bool
    ) -> None:
        self.images = images
        self._config, self._plan, self._world = replace(config, **plan.compute.options), plan, world
        #: Copies of the model, or of the whole pipeline, which divide each batch.
        self.replicas = plan.layout.replicas
        self._replica = plan.layout.replica_of(world.rank)
        #: This worker among those that divide the test set, and their number.
        self._tests = world.rank, world.size
        if own_only and plan.layout.positions > 1:  # the workers of a replica evaluate together
            self._tests = self._replica, self.replicas
        self._step_workers = self._tests[1]
        if config.parameter_servers is not None and not config.parameter_servers.waits_for_all:
            self._tests = 0, 1  # worker 0 tests alone
        self._shares = _shares_of(config, plan)
        #: Those of the steps to come.
        self.batches = self.make(config.samples_per_step)
        self.test = self._make_test(self._shares)

    def make(self, batch_size: int) -> TrainBatches:
        """Batches of any size, divided as at first."""
        config, plan = self._config, self._plan
        return TrainBatches(
            self.images,
            seed=config.seed,
            batch_size=batch_size,
            rank=self._replica,
            workers=self.replicas,
            micro_batches=config.parts_per_step(plan.pipeline.micro_batches),
            loader_workers=config.loader_workers,
            device=self._world.device,
            channels_last=plan.channels_last,
            in_pairs=config.mixing.is_on,
            repeats=config.augmentation.repeats,
            shares=self._shares,
            idle=plan.sync.batch_norm != "sync",
        )

    def _make_test(self, shares: Sequence[float] | None) -> TestBatches:
        rank, workers = self._tests
        shares = shares if shares is not None and len(shares) == workers else None
        step_workers = self._step_workers
        return batches_to_test(self.images, self._config, self._world.device, rank, workers, shares, step_workers)

    @property
    def per_epoch(self) -> int:
        """Steps of a whole epoch."""
        return self.batches.steps_per_epoch

    def divide(self, shares: Sequence[int] | None) -> None:
        """Divide the steps to come, and the test set, by other shares."""
        self.batches.shares = shares
        self.test = self._make_test(shares)

    def epoch(self, epoch: int, state: RunState) -> Iterator[Batch]:
        """The batches that are left of an epoch; when shares change, the rest of them is divided anew."""
        while True:
            shares = self.batches.shares
            for batch in self.batches.epoch(epoch, state.epoch_step):
                yield batch
                if self.batches.shares != shares:
                    break
            else:
                return

    def endless(self, state: RunState) -> Iterator[Batch]:
        """The batches of all steps to come, for a worker that goes through the data by itself."""
        epoch, first = state.epoch, state.epoch_step
        while True:
            yield from self.batches.epoch(epoch, first)
            epoch, first = epoch + 1, 0


def _shares_of(config: TrainConfig, plan: ResolvedPlan) -> tuple[float, ...] | None:
    """What each replica gets of a batch at first, as `--shares` says, or else the plan; None for equal parts."""
    shares, replicas = config.share_list, plan.layout.replicas
    if shares is None and config.shares.strip() == "equal":
        return plan.placement.shares
    check(
        shares is None or len(shares) == replicas,
        f"--shares {config.shares} has {len(shares or ())} numbers, for {replicas} replica(s)",
        "Every replica has a share of the batch: every worker, where the model is not cut.",
        "Give as many numbers as there are replicas.",
    )
    return None if shares is None or len(set(shares)) == 1 else shares
