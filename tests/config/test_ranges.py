"""The table of ranges names options, each once, whose defaults it allows."""

from __future__ import annotations

from dataclasses import fields

import pytest

from hybridpar.config import TrainConfig
from hybridpar.config.ranges import RANGES, check_ranges
from hybridpar.errors import UsageError


def test_ranges_are_of_options_and_allow_their_defaults():
    names = [name for *_, own in RANGES for name in own.split()]
    assert len(names) == len(set(names))
    assert set(names) <= {field.name for field in fields(TrainConfig)}
    check_ranges(TrainConfig())


def test_only_some_options_are_checked():
    config = TrainConfig(lr=-1.0, select_batch=-1)
    with pytest.raises(UsageError, match="--select-batch is -1"):
        check_ranges(config, ("select_batch",))
    check_ranges(config, ("momentum",))
