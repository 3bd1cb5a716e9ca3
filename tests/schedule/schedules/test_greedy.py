"""`greedy` is never worse than another schedule, keeps the cap on memory, and uses what was measured."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridpar.errors import ScheduleError
from hybridpar.schedule.actions import Edge, Kind, place_stages
from hybridpar.schedule.check import check
from hybridpar.schedule.memory import most_held
from hybridpar.schedule.program import lower
from hybridpar.schedule.schedules import SCHEDULES, ScheduleRequest, make
from hybridpar.schedule.simulate import simulate
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
    split = draw(st.booleans())
    saved = tuple(draw(st.integers(1, 20)) for _ in range(stages))
    layout = place_stages(stages, lanes, kind, workers=workers, edges=sorted(edges, key=lambda e: (e.source, e.target)))
    least = max(sum(saved[s] for s in range(stages) if layout.home(s) == worker) for worker in range(workers))
    return ScheduleRequest(
        layout,
        draw(st.integers(1, 7)),
        forward,
        backward,
        tuple(time * 0.6 for time in backward) if split else None,
        tuple(time * 0.5 for time in backward) if split else None,
        saved,
        draw(st.none() | st.integers(least, 3 * least)),
        draw(st.sampled_from([0.0, 0.3])),
        draw(st.sampled_from([None, 1e6])),
    )


@given(uneven_requests())
@settings(max_examples=60, deadline=None)
def test_greedy_keeps_the_cap_and_is_never_worse(wanted):
    made = make("greedy", wanted)
    check(made, wanted.layout, saved_bytes=wanted.saved_bytes, memory_cap=wanted.memory_cap)
    assert_backward_passes_ascend(made)
    own = step_ms(made, wanted)
    held = most_held(made, wanted.layout, wanted.saved_bytes)
    assert max(simulate(lower(made, wanted.layout), wanted.costs).peak_saved_bytes) <= max(held.worker_bytes)
    for name in set(SCHEDULES) - {"greedy"}:
        try:
            other = make(name, wanted)
            check(other, wanted.layout, saved_bytes=wanted.saved_bytes, memory_cap=wanted.memory_cap)
        except ScheduleError:
            continue
        if name != "zero_bubble" or wanted.input_ms is not None:
            assert own <= step_ms(other, wanted) + 1e-6


def test_greedy_uses_what_was_measured():
    """A slow link: 1F1B waits for every answer, an order with more micro-batches under way does not."""
    slow = request(4, 4, count=12, latency_ms=2.0)
    assert step_ms(make("greedy", slow), slow) < 0.8 * step_ms(make("1f1b", slow), slow)
    uneven = request(8, 4, "v", 8, forward_ms=(1, 2, 1, 3, 1, 2, 1, 1))
    assert step_ms(make("greedy", uneven), uneven) < 0.95 * step_ms(make("looped_bfs", uneven), uneven)


def test_greedy_with_room_for_one_micro_batch_only():
    tight = request(6, 3, "v", 4, saved_bytes=(5, 1, 2, 3, 4, 6), memory_cap=11)
    made = make("greedy", tight)
    check(made, tight.layout, saved_bytes=tight.saved_bytes, memory_cap=11)
    assert most_held(made, tight.layout, tight.saved_bytes).worker_bytes <= (11, 11, 11)
    with pytest.raises(ScheduleError, match="worker 0 holds 11 bytes for one micro-batch, and its cap is 10"):
        make("greedy", request(6, 3, "v", 4, saved_bytes=(5, 1, 2, 3, 4, 6), memory_cap=10))


def test_greedy_splits_only_where_both_halves_were_measured():
    whole = make("greedy", request(4, 4, count=8))
    assert all(action.kind in (Kind.FORWARD, Kind.BACKWARD) for row in whole.rows for action in row)
    wanted = request(4, 4, count=8, input_ms=(1.0,) * 4, weight_ms=(1.0,) * 4)
    assert step_ms(make("greedy", wanted), wanted) < step_ms(whole, wanted)
    # Where splitting costs more than its bubbles, the whole passes win.
    dear = request(4, 4, count=8, input_ms=(2.0,) * 4, weight_ms=(2.0,) * 4)
    assert all(a.kind in (Kind.FORWARD, Kind.BACKWARD) for row in make("greedy", dear).rows for a in row)
