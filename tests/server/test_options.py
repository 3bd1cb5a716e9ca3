"""Tests the options of runs with parameter servers; contradictions are refused before anything is started."""

from __future__ import annotations

import pytest

from hybridpar.comm.world import World
from hybridpar.compress import read_policy
from hybridpar.config import TrainConfig
from hybridpar.data import load_dataset
from hybridpar.errors import UsageError
from hybridpar.planner.resolve import resolve
from hybridpar.run.data import Samples
from hybridpar.server import Rules
from hybridpar.server.encoding import check_for_servers
from hybridpar.train.trainer import Trainer
from tests.small_nets import plain


@pytest.mark.parametrize(
    ("sync", "workers", "collect", "barrier", "rate"),
    [
        ("ps", 3, 3, True, 1.0),
        ("ps-async", 3, 1, False, 1 / 3),
        ("softsync:1", 5, 5, False, 1.0),
        ("softsync:2", 5, 2, False, 2 / 5),
    ],
)
def test_modes_as_rules(sync, workers, collect, barrier, rate):
    config = TrainConfig(sync=sync, nproc=workers)
    config.check()
    rules = Rules.of(config, workers)
    assert (rules.learners, rules.collect, rules.barrier, rules.rate) == (workers, collect, barrier, rate)


def test_the_default_of_staleness_is_the_papers():
    assert Rules.of(TrainConfig(sync="ps-async"), 4).scale(5, 4) == 1 / 5
    assert Rules.of(TrainConfig(sync="ps-async:staleness=mean"), 4).scale(5, 4) == 1 / 4


@pytest.mark.parametrize("sync", ["ps", "ps-async", "softsync:2"])
def test_a_worker_tests_in_batches_of_as_many_images_as_it_trains_on(sync):
    config = TrainConfig(sync=sync, nproc=8, data="synthetic:samples=512", batch_size=64, image_size=8, plan="none")
    samples = Samples(load_dataset(config), config, resolve(config, 8), World(rank=0, size=8), own_only=False)
    images, _ = next(iter(samples.test))
    assert len(images) == 8
    assert samples.test.samples == (samples.test.total // 8 if sync == "ps" else samples.test.total)


def test_a_trainer_says_where_servers_are_to_be_had():
    with pytest.raises(UsageError, match="hybridpar train --sync"):
        Trainer(plain(), config=TrainConfig(sync="ps"))


def test_a_codec_with_owners_of_its_own_is_refused():
    with pytest.raises(UsageError, match="with parameter servers"):
        check_for_servers(read_policy("onebit_sgd"))
