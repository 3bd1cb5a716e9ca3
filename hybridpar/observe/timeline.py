"""`Timeline`: what every worker did in a few steps, beside what was predicted.

A timeline is written as a trace by `timeline_file.py`, printed by `timeline_text.py` and drawn by
`timeline_picture.py`. It holds spans and nothing that follows from them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hybridpar.schedule.actions import RECEIVES, Action, Kind
from hybridpar.schedule.layout import Layout
from hybridpar.schedule.spans import Span, StepSpans, joint_bubble

_SEND_OF = {Kind.RECEIVE_FORWARD: Kind.SEND_FORWARD, Kind.RECEIVE_BACKWARD: Kind.SEND_BACKWARD}

#: Kinds of queues in the order in which they are shown.
QUEUES = ("compute", "send", "receive", "sync", "control", "copy")


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

    def queues(self) -> dict[tuple[str, int], list[Span]]:
        """Its spans by kind and number of queue, in the order in which queues are shown."""
        found: dict[tuple[str, int], list[Span]] = {}
        for span in self.spans.spans:
            found.setdefault((span.queue, span.lane), []).append(span)
        return {key: found[key] for key in sorted(found, key=lambda key: (QUEUES.index(key[0]), key[1]))}


@dataclass(frozen=True)
class Timeline:
    """Steps of a run as they ran and as they were predicted.

    Attributes:
        rows: In any order.
        layout: Where stages run.
        facts: What the run was, as plain values to be shown: `model`, `stages`, `micro_batches`, `schedule`,
            `clocks` (how the clocks were aligned) and `prediction` (where it comes from).
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

    def typical_step(self) -> int:
        """The step whose length is the median; of an even number the longer of the middle ones."""
        shown = {step: self.at(step, predicted=False) or self.at(step, predicted=True) for step in self.steps}
        lengths = [(round(length_ms(rows), 6), step) for step, rows in shown.items()]  # to nanoseconds
        return sorted(lengths)[len(lengths) // 2][1]

    def bubble(self, rows: Sequence[TimelineRow]) -> float:
        """The bubble of a step, see `joint_bubble`; the mean over the replicas."""
        replicas = [[row.spans.computed for row in rows if row.worker in ranks] for ranks in self.layout.ranks]
        bubbles = [joint_bubble(workers) for workers in replicas if workers]
        return sum(bubbles) / len(bubbles)


def begin_of(rows: Sequence[TimelineRow]) -> float:
    """When a step began: with the first action of any worker that does not wait for others. In seconds."""
    return min(row.spans.computed.begin for row in rows)


def length_ms(rows: Sequence[TimelineRow]) -> float:
    """From the beginning of a step to the end of its last action."""
    return 1e3 * (max(row.end for row in rows) - begin_of(rows)) if rows else 0.0


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


def joined_at(rows: Sequence[TimelineRow], layout: Layout) -> dict[tuple[int, Action], float]:
    """When the last party had come to what several workers do together; what lies before it was waiting."""
    starts = {
        (row.worker, span.action): row.spans.origin + span.start_ms / 1e3 for row in rows for span in row.spans.spans
    }
    by_replica = {(layout.replica_of(worker), action): start for (worker, action), start in starts.items()}
    sums: dict[Action, float] = {}
    for (_, action), start in starts.items():
        if action.kind is Kind.SYNC:
            sums[action] = max(start, sums.get(action, start))
    joined = {}
    for (worker, action), start in starts.items():
        if action.kind is Kind.SYNC:
            joined[worker, action] = sums[action]
        elif action.kind in RECEIVES:
            joined[worker, action] = max(start, by_replica.get((layout.replica_of(worker), send_of(action)), start))
    return joined


def send_of(receive: Action) -> Action:
    """The other end of a receive."""
    assert receive.peer is not None
    return Action(receive.peer, _SEND_OF[receive.kind], receive.index, receive.stage)


def describe_action(action: Action) -> str:
    """An action in words: `F3 stage 1`, `send F3 to stage 2`, `sync bucket 0 stage 1`, `optimizer stage 1`."""
    match action.kind:
        case Kind.SYNC:
            return f"sync bucket {action.index} stage {action.stage}"
        case Kind.STEP:
            return f"optimizer stage {action.stage}"
        case Kind.REPORT:
            return f"report on {'gradients' if action.index else 'forward passes'} stage {action.stage}"
        case Kind.DECIDE:
            return "decision of all workers"
        case Kind.PARK | Kind.FETCH:
            return f"{action.kind.value.lower()} micro-batch {action.index} stage {action.stage}"
        case Kind.SEND_FORWARD | Kind.SEND_BACKWARD:
            return f"send {action.kind.value[-1]}{action.index} to stage {action.peer}"
        case Kind.RECEIVE_FORWARD | Kind.RECEIVE_BACKWARD:
            return f"receive {action.kind.value[-1]}{action.index} from stage {action.peer}"
        case _:
            return f"{action.kind.value}{action.index} stage {action.stage}"


def describe_queue(queue: str, lane: int, layout: Layout, worker: int = 0) -> str:
    """A queue in words: `compute lane 0`, `send to worker 1`, `sync lane 1`."""
    if queue in ("send", "receive"):
        return f"{queue} {'to' if queue == 'send' else 'from'} worker {layout.peer(worker, lane)}"
    return f"{queue} lane {lane}"
