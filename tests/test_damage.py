"""Every kind of damaged file is one short error of the package, or is passed over; `make fuzz` tries many more."""

from __future__ import annotations

import pytest

from tests.damage import complaints, names


@pytest.mark.parametrize("name", names())
def test_a_damaged_file_is_one_short_error(name: str) -> None:
    assert complaints(name, 500) == []
