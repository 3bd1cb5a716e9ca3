"""Why: whether a codec pays is seen only where its own time stands beside the time that its messages travel.

An exchange works in turns: it writes messages, they travel, it reads what came. A `Laps` notes the end of every turn:
on a CPU by the clock, on a GPU by an event on the current stream, which costs the host nothing and waits for nothing;
the times are then asked for when the step is over.
"""

from __future__ import annotations

import enum
import time
from dataclasses import dataclass
from typing import Any

import torch


class Turn(enum.Enum):
    """What an exchange does at a time."""

    #: Writing messages.
    ENCODE = "encode"
    #: Messages travel, or wait for the other workers.
    WIRE = "wire"
    #: Reading messages; at the owner of a stripe also adding them and writing the sum.
    DECODE = "decode"


@dataclass(frozen=True)
class TurnTimes:
    """Milliseconds of an exchange, or of several."""

    encode: float = 0.0
    wire: float = 0.0
    decode: float = 0.0

    def __add__(self, other: TurnTimes) -> TurnTimes:
        return TurnTimes(self.encode + other.encode, self.wire + other.wire, self.decode + other.decode)

    @property
    def total(self) -> float:
        """All of it."""
        return self.encode + self.wire + self.decode


class Laps:
    """When each turn of an exchange ended.

    Args:
        device: Where the exchange works; a GPU's current stream is the one that it uses.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._marks: list[Any] = [self._now()]
        self._turns: list[Turn] = []

    def end(self, turn: Turn) -> None:
        """What was done since the last call, or since the start, was this."""
        self._marks.append(self._now())
        self._turns.append(turn)

    def times(self) -> TurnTimes:
        """Time of each kind of turn. On a GPU this waits for the last of them."""
        sums = dict.fromkeys(Turn, 0.0)
        for turn, start, stop in zip(self._turns, self._marks, self._marks[1:], strict=False):
            sums[turn] += self._between(start, stop)
        return TurnTimes(sums[Turn.ENCODE], sums[Turn.WIRE], sums[Turn.DECODE])

    def span(self, origin: Laps) -> tuple[float, float]:
        """Start and end in milliseconds since the start of another exchange of the same device."""
        first = origin._marks[0]
        return self._between(first, self._marks[0]), self._between(first, self._marks[-1])

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _between(self, start: Any, stop: Any) -> float:
        if not self._on_gpu:
            return float(stop - start) * 1e3
        stop.synchronize()
        return float(start.elapsed_time(stop))
