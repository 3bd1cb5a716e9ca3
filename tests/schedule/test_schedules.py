"""Schedules have the orders of their papers, fit what they say they fit, and `greedy` is never worse."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridpar.errors import ScheduleError, UsageError
from hybridpar.schedule.actions import Edge, Kind, Schedule, place_stages, read_schedule
from hybridpar.schedule.check import check
from hybridpar.schedule.program import lower
from hybridpar.schedule.schedules import SCHEDULES, ScheduleRequest, make
from hybridpar.schedule.simulate import simulate

GOLDEN = Path(__file__).parents[1] / "golden/schedules"

#: File name, schedule, stages, lanes, placement, micro-batches. A file is what `to_csv` wrote, looked at by eye.
GOLDENS = [
    ("accumulate-1-1-3", "accumulate", 1, 1, "linear", 3),
    ("gpipe-3-3-4", "gpipe", 3, 3, "linear", 4),
    ("1f1b-4-4-6", "1f1b", 4, 4, "linear", 6),
    ("1f1b-4-4-2", "1f1b", 4, 4, "linear", 2),
    ("looped_bfs-4-2-3", "looped_bfs", 4, 2, "loop", 3),
    ("interleaved-4-2-4", "interleaved", 4, 2, "loop", 4),
    ("interleaved-4-2-5", "interleaved", 4, 2, "loop", 5),
    ("interleaved-8-4-8", "interleaved", 8, 4, "loop", 8),
    ("zero_bubble-4-4-6", "zero_bubble", 4, 4, "linear", 6),
    ("greedy-4-2-v-4", "greedy", 4, 2, "v", 4),
]


def request(stages: int, lanes: int, kind: str = "linear", count: int = 4, **more) -> ScheduleRequest:
    return ScheduleRequest(place_stages(stages, lanes, kind), count, **more)


def step_ms(schedule: Schedule, wanted: ScheduleRequest) -> float:
    return simulate(lower(schedule, wanted.layout), wanted.costs).step_ms


@pytest.mark.parametrize(("file", "name", "stages", "lanes", "kind", "count"), GOLDENS, ids=[row[0] for row in GOLDENS])
def test_goldens(file, name, stages, lanes, kind, count):
    made = make(name, request(stages, lanes, kind, count))
    assert made == read_schedule(GOLDEN / f"{file}.csv", name)


def test_every_golden_is_compared():
    assert {path.stem for path in GOLDEN.iterdir()} == {row[0] for row in GOLDENS}


@pytest.mark.parametrize("path", sorted(GOLDEN.iterdir()), ids=lambda path: path.stem)
def test_torch_reads_every_cell(path):
    from torch.distributed.pipelining.schedules import _Action

    for cell in path.read_text().replace("\n", ",").split(","):
        if cell:
            assert str(_Action.from_str(cell)) == cell


def order_of_torch(name: str, lanes: int, count: int, per_lane: int | None = None) -> list[list[str]]:
    visualizer = pytest.importorskip("torch.distributed.pipelining._schedule_visualizer")
    rows = visualizer.get_schedule_ops(name, lanes, count, per_lane)
    return [[str(cell) for cell in row if cell is not None and "REDUCE" not in str(cell)] for row in rows]


def own_order(name: str, wanted: ScheduleRequest) -> list[list[str]]:
    return [[str(action) for action in row] for row in make(name, wanted).rows]


@pytest.mark.parametrize(("lanes", "per_lane", "count"), [(2, 2, 4), (4, 2, 8), (4, 3, 16), (4, 2, 10), (4, 2, 3)])
def test_interleaved_is_torchs_where_torch_can(lanes, per_lane, count):
    own = own_order("interleaved", request(lanes * per_lane, lanes, "loop", count))
    assert own == order_of_torch("Interleaved1F1B", lanes, count, per_lane)


@pytest.mark.parametrize(("lanes", "count"), [(2, 4), (4, 8), (4, 4), (3, 7)])
def test_1f1b_is_torchs(lanes, count):
    # torch 2.14 numbers the forward passes of its last rank from 1, so that one is left out.
    assert own_order("1f1b", request(lanes, lanes, count=count))[:-1] == order_of_torch("1F1B", lanes, count)[:-1]


def test_no_schedule_needs_torch():
    code = "import sys, hybridpar.schedule.schedules, hybridpar.schedule.check; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_listing_and_unknown_names():
    assert set(SCHEDULES) >= {"accumulate", "gpipe", "1f1b", "interleaved", "looped_bfs", "greedy"}
    with pytest.raises(UsageError, match="unknown schedule 'gpip'") as caught:
        make("gpip", request(2, 2))
    assert "gpipe" in caught.value.fix


@pytest.mark.parametrize(
    ("name", "wanted", "instead"),
    [
        ("accumulate", request(2, 2), "1f1b"),
        ("gpipe", request(4, 2, "loop"), "looped_bfs"),
        ("1f1b", request(4, 2, "loop"), "interleaved"),
        ("zero_bubble", request(4, 2, "v"), "greedy"),
        ("interleaved", request(4, 2, "v"), "looped_bfs"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused_with_what_does(name, wanted, instead):
    with pytest.raises(ScheduleError) as caught:
        make(name, wanted)
    assert instead in caught.value.fix
    check(make(instead, wanted), wanted.layout)


@pytest.mark.parametrize(
    ("more", "match"),
    [
        ({"count": 0}, "0 micro-batches"),
        ({"forward_ms": (1.0,)}, "forward_ms"),
        ({"backward_ms": (1.0, -1.0)}, "backward_ms"),
        ({"input_ms": (1.0, 1.0)}, "one half"),
        ({"memory_cap": 3}, "saved_bytes"),
    ],
)
def test_requests_that_say_too_little_are_refused(more, match):
    with pytest.raises(ScheduleError, match=match):
        request(2, 2, **more)


SHAPES = [("linear", lanes, lanes) for lanes in range(1, 9)] + [
    ("loop", 2, 4),
    ("loop", 2, 8),
    ("loop", 3, 6),
    ("loop", 4, 8),
    ("v", 2, 4),
    ("v", 4, 8),
]


@pytest.mark.parametrize(("kind", "lanes", "stages"), SHAPES)
def test_every_schedule_is_proved(kind, lanes, stages):
    layout = place_stages(stages, lanes, kind)
    proved = 0
    for name in sorted(set(SCHEDULES) - {"greedy"}):
        for count in (1, 2, 3, 5, 8, 13, 32):
            try:
                schedule = make(name, ScheduleRequest(layout, count))
            except ScheduleError:
                assert kind != "linear" or name == "accumulate"
                continue
            check(schedule, layout)
            assert_backward_passes_ascend(schedule)
            proved += 1
    assert proved >= 7


def assert_backward_passes_ascend(schedule: Schedule) -> None:
    for kind in (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT):
        for stage in range(schedule.stages):
            found = [a.index for row in schedule.rows for a in row if a.stage == stage and a.kind is kind]
            assert found in ([], list(range(schedule.micro_batches)))


@pytest.mark.sweep
@pytest.mark.timeout(1800)
def test_interleaved_never_locks():
    for lanes in range(1, 9):
        for chunks in range(1, 5):
            layout = place_stages(lanes * chunks, lanes, "loop")
            for count in range(1, 33):
                check(make("interleaved", ScheduleRequest(layout, count)), layout)


@pytest.mark.parametrize("stages", [1, 2, 4, 8])
@pytest.mark.parametrize("count", [1, 3, 8, 17])
def test_what_is_held(stages, count):
    layout = place_stages(stages, stages)
    names = ("gpipe", "looped_bfs", "1f1b", "zero_bubble")
    held = {name: check(make(name, ScheduleRequest(layout, count)), layout).peak_in_flight for name in names}
    assert held["gpipe"] == held["looped_bfs"] == (count,) * stages
    assert held["1f1b"] == tuple(min(count, stages - stage) for stage in range(stages))
    assert max(held["zero_bubble"]) <= max(held["1f1b"])


@pytest.mark.parametrize(("stages", "count"), [(1, 4), (2, 1), (4, 8), (8, 8)])
def test_time_of_equal_stages(stages, count):
    """(M + S - 1)(f + b): Huang et al. 2019, section 2.3; and 1F1B takes the same."""
    wanted = request(stages, stages, count=count, forward_ms=(3.0,) * stages, backward_ms=(5.0,) * stages)
    for name in ("gpipe", "1f1b"):
        result = simulate(lower(make(name, wanted), wanted.layout), wanted.costs)
        assert result.step_ms == pytest.approx((count + stages - 1) * 8.0)
        assert result.bubble == pytest.approx((stages - 1) / (count + stages - 1))


@pytest.mark.parametrize(("lanes", "chunks", "count"), [(2, 2, 4), (4, 2, 8), (4, 3, 12)])
def test_interleaving_divides_the_bubble(lanes, chunks, count):
    """The fill and drain take (P - 1)(f + b) / v: Narayanan et al. 2021, section 2.2."""
    wanted = request(lanes * chunks, lanes, "loop", count)
    bound = count * chunks * 3.0
    assert step_ms(make("interleaved", wanted), wanted) == pytest.approx(bound + (lanes - 1) * 3.0)


@pytest.mark.parametrize(("stages", "count"), [(2, 4), (4, 8), (8, 16)])
def test_zero_bubble_leaves_a_third_of_the_bubble(stages, count):
    """ZB-H1 with equal thirds: (p - 1)(f + b_i - w) is left of 3 (p - 1): Qi et al. 2024, table 2."""
    wanted = request(stages, stages, count=count)
    assert step_ms(make("zero_bubble", wanted), wanted) == pytest.approx(3.0 * count + stages - 1)


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
    proof = check(made, wanted.layout, saved_bytes=wanted.saved_bytes, memory_cap=wanted.memory_cap)
    assert_backward_passes_ascend(made)
    own = step_ms(made, wanted)
    assert max(simulate(lower(made, wanted.layout), wanted.costs).peak_saved_bytes) <= max(proof.worker_saved_bytes)
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
    assert check(made, tight.layout, saved_bytes=tight.saved_bytes, memory_cap=11).worker_saved_bytes <= (11, 11, 11)
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
