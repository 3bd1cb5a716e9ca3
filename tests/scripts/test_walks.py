"""Files of the package that run in one training step and in one command: fewer may do, and more never."""

from __future__ import annotations

import sys
import threading
from collections import Counter

import pytest

from hybridpar.comm.world import World
from scripts.walks import COMMAND, WALKS, count, step
from tests.ranks import run_ranks

#: The most files of each walk. Lower a number when fewer run; `python scripts/walks.py -v` lists them.
MOST_FILES = {
    "one worker": 14,
    "two workers, onebit": 30,
    "two stages, four micro-batches": 15,
    "hybridpar train, to the end of its first step": 87,
}


#: The other walks take half a minute under a profiler.
LONG = ("two workers, onebit", "two stages, four micro-batches")


def counted(world: World, walk: str) -> Counter[str]:
    """The calls of a step of one worker, in a process that has imported torch."""
    try:
        return step(walk)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "walk", [pytest.param(walk, marks=pytest.mark.sweep) if walk in LONG else walk for walk in WALKS]
)
def test_a_walk_goes_through_no_more_files(walk: str) -> None:
    files = count(walk) if walk == COMMAND or walk in LONG else run_ranks(counted, 1, walk)[0]
    assert files, "the profiler saw nothing"
    assert len(files) <= MOST_FILES[walk], f"{walk} goes through more files than it did: {', '.join(sorted(files))}"
