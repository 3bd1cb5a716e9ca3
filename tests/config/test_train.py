"""Every option that is out of range is named, with its value and its rule."""

from __future__ import annotations

import math

import pytest

from hybridpar.compress import CODECS
from hybridpar.config import TrainConfig, sync
from hybridpar.config.data import OTHER_SETS
from hybridpar.data.sources import LOADERS
from hybridpar.errors import UsageError

WRONG = [
    ("batch_size", 0, "at least 1 or 'auto'"),
    ("epochs", 0, "at least 1"),
    ("epochs", "3", "a valid integer"),
    ("amp", "bf15", "'none', 'bf16' or 'fp16'"),
    ("weight_decay", -1e-4, "at least 0"),
    ("weight_decay", math.inf, "a finite number"),
    ("timeout", 0.0, "greater than 0"),
    ("loader_workers", -1, "at least 0"),
    ("freeze", ["body"], "a valid tuple"),
]


def test_the_defaults_are_valid():
    TrainConfig().check()


@pytest.mark.parametrize(("option", "value", "rule"), WRONG)
def test_a_value_out_of_range_is_named_with_its_rule(option, value, rule):
    with pytest.raises(UsageError) as caught:
        TrainConfig(**{option: value}).check()
    assert caught.value.what == f"--{option.replace('_', '-')} is {value}"
    assert caught.value.why == f"It must be {rule}."


def test_the_best_are_ranked_by_the_average_where_there_is_one():
    assert TrainConfig().saving.by == "test_accuracy"
    assert TrainConfig(model_ema=0.9).saving.by == "ema_test_accuracy"
    assert TrainConfig(model_ema=0.9, checkpoints="epoch,best=2").saving.best == 2
    assert TrainConfig(model_ema=0.9, checkpoints="epoch,by=test_loss").saving.by == "test_loss"


def test_a_rate_is_one_number_or_two():
    with pytest.raises(UsageError, match=r"0\.1/256/3") as caught:
        TrainConfig(lr="0.1/256/3").check()
    assert "at most 2 items" in caught.value.why


def test_a_rate_for_a_batch_is_in_proportion_to_the_batch():
    assert TrainConfig(lr="0.1/256", batch_size=64).peak_lr == pytest.approx(0.025)
    assert TrainConfig(lr="0.1", batch_size=64).peak_lr == TrainConfig(lr=0.1).peak_lr == 0.1


@pytest.mark.parametrize("said", ["0,0", "1,-1", "nan,1", "1;2", "", "fast"])
def test_shares_that_are_no_shares_are_one_error(said):
    with pytest.raises(UsageError) as caught:
        TrainConfig(shares=said).check()
    assert caught.value.what == f"--shares is {said}"
    assert caught.value.fix
    assert TrainConfig(shares="1, 0,2.5").share_list == (1.0, 0.0, 2.5)


def test_the_names_of_codecs_and_data_sets_are_those_that_are_registered():
    assert set(CODECS) == set(sync.CODECS)
    assert set(LOADERS) == set(OTHER_SETS)
