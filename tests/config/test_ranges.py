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


@pytest.mark.parametrize("option", [{"lr": "abc"}, {"momentum": "x"}, {"betas": 0.9}])
def test_a_value_of_another_type_is_refused(option):
    with pytest.raises(UsageError, match="It must be"):
        check_ranges(TrainConfig(**option))
