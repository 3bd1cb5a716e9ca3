"""Names of options in other trainers are answered with ours, and the page of the documentation lists them."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from hybridpar.commands import COMMANDS
from hybridpar.config.foreign import foreign_names, page
from hybridpar.errors import UsageError

ROWS = [(name, text) for rows in foreign_names().values() for names, text in rows.items() for name in names.split()]


def test_the_page_is_made_from_the_table() -> None:
    assert (Path(__file__).parents[2] / "docs/names.md").read_text() == page()


@pytest.mark.parametrize(("name", "text"), ROWS)
def test_a_foreign_name_is_answered_with_options_that_exist(name: str, text: str) -> None:
    command = COMMANDS.get("train")
    ours = {f"--{field.name.replace('_', '-')}" for field in fields(command.options)} - {"--model"}
    assert name not in ours
    assert set(re.findall(r"--[a-z][a-z-]*", text)) <= ours
    with pytest.raises(UsageError) as caught:
        command.parse("train", ["resnet18", name, "0.5"])
    assert name in caught.value.what
    said = caught.value.fix
    assert (
        said == f"Leave it out: {text.partition('nothing: ')[2]}." or said == f"Write {text.replace('VALUE', '0.5')}."
    )


def test_no_name_has_two_answers() -> None:
    names = [name for name, _ in ROWS]
    assert len(names) == len(set(names))
