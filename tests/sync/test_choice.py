"""What is told of a choice that was measured."""

from __future__ import annotations

import pytest

from hybridpar.compress import Policy, parse_codec
from hybridpar.compress.auto import PROVEN
from hybridpar.sync.choice import proof_lines


@pytest.mark.parametrize("codec", PROVEN)
def test_codecs_that_lose_something_come_with_what_is_known_of_it(codec: str) -> None:
    (line,) = proof_lines(Policy.of(parse_codec(codec)))
    assert f"learning rate of {PROVEN[codec]:g}" in line


@pytest.mark.parametrize("codec", ["none", "fp16", "bf16"])
def test_others_come_without(codec: str) -> None:
    assert proof_lines(Policy.of(parse_codec(codec))) == []
