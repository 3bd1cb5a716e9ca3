"""What really ran, as spans; and what the numbers made of them mean."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import hybridpar.pipeline.executor as executor_module
import hybridpar.pipeline.step as recorder_module
from hybridpar.pipeline.engine import PipelineEngine
from hybridpar.pipeline.step import SpanRecorder
from hybridpar.schedule.actions import Action, Kind
from hybridpar.schedule.spans import joint_bubble
from tests.pipeline.oracle import Residuals, Setting, batches_of, cut, images, places, run_step, seeded, train_stages

CPU = torch.device("cpu")


def recorded(*entries: tuple[str, int, Action, float, float]) -> Any:
    """Spans of actions that started and ended at given times, in milliseconds."""
    recorder = SpanRecorder(CPU)
    for kind, lane, action, start, end in entries:
        times = iter((start / 1e3, end / 1e3))
        recorder._now = lambda times=times: next(times)  # type: ignore[method-assign]
        recorder.run((kind, 0, lane), action, nullcontext(), lambda: None)
    return recorder.collect()


def test_times_count_from_the_first_start() -> None:
    forward, backward = Action(0, Kind.FORWARD, 0), Action(0, Kind.BACKWARD, 0)
    spans = recorded(("compute", 0, backward, 17.0, 20.0), ("compute", 0, forward, 10.0, 12.0))
    assert [span.action for span in spans.spans] == [forward, backward]
    assert [(span.start_ms, span.end_ms) for span in spans.spans] == [
        (0.0, pytest.approx(2.0)),
        (pytest.approx(7.0), pytest.approx(10.0)),
    ]
    assert spans.origin == pytest.approx(0.010)
    assert spans.step_ms == pytest.approx(10.0)
    assert joint_bubble([spans.computed]) == pytest.approx(0.5)  # 5 of 10 ms


def test_the_bubble_is_over_all_lanes_that_compute() -> None:
    spans = recorded(
        ("compute", 0, Action(0, Kind.FORWARD, 0), 0.0, 10.0),
        ("compute", 1, Action(1, Kind.FORWARD, 0), 5.0, 10.0),
        ("send", 1, Action(1, Kind.SEND_FORWARD, 0, 2), 10.0, 30.0),
    )
    assert spans.compute_end_ms == pytest.approx(10.0)
    assert joint_bubble([spans.computed]) == pytest.approx(0.25)
    assert spans.exposed_sync_ms == 0.0


def test_sync_is_exposed_where_it_outlasts_the_computing() -> None:
    spans = recorded(
        ("compute", 0, Action(0, Kind.BACKWARD, 0), 0.0, 10.0),
        ("sync", 0, Action(0, Kind.SYNC, 0), 4.0, 8.0),
        ("sync", 1, Action(0, Kind.SYNC, 1), 9.0, 13.0),
    )
    assert spans.sync_ms == pytest.approx(8.0)
    assert spans.exposed_sync_ms == pytest.approx(3.0)


def test_nothing_is_nothing() -> None:
    spans = SpanRecorder(CPU).collect()
    assert (spans.spans, spans.step_ms, spans.exposed_sync_ms) == ((), 0.0, 0.0)


def test_where_it_is_off_work_is_done_and_no_time_is_noted() -> None:
    done: list[str] = []
    recorder = SpanRecorder(CPU, enabled=False)
    recorder.run(("compute", 0, 0), Action(0, Kind.FORWARD, 0), nullcontext(), lambda: done.append("work"))
    assert done == ["work"]
    assert recorder._notes == []


def test_on_a_gpu_it_takes_events_and_is_done_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter((3.0, 5.0, 6.0, 6.5, 9.0))

    class Event:
        """Takes its time from a list, as the stream would come to it."""

        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing
            self.at = -1.0
            self.waited = False

        def record(self) -> None:
            self.at = next(moments)

        def synchronize(self) -> None:
            self.waited = True

        def elapsed_time(self, other: Event) -> float:
            assert other.waited or other.at < 9.0
            return other.at - self.at

    monkeypatch.setattr(recorder_module, "cuda", SimpleNamespace(Event=Event))
    device = torch.device("cuda", 0)
    assert not SpanRecorder(device).enabled
    recorder = SpanRecorder(device, enabled=True)
    backward, add = Action(0, Kind.BACKWARD, 0), Action(0, Kind.SYNC, 0)
    recorder.run(("compute", 0, 0), backward, nullcontext(), lambda: recorder.ready(add))
    recorder.run(("sync", 0, 0), add, nullcontext(), lambda: None)
    first, second = recorder.collect().spans
    assert (first.start_ms, first.end_ms, second.start_ms, second.end_ms) == (0.0, 3.0, 3.5, 6.0)
    assert second.ready_ms == 2.0


@pytest.mark.parametrize("record", [False, True])
def test_what_the_options_ask_for_reaches_the_recorder(record: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool | None] = []

    def note(device: torch.device, enabled: bool | None = None) -> SpanRecorder:
        asked.append(enabled)
        return SpanRecorder(device, enabled)

    monkeypatch.setattr(executor_module, "SpanRecorder", note)
    model = seeded(Residuals)
    train_stages(
        model, cut(model, images(2)[0], 2), batches_of(8, 1), Setting(), places(2), together=True, record=record
    )
    assert asked == [True if record else None]


@pytest.mark.parametrize(("kind", "schedule"), [("linear", "1f1b"), ("v", "greedy"), ("linear", "gpipe")])
def test_a_step_has_a_span_for_every_action_of_its_program(kind: str, schedule: str) -> None:
    stages = 4 if kind == "v" else 3
    model = seeded(Residuals)
    parts = cut(model, images(2)[0], stages)

    def look(engine: PipelineEngine) -> None:
        outcome = run_step(engine, Setting().of_replica(images(8), 0), 8)
        spans = outcome.spans.spans
        program = engine.executor.program
        assert program is not None
        assert sorted(str(span.action) for span in spans) == sorted(str(action) for action in program.workers[0])
        ends = {span.action: span.end_ms for span in spans}
        for span in spans:
            assert span.end_ms >= span.start_ms >= 0
            for need in program.needs[span.action]:
                assert ends[need] <= span.start_ms, (need, span.action)
        lanes: dict[int, list[Action]] = {}
        for span in spans:
            if span.queue == "compute" and span.action.kind is not Kind.STEP:
                lanes.setdefault(span.lane, []).append(span.action)
        assert [tuple(lanes[lane]) for lane in sorted(lanes)] == list(program.schedule.rows)
        assert 0 <= joint_bubble([outcome.spans.computed]) < 1

    train_stages(model, parts, batches_of(8, 1), Setting(), places(stages, kind), schedule=schedule, on_engine=look)
