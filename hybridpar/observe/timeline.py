"""`Timeline`: what every worker did in a few steps, beside what was predicted; as text, and as a file.

A file is JSON in the Trace Event Format, for ui.perfetto.dev and chrome://tracing: a process for each worker, beside it
one for its prediction, and a thread for each queue. `page.py` draws a timeline.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from hybridpar.errors import UsageError, counted, shortened
from hybridpar.formats.file_reader import first_problem
from hybridpar.formats.output_files import replace_file
from hybridpar.schedule.actions import Action, Kind
from hybridpar.schedule.layout import Layout
from hybridpar.schedule.spans import Span, StepSpans, joint_bubble

#: Kinds of queues in the order in which they are shown.
QUEUES = ("compute", "send", "receive", "sync", "control", "copy")

#: What `otherData` calls the writer, by which our traces are told from those of others.
_WRITER = "hybridpar timeline 3"

#: Words for an action, where they are not its text.
_WORDS = {
    Kind.SYNC: "sync bucket {index} stage {stage}",
    Kind.STEP: "optimizer stage {stage}",
    Kind.REPORT: "report {index} stage {stage}",
    Kind.DECIDE: "decision of all workers",
    Kind.PARK: "park micro-batch {index} stage {stage}",
    Kind.FETCH: "fetch micro-batch {index} stage {stage}",
    Kind.SEND_FORWARD: "send F{index} to stage {peer}",
    Kind.SEND_BACKWARD: "send B{index} to stage {peer}",
    Kind.RECEIVE_FORWARD: "receive F{index} from stage {peer}",
    Kind.RECEIVE_BACKWARD: "receive B{index} from stage {peer}",
}


@dataclass(frozen=True)
class TimelineRow:
    """What one worker did, or was predicted to do, in one step.

    Attributes:
        worker: Its rank in the job.
        step: The step's number in the run.
        spans: What it did; the origin is on the clock that all rows share, in seconds.
        predicted: Whether this is the prediction.
    """

    worker: int
    step: int
    spans: StepSpans
    predicted: bool = False

    @property
    def end(self) -> float:
        """When its last action ended, in seconds on the shared clock."""
        return self.spans.origin + self.spans.step_ms / 1e3


_ROWS = TypeAdapter(tuple[TimelineRow, ...])


@dataclass(frozen=True)
class Timeline:
    """Steps of a run as they ran and as they were predicted.

    Attributes:
        rows: In any order.
        layout: Where stages run.
        facts: What the run was, as plain values to be shown: `model`, `micro_batches`, `schedule`, `clocks` (how the
            clocks were aligned), `prediction` (where it comes from), and of a plan the `whole` step.
    """

    rows: tuple[TimelineRow, ...]
    layout: Layout
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def steps(self) -> list[int]:
        """Numbers of the steps, ascending."""
        return sorted({row.step for row in self.rows})

    def at(self, step: int, *, predicted: bool) -> list[TimelineRow]:
        """The rows of a step by worker."""
        rows = [row for row in self.rows if row.step == step and row.predicted == predicted]
        return sorted(rows, key=lambda row: row.worker)

    def panels(self) -> Iterator[tuple[str, list[TimelineRow]]]:
        """The step of median length as it was predicted and as it ran, each with a title."""
        shown = {step: self.at(step, predicted=False) or self.at(step, predicted=True) for step in self.steps}
        # To nanoseconds; of an even number the longer of the middle ones.
        step = sorted(shown, key=lambda step: (round(length_ms(shown[step]), 6), step))[len(shown) // 2]
        ran = f"measured, step {step}" + (", the one of median length" if len(shown) > 1 else "")
        for predicted, title in ((True, "predicted"), (False, ran)):
            if rows := self.at(step, predicted=predicted):
                yield f"{title}:  {length_ms(rows):,.1f} ms, bubble {100 * self.bubble(rows):.0f} %", rows

    def bubble(self, rows: Sequence[TimelineRow]) -> float:
        """The bubble of a step, see `joint_bubble`; the mean over the replicas."""
        replicas = [[row.spans.computed for row in rows if row.worker in ranks] for ranks in self.layout.ranks]
        bubbles = [joint_bubble(workers) for workers in replicas if workers]
        return sum(bubbles) / len(bubbles)

    def lanes(self, rows: Sequence[TimelineRow]) -> dict[str, list[Span]]:
        """What was done in a step in the queues of all workers, by the time since its beginning."""
        lanes: dict[str, list[Span]] = {}
        for row in rows:
            shift = 1e3 * (row.spans.origin - begin_of(rows))
            for span in sorted(row.spans.spans, key=lambda span: (QUEUES.index(span.queue), span.lane)):
                name = f"worker {row.worker} {self.queue_name(span.queue, span.lane, row.worker)}"
                lanes.setdefault(name, []).append(span.shifted(shift))
        return lanes

    def queue_name(self, queue: str, lane: int, worker: int) -> str:
        """A queue in words: `compute lane 0`, `send to worker 1`, `sync lane 1`."""
        if queue in ("send", "receive"):
            return f"{queue} {'to' if queue == 'send' else 'from'} worker {self.layout.peer(worker, lane)}"
        return f"{queue} lane {lane}"

    def lines(self) -> Iterator[str]:
        """What ran, and the figures of every worker in the step of median length."""
        model, replicas = self.facts.get("model", "a model"), self.layout.replicas
        stages = counted(self.layout.stages, "stage") + (f" x {replicas} replicas" if replicas > 1 else "")
        yield f"{model}, {stages}, steps {self.steps[0]} to {self.steps[-1]}"
        yield from (f"{key.replace('_', '-')}: {value}" for key, value in self.facts.items() if key != "model")
        for title, rows in self.panels():
            yield from ("", title)
            for row in rows:
                computed, exposed = row.spans.computed, row.spans.exposed_sync_ms
                busy = f"{computed.busy_ms:9,.1f} ms of passes on {counted(computed.lanes, 'lane')}"
                yield f"worker {row.worker}  {busy}, {exposed:,.1f} ms of sums exposed"


def begin_of(rows: Sequence[TimelineRow]) -> float:
    """When a step began: with the first action of any worker that does not wait for others. In seconds."""
    return min(row.spans.computed.begin for row in rows)


def length_ms(rows: Sequence[TimelineRow]) -> float:
    """From the beginning of a step to the end of its last action."""
    return 1e3 * (max(row.end for row in rows) - begin_of(rows))


def add_prediction(
    steps: Mapping[int, Mapping[int, StepSpans]], predicted: Sequence[Span], layout: Layout
) -> tuple[TimelineRow, ...]:
    """Rows of steps that ran, each with its prediction, which begins where the step began.

    A prediction that is longer than the step would overlap the next one; that one then begins where the last one ends.
    """
    rows = [TimelineRow(rank, step, spans) for step, ranks in steps.items() for rank, spans in ranks.items()]
    length = max((span.end_ms for span in predicted), default=0.0) / 1e3
    free = 0.0
    for step in sorted(steps):
        start = max(free, min(spans.computed.begin for spans in steps[step].values()))
        free = start + length
        for position in sorted({span.worker for span in predicted}):
            mine = tuple(span for span in predicted if span.worker == position)
            rows.append(TimelineRow(layout.ranks[0][position], step, StepSpans(start, mine), predicted=True))
    return tuple(rows)


def describe_action(action: Action) -> str:
    """An action in words: `F3 stage 1`, `send F3 to stage 2`, `sync bucket 0 stage 1`, `optimizer stage 1`."""
    return _WORDS.get(action.kind, "{kind}{index} stage {stage}").format(**action._asdict())


# ---------------------------------------------------------------------------------------------------------- the file


def write_timeline(path: Path, timeline: Timeline) -> None:
    """Write a timeline as a trace, as a whole or not at all."""
    replace_file(path, [json.dumps(trace_of(timeline), separators=(",", ":"), allow_nan=False).encode(), b"\n"])


def trace_of(timeline: Timeline) -> dict[str, Any]:
    """A timeline as the object that is written as JSON, with events for viewers and the rows for `timeline_of`."""
    zero = min((row.spans.origin for row in timeline.rows), default=0.0)
    events: list[dict[str, Any]] = []
    names: dict[tuple[int, int], str] = {}  # of processes and threads
    for row in timeline.rows:
        process, origin = 2 * row.worker + (1 if row.predicted else 2), 1e6 * (row.spans.origin - zero)
        names[process, 0] = f"{'predicted ' if row.predicted else ''}worker {row.worker}"
        for span in row.spans.spans:
            # Unique in the whole file: Perfetto takes them for ids of the operating system.
            thread = (process * len(QUEUES) + QUEUES.index(span.queue)) * 10_000 + span.lane
            names[process, thread] = timeline.queue_name(span.queue, span.lane, row.worker)
            begin, until = (round(origin + 1e3 * moment, 3) for moment in (span.start_ms, span.end_ms))
            event = {"ph": "X", "name": describe_action(span.action), "cat": span.queue, "pid": process, "tid": thread}
            # The length is of rounded ends: what follows directly must not overlap.
            events.append(event | {"ts": begin, "dur": round(until - begin, 3), "args": {"step": row.step}})
    for (process, thread), name in names.items():
        meta, what = {"ph": "M", "pid": process, "tid": thread, "ts": 0}, "thread" if thread else "process"
        events.append(meta | {"name": f"{what}_name", "args": {"name": name}})
        events.append(meta | {"name": f"{what}_sort_index", "args": {"sort_index": thread or process}})
    rows = _ROWS.dump_python(timeline.rows, mode="json")
    other = {"facts": timeline.facts, "writer": _WRITER, "layout": list(timeline.layout.texts()), "rows": rows}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}


def timeline_of(data: Any, source: str) -> Timeline:
    """A timeline from the object that `trace_of` made."""
    other = data.get("otherData") if isinstance(data, dict) else None
    if not isinstance(other, dict) or other.get("writer") != _WRITER:
        raise UsageError(
            f"{source} is not a trace of hybridpar",
            f"Its otherData.writer must be {_WRITER!r}.",
            "Name a file that `hybridpar train --timeline FILE` wrote; others can be opened in ui.perfetto.dev.",
        )
    try:
        timeline = Timeline(_ROWS.validate_python(other["rows"]), Layout.parse(other["layout"]), other["facts"])
        json.dumps(trace_of(timeline), allow_nan=False)  # what cannot be shown fails here
        list(timeline.lines())
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        problem = " ".join(first_problem(error)) if isinstance(error, ValidationError) else shortened(error)
        raise UsageError(f"{source} is damaged: {problem}", fix="Write it again with --timeline.") from error
    return timeline
