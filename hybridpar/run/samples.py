"""What this worker sees of the training set and of the test set, as the plan divides them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from hybridpar.comm.world import World
from hybridpar.config import TrainConfig
from hybridpar.data import Batch, ImageData
from hybridpar.plan import ResolvedPlan
from hybridpar.run.data import batch_maker, shares_of, test_batches
from hybridpar.run.state import RunState


class Samples:
    """This worker's batches, and its share of the test set."""

    def __init__(
        self, images: ImageData, config: TrainConfig, plan: ResolvedPlan, world: World, own_only: bool
    ) -> None:
        self.images = images
        #: Copies of the model, or of the whole pipeline, which divide each batch.
        self.replicas = plan.layout.replicas
        replica, shares = plan.layout.replica_of(world.rank), shares_of(config, plan)
        #: Makes batches of any size.
        self.make = batch_maker(images, config, plan, world.device, replica, shares)
        #: Those of the steps to come.
        self.batches = self.make(config.samples_per_step)
        divided = world.size, world.rank, world.size
        if own_only and plan.layout.positions > 1:  # the workers of a replica evaluate together
            divided = self.replicas, replica, self.replicas
        if config.parameter_servers is not None and not config.parameter_servers.waits_for_all:
            divided = world.size, 0, 1  # worker 0 tests alone
        self._make_test = partial(test_batches, images, config, plan, world.device, *divided)
        self.test = self._make_test(shares)

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
