"""The actions of a training step.

The checker proves that it cannot deadlock, the simulator times it, the drawer draws it and the executor runs it. An
action's text is the one that torch.distributed.pipelining reads and writes (`2F0`, `1B3`, `0SEND_F1`), so a schedule
can be handed over in either direction. A transfer that does not go to the neighbouring stage names its other end:
`0SEND_F1>2`.
"""

from __future__ import annotations

import csv
import io
import re
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from hybridpar.errors import ScheduleError, shortened


class Kind(StrEnum):
    """What an action does."""

    FORWARD = "F"
    BACKWARD = "B"
    #: Transfers of activations (F) and of their gradients (B) between workers.
    SEND_FORWARD = "SEND_F"
    RECEIVE_FORWARD = "RECV_F"
    SEND_BACKWARD = "SEND_B"
    RECEIVE_BACKWARD = "RECV_B"
    #: Sum one bucket of a stage's gradients over the replicas.
    SYNC = "SYNC"
    #: Sum over the replicas what the forward passes of a stage have come to (0), and what its gradients have (1).
    REPORT = "REPORT"
    #: All workers agree on the step; once for each of them, by its first stage.
    DECIDE = "DECIDE"
    #: What a forward pass has saved moves to the host's memory, and back before the backward pass.
    PARK = "PARK"
    FETCH = "FETCH"
    #: The optimizer step of a stage.
    STEP = "STEP"


COMPUTE = frozenset({Kind.FORWARD, Kind.BACKWARD})
SENDS = frozenset({Kind.SEND_FORWARD, Kind.SEND_BACKWARD})
RECEIVES = frozenset({Kind.RECEIVE_FORWARD, Kind.RECEIVE_BACKWARD})
#: What a stage or a worker does once in a step.
ONCE = frozenset({Kind.DECIDE, Kind.STEP})

_TEXT = re.compile(
    r"(\d{1,6})(SEND_F|RECV_F|SEND_B|RECV_B|SYNC|REPORT|DECIDE|PARK|FETCH|STEP|F|B)(\d{0,6})(?:>(\d{1,6}))?"
)


class Action(NamedTuple):
    """One thing that a worker does in a step.

    Attributes:
        stage: Whose work it is. A send belongs to the stage that sends, a receive to the stage that receives.
        kind: What it does.
        index: The micro-batch; for `SYNC` the bucket; for `REPORT` 0 after forward passes, 1 after the gradients;
            None for `DECIDE` and `STEP`.
        peer: For transfers the stage at the other end.
    """

    stage: int
    kind: Kind
    index: int | None = None  # type: ignore[assignment]  # of a tuple it is a method
    peer: int | None = None

    def __str__(self) -> str:
        text = f"{self.stage}{self.kind.value}{'' if self.index is None else self.index}"
        if self.peer is None or self.peer == _neighbour(self.stage, self.kind):
            return text
        return f"{text}>{self.peer}"


def parse_action(text: str) -> Action:
    """An action from its text."""
    match = _TEXT.fullmatch(text.strip())
    kind = Kind(match[2]) if match else None
    if match is None or kind is None or (match[3] == "") != (kind in ONCE):
        raise ScheduleError(
            f"{shortened(repr(text))} is not an action",
            "An action is a stage, a kind such as F, B, SEND_F, RECV_F, SYNC or STEP, then a micro-batch or bucket.",
            "Write 2F0 for the forward pass of micro-batch 0 in stage 2.",
        )
    stage = int(match[1])
    peer = int(match[4]) if match[4] else _neighbour(stage, kind)
    return Action(stage, kind, int(match[3]) if match[3] else None, peer)


def _neighbour(stage: int, kind: Kind) -> int | None:
    """The other end of a transfer between stages that follow each other."""
    if kind in (Kind.SEND_FORWARD, Kind.RECEIVE_BACKWARD):
        return stage + 1
    if kind in (Kind.SEND_BACKWARD, Kind.RECEIVE_FORWARD):
        return stage - 1
    return None


@dataclass(frozen=True)
class Schedule:
    """The order of computation: for every lane a list of F and B actions.

    Attributes:
        name: Which schedule it is.
        rows: One list per lane.
        micro_batches: Micro-batches per step.
    """

    name: str
    rows: tuple[tuple[Action, ...], ...]
    micro_batches: int

    def to_csv(self) -> str:
        """The `compute_only` format of torch.distributed.pipelining: a row per lane, a cell per action."""
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([str(action) for action in row] for row in self.rows)
        return text.getvalue()


def read_schedule(text: str, name: str = "schedule") -> Schedule:
    """A schedule from CSV text. Empty cells are bubbles and mean nothing.

    Args:
        text: A row per lane, a cell per action.
        name: What to call the schedule.

    Raises:
        ScheduleError: A cell is not an action, or an action is neither F nor B.
    """
    try:
        rows = [[parse_action(cell) for cell in row if cell.strip()] for row in csv.reader(io.StringIO(text)) if row]
    except csv.Error as error:
        raise ScheduleError(f"the schedule {shortened(name)} is no CSV: {error}", fix="Write it again.") from error
    actions = [action for row in rows for action in row]
    other = next((action for action in actions if action.kind not in COMPUTE), None)
    if other is not None or not actions:
        raise ScheduleError(
            f"{other if other is not None else 'nothing'} stands in schedule {name!r}",
            "A schedule orders computation only: F and B. What travels follows from it.",
            "Leave the other actions out.",
        )
    return Schedule(name, tuple(map(tuple, rows)), 1 + max(action.index or 0 for action in actions))
