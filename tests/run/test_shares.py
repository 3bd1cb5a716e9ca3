"""`--shares`: decisions of `auto` on times that are made up, and runs with shares beside one worker alone."""

import os
import random
import signal
from unittest import mock

import pytest
import torch

from hybridpar.comm.world import World
from hybridpar.config import TrainConfig
from hybridpar.errors import UsageError
from hybridpar.observe.metrics import read_metrics
from hybridpar.plan import read_plan
from hybridpar.run import shares as tuning
from hybridpar.run.shares import ShareTuner
from hybridpar.train.checkpoint import load_checkpoint
from hybridpar.train.trainer import Trainer
from tests.ranks import run_ranks
from tests.runs import check_run, saved_state, train, train_rank

BATCH = 96


class Made(World):
    """Workers whose times are made up."""

    def __init__(self, costs, noise=0.0):
        super().__init__()
        self.costs, self.noise, self.random = costs, noise, random.Random(0)

    def tuner(self, **options):
        rules = {"idle": True, "in_pairs": False, "wait": lambda: None, **options}
        self.tuned = ShareTuner(self, [[rank] for rank in range(len(self.costs))], BATCH, 1, **rules)
        return self.tuned

    def times(self):
        pairs = zip(self.costs, self.tuned.counts, strict=True)
        exact = [fixed_ms + count * sample_ms for (fixed_ms, sample_ms), count in pairs]
        return [time * (1 + self.noise * (2 * self.random.random() - 1)) for time in exact]

    def gather(self, item):
        return [(time or 1e-6, 2 * self.noise * time) for time in self.times()]

    def steps(self, count):
        """The divisions after so many steps, where they changed."""
        changes = []
        for _ in range(count):
            if self.tuned.note(10.0 + self.noise * self.random.random(), BATCH) is not None:
                changes.append(list(self.tuned.counts))
        return changes


@pytest.mark.parametrize(
    ("costs", "best"), [([(0, 3), (0, 1)], 72), ([(15, 2), (5, 1)], 72.3), ([(10, 1), (2, 4), (30, 0.5)], 51.2)]
)
def test_unequal_workers_come_to_the_best_division(costs, best):
    world = Made(costs)
    tuner = world.tuner()
    assert tuner.counts == [BATCH // len(costs)] * len(costs)
    changes = world.steps(400)
    assert 1 <= len(changes) <= 4
    assert sum(tuner.counts) == BATCH
    assert max(world.times()) <= 1.03 * best


@pytest.mark.parametrize("noise", [0.02, 0.05, 0.1])
def test_noise_does_not_move_the_shares_of_equal_workers(noise):
    world = Made([(5, 1), (5, 1), (5, 1)], noise)
    world.tuner()
    assert len(world.steps(5000)) <= 4
    assert max(world.tuned.counts) - min(world.tuned.counts) <= 8


def test_what_was_decided_is_restored_for_as_many_replicas_only():
    world = Made([(0, 3), (0, 1)])
    world.tuner()
    world.steps(200)
    state = world.tuned.state()
    other = Made([(0, 3), (0, 1)])
    other.tuner().restore(mock.MagicMock(), state)
    assert other.tuned.counts == world.tuned.counts
    assert not other.steps(100)
    third = Made([(0, 1)] * 3)
    third.tuner().restore(mock.MagicMock(), state)
    assert third.tuned.counts == [32, 32, 32]


# ------------------------------------------------------------------------------------------------------------- runs


#: The last batch has 4 samples. BatchNorm would normalise other parts of a batch in each layout.
UNEVEN = {"data": "synthetic:samples=100", "batch_norm": "frozen"}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    directory = tmp_path_factory.mktemp("alone")
    train(directory, **UNEVEN)
    return saved_state(directory)


def assert_close(directory, expected):
    state = saved_state(directory)
    assert state.keys() == expected.keys()
    for name, value in state.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6, msg=name)


# In the last batch the first worker gets no sample.
@pytest.mark.parametrize(
    "options", [{"shares": "1,6"}, {"shares": "0,1"}, {"shares": "1,6", "stages": 2, "replicas": 2}]
)
def test_a_run_with_shares_is_that_of_one_worker(alone, tmp_path, options):
    run_ranks(train_rank, 2, tmp_path, "plain", None, {**UNEVEN, **options})
    assert check_run(tmp_path)["shares"] == options["shares"]
    assert_close(tmp_path, alone)


def slow_rank(world, directory, fault, options, first=1):
    """The first replica, of so many workers, is three times as slow, as far as it knows, and decisions come early."""
    note, slow = ShareTuner.note, world.rank < first

    def patched(tuner, busy_ms, samples):
        return note(tuner, tuner.counts[not slow] * (3.0 if slow else 1.0), samples)

    with (
        mock.patch.multiple(tuning, LEFT_OUT=1, WATCHED=2),
        mock.patch.object(ShareTuner, "note", patched),
    ):
        return train_rank(world, directory, "plain", fault, options)


def test_shares_change_within_an_epoch_and_resumption_goes_on_with_them(alone, tmp_path):
    options = {**UNEVEN, "shares": "auto"}
    run_ranks(slow_rank, 2, tmp_path, "TERM@0:5", options)
    assert load_checkpoint(tmp_path).training["extra"]["shares"]["counts"] == [4, 12]
    run_ranks(slow_rank, 2, tmp_path, None, {**options, "resume": True})
    assert check_run(tmp_path)["shares"] == "auto:4,12"
    assert_close(tmp_path, alone)
    assert list(read_metrics(tmp_path).steps["samples"]) == 2 * [16, 16, 16, 16, 16, 16, 4]


# -------------------------------------------------------------------------- replicas of different numbers of workers

BESIDE = {**UNEVEN, "stages": 2, "placement": "0,0;1,2"}


def stopped_rank(world, directory, stop, options):
    """A run whose last worker gets a signal before a step; None lets it finish."""
    step = Trainer.step

    def patched(trainer, *batch, **asked):
        if world.rank == world.size - 1 and trainer.steps_done + 1 == stop:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(trainer, *batch, **asked)

    with mock.patch.object(Trainer, "step", patched):
        return train(directory, **options)


def test_a_worker_beside_two_is_stopped_and_any_layout_goes_on(alone, tmp_path):
    options = {**BESIDE, "shares": "1,6"}
    run_ranks(stopped_rank, 3, tmp_path, 5, options)
    run_ranks(stopped_rank, 3, tmp_path, 9, {**options, "placement": "0,2;1,1", "resume": True})
    train(tmp_path, resume=True, **UNEVEN)
    assert check_run(tmp_path)["workers"] == 1
    assert_close(tmp_path, alone)


def test_shares_of_unequal_replicas_are_found_and_their_plan_can_be_followed(alone, tmp_path):
    placed = {**BESIDE, "placement": "0,1;2,2"}
    run_ranks(slow_rank, 3, tmp_path / "found", None, {**placed, "shares": "auto"}, 2)
    assert check_run(tmp_path / "found")["shares"] == "auto:4,12"
    assert_close(tmp_path / "found", alone)
    options = {**UNEVEN, "plan": tmp_path / "found" / "plan.json"}
    run_ranks(train_rank, 3, tmp_path / "followed", "plain", None, options)
    assert read_plan(tmp_path / "followed" / "plan.json").layout.texts() == ("0,1", "2,2")
    assert_close(tmp_path / "followed", alone)


def test_codecs_of_unequal_replicas_keep_what_they_have_not_sent(tmp_path):
    options = {**BESIDE, "compress": "onebit", "epochs": 1}
    run_ranks(stopped_rank, 3, tmp_path / "whole", None, options)
    run_ranks(stopped_rank, 3, tmp_path / "parts", 4, options)
    run_ranks(stopped_rank, 3, tmp_path / "parts", None, {**options, "resume": True})
    whole, parts = saved_state(tmp_path / "whole"), saved_state(tmp_path / "parts")
    assert all(torch.equal(value, parts[name]) for name, value in whole.items())


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"placement": "0,0;1,3"}, "--placement 0,0;1,3 with --stages 2"),
        ({"placement": "0,1;1,2"}, "--placement 0,1;1,2 with --stages 2"),
        ({"replicas": 3}, "--placement 0,0;1,2 with --stages 2 and --replicas 3"),
        ({"batch_norm": "sync"}, "--batch-norm sync with replicas of different numbers of workers"),
        ({"compress": "auto"}, "--compress auto with replicas of different numbers of workers"),
    ],
)
def test_placements_that_cannot_be(options, what):
    with pytest.raises(UsageError) as raised:
        TrainConfig(**{"stages": 2, "placement": "0,0;1,2", **options}).check()
    assert raised.value.what == what
    if "replicas of different numbers of workers" in what:
        TrainConfig(**{"stages": 2, "placement": "0,0;1,1", **options}).check()


def refused(world, directory):
    try:
        train_rank(world, directory, "plain", None, {"shares": "1,2,3"})
    except UsageError as error:
        return error.what
    return "passed"


def test_a_list_of_another_length_is_one_error(tmp_path):
    assert run_ranks(refused, 2, tmp_path) == ["--shares 1,2,3 has 3 numbers, for 2 replica(s)"] * 2
