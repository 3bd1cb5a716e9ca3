"""`hybridpar doctor --hang RUN`: lists what each worker of a run is in, and what it did last.

The workers do the same collectives in the same order, and number them (`hybridpar.comm.flight`): the one whose number
is behind the others' is the one that they wait for.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from hybridpar.comm.flight import FOLDER, Flight, Note, process_fields, process_start, read_flights
from hybridpar.errors import UsageError
from hybridpar.observe.text import format_duration


def run_hang(run: Path) -> int:
    """Print what each worker of the job that wrote last in a run directory is in, and what it did last."""
    flights = read_flights(run / FOLDER)
    if not flights:
        raise UsageError(
            f"--hang {run}: no worker has left a record there",
            f"A run keeps one per worker in {FOLDER}/ while it goes on, and where it failed. One that ended in an "
            "orderly way has none, nor has one with parameter servers.",
            "Name the directory of a run that stands still, on the machine of its workers.",
        )
    last = max(flights, key=lambda flight: flight.changed)
    flights = [flight for flight in flights if (flight.job, flight.size) == (last.job, last.size)]
    print("\n".join(text_lines(flights, time.time())))
    return 0


def state_of(flight: Flight) -> str:
    """What became of a worker's process; empty where it goes on, or is another machine's."""
    if flight.host != socket.gethostname():
        return ""
    fields = process_fields(flight.pid)
    if not fields or process_start(flight.pid) != flight.started:
        return "is gone"
    return {"T": "is stopped by a signal", "t": "is stopped by a debugger"}.get(fields[0], "")


def text_lines(flights: Sequence[Flight], now: float) -> Iterator[str]:
    """What workers are in, and what they did last, a line for each lane."""
    for flight in flights:
        yield f"worker {flight.rank}   process {flight.pid} on {flight.host} {state_of(flight)}".rstrip()
        for lane, notes in flight.lanes.items():
            parts = [f"in {_text(note)} since {format_duration(now - note.begin)}" for note in flight.open_notes(lane)]
            done = [(note.end, note) for note in notes if note.end is not None]
            if done:
                end, note = max(done, key=lambda pair: pair[0])
                parts.append(f"last done: {_text(note)}, {format_duration(now - end)} ago")
            yield f"  {lane}: {'; '.join(parts)}"
    missing = set(range(flights[0].size)) - {flight.rank for flight in flights}
    if missing:
        yield f"no record here of workers {', '.join(map(str, sorted(missing)))}"
    yield "`py-spy dump --pid PID` shows the stack of a process."


def _text(note: Note) -> str:
    """What a note says, with its number and who takes part; passes are in the notation of schedules, as 0F1."""
    if note.channel is None:
        return note.doing
    return f"{note.doing} (number {note.order} of workers {', '.join(map(str, note.channel.members))})"
