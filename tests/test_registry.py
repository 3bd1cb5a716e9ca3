"""One registry gives all names the same rules."""

from __future__ import annotations

import pytest

from hybridpar.errors import UsageError
from hybridpar.registry import Registry


@pytest.fixture
def fruits():
    registry: Registry[str] = Registry("fruit")
    registry.register("pear", "green")("P")
    registry.register("apple", "red")("A")
    return registry


def test_an_unknown_name_is_answered_with_the_near_ones(fruits):
    with pytest.raises(UsageError) as caught:
        fruits.get("peer")
    assert caught.value.what == "unknown fruit 'peer'"
    assert "pear" in caught.value.fix


def test_a_name_can_be_taken_only_once(fruits):
    with pytest.raises(ValueError, match="fruit 'pear' is registered twice: as 'green' and as 'another'"):
        fruits.register("pear", "another")("X")
    assert fruits.get("pear") == "P"
