"""Tests the prediction of a pipeline's step time: measured costs give back the step that was measured."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridpar.errors import ScheduleError
from hybridpar.pipeline.predict import StageFacts, fit_link, predicted_costs, whole_program
from hybridpar.schedule.costs import BucketCost, Costs, Link
from hybridpar.schedule.layout import Edge, Layout
from hybridpar.schedule.program import lower
from hybridpar.schedule.schedules import ScheduleRequest, make
from hybridpar.schedule.simulate import simulate
from hybridpar.schedule.spans import StepSpans

FACTS = (StageFacts((8 << 20, 3 << 20), 1000), StageFacts((5 << 20,), 2000), StageFacts((), 500))


def a_program(schedule="1f1b", micro_batches=4):
    edges = [Edge(0, 1, 400_000, 400_000), Edge(0, 2, 90_000, 90_000), Edge(1, 2, 200_000, 200_000)]
    layout = Layout.dealt(3, 3, edges=edges)
    return lower(make(schedule, ScheduleRequest(layout, micro_batches)), layout, [2, 1, 0])


def job(replicas):
    return Layout.dealt(3, 3, replicas=replicas)


def some_costs(replicas=2):
    return Costs(
        forward_ms=(10.0, 12.0, 8.0),
        backward_ms=(20.0, 25.0, 15.0),
        step_ms=(3.0, 2.0, 1.0),
        saved_bytes=(1000, 2000, 500),
        link=Link(0.25, 0.2e9),
        buckets=((BucketCost(8 << 20, 0.5), BucketCost(3 << 20)), (BucketCost(5 << 20, 0.75),), ()),
        replicas=replicas,
        sync_link=Link(0.5, 1e9),
        sync_lanes=2,
        commit=True,
        control_ms=0.75,
    )


def as_if_it_ran(program, costs, replicas, origins=(5.0, 9.0)):
    """Steps of all ranks that took exactly what the simulator says."""
    timeline = simulate(program, costs).timeline
    return [
        {
            position * replicas + replica: StepSpans(origin, tuple(s for s in timeline if s.worker == position))
            for position in range(program.layout.workers)
            for replica in range(replicas)
        }
        for origin in origins
    ]


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("replicas", [1, 2])
def test_costs_that_were_measured_give_the_step_that_was_measured(schedule, replicas):
    program, costs = a_program(schedule), some_costs(replicas)
    steps = as_if_it_ran(program, costs, replicas)
    again = predicted_costs(program, FACTS, steps=steps, layout=job(replicas), sync_lanes=2)
    assert again.forward_ms == pytest.approx(costs.forward_ms)
    assert again.step_ms == pytest.approx(costs.step_ms)
    assert again.control_ms == pytest.approx(costs.control_ms)
    assert again.saved_bytes == costs.saved_bytes
    was, now = simulate(program, costs), simulate(program, again)
    assert now.step_ms == pytest.approx(was.step_ms, rel=0.02)
    assert now.bubble == pytest.approx(was.bubble, abs=0.02)
    assert now.bytes_sent == pytest.approx(was.bytes_sent)
    assert now.peak_saved_bytes == was.peak_saved_bytes


def test_buckets_are_ready_when_they_were_seen_to_leave():
    program, costs = a_program(), some_costs()
    again = predicted_costs(program, FACTS, steps=as_if_it_ran(program, costs, 2), layout=job(2), sync_lanes=2)
    assert [bucket.ready for bucket in again.buckets[0]] == pytest.approx([0.5, 1.0])
    assert [bucket.bytes for bucket in again.buckets[0]] == [8 << 20, 3 << 20]


def test_waiting_is_no_part_of_a_transfer_or_a_sum():
    program, costs = a_program(), some_costs()
    steps = as_if_it_ran(program, costs, 2)
    plain = predicted_costs(program, FACTS, steps=steps, layout=job(2))
    # Receives, and the sums of the first replica, begin to wait long before there is anything to do.
    early = [
        {
            rank: StepSpans(
                one.origin,
                tuple(
                    type(span)(span.worker, span.queue, span.lane, span.action, span.start_ms - 7.0, span.end_ms)
                    if span.queue == "receive" or (span.queue == "sync" and rank % 2 == 0)
                    else span
                    for span in one.spans
                ),
            )
            for rank, one in step.items()
        }
        for step in steps
    ]
    waiting = predicted_costs(program, FACTS, steps=early, layout=job(2))
    assert waiting.link == plain.link
    assert waiting.sync_link == plain.sync_link


def test_a_profile_counts_before_what_was_seen():
    program, costs = a_program(), some_costs(1)
    steps = as_if_it_ran(program, costs, 1)
    again = predicted_costs(program, FACTS, forward_ms=(1, 2, 3), backward_ms=(4, 5, 6), steps=steps, layout=job(1))
    assert (again.forward_ms, again.backward_ms) == ((1, 2, 3), (4, 5, 6))
    assert again.step_ms == pytest.approx(costs.step_ms)


def test_a_profile_alone_is_enough_and_nothing_is_not():
    program = a_program()
    costs = predicted_costs(program, FACTS, forward_ms=(1, 1, 1), backward_ms=(2, 2, 2), layout=job(2))
    # With free transfers and sums the bubble is that of the textbook: (p - 1) / (m + p - 1).
    assert simulate(program, costs).bubble == pytest.approx(2 / 6)
    with pytest.raises(ScheduleError, match="stage 0 takes"):
        predicted_costs(program, FACTS, layout=job(1))


def test_the_whole_program_has_the_sums_of_all_stages():
    program = a_program()
    mine = lower(program.schedule, program.layout, [2, 0, 0])
    assert whole_program(mine, FACTS).workers == program.workers


# --------------------------------------------------------------------------------------------------------------- links


@given(
    latency=st.floats(0, 10), speed=st.floats(1e6, 1e11), sizes=st.sets(st.integers(1, 10**8), min_size=2, max_size=6)
)
def test_a_link_is_found_again(latency, speed, sizes):
    samples = [(float(size), latency + 1e3 * size / speed) for size in sizes for _ in range(3)]
    link = fit_link(samples)
    for size, ms in samples:
        assert link.latency_ms + link.wire_ms(size) == pytest.approx(ms, rel=1e-3, abs=1e-6)


def test_one_size_says_nothing_of_latency():
    link = fit_link([(1e6, 2.0), (1e6, 3.0), (1e6, 50.0)])
    assert link.latency_ms == 0
    assert link.wire_ms(1e6) == pytest.approx(3.0), "the median: one transfer that met something else does not count"


@pytest.mark.parametrize(
    ("samples", "latency"),
    [
        ([(1e3, 2.0), (1e6, 2.0)], 2.0),  # size makes no difference
        ([(1e3, 3.0), (1e6, 1.0)], 2.0),  # the larger the faster: noise
        ([(1e6, 1.0), (2e6, 4.0)], 0.0),  # no latency can be below zero
    ],
)
def test_neither_latency_nor_speed_is_below_zero(samples, latency):
    link = fit_link(samples)
    assert link.latency_ms == pytest.approx(latency)
    assert link.bytes_per_second is None or link.bytes_per_second > 0


@pytest.mark.parametrize("samples", [[], [(0.0, 1.0)]])
def test_without_bytes_a_link_costs_nothing(samples):
    assert fit_link(samples) == Link()
