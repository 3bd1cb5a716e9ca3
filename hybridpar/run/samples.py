"""What this worker sees of the training set and of the test set, as the plan divides them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from hybridpar.comm.world import World
from hybridpar.config import TrainConfig
from hybridpar.data import Batch, ImageData, TestBatches, TrainBatches
from hybridpar.errors import check
from hybridpar.plan import ResolvedPlan
from hybridpar.run.data import batches_to_test
from hybridpar.run.state import RunState


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
        return batches_to_test(self.images, self._config, self._world.device, rank, workers, shares)

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
