"""A package lists the names that it loads on first use, and no other is found."""

from __future__ import annotations

import pytest

from hybridpar import observe
from hybridpar.formats.lazy_names import lazy_names


def test_names_are_those_that_are_imported_for_type_checking(tmp_path):
    source = tmp_path / "__init__.py"
    source.write_text("if TYPE_CHECKING:\n    from hybridpar.errors import UsageError as UsageError\n")
    load, listed, names = lazy_names("some", str(source))
    assert names == listed() == ["UsageError"]
    assert load("UsageError").__module__ == "hybridpar.errors"
    with pytest.raises(AttributeError, match="module 'some' has no attribute 'Error'"):
        load("Error")


def test_an_attribute_of_a_package_is_loaded():
    assert observe.RunInfo.__module__ == "hybridpar.observe.records"
    assert "RunInfo" in dir(observe)
