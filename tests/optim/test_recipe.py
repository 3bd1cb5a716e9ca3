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
    assert (sgd.compress, sgd.momentum, sgd.late) == ("onebit_sgd:warmup=8,momentum=0.8", 0.0, "off")
    assert sgd.weight_decay == pytest.approx(TrainConfig.weight_decay / 0.2)
    assert sgd.lr == 1e-2 < TrainConfig().peak_lr == 0.02
    given = TrainConfig(sync="onebit-sgd", lr=0.02)
    assert expand(given, total_steps=100, replicas=2).lr == given.peak_lr == 0.02  # not taken for left out
    alone = expand(TrainConfig(sync="onebit-sgd"), total_steps=None, replicas=1)
    assert alone.compress == "none"


def test_options_go_before_what_a_recipe_would_set():
    config = TrainConfig(sync="onebit-sgd:warm=3", compress="onebit_sgd:adagrad=off,momentum=0.5")
    expanded = expand(config, total_steps=None, replicas=2)
    assert expanded.compress == "onebit_sgd:adagrad=off,momentum=0.5,warmup=3"
    assert expanded.weight_decay == 2 * TrainConfig.weight_decay
    late = expand(TrainConfig(sync="onebit-sgd:late=half", lr=0.03), total_steps=9, replicas=2)
    assert (late.late, late.lr) == ("half", 0.03)
    rate = expand(TrainConfig(lr="0.001/1", batch_size=32), total_steps=None, replicas=1)
    assert rate.lr == pytest.approx(0.032)


def test_the_length_of_the_run_must_be_known():
    with pytest.raises(UsageError, match="without a number of first steps"):
        expand(TrainConfig(sync="onebit-sgd"), total_steps=None, replicas=2)


def _train(world, options, steps, more):
    return train_rank(world, options, steps, **more)


def test_without_bits_any_number_of_workers_makes_the_same_update():
    options = {"sync": "onebit-sgd", "compress": "onebit_sgd:bits=off,level=off", "lr": 0.01}
    alone, two, three = (run_ranks(_train, size, options, 5, {"total": 50}, shared_memory=False) for size in (1, 2, 3))
    assert alone[0]["optimizer"] == "AdaGradSGD"
    assert two[0]["optimizer"] == "SGD"
    assert same(three[0]["weights"], three[2]["weights"])
    close(two[0]["weights"], alone[0]["weights"], rtol=1e-3, atol=1e-5)
    close(three[0]["weights"], alone[0]["weights"], rtol=1e-3, atol=1e-5)


def test_without_adagrad_and_bits_it_is_sgd_with_momentum():
    recipe = {"sync": "onebit-sgd", "compress": "onebit_sgd:bits=off,adagrad=off"}
    options = {"weight_decay": 0.0}
    ours = run_ranks(_train, 2, {**recipe, **options}, 5, {"total": 50}, shared_memory=False)
    close(ours[0]["weights"], run_ranks(_train, 2, options, 5, {}, shared_memory=False)[0]["weights"])


def test_the_whole_recipe_learns_and_workers_stay_equal(tmp_path):
    options = {"sync": "onebit-sgd:late=half,warm=2", "lr": 0.02}
    more = {"total": 30, "norm": True, "save": (str(tmp_path), 6)}
    ranks = run_ranks(_train, 3, options, 9, more, shared_memory=False)
    assert same(ranks[0]["weights"], ranks[1]["weights"])
    assert same(ranks[0]["weights"], ranks[2]["weights"])
    resumed = run_ranks(
        _train, 3, options, 9, {"total": 30, "norm": True, "load": str(tmp_path / "step-6")}, shared_memory=False
    )
    assert same(ranks[2]["weights"], resumed[2]["weights"])
    fewer = run_ranks(
        _train, 2, options, 9, {"total": 30, "norm": True, "load": str(tmp_path / "step-6")}, shared_memory=False
    )
    assert same(fewer[0]["weights"], fewer[1]["weights"])
    assert all(one.isfinite().all() for one in fewer[0]["weights"])


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
