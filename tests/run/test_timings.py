"""Tests how the time of a step is divided: the parts add up to the time that passed, whatever overlaps."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridpar.observe.records import StepRecord
from hybridpar.observe.summary import STEP_PARTS, step_without_data_ms
from hybridpar.run.timings import StepClock, StepTimes, Timings, combine, measured_step, steps_to_show
from hybridpar.schedule.actions import parse_action
from hybridpar.schedule.costs import BucketCost, Costs
from hybridpar.schedule.layout import Layout
from hybridpar.schedule.program import lower
from hybridpar.schedule.schedules import ScheduleRequest, make
from hybridpar.schedule.simulate import simulate
from hybridpar.schedule.spans import Span, StepSpans


def step(origin, *spans):
    """A step from (queue, action, start, end); times in milliseconds, the origin in seconds."""
    return StepSpans(origin, tuple(Span(0, queue, 0, parse_action(text), a, b) for queue, text, a, b in spans))


def busy(start, end):
    """A step that computes from one moment to another, in seconds."""
    return step(start, ("compute", "0F0", 0.0, 1e3 * (end - start)))


def test_an_exchange_after_a_step_is_exposed_and_no_waiting_for_data():
    clock = StepClock()
    first, _ = clock.divide(busy(1.0, 1.5), 0.0, 100.0)
    assert first == pytest.approx((500.0, 100.0, 0.0))
    second, _ = clock.divide(busy(1.7, 2.0), 0.0)
    assert (second.data_ms, sum(second)) == pytest.approx((100.0, 400.0))


def test_what_sums_outlast_is_exposed_and_no_computation():
    clock = StepClock()
    spans = step(0.0, ("compute", "0B0", 0, 100), ("sync", "0SYNC0", 60, 130), ("compute", "0STEP", 130, 140))
    times, _ = clock.divide(spans, 0.0)
    assert (times.compute_ms, times.exposed_sync_ms, times.data_ms) == pytest.approx((110, 30, 0))


def test_evaluation_and_checkpoints_are_no_waiting_for_data():
    now = iter([2.0, 2.25, 2.3, 2.4])
    clock = StepClock(lambda: next(now))
    clock.divide(busy(1.0, 1.9), 0.0)
    with clock.away():
        pass
    with clock.away():
        pass
    times, _ = clock.divide(busy(2.5, 3.0), 0.0)
    assert times.data_ms == pytest.approx(600 - 250 - 100)
    later, _ = clock.divide(busy(3.5, 4.0), 0.0)
    assert later.data_ms == pytest.approx(500)


def test_receives_that_waited_during_the_step_before_are_cut():
    clock = StepClock()
    clock.divide(busy(0.0, 1.0), 0.0)
    ahead = step(0.4, ("receive", "1RECV_F0", 0, 700), ("compute", "1F0", 700, 800))
    times, spans = clock.divide(ahead, 0.0)
    assert spans.origin == pytest.approx(1.0)
    assert [(span.start_ms, span.end_ms) for span in spans.spans] == [
        pytest.approx((0, 100)),
        pytest.approx((100, 200)),
    ]
    assert (times.compute_ms, times.data_ms) == pytest.approx((200, 0))


@given(st.lists(st.tuples(st.floats(-0.5, 1.0), st.floats(0.001, 1.0), st.floats(0.0, 0.5)), min_size=1, max_size=20))
def test_the_parts_add_up_to_the_time_that_passed(steps):
    """Steps with gaps or overlaps (negative gaps), and sums that last longer than computation."""
    clock, end, latest, total = StepClock(), 100.0, 100.0, 0.0
    for number, (gap, length, sync) in enumerate(steps):
        start = end + (max(0.0, gap) if number == 0 else gap)
        spans = step(start, ("compute", "0B0", 0, 1e3 * length), ("sync", "0SYNC0", 0, 1e3 * (length + sync)))
        times, _ = clock.divide(spans, 1e3 * (start - end))
        assert min(times.compute_ms, times.exposed_sync_ms, times.data_ms) >= 0
        total += sum(times)
        end = start + length + sync
        latest = max(latest, end)
    assert total == pytest.approx(1e3 * (latest - 100.0), rel=1e-6, abs=1e-3)


# ------------------------------------------------------------------------------------------------- over all workers


def recorded(times, bytes_sent=0, **more):
    """A step that took so long."""
    parts = {"compute_ms": times.compute_ms, "exposed_sync_ms": times.exposed_sync_ms, "data_ms": times.data_ms}
    figures = {"loss": 1.0, "lr": 0.1, "samples": 8, "skipped": False, "grad_norm": None, "bytes_sent": bytes_sent}
    return StepRecord(step=1, epoch=0, step_ms=sum(times), **parts, **figures, **more)


def combined(found, replicas, step_ms=None):
    return combine(dict(enumerate(found)), [range(i, len(found), replicas) for i in range(replicas)], step_ms)


def shares(positions, micro_batches, replicas):
    layout = Layout.dealt(positions, positions)
    program = lower(make("gpipe", ScheduleRequest(layout, micro_batches)), layout, [1] * positions)
    costs = Costs((1.0,) * positions, (2.0,) * positions, buckets=((BucketCost(1),),) * positions)
    timeline = simulate(program, costs).timeline
    found = []
    for rank in range(positions * replicas):
        timings = Timings()
        for number in range(5):
            mine = tuple(span for span in timeline if span.worker == rank // replicas)
            timings.add(recorded(StepTimes(10.0 * rank, 1.0, 2.0), 100 * rank), StepSpans(number, mine))
        found.append(timings.share())
    return found


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 4), (4, 8), (3, 1)])
@pytest.mark.parametrize("replicas", [1, 2])
def test_the_bubble_is_that_of_the_textbook(stages, micro_batches, replicas):
    figures = combined(shares(stages, micro_batches, replicas), replicas)
    assert figures["bubble"] == pytest.approx((stages - 1) / (micro_batches + stages - 1), abs=1e-4)


def test_the_parts_of_a_run_add_up_to_its_step_whatever_its_workers_noted():
    found = []
    for steps in ([(1.0, 2.0, 3.0), (500.0, 0.0, 0.0)], [(0.0, 0.0, 7.0)] * 5, [(0.0, 0.0, 0.0)]):
        timings = Timings()
        for times in steps:
            timings.add(recorded(StepTimes(*times)))
        found.append(timings.share())
    parts = [combined(found, 1, 90.0)[key] for key in STEP_PARTS]
    assert sum(parts) == pytest.approx(90.0, abs=2e-3)
    assert min(parts) >= 0
    assert not {*STEP_PARTS} & combined(found[2:], 1, 90.0).keys(), "nothing was measured"


def test_the_compression_ratio_is_that_of_all_workers():
    found = []
    for after in (100, 300):
        timings = Timings()
        for _ in range(8):
            timings.add(recorded(StepTimes(1.0, 1.0, 1.0), bytes_before=800, bytes_after=after))
        found.append(timings.share())
    assert combined(found, 1)["compression_ratio"] == 4.0
    assert combined(found[:1], 1)["compression_ratio"] == 8.0
    assert "compression_ratio" not in combined([Timings().share()], 1)


def test_overlap_is_what_did_not_outlast_computation():
    layout = Layout.dealt(1, 1)
    program = lower(make("gpipe", ScheduleRequest(layout, 1)), layout, [1])
    costs = Costs((1.0,), (4.0,), buckets=((BucketCost(1000, 0.5, latency_ms=8.0),),), replicas=2)
    spans = StepSpans(0.0, simulate(program, costs).timeline)
    sync = SimpleNamespace(bytes_before=0, sync_ms=None)
    outcome = SimpleNamespace(
        spans=spans, exposed_sync_ms=spans.exposed_sync_ms, sync=sync, samples=8, bytes_sent=0, bytes_pulled=None
    )
    result = SimpleNamespace(
        outcome=outcome, staged=True, step=1, loss=1.0, lr=0.1, skipped=False, grad_norm=None, staleness=None
    )
    measured = measured_step(result, 0.0, 0, StepClock())
    timings = Timings()
    timings.add(measured.record, measured.spans)
    # The sum takes 8 ms and begins 2 ms before the end of the pass.
    assert measured.record.hidden_share == combined([timings.share()], 1)["overlap"] == pytest.approx(0.25)


def test_a_mean_step_counts_the_few_that_exchange():
    timings = Timings()
    assert timings.mean_step(8) == {}
    for number in range(12):
        timings.add(recorded(StepTimes(10.0, 90.0 if number % 3 == 2 else 0.0, 1.0)))
    found = timings.mean_step(82)
    assert found.pop("images_per_second") == 2000.0
    assert found == {"compute_ms": 10.0, "exposed_sync_ms": 30.0, "data_ms": 1.0, "step_ms_mean": 41.0}
    assert step_without_data_ms({"step_ms_median": 11.0, **found}) == 40.0
    assert step_without_data_ms({"step_ms_median": 11.0, "data_ms": 1.0}) == 10.0


@pytest.mark.parametrize(
    ("done", "total", "shown"), [(0, 100, [4, 5, 6]), (0, 5, [4, 5]), (0, 1, [1]), (0, 2, [2]), (10, 12, [12])]
)
def test_timelines_leave_out_the_first_steps_where_there_are_others(done, total, shown):
    assert list(steps_to_show(done, total)) == shown
