"""`hybridpar doctor --hang RUN`: lists what each worker of a run is in, and what it did last.

The workers do the same collectives in the same order, and number them (`hybridpar.comm.flight`): the one whose number
is behind the others' is the one that they wait for.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from hybridpar.comm.flight import FOLDER, Flight, Note, process_fields, process_start, read_flights
from hybridpar.errors import ScheduleError, UsageError
from hybridpar.observe.text import format_duration
from hybridpar.observe.timeline import describe_action
from hybridpar.schedule.actions import parse_action


def run_hang(run: Path, as_json: bool) -> int:
    """Print what each worker of a run is in, and what it did last."""
    flights = load(run)
    if as_json:
        print(json.dumps([{"state": state_of(flight), **asdict(flight)} for flight in flights], indent=2))
    else:
        print("\n".join(text_lines(flights, time.time())))
    return 0


def load(run: Path) -> list[Flight]:
    """The records of the workers of the job that wrote last in a run directory."""
    flights = read_flights(run / FOLDER)
    if not flights:
        raise UsageError(
            f"--hang {run}: no worker has left a record there",
            f"A run keeps one per worker in {FOLDER}/ while it goes on, and where it failed. One that ended in an "
            "orderly way has none, nor has one with parameter servers.",
            "Name the directory of a run that stands still, on the machine of its workers.",
        )
    last = max(flights, key=lambda flight: flight.changed)
    return [one for one in flights if (one.job, one.size) == (last.job, last.size) and one.rank < last.size]


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
        width = max(map(len, flight.lanes), default=0)
        for lane, notes in flight.lanes.items():
            done = [note for note in notes if note.end is not None]
            told = [f"in {_told(note)} since {format_duration(now - note.begin)}" for note in flight.open_notes(lane)]
            if done:
                last = max(done, key=lambda note: note.end or 0.0)
                told.append(f"last done: {_told(last)}, {format_duration(now - (last.end or now))} ago")
            yield f"  {lane:{width}}  {'; '.join(told)}"
    known = {flight.rank for flight in flights}
    if missing := [str(rank) for rank in range(flights[0].size) if rank not in known]:
        yield f"no record here of workers {', '.join(missing)}"
    yield "`py-spy dump --pid PID` shows the stack of a process."


def _told(note: Note) -> str:
    """What a note says, with its number and who takes part; actions of a schedule are noted in short."""
    try:
        text = describe_action(parse_action(note.doing))
    except ScheduleError:
        text = note.doing
    if note.channel is None:
        return text
    return f"{text} (number {note.order} of workers {', '.join(map(str, note.channel.members))})"
