"""Trains random models that keep state in random layouts, beside a plain loop: equal, or refused for a listed reason.

Each case follows from its number; many more than usual are tried with `-m sweep`.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable

import pytest

from hybridpar.comm.world import World
from tests.ranks import run_ranks
from tests.state.cases import Case, draw
from tests.state.joinings import JOININGS
from tests.state.pieces import PIECES
from tests.state.plain_loop import Trained, differences, plain_loop, with_trainer

#: Seconds that a case may take.
LONGEST = 60.0

#: What may be refused: how the message begins, and of which cases it is right.
REFUSALS: tuple[tuple[str, Callable[[Case], bool]], ...] = (
    (r"\d stages are asked for, the model has \d+ unit", lambda case: case.stages > 2 or case.joining in TIED),
    (
        r"--recompute \d with .* whose forward changes its attribute",
        lambda case: case.has("objects"),
    ),
    (r".* cannot be cut into stages because of .*: forward writes into it", lambda case: case.has("changes")),
    (r"counter_of_the_root changes its attribute 'calls'", lambda case: True),
    (
        r"the BatchNorm layers .* share running statistics",
        lambda case: "statistics_shared" in case.pieces and case.batch_norm == "pooled",
    ),
    (
        r"the elements of the buffer .* share memory",
        lambda case: "buffer_expanded" in case.pieces and case.workers > 1,
    ),
    (r"cannot trace .*", lambda case: case.joining == "buffer_of_the_root"),
    (r"features cannot be cut into stages", lambda case: case.joining == "features_by_hook"),
    (r"'.*', which leaves stage \d, needs a gradient now", lambda case: case.frozen > 0),
)

#: Joinings with a parameter, a buffer or a piece that is used at both ends.
TIED = {"shared", "tied_decoder", "tied_layers", "statistics_read_early", "parameters_of_the_root"}


def run_case(seed: int, workers: int) -> tuple[str, list[str]]:
    """The outcome of a case, and what there is to say about it."""
    case = draw(seed, workers)
    try:
        expected = plain_loop(case)
    except RuntimeError as error:  # such as a change in place of what autograd has saved
        return "unfit", [str(error)]
    try:
        parts = run_ranks(_on_worker, workers, seed, workers, timeout=LONGEST) if workers > 1 else [_on(case, expected)]
    except BaseException:
        lines = traceback.format_exc().splitlines()
        return "crashed", [line[:300] for line in lines if re.match(r"[\w.]+(Error|Exception|NotMet)\b", line)]
    refused, differ = parts[0]
    if any(part[0] != refused for part in parts):
        return "wrong", [f"workers refuse differently: {[part[0] for part in parts]}"]
    if refused is None:
        differ = [f"worker {rank}:{text}" for rank, part in enumerate(parts) for text in part[1]]
        return ("wrong" if differ else "equal"), differ
    message, steps = refused
    for pattern, is_right in REFUSALS:
        if re.match(pattern, message):
            late = 2 if pattern.endswith("needs a gradient now") else 0
            return (f"refused: {pattern}" if is_right(case) and steps <= late else "wrong"), [message]
    return "wrong", [f"refused after {steps} steps: {message}"]


def _on_worker(world: World, seed: int, workers: int) -> tuple[tuple[str, int] | None, list[str]]:
    case = draw(seed, workers)
    return _on(case, plain_loop(case, world.rank % case.replicas), world)


def _on(case: Case, expected: Trained, world: World | None = None) -> tuple[tuple[str, int] | None, list[str]]:
    found = with_trainer(case, world)
    return found.refused, [] if found.refused else differences(case, expected, found)


ALONE, PAIRS = range(150), range(30)


def check_cases(first: int, count: int, workers: int) -> None:
    outcomes = []
    for seed in range(first, first + count):
        outcome, lines = run_case(seed, workers)
        outcomes.append(outcome)
        assert outcome in ("equal", "unfit") or outcome.startswith("refused"), (draw(seed, workers), lines)
    assert "equal" in outcomes, outcomes


@pytest.mark.parametrize("first", ALONE[::10])
def test_in_one_process(first: int) -> None:
    check_cases(first, 10, 1)


@pytest.mark.parametrize("first", PAIRS[::5])
def test_on_two_workers(first: int) -> None:
    check_cases(first, 5, 2)


@pytest.mark.sweep
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("first", range(150, 1000, 10))
def test_many_more(first: int, workers: int) -> None:
    check_cases(first, 10, workers)


def test_the_cases_have_every_piece_and_every_joining() -> None:
    cases = [draw(seed) for seed in ALONE]
    assert {name for case in cases for name in case.pieces} == set(PIECES)
    assert {case.joining for case in cases} == set(JOININGS)
