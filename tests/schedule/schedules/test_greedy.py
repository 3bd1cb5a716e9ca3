"""`greedy` is never worse than another schedule, and uses what was measured."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from hybridpar.errors import ScheduleError
from hybridpar.schedule.costs import Costs, Link
from hybridpar.schedule.layout import Edge, Layout
from hybridpar.schedule.program import lower
from hybridpar.schedule.schedules import SCHEDULES, ScheduleRequest, make
from hybridpar.schedule.simulate import most_held, simulate
from tests.schedule.proof import prove
from tests.schedule.requests import assert_backward_passes_ascend, request, step_ms


@st.composite
def uneven_requests(draw):
    kind = draw(st.sampled_from(["linear", "loop", "v"]))
    lanes = draw(st.integers(1, 4))
    stages = {"linear": lanes, "v": 2 * lanes}.get(kind) or lanes * draw(st.integers(1, 3))
    workers = draw(st.sampled_from([number for number in (1, 2, 3, 4) if lanes % number == 0]))
    edges = [Edge(s, s + 1, draw(st.integers(0, 4000)), draw(st.integers(0, 4000))) for s in range(stages - 1)]
    if stages > 2 and draw(st.booleans()):
        edges.append(Edge(0, stages - 1, 500, 500))
    times = st.floats(0.5, 4).map(lambda time: round(time, 2))
    forward, backward = (tuple(draw(times) for _ in range(stages)) for _ in range(2))
    saved = tuple(draw(st.integers(1, 20)) for _ in range(stages))
    layout = Layout.dealt(stages, lanes, kind, workers=workers, edges=sorted(edges, key=lambda e: (e.source, e.target)))
    link = Link(draw(st.sampled_from([0.0, 0.3])), draw(st.sampled_from([None, 1e6])))
    return ScheduleRequest(layout, draw(st.integers(1, 7)), Costs(forward, backward, saved_bytes=saved, link=link))


@given(uneven_requests())
@settings(max_examples=60, deadline=None)
def test_greedy_is_never_worse(wanted):
    made = make("greedy", wanted)
    prove(made, wanted.layout)
    assert_backward_passes_ascend(made)
    own = step_ms(made, wanted)
    held = most_held(made, wanted.layout, wanted.costs.saved_bytes)
    assert max(simulate(lower(made, wanted.layout), wanted.costs).peak_saved_bytes) <= max(held.worker_bytes)
    for name in set(SCHEDULES) - {"greedy"}:
        try:
            other = make(name, wanted)
            prove(other, wanted.layout)
        except ScheduleError:
            continue
        assert own <= step_ms(other, wanted) + 1e-6


UNEVEN = (1, 2, 1, 3, 1, 2, 1, 1)


def test_greedy_uses_what_was_measured():
    """A slow link: 1F1B waits for every answer, an order with more micro-batches under way does not."""
    slow = request(4, 4, count=12, link=Link(2.0))
    assert step_ms(make("greedy", slow), slow) < 0.8 * step_ms(make("1f1b", slow), slow)
    uneven = request(8, 4, "v", 8, forward_ms=UNEVEN, backward_ms=tuple(2 * time for time in UNEVEN))
    assert step_ms(make("greedy", uneven), uneven) < 0.95 * step_ms(make("looped_bfs", uneven), uneven)
