"""Jobs that share something slow down together, and no work gets lost."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridpar.schedule.resources import EventLoop, Job, Phase, Resource


def run(rows: list[list[Phase]], starts: list[float] | None = None) -> list[float]:
    """When each job ends; they start at given times."""
    loop = EventLoop()
    ends = [-1.0] * len(rows)

    def start(number: int) -> None:
        phases = rows[number]

        def on_phase(ended: int) -> None:
            if ended == len(phases) - 1:
                ends[number] = loop.now

        loop.start(Job(phases, on_phase))

    for number, at in enumerate(starts or [0.0] * len(rows)):
        loop.start(Job([Phase(at)], lambda _, number=number: start(number)))
    loop.run()
    return ends


def test_alone():
    core = Resource(1)
    assert run([[Phase(3), Phase(0), Phase(2, (core,))]]) == [5]


def test_two_on_one_core():
    core = Resource(1)
    # Both at half speed until the shorter one has done its 2, at 4; then the other alone for its last 1.
    assert run([[Phase(2, (core,))], [Phase(3, (core,))]]) == [4, 5]


def test_three_on_two_cores_and_a_late_one():
    cores = Resource(2)
    # Alone until 1; from then on three at 2/3.
    assert run([[Phase(3, (cores,))] for _ in range(3)], [0, 1, 1]) == pytest.approx([4, 5, 5])


def test_the_most_crowded_resource_counts():
    core, link = Resource(1), Resource(1)
    both = Phase(1, (core, link))
    # The first shares the core with one other and the link with two: it runs at 1/3 until the links are free.
    assert run([[both], [Phase(1, (core,))], [Phase(1, (link,))], [Phase(1, (link,))]]) == pytest.approx([3, 2, 3, 3])


@given(st.lists(st.tuples(st.floats(0, 5), st.floats(0.01, 5)), min_size=1, max_size=8), st.integers(1, 3))
@settings(deadline=None)
def test_no_work_is_lost_and_no_core_idles(jobs, cores):
    """With equal sharing the resource is as busy as it can be, so the end is that of any order without idling."""
    resource = Resource(cores)
    starts = [start for start, _ in jobs]
    ends = run([[Phase(work, (resource,))] for _, work in jobs], starts)
    assert not resource.jobs
    for (start, work), end in zip(jobs, ends, strict=True):
        assert end >= start + work - 1e-6
    if cores == 1:
        clock = 0.0
        for start, work in sorted(jobs):
            clock = max(clock, start) + work
        assert max(ends) == pytest.approx(clock)
