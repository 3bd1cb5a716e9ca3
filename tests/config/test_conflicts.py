"""Every pair of features that contradict each other is one error that names both; every other pair is allowed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hybridpar.config import TrainConfig
from hybridpar.config.conflicts import CONFLICTS, FEATURES, NEED_EQUAL_REPLICAS, features_of
from hybridpar.errors import UsageError

#: Options with which a run has a feature, and no other that it does not need.
OPTIONS: dict[str, dict[str, Any]] = {
    "adafactor": {"optimizer": "adafactor", "memory_format": "channels_last"},
    "another codec": {"compress": "fp16"},
    "asynchronous": {"sync": "ps-async"},
    "batch auto": {"batch_size": "auto"},
    "batch norm sync": {"batch_norm": "sync"},
    "codec": {"compress": "onebit"},
    "codec auto": {"compress": "auto"},
    "compile": {"compile": True},
    "cuda graph": {"cuda_graph": "on"},
    "model_ema": {"model_ema": 0.9},
    "fp16": {"amp": "fp16"},
    "half": {"sync": "allreduce:late=half"},
    "kernels": {"kernels": "auto"},
    "kron": {"optimizer": "timm/kron"},
    "late": {"sync": "allreduce:late=delay"},
    "local": {"sync": "local:2"},
    "nesterov": {"optimizer": "sgd:nesterov"},
    "guard": {"guard": False},
    "no share": {"shares": "0,1"},
    "not sgd": {"optimizer": "adamw"},
    "outer": {"sync": "outer:4"},
    "placed": {"stages": 2, "placement": "0,0;1,2"},
    "plan file": {"plan": Path("plan.json")},
    "plateau": {"lr_schedule": "plateau"},
    "profile": {"profile": True},
    "recipe": {"sync": "onebit-sgd"},
    "recompute all": {"recompute": ("all",)},
    "replicas without stages": {"replicas": 2},
    "resume": {"resume": True},
    "resume_from": {"resume_from": Path("runs/one")},
    "select_batch": {"select_batch": 1},
    "servers": {"sync": "ps"},
    "shard_optimizer": {"shard_optimizer": True},
    "shares": {"shares": "1,2"},
    "shares auto": {"shares": "auto"},
    "stages": {"stages": 2},
    "steps": {"steps": 9},
    "stop early": {"checkpoints": "stop=3"},
    "timeline": {"timeline": Path("t.json")},
    "weights": {"weights": "default"},
}

PAIRS = [frozenset((name, other)) for name, others, _ in CONFLICTS for other in others]


def test_the_table_knows_every_feature_and_each_pair_once():
    assert OPTIONS.keys() == {*FEATURES, *(name for pair in PAIRS for name in pair)}
    assert len(PAIRS) == len(set(PAIRS))
    assert not features_of(TrainConfig())
    for feature, options in OPTIONS.items():
        assert feature in features_of(TrainConfig(**options))


@pytest.mark.parametrize("feature", OPTIONS)
def test_a_pair_is_refused_if_the_table_has_it(feature: str) -> None:
    for other, options in OPTIONS.items():
        if other <= feature or options.keys() & OPTIONS[feature].keys():
            continue  # the same option says both, so only one of them can be given
        config = TrainConfig(**OPTIONS[feature], **options)
        features = features_of(config)
        refused = [tuple(row) for row in PAIRS if row <= features.keys()]
        refused += [(name, name) for name in NEED_EQUAL_REPLICAS if {"placed", name} <= features.keys()]
        what = refusal(config)
        assert bool(what) == bool(refused), (feature, other, what)
        assert not what or any(features[name] in what and features[also] in what for name, also in refused), other


def refusal(config: TrainConfig) -> str:
    try:
        config.check()
    except UsageError as error:
        return error.what
    return ""
