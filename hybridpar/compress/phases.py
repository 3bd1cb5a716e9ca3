"""Why: measures how long an exchange encodes, waits for its messages, and decodes.

On a CPU the end of each phase is noted by the clock, on a GPU by an event on the current stream, which does not wait;
the times are read when the step is over.
"""

from __future__ import annotations

import enum
import time
from dataclasses import dataclass
from typing import Any

import torch


class Phase(enum.Enum):
    """What an exchange is doing."""

    #: Writing messages.
    ENCODE = "encode"
    #: Messages travel, or wait for the other workers.
    WIRE = "wire"
    #: Reading messages; at the owner of a stripe also adding them and writing the sum.
    DECODE = "decode"


@dataclass(frozen=True)
class PhaseTimes:
    """Milliseconds of an exchange, or of several."""

    encode: float = 0.0
    wire: float = 0.0
    decode: float = 0.0

    def __add__(self, other: PhaseTimes) -> PhaseTimes:
        return PhaseTimes(self.encode + other.encode, self.wire + other.wire, self.decode + other.decode)

    @property
    def total(self) -> float:
        """All of it."""
        return self.encode + self.wire + self.decode


class PhaseTimer:
    """Measures the phases of an exchange.

    Args:
        device: Where the exchange works; a GPU's current stream is the one that it uses.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._marks: list[Any] = [self._now()]
        self._phases: list[Phase] = []

    def end(self, phase: Phase) -> None:
        """End a phase, which began at the last call or at the start."""
        self._marks.append(self._now())
        self._phases.append(phase)

    def times(self) -> PhaseTimes:
        """Milliseconds of each phase. On a GPU this waits for the end of the last one."""
        sums = dict.fromkeys(Phase, 0.0)
        for phase, start, stop in zip(self._phases, self._marks, self._marks[1:], strict=False):
            sums[phase] += self._between(start, stop)
        return PhaseTimes(sums[Phase.ENCODE], sums[Phase.WIRE], sums[Phase.DECODE])

    def span(self, origin: PhaseTimer) -> tuple[float, float]:
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
