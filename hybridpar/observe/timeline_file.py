"""Reads and writes timelines as JSON in the Trace Event Format, for ui.perfetto.dev and chrome://tracing.

A file has a process per worker, beside it one for its prediction, a thread per queue, arrows from sends to receives.
Where a thread is needed that no worker has, `steps`, it shows from when to when a worker was busy with a step.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hybridpar.errors import ScheduleError, UsageError, shortened
from hybridpar.formats.file_reader import read_json
from hybridpar.observe.files import replace_file
from hybridpar.observe.timeline import (
    QUEUES,
    Timeline,
    TimelineRow,
    describe_action,
    describe_queue,
    joined_at,
    send_of,
)
from hybridpar.schedule.actions import COMPUTE, RECEIVES, SENDS, Action, Kind, parse_action
from hybridpar.schedule.layout import Layout
from hybridpar.schedule.spans import Span, StepSpans

#: What `otherData` calls the writer; tells our traces from those of others.
WRITER = "hybridpar timeline 1"

#: Microseconds.
_LATEST = 1e18

# Thread ids are unique in the whole file: Perfetto takes them for ids of the operating system.
_THREADS = 1000


def write_timeline(path: Path, timeline: Timeline) -> None:
    """Write a timeline as a trace, as a whole or not at all."""
    replace_file(path, [json.dumps(trace_of(timeline), separators=(",", ":"), allow_nan=False).encode(), b"\n"])


def read_timeline(path: Path) -> Timeline:
    """Read what `write_timeline` wrote."""
    fix = "Name a file that --timeline wrote."
    return timeline_of(read_json(path, "the trace", UsageError, fix), shortened(path))


def trace_of(timeline: Timeline) -> dict[str, Any]:
    """A timeline as the object that is written as JSON. Times in it are microseconds since the first event."""
    zero = min((row.spans.origin for row in timeline.rows), default=0.0)
    events: list[dict[str, Any]] = []
    known: dict[tuple[int, str, int], int] = {}
    for row in timeline.rows:
        for key in [("steps", 0), *row.queues()]:
            process = _process(row)
            known.setdefault((process, *key), 0)
    for number, (process, queue, lane) in enumerate(sorted(known, key=_thread_order)):
        known[process, queue, lane] = process * _THREADS + number
    events += _names(timeline, known)
    busy: dict[int, float] = {}
    for step in timeline.steps:
        for predicted in (False, True):
            rows = timeline.at(step, predicted=predicted)
            joined = joined_at(rows, timeline.layout)
            for row in rows:
                events.append(_step_event(row, known, zero, busy.get(_process(row), 0.0)))
                busy[_process(row)] = row.end - zero
                events += _events_of(row, known, zero, joined)
            events += _arrows(rows, known, zero, joined, timeline.layout)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {**timeline.facts, "writer": WRITER, "layout": list(timeline.layout.texts())},
    }


def timeline_of(data: Any, source: str = "the trace") -> Timeline:
    """A timeline from the object that `trace_of` made."""
    other = data.get("otherData") if isinstance(data, dict) else None
    if not isinstance(other, dict) or other.get("writer") != WRITER:
        raise UsageError(
            f"{source} is not a trace of hybridpar",
            f"Its otherData.writer must be {WRITER!r}.",
            "Name a file that `hybridpar train --timeline FILE` wrote; others can be opened in ui.perfetto.dev.",
        )
    facts = dict(other)
    del facts["writer"]
    spans: dict[tuple[int, int, bool], list[Span]] = {}
    origins: dict[tuple[int, int, bool], float] = {}
    try:
        layout = Layout.parse(facts.pop("layout"))
        for event in data["traceEvents"]:
            if event["ph"] != "X":
                continue
            args = event["args"]
            position = layout.position_of(args["worker"])
            key = (_whole(args["worker"]), _whole(args["step"], most=10**12), args["predicted"] is True)
            if event["cat"] == "steps":
                origins[key] = _time(args["origin_us"]) / 1e6
                continue
            start, queue = _time(event["ts"]) / 1e3, QUEUES[QUEUES.index(event["cat"])]
            action = parse_action(args["action"])
            end = start + _time(event["dur"]) / 1e3
            spans.setdefault(key, []).append(Span(position, queue, _whole(args["lane"]), action, start, end))
    except (AttributeError, KeyError, TypeError, ValueError, ScheduleError) as error:
        raise UsageError(
            f"{source} is damaged: {type(error).__name__} {shortened(error)}", fix="Write it again with --timeline."
        ) from error
    if not origins:
        raise UsageError(f"{source} has no step in it", fix="Write it again with --timeline.")
    rows = []
    for key, origin in origins.items():
        moved = tuple(span.shifted(-origin * 1e3) for span in spans.get(key, ()))
        rows.append(TimelineRow(key[0], key[1], StepSpans(origin, moved), key[2]))
    return Timeline(tuple(rows), layout, facts)


def _whole(value: object, least: int = 0, most: int = 1 << 20) -> int:
    if not isinstance(value, int) or not least <= value <= most:
        raise ValueError(f"{shortened(repr(value))} where a whole number from {least} to {most} was written")
    return value


def _time(value: object) -> float:
    if not isinstance(value, int | float) or not abs(value) < _LATEST:
        raise ValueError(f"{shortened(repr(value))} where a time was written")
    return float(value)


def _process(row: TimelineRow) -> int:
    return 2 * row.worker + (1 if row.predicted else 2)


def _thread_order(key: tuple[int, str, int]) -> tuple[int, int, int]:
    process, queue, lane = key
    return process, ("steps", *QUEUES).index(queue), lane


def _names(timeline: Timeline, threads: Mapping[tuple[int, str, int], int]) -> Iterator[dict[str, Any]]:
    """Names and order of processes and threads."""
    for process in sorted({key[0] for key in threads}):
        worker, predicted = (process - 1) // 2, process % 2 == 1
        name = f"predicted worker {worker}" if predicted else f"worker {worker}"
        yield _meta("process_name", process, 0, name=name)
        yield _meta("process_sort_index", process, 0, sort_index=process)
    for (process, queue, lane), thread in threads.items():
        worker = (process - 1) // 2
        name = "steps" if queue == "steps" else describe_queue(queue, lane, timeline.layout, worker)
        yield _meta("thread_name", process, thread, name=name)
        yield _meta("thread_sort_index", process, thread, sort_index=thread)


def _meta(what: str, process: int, thread: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "ts": 0, "args": args}


def _event(
    row: TimelineRow,
    name: str,
    key: tuple[int, str, int],
    threads: Mapping[tuple[int, str, int], int],
    times: tuple[float, float],
    args: Mapping[str, Any],
) -> dict[str, Any]:
    """A stretch of time on a thread. Its length is of rounded ends: what follows directly must not overlap."""
    begin, end = map(_microseconds, times)
    return {
        "ph": "X",
        "name": name,
        "cat": key[1],
        "pid": key[0],
        "tid": threads[key],
        "ts": begin,
        "dur": round(end - begin, 3),
        "args": {"step": row.step, "worker": row.worker, "predicted": row.predicted, **args},
    }


def _step_event(
    row: TimelineRow, threads: Mapping[tuple[int, str, int], int], zero: float, free: float
) -> dict[str, Any]:
    """The whole step, from where the one before has ended: on other lanes it may have begun before."""
    origin, end = row.spans.origin - zero, row.end - zero
    args = {"origin_us": _microseconds(origin), "exposed_sync_ms": round(row.spans.exposed_sync_ms, 3)}
    times = max(origin, min(free, end)), end
    return _event(row, f"step {row.step}", (_process(row), "steps", 0), threads, times, args)


def _events_of(
    row: TimelineRow,
    threads: Mapping[tuple[int, str, int], int],
    zero: float,
    joined: Mapping[tuple[int, Action], float],
) -> Iterator[dict[str, Any]]:
    for span in row.spans.spans:
        start, end = (row.spans.origin + ms / 1e3 for ms in (span.start_ms, span.end_ms))
        args: dict[str, Any] = {"action": str(span.action), "lane": span.lane, **_parts(span.action)}
        waited = joined.get((row.worker, span.action), start) - start
        if waited > 1e-6:
            args["waited_ms"] = round(min(waited * 1e3, span.duration_ms), 3)
        key = _process(row), span.queue, span.lane
        yield _event(row, describe_action(span.action), key, threads, (start - zero, end - zero), args)


def _parts(action: Action) -> dict[str, int]:
    """What an action is about, in the words of the trace."""
    parts = {"stage": action.stage}
    if action.kind is Kind.SYNC:
        parts["bucket"] = action.index or 0
    elif action.kind in COMPUTE or action.kind in SENDS or action.kind in RECEIVES:
        parts["micro_batch"] = action.index or 0
    if action.peer is not None:
        parts["peer_stage"] = action.peer
    return parts


def _arrows(
    rows: list[TimelineRow],
    threads: Mapping[tuple[int, str, int], int],
    zero: float,
    joined: Mapping[tuple[int, Action], float],
    layout: Layout,
) -> Iterator[dict[str, Any]]:
    """From the start of every send to its receive."""
    sends = {
        (row.worker, span.action): (row, span) for row in rows for span in row.spans.spans if span.action.kind in SENDS
    }
    for row in rows:
        for span in row.spans.spans:
            if span.action.kind not in RECEIVES:
                continue
            send = send_of(span.action)
            peer = layout.peer(row.worker, span.lane)
            if (peer, send) not in sends:
                continue
            other, sent = sends[peer, send]
            name = f"{'predicted ' if row.predicted else ''}{row.step} {peer} {send}"
            begin = other.spans.origin + sent.start_ms / 1e3
            end = min(max(joined[row.worker, span.action], begin), row.spans.origin + span.end_ms / 1e3)
            for phase, place, queue, when in (("s", other, sent, begin), ("f", row, span, end)):
                process = _process(place)
                yield {
                    "ph": phase,
                    "name": "transfer",
                    "cat": "transfer",
                    "id": name,
                    "pid": process,
                    "tid": threads[process, queue.queue, queue.lane],
                    "ts": _microseconds(when - zero),
                    **({"bp": "e"} if phase == "f" else {}),
                }


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)
