"""Tests timelines: their trace files, which other programs' viewers and this package read, and their text."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace

import pytest

from hybridpar.errors import UsageError
from hybridpar.observe.timeline import (
    add_prediction,
    timeline_of,
    trace_of,
    write_timeline,
)
from hybridpar.schedule.layout import Layout
from hybridpar.schedule.spans import StepSpans
from tests.observe.timelines import a_step, a_timeline
from tests.runs import read_timeline

TIMELINES = {
    "replicas": a_timeline(),
    "nothing predicted": a_timeline(predicted=False),
    "lanes of one worker": a_timeline(replicas=1, workers=1),
    "four stages": a_timeline(stages=4, workers=2),
}


def check_events(data):
    """What the Trace Event Format asks for, as far as viewers rely on it; the events and names by thread."""
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    threads, names = {}, {}
    for event in data["traceEvents"]:
        assert event["ph"] in ("M", "X")
        assert math.isfinite(event["ts"])
        thread = event["pid"], event["tid"]
        if event["ph"] == "M":
            names.setdefault(event["name"], {})[thread] = event["args"]
        else:
            assert event["dur"] >= 0
            assert event["ts"] >= 0
            threads.setdefault(thread, []).append((event["ts"], event["ts"] + event["dur"], event))
    assert len({tid for _, tid in threads}) == len(threads), "thread ids are unique in the file"
    for thread, events in threads.items():
        assert thread in names["thread_name"]
        assert (thread[0], 0) in names["process_name"]
        events.sort(key=lambda event: event[:2])
        for (_, end, one), (start, _, other) in itertools.pairwise(events):
            assert start >= end - 2e-3, f"{one['name']} overlaps {other['name']}"  # rounded to nanoseconds
    return threads, names


@pytest.mark.parametrize("name", TIMELINES)
def test_a_trace_is_one_by_the_book_and_comes_back_whole(name, tmp_path):
    was = TIMELINES[name]
    check_events(trace_of(was))
    write_timeline(tmp_path / "trace.json", was)
    now = read_timeline(tmp_path / "trace.json")
    assert (now.rows, now.layout, now.facts) == (was.rows, was.layout, was.facts)


def test_a_prediction_begins_with_its_step_and_never_overlaps_the_next():
    predicted = a_step(2.0)  # longer than the steps, which begin every 100 ms
    assert predicted.step_ms > 100
    steps = {step: {0: StepSpans(0.1 * step, a_step().timeline)} for step in (1, 2, 3)}
    rows = [row for row in add_prediction(steps, predicted.timeline, Layout.dealt(2, 2)) if row.predicted]
    begins = {step: min(row.spans.origin for row in rows if row.step == step) for step in (1, 2, 3)}
    length = predicted.step_ms / 1e3
    assert begins == pytest.approx({1: 0.1, 2: 0.1 + length, 3: 0.1 + 2 * length})


def test_the_text_to_the_letter():
    assert "\n".join(replace(a_timeline(), facts={"model": "resnet18", "micro_batches": 4}).lines()) == GOLDEN


GOLDEN = """\
resnet18, 2 stages x 2 replicas, steps 4 to 6
micro-batches: 4

predicted:  161.3 ms, bubble 22 %
worker 0      120.0 ms of passes on 1 lane, 4.4 ms of sums exposed
worker 2      120.0 ms of passes on 1 lane, 4.4 ms of sums exposed

measured, step 5, the one of median length:  191.8 ms, bubble 22 %
worker 0      144.0 ms of passes on 1 lane, 4.4 ms of sums exposed
worker 1      144.0 ms of passes on 1 lane, 4.4 ms of sums exposed
worker 2      144.0 ms of passes on 1 lane, 4.4 ms of sums exposed
worker 3      144.0 ms of passes on 1 lane, 4.4 ms of sums exposed"""


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"writer": "someone"}, "not a trace of hybridpar"),
        ({"rows": []}, "is damaged"),
        ({"layout": ["0"]}, "is damaged"),
        ({"rows": [[1]]}, "is damaged"),
    ],
)
def test_a_damaged_trace_is_refused(change, said):
    data = trace_of(a_timeline())
    data["otherData"] |= change
    with pytest.raises(UsageError, match=said):
        timeline_of(data, "the trace")
