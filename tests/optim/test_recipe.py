"""What a recipe sets, what it refuses, and the update that it makes on any number of workers."""

from __future__ import annotations

import pytest

from hybridpar.config import TrainConfig
from hybridpar.errors import UsageError
from hybridpar.optim.build import expand
from tests.ranks import run_ranks
from tests.train.test_engine import make_trainer, state_of, steps
from tests.train.training import close, same, train_rank


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *[("sync", text) for text in ("local:0", "local:x", "outer:4,lr=0", "outer:4,fragments=5", "gossip")],
        *[("sync", text) for text in ("outer:4,fragments=2,delay=2", "outer:2,momentum=0.5", "allreduce,delay=1")],
        *[("sync", text) for text in ("allreduce:warm=5", "local:2,late=delay", "ps:late=delay", "ps:fragments=2")],
        *[("lr", text) for text in ("0/1", "0.1/", "fast")],
    ],
)
def test_values_out_of_range_and_keys_of_another_choice(option, value):
    with pytest.raises(UsageError) as caught:
        TrainConfig(**{option: value}).check()
    assert f"--{option}" in caught.value.what
    assert caught.value.exit_code == 2


def test_what_the_recipes_stand_for():
    sgd = expand(TrainConfig(sync="onebit-sgd", optimizer="sgd:momentum=0.8"), total_steps=100, replicas=2)
    assert (sgd.compress, sgd.optim.momentum, sgd.late) == ("onebit_sgd:warmup=8,momentum=0.8", 0.0, "off")
    assert sgd.weight_decay == pytest.approx(TrainConfig.weight_decay / 0.2)
    assert sgd.lr == 1e-2 < TrainConfig().peak_lr == 0.02
    given = TrainConfig(sync="onebit-sgd", lr=0.02)
    assert expand(given, total_steps=100, replicas=2).lr == given.peak_lr == 0.02  # not taken for left out
    with pytest.raises(UsageError, match="onebit-sgd with one replica"):
        expand(TrainConfig(sync="onebit-sgd"), total_steps=100, replicas=1)


def test_options_go_before_what_a_recipe_would_set():
    config = TrainConfig(sync="onebit-sgd:warm=3", compress="onebit_sgd:adagrad=off,momentum=0.5")
    expanded = expand(config, total_steps=None, replicas=2)
    assert expanded.compress == "onebit_sgd:warmup=3,momentum=0.5,adagrad=off"
    assert expanded.weight_decay == 2 * TrainConfig.weight_decay
    late = expand(TrainConfig(sync="onebit-sgd:late=half", lr=0.03), total_steps=9, replicas=2)
    assert (late.late, late.lr) == ("half", 0.03)
    rate = expand(TrainConfig(lr="0.001/1", batch_size=32), total_steps=None, replicas=1)
    assert rate.lr == pytest.approx(0.032)


def test_the_recipe_needs_error_feedback():
    with pytest.raises(UsageError, match="--sync onebit-sgd with --compress onebit_sgd:feedback=off"):
        expand(TrainConfig(sync="onebit-sgd", compress="onebit_sgd:feedback=off"), total_steps=100, replicas=2)


def test_the_length_of_the_run_must_be_known():
    with pytest.raises(UsageError, match="without a number of first steps"):
        expand(TrainConfig(sync="onebit-sgd"), total_steps=None, replicas=2)


def trained(size, options, steps=5, **more):
    return [rank["weights"] for rank in run_ranks(_train, size, options, steps, more, shared_memory=False)]


def _train(world, options, steps, more):
    return train_rank(world, options, steps, **more)


def test_without_bits_any_number_of_workers_makes_the_same_update():
    options = {"sync": "onebit-sgd", "compress": "onebit_sgd:bits=off,level=off", "lr": 0.01}
    two, three = (trained(size, options, total=50) for size in (2, 3))
    assert same(three[0], three[2])
    close(two[0], three[0], rtol=1e-3, atol=1e-5)


def test_without_adagrad_and_bits_it_is_sgd_with_momentum():
    recipe, options = {"sync": "onebit-sgd", "compress": "onebit_sgd:bits=off,adagrad=off"}, {"weight_decay": 0.0}
    close(trained(2, {**recipe, **options}, total=50)[0], trained(2, options)[0])


def test_the_whole_recipe_learns_and_workers_stay_equal(tmp_path):
    options, more = {"sync": "onebit-sgd:late=half,warm=2", "lr": 0.02}, {"total": 30, "norm": True}
    three = trained(3, options, 9, save=(str(tmp_path), 6), **more)
    resumed, fewer = (trained(size, options, 9, load=str(tmp_path / "step-6"), **more) for size in (3, 2))
    assert all(same(three[0], other) for other in (*three[1:], *resumed))
    assert same(*fewer)
    assert all(weights.isfinite().all() for weights in fewer[0])


def _pipeline(world, options):
    with make_trainer(2, world=world, replicas=2, **options) as trainer:
        steps(trainer, 4, replicas=2)
        return state_of(trainer), str(trainer.engine.wire_format().policy), type(trainer.optimizer).__name__


def test_the_recipe_trains_the_replicas_of_stages():
    options = {"sync": "onebit-sgd:warm=2", "lr": 0.01}
    ranks = run_ranks(_pipeline, 2, options, shared_memory=False)
    assert ranks[0][1].startswith("onebit_sgd:")
    assert ranks[0][2] == "SGD"
    assert all(one.isfinite().all() for one in ranks[0][0].values())
    assert all(one.equal(ranks[1][0][name]) for name, one in ranks[0][0].items())
