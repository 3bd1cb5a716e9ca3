"""Random models that keep state, in random layouts: equal to a plain loop, or refused for a listed reason."""

from __future__ import annotations

import pytest

from tests.state.cases import draw
from tests.state.joinings import JOININGS
from tests.state.pieces import PIECES
from tests.state.random_state import run_case

ALONE, PAIRS = range(150), range(30)


@pytest.mark.parametrize("first", ALONE[::10])
def test_in_one_process(first: int) -> None:
    for seed in range(first, first + 10):
        outcome, lines = run_case(seed, 1)
        assert outcome in ("equal", "unfit") or outcome.startswith("refused"), (draw(seed), lines)


@pytest.mark.parametrize("first", PAIRS[::5])
def test_on_two_workers(first: int) -> None:
    for seed in range(first, first + 5):
        outcome, lines = run_case(seed, 2)
        assert outcome in ("equal", "unfit") or outcome.startswith("refused"), (draw(seed, 2), lines)


def test_the_cases_have_every_piece_and_every_joining() -> None:
    cases = [draw(seed) for seed in ALONE]
    assert {name for case in cases for name in case.pieces} == set(PIECES)
    assert {case.joining for case in cases} == set(JOININGS)
