"""Predicted times are those that can be worked out by hand, and move the right way when something gets faster."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridpar.errors import ScheduleError
from hybridpar.schedule.actions import COMPUTE, Kind, parse_action, read_schedule
from hybridpar.schedule.costs import BucketCost, Costs, Link
from hybridpar.schedule.layout import Edge, Layout
from hybridpar.schedule.program import Program, lower
from hybridpar.schedule.schedules import ScheduleRequest, make
from hybridpar.schedule.simulate import Simulation, simulate

KIB = 1024
#: One KiB per millisecond.
WIRE = Link(0.0, 1000 * KIB)


def stages(count: int, size: int = KIB, lanes: int | None = None, kind: str = "linear", **more) -> Layout:
    edges = [Edge(stage, stage + 1, size, size) for stage in range(count - 1)]
    return Layout.dealt(count, lanes or count, kind, edges=edges, **more)


def predict(schedule: str, layout: Layout, *, commit: bool = False, **costs) -> Simulation:
    counts = [len(buckets) for buckets in costs.get("buckets", ())]
    program = lower(read_schedule(schedule), layout, counts, commit=commit)
    given_costs = {"forward_ms": (1.0,) * layout.stages, "backward_ms": (2.0,) * layout.stages} | costs
    return simulate(program, Costs(**given_costs))


def span(result: Simulation, text: str) -> tuple[float, float]:
    """Start and end of an action."""
    (found,) = (span for span in result.timeline if span.action == parse_action(text))
    return found.start_ms, found.end_ms


ONE = "0F0,0B0,0F1,0B1\n"
PAIR = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"


def test_one_stage():
    result = predict(ONE, stages(1), step_ms=(0.5,), saved_bytes=(7,))
    assert result.step_ms == pytest.approx(2 * 3 + 0.5)
    assert result.compute_ms == pytest.approx(6)
    assert result.bubble == pytest.approx(0)
    assert result.peak_saved_bytes == (7,)
    assert result.busy_ms == pytest.approx((6,))


def test_a_transfer_takes_latency_and_bytes():
    result = predict(PAIR, stages(2), link=Link(0.5, 1000 * KIB))
    # Micro-batch 0 arrives at 1 + 1.5; its backward pass ends at 5.5, and is back at 7.
    assert span(result, "0SEND_F0") == span(result, "1RECV_F0") == pytest.approx((1, 2.5))
    assert span(result, "1F0") == pytest.approx((2.5, 3.5))
    assert span(result, "0B0") == pytest.approx((7, 9))
    # Micro-batch 1 is sent behind 0, waits for the lane, and is back at 10.
    assert span(result, "1RECV_F1") == pytest.approx((2.5, 4))
    assert span(result, "1B1") == pytest.approx((6.5, 8.5))
    assert span(result, "0B1") == pytest.approx((10, 12))
    assert result.step_ms == pytest.approx(12)
    assert result.bubble == pytest.approx(1 - 12 / 24)
    assert result.busy_ms == pytest.approx((6, 6))
    assert result.bytes_sent == (2 * KIB, 2 * KIB)


def test_directions_of_a_link_do_not_disturb_each_other():
    """While worker 0 still sends micro-batch 2 forward, micro-batch 0 comes back at full speed."""
    schedule = "0F0,0F1,0F2,0B0,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n"
    result = predict(schedule, stages(2, 3 * KIB), link=WIRE)
    assert span(result, "0SEND_F2") == pytest.approx((7, 10))
    assert span(result, "1SEND_B0") == pytest.approx((7, 10))


def fan_out(**costs) -> Simulation:
    """Stage 0 sends 2 KiB to each of two workers at the same time."""
    layout = Layout.dealt(3, 3, edges=(Edge(0, 1, 2 * KIB, 0), Edge(0, 2, 2 * KIB, 0)))
    return predict("0F0,0B0\n1F0,1B0\n2F0,2B0\n", layout, **costs)


def test_what_a_worker_sends_at_one_time_shares_its_link():
    assert span(fan_out(link=WIRE), "0SEND_F0>2") == span(fan_out(link=WIRE), "0SEND_F0") == pytest.approx((1, 5))
    own = fan_out(link=WIRE, links={(0, 2): WIRE})
    assert span(own, "0SEND_F0") == span(own, "0SEND_F0>2") == pytest.approx((1, 3))


def test_what_a_worker_receives_at_one_time_shares_its_link():
    layout = Layout.dealt(3, 3, edges=(Edge(0, 2, 2 * KIB, 0), Edge(1, 2, 2 * KIB, 0)))
    result = predict("0F0,0B0\n1F0,1B0\n2F0,2B0\n", layout, link=WIRE)
    assert span(result, "2RECV_F0") == span(result, "2RECV_F0>0") == pytest.approx((1, 5))


def test_links_of_pairs():
    result = predict(PAIR, stages(2), link=WIRE, links={(1, 0): Link(4.0)})
    assert span(result, "0SEND_F0") == pytest.approx((1, 2))
    assert span(result, "1SEND_B0") == pytest.approx((5, 9))


def test_a_send_waits_for_its_receive_and_queues_keep_their_order():
    layout = stages(2)
    program = lower(read_schedule(PAIR), layout)
    receives = [action for action in program.workers[1] if action.kind is Kind.RECEIVE_FORWARD]
    late = [action for action in program.workers[1] if action not in receives]
    turned = replace(program, workers=(program.workers[0], (*reversed(receives), *late)))
    with pytest.raises(ScheduleError, match="stops with"):
        simulate(turned, Costs((1.0, 1.0), (2.0, 2.0)))


# Gradient synchronisation. Two replicas send and receive each byte of a bucket once.


def synced(schedule: str = PAIR, layout: Layout | None = None, **costs) -> Simulation:
    layout = layout or stages(2)
    usual = {
        "replicas": 2,
        "buckets": ((BucketCost(2 * KIB, wire_ms=2.0, latency_ms=0.25),),) * layout.stages,
    }
    return predict(schedule, layout, **(usual | costs))


def test_sync_follows_the_last_backward_pass_and_hides_behind_the_others():
    result = synced()
    # Stage 1 ends at 7 and stage 0 at 9; each sum takes 0.25 + 2.
    assert span(result, "1SYNC0") == pytest.approx((7, 9.25))
    assert span(result, "0SYNC0") == pytest.approx((9, 11.25))
    assert result.step_ms == pytest.approx(11.25)
    assert result.compute_ms == pytest.approx(9)
    assert result.exposed_sync_ms == pytest.approx((2.25, 0.25))
    assert result.bytes_sent == (4 * KIB, 4 * KIB)


def test_more_replicas_send_more_and_one_nothing():
    assert synced(replicas=4).bytes_sent == (5 * KIB, 5 * KIB)
    assert synced(replicas=1).step_ms == pytest.approx(9)


def test_a_bucket_leaves_as_soon_as_it_is_ready():
    early = ((BucketCost(KIB, ready=0.25, wire_ms=1.0), BucketCost(KIB, wire_ms=1.0)),)
    result = predict(ONE, stages(1), replicas=2, buckets=early)
    # The last backward pass runs from 4 to 6.
    assert span(result, "0SYNC0") == pytest.approx((4.5, 5.5))
    assert span(result, "0SYNC1") == pytest.approx((6, 7))
    assert result.exposed_sync_ms == pytest.approx((1,))


def test_sync_lanes_share_the_link():
    buckets = ((BucketCost(KIB, wire_ms=1.0),) * 3,)
    one = predict(ONE, stages(1), replicas=2, buckets=buckets)
    assert [span(one, f"0SYNC{index}")[0] for index in range(3)] == pytest.approx([6, 7, 8])
    two = predict(ONE, stages(1), replicas=2, buckets=buckets, sync_lanes=2)
    assert [span(two, f"0SYNC{index}")[0] for index in range(3)] == pytest.approx([6, 6, 8])


def test_sync_on_the_link_of_the_transfers():
    """Stage 1's sum runs while its last gradient goes back to stage 0: apart each takes 2 ms, together 4."""
    given = {"layout": stages(2, 2 * KIB), "link": WIRE, "buckets": ((BucketCost(2 * KIB, wire_ms=2.0),),) * 2}
    apart = synced(**given, sync_own_link=True)
    start, end = span(apart, "1SYNC0")
    assert span(apart, "1SEND_B1") == (start, end)
    assert end - start == pytest.approx(2)
    shared = synced(**given)
    assert span(shared, "1SYNC0") == span(shared, "1SEND_B1") == pytest.approx((start, start + 4))


def test_codecs_take_time_before_and_after():
    buckets = ((BucketCost(KIB, encode_ms=0.5, decode_ms=0.25, wire_ms=1.0),),)
    result = predict(ONE, stages(1), replicas=2, buckets=buckets)
    assert span(result, "0SYNC0") == pytest.approx((6, 7.75))


def test_optimizers_wait_for_everybody_where_a_step_can_be_rolled_back():
    free = synced(step_ms=(0.5, 0.5))
    assert span(free, "1STEP") == pytest.approx((9.25, 9.75))
    bound = synced(step_ms=(0.5, 0.5), commit=True, control_ms=0.125)
    assert span(bound, "1STEP") == span(bound, "0STEP") == pytest.approx((11.375, 11.875))


# Processors. Two lanes of a worker compute side by side: 6 ms where each is as fast as alone.

BESIDE = "0F0,0B0,0F1,0B1\n1F0,1B0,1F1,1B1\n"
APART = Layout((((0, 0), (0, 1)),))


def test_lanes_of_a_worker_do_not_slow_each_other_down():
    assert predict(BESIDE, APART).step_ms == pytest.approx(6)


def test_a_codec_shares_the_processor_with_the_lane_that_computes():
    # A message is encoded in 1 ms, from 4 on, while the last backward pass runs from 4 to 6: each has half until 6.
    buckets = ((BucketCost(2 * KIB, ready=0.0, encode_ms=1.0, wire_ms=1.5),),)
    result = predict(ONE, stages(1), replicas=2, buckets=buckets)
    assert span(result, "0SYNC0") == pytest.approx((4, 7.5))
    assert span(result, "0B1") == pytest.approx((4, 7))


def test_moving_bytes_takes_nothing_of_a_processor():
    buckets = ((BucketCost(2 * KIB, ready=0.0, wire_ms=2.0),),)
    result = predict(ONE, stages(1), replicas=2, buckets=buckets)
    assert span(result, "0SYNC0") == span(result, "0B1") == pytest.approx((4, 6))


# Rules that hold for every schedule.


_FITTING = {
    "linear": ["1f1b", "gpipe"],
    "loop": ["interleaved", "looped_bfs"],
    "v": ["looped_bfs"],
}


@st.composite
def cases(draw) -> tuple[Program, Costs]:
    kind = draw(st.sampled_from(["linear", "loop", "v"]))
    lanes = draw(st.integers(1, 3))
    count = {"linear": lanes, "loop": 2 * lanes, "v": 2 * lanes}[kind]
    layout = stages(count, draw(st.integers(1, 4)) * KIB, lanes, kind)
    name = draw(st.sampled_from(_FITTING[kind]))
    times = st.floats(0.25, 4).map(lambda time: round(time, 3))
    forward, backward = (tuple(draw(times) for _ in range(count)) for _ in range(2))
    schedule = make(name, ScheduleRequest(layout, draw(st.integers(1, 5))))
    program = lower(schedule, layout, [1] * count, offload=draw(st.sets(st.integers(0, 5))), commit=draw(st.booleans()))
    costs = Costs(
        forward,
        backward,
        link=Link(draw(st.sampled_from([0.0, 0.25])), draw(st.sampled_from([None, 500.0 * KIB, 4000.0 * KIB]))),
        buckets=((BucketCost(3 * KIB, draw(st.sampled_from([0.5, 1.0])), wire_ms=3.0, latency_ms=0.1),),) * count,
        replicas=draw(st.integers(1, 3)),
        sync_own_link=draw(st.booleans()),
        control_ms=0.05,
    )
    return program, costs


@given(cases())
@settings(deadline=None)
def test_no_action_is_early_or_lost(case):
    program, costs = case
    result = simulate(program, costs)
    spans = {span.action: span for span in result.timeline}
    assert len(spans) == len(result.timeline) == len(program.needs)
    early = {action for action in program.needs if action.kind is Kind.SYNC}
    for action, needs in program.needs.items():
        if action.kind.value.startswith("RECV"):
            assert spans[action].start_ms == spans[needs[0]].start_ms
            assert spans[action].end_ms == spans[needs[0]].end_ms
        elif action not in early:
            assert all(spans[need].end_ms <= spans[action].start_ms + 1e-9 for need in needs)
    queues: dict[tuple[str, int, int], float] = {}
    for span in result.timeline:  # in the order of their starts
        key = (span.queue, span.worker, span.lane)
        assert span.start_ms >= queues.get(key, 0.0) - 1e-9
        queues[key] = span.end_ms
    assert result.step_ms == max(span.end_ms for span in result.timeline)


@given(cases())
@settings(deadline=None)
def test_a_step_is_no_shorter_than_its_work_and_its_longest_path(case):
    program, costs = case
    result = simulate(program, costs)
    layout = program.layout
    for lane, row in enumerate(program.schedule.rows):
        work = sum(costs.compute_ms(action.stage, action.kind) for action in row)
        assert result.busy_ms[lane] >= work - 1e-6
        assert result.compute_ms >= work - 1e-6
    travel = sum(
        2 * costs.link.latency_ms + costs.link.wire_ms(edge.bytes) + costs.link.wire_ms(edge.gradient_bytes)
        for edge in layout.edges
        if layout.crosses(edge)
    )
    path = sum(costs.forward_ms) + sum(costs.backward_ms) + travel
    assert result.compute_ms >= path - 1e-6
    assert 0 <= result.bubble < 1
    for stage in range(layout.stages):
        assert 0 <= result.exposed_sync_ms[stage] <= result.step_ms


@given(cases(), st.floats(1.0, 4.0))
@settings(deadline=None)
def test_everything_faster_by_a_factor_is_faster_by_that_factor(case, factor):
    program, costs = case
    slow = replace(
        costs,
        forward_ms=tuple(time * factor for time in costs.forward_ms),
        backward_ms=tuple(time * factor for time in costs.backward_ms),
        link=_slower(costs.link, factor),
        buckets=tuple(
            tuple(replace(one, wire_ms=factor * one.wire_ms, latency_ms=factor * one.latency_ms) for one in stage)
            for stage in costs.buckets
        ),
        control_ms=costs.control_ms * factor,
    )
    assert simulate(program, slow).step_ms == pytest.approx(factor * simulate(program, costs).step_ms, rel=1e-6)


@given(cases(), st.floats(1.0, 8.0))
@settings(deadline=None)
def test_a_faster_link_is_never_worse_where_nothing_is_shared(case, factor):
    """With a wire for every pair each action's start depends only on maxima and sums of others."""
    program, costs = case
    workers = range(program.layout.workers)
    pairs = [(one, other) for one in workers for other in workers if one != other]
    slow = replace(costs, links=dict.fromkeys(pairs, _slower(costs.link, factor)))
    fast = replace(costs, links=dict.fromkeys(pairs, costs.link))
    assert simulate(program, fast).step_ms <= simulate(program, slow).step_ms + 1e-9


def _slower(link: Link, factor: float) -> Link:
    speed = None if link.bytes_per_second is None else link.bytes_per_second / factor
    return Link(link.latency_ms * factor, speed)


def test_memory_over_time():
    layout = stages(4)
    program = lower(make("1f1b", ScheduleRequest(layout, 8)), layout)
    costs = Costs((1.0,) * 4, (2.0,) * 4, saved_bytes=(1, 10, 100, 1000))
    assert simulate(program, costs).peak_saved_bytes == (4, 30, 200, 1000)
    # A pass that takes no time still holds what it holds.
    timeless = replace(costs, forward_ms=(0.0,) * 4, backward_ms=(0.0,) * 4)
    assert simulate(program, timeless).peak_saved_bytes == (4, 30, 200, 1000)


def test_the_timeline_has_the_queues_of_the_program():
    layout = stages(4, lanes=2, kind="loop")
    program = lower(make("interleaved", ScheduleRequest(layout, 4)), layout, [2] * 4)
    costs = Costs((1.0,) * 4, (2.0,) * 4, buckets=((BucketCost(8),) * 2,) * 4, replicas=2, sync_lanes=2)
    for span in simulate(program, costs).timeline:
        assert (span.queue, span.worker, span.lane) == program.queue_of(span.action)
        assert span.duration_ms >= 0
        assert (span.queue == "compute") == (span.action.kind in COMPUTE | {Kind.STEP})
