"""One registry gives all names the same rules."""

from __future__ import annotations

import importlib
import sys

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


def test_modules_are_imported_when_their_names_are_looked_up(tmp_path, monkeypatch):
    folder = tmp_path / "basket"
    folder.mkdir()
    (folder / "__init__.py").write_text(
        "from hybridpar.registry import Registry\nFRUITS = Registry('fruit', 'basket')\n"
    )
    for module, name in (("citrus", "lemon"), ("pear", "pear")):
        (folder / f"{module}.py").write_text(f"import basket\nbasket.FRUITS.register({name!r}, '')({name[0]!r})\n")
    monkeypatch.syspath_prepend(tmp_path)
    fruits = importlib.import_module("basket").FRUITS
    assert fruits.get("pear") == "p"
    assert "basket.citrus" not in sys.modules
    assert fruits.get("lemon") == "l"
    assert list(fruits) == ["lemon", "pear"]
    assert "plum" not in fruits
