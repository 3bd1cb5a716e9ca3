"""Tests recording of timelines and their trace files, which other programs' viewers and this package read."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace

import pytest

from hybridpar.observe.timeline import (
    Timeline,
    TimelineRow,
    add_prediction,
)
from hybridpar.observe.timeline_file import read_timeline, timeline_of, trace_of, write_timeline
from hybridpar.schedule.actions import parse_action
from hybridpar.schedule.layout import Layout
from hybridpar.schedule.spans import Span, StepSpans
from tests.observe.timelines import a_step, a_timeline

TIMELINES = {
    "replicas": a_timeline(),
    "nothing predicted": a_timeline(predicted=False),
    "lanes of one worker": a_timeline(replicas=1, workers=1),
    "four stages": a_timeline(stages=4, workers=2),
}


def check_events(data):
    """What the Trace Event Format asks for, as far as viewers rely on it; returns complete events by thread."""
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    assert data["displayTimeUnit"] in ("ms", "ns")
    threads, names, flows = {}, {}, {}
    for event in data["traceEvents"]:
        assert event["ph"] in ("M", "X", "s", "f")
        assert all(isinstance(event[key], int) for key in ("pid", "tid"))
        assert isinstance(event["name"], str)
        assert math.isfinite(event["ts"])
        assert event["ts"] >= 0
        thread = event["pid"], event["tid"]
        if event["ph"] == "M":
            names.setdefault(event["name"], {})[thread] = event["args"]
        elif event["ph"] == "X":
            assert event["dur"] >= 0
            assert isinstance(event["cat"], str)
            threads.setdefault(thread, []).append((event["ts"], event["ts"] + event["dur"], event))
        else:
            flows.setdefault(event["id"], {})[event["ph"]] = event
    assert len({tid for _, tid in threads}) == len(threads), "thread ids are unique in the file"
    for thread, events in threads.items():
        assert thread in names["thread_name"]
        assert (thread[0], 0) in names["process_name"]
        events.sort(key=lambda event: event[:2])
        for (_, end, one), (start, _, other) in itertools.pairwise(events):
            assert start >= end - 2e-3, f"{one['name']} overlaps {other['name']}"  # rounded to nanoseconds
    for both in flows.values():
        assert both["s"]["ts"] <= both["f"]["ts"] + 2e-3
        assert both["f"]["bp"] == "e"
        for phase, kind in (("s", "send"), ("f", "receive")):
            place = both[phase]["pid"], both[phase]["tid"]
            around = [e for a, b, e in threads[place] if a - 2e-3 <= both[phase]["ts"] <= b + 2e-3]
            assert any(event["cat"] == kind for event in around), "an arrow begins and ends in a box"
    return threads, names, flows


@pytest.mark.parametrize("name", TIMELINES)
def test_a_trace_is_one_by_the_book(name):
    check_events(trace_of(TIMELINES[name]))


@pytest.mark.parametrize("name", TIMELINES)
def test_a_timeline_comes_back_whole(name, tmp_path):
    was = TIMELINES[name]
    write_timeline(tmp_path / "trace.json", was)
    now = read_timeline(tmp_path / "trace.json")
    assert (now.layout, now.facts) == (was.layout, was.facts)
    assert now.steps == was.steps
    zero = min(row.spans.origin for row in was.rows)
    for step in was.steps:
        for predicted in (True, False):
            pairs = list(zip(was.at(step, predicted=predicted), now.at(step, predicted=predicted), strict=True))
            for before, after in pairs:
                assert after.worker == before.worker
                assert after.spans.origin == pytest.approx(before.spans.origin - zero, abs=1e-8)
                found = sorted(after.spans.spans, key=str)
                for one, other in zip(sorted(before.spans.spans, key=str), found, strict=True):
                    assert replace(other, start_ms=one.start_ms, end_ms=one.end_ms) == one
                    assert (other.start_ms, other.end_ms) == pytest.approx((one.start_ms, one.end_ms), abs=1e-5)


def test_everybody_has_a_process_and_every_queue_a_thread():
    data = trace_of(a_timeline())
    _, names, flows = check_events(data)
    processes = [args["name"] for args in names["process_name"].values()]
    # Rank = position * replicas + replica; one replica is predicted.
    assert sorted(processes) == ["predicted worker 0", "predicted worker 2", *(f"worker {rank}" for rank in range(4))]
    of_worker_3 = {args["name"] for (pid, _), args in names["thread_name"].items() if pid == 8}
    assert of_worker_3 == {
        *("steps", "compute lane 1", "send to worker 1", "receive from worker 1", "sync lane 0", "sync lane 1"),
        "control lane 1",
    }
    transfers = 2 * 4  # forward and backward, of four micro-batches
    assert len(flows) == 3 * transfers * (2 + 1), "in each of three steps, of both replicas and of the prediction"


def test_a_prediction_begins_with_its_step_and_never_overlaps_the_next():
    predicted = a_step(2.0)  # longer than the steps, which begin every 100 ms
    assert predicted.step_ms > 100
    steps = {step: {0: StepSpans(0.1 * step, a_step().timeline)} for step in (1, 2, 3)}
    rows = [row for row in add_prediction(steps, predicted.timeline, Layout.dealt(2, 2)) if row.predicted]
    begins = {step: min(row.spans.origin for row in rows if row.step == step) for step in (1, 2, 3)}
    length = predicted.step_ms / 1e3
    assert begins == pytest.approx({1: 0.1, 2: 0.1 + length, 3: 0.1 + 2 * length})


def test_steps_that_overlap_on_other_lanes_are_shown_one_after_the_other():
    one = StepSpans(0.0, (Span(0, "compute", 0, parse_action("0F0"), 0, 10),))
    other = StepSpans(0.008, (Span(0, "compute", 1, parse_action("1F0"), 0, 10),))
    timeline = Timeline((TimelineRow(0, 1, one), TimelineRow(0, 2, other)), Layout.repeated([(0, 0)]))
    threads, _, _ = check_events(trace_of(timeline))
    shown = [event[:2] for events in threads.values() for event in events if event[2]["cat"] == "steps"]
    assert shown == [(0.0, 10_000.0), (10_000.0, 18_000.0)]
    again = timeline_of(trace_of(timeline)).at(2, predicted=False)[0].spans
    assert again.origin == pytest.approx(0.008)


# -------------------------------------------------------------------------------------------------------------- files
