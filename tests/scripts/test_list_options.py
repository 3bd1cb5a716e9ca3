"""The lists of options and codecs in the reference name all of them, and what they show can be typed."""

from __future__ import annotations

import re
from dataclasses import fields

import pytest

from docs.list_options import codecs_list, options_list, specs
from hybridpar.compress import CODECS, parse_codec
from hybridpar.config import TrainConfig
from hybridpar.spec import check_rules

#: What is typed for a value that stands in front, or has no default.
EXAMPLES = {"H": "16", "N": "2", "PX": "32", "RATE": "0.1", "LIMIT": "1", "DECAY": "0.9", "WHEN": "epoch", "SPEC": "v0"}


def inside(option: str) -> list[str]:
    part = options_list().partition(f"### Inside `{option}`")[2].partition("###")[0]
    return re.findall(r"^- `([^`]+)`$", part, flags=re.MULTILINE)


def test_every_option_is_listed_with_its_text():
    rows = re.findall(r"^\| `(\w+)` \| .* \| .{8,} \|$", options_list().partition("### Inside")[0], flags=re.MULTILINE)
    assert sorted(rows) == sorted({option.name for option in fields(TrainConfig)} - {"given"})


@pytest.mark.parametrize("option", [option for option, _ in specs()])
def test_what_is_listed_inside_an_option_can_be_typed(option):
    assert inside(option)
    for text in inside(option):
        typed = re.sub(r"\b[A-Z]+\b", lambda match: EXAMPLES[match[0]], text).replace("at=...", "at=1")
        check_rules(TrainConfig(**{option: typed}))


def test_every_codec_is_listed_as_it_is_typed():
    listed = re.findall(r"^- `([^`]+)`: ", codecs_list(), flags=re.MULTILINE)
    assert [text.partition(":")[0] for text in listed] == list(CODECS)
    for text in listed:
        assert parse_codec(text) == parse_codec(text.partition(":")[0])
