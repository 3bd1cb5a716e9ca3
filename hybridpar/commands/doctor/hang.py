"""`hybridpar doctor --hang RUN`: reads what each worker of a run noted last, and says who waits for whom.

The workers of a run do the same collectives in the same order, and number them (`hybridpar.comm.flight`). A worker that
waits in collective 57 of some workers waits for those of them that have not begun their 57th.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from hybridpar.comm.flight import FOLDER, Channel, Flight, Note, process_fields, process_start, read_flights
from hybridpar.errors import ScheduleError, UsageError
from hybridpar.observe.timeline import describe_action
from hybridpar.schedule.actions import parse_action

#: A run whose last note is younger than this many seconds is taken to go on.
FRESH_SECONDS = 5.0

_GONE, _STOPPED = "is gone", "is stopped by a signal"
_STATES = {
    "R": "runs",
    "S": "sleeps",
    "D": "waits for a disk or the system",
    "T": _STOPPED,
    "t": "is stopped by a debugger",
    "Z": _GONE,
    "X": _GONE,
}


@dataclass(frozen=True)
class Wait:
    """A worker that is in a collective or a transfer which others have not begun.

    Attributes:
        rank: The worker.
        lane: Its lane.
        note: What it is in.
        absent: Those who have not begun it.
        unknown: Those of whom there is no record here.
    """

    rank: int
    lane: str
    note: Note
    absent: tuple[int, ...]
    unknown: tuple[int, ...]


@dataclass(frozen=True)
class Standstill:
    """Where a run stands.

    Attributes:
        flights: The records of its workers.
        states: What each process does, as far as this machine knows; by rank.
        age: Seconds since the last note of any worker.
        waits: Who waits for whom.
        missing: Workers of whom there is no record here.
        conclusion: What follows, in words.
        hangs: Whether the run stands still.
    """

    flights: tuple[Flight, ...]
    states: dict[int, str]
    age: float
    waits: tuple[Wait, ...]
    missing: tuple[int, ...]
    conclusion: tuple[str, ...]
    hangs: bool


def run_hang(run: Path, as_json: bool) -> int:
    """Print where a run stands.

    Args:
        run: Its directory.
        as_json: Print JSON.

    Returns:
        0 where the run goes on, 1 where it stands still or has died.

    Raises:
        UsageError: No worker of it has left a record.
    """
    now = time.time()
    found = examine(load(run), now)
    print(to_json(found) if as_json else "\n".join(text_lines(found, run, now)))
    return int(found.hangs)


def load(run: Path) -> list[Flight]:
    """The records of the workers of a run.

    Args:
        run: Its directory.

    Returns:
        Those of the job that wrote last; another one may have left some of more workers.

    Raises:
        UsageError: There is none.
    """
    if not run.is_dir():
        raise UsageError(
            f"--hang {run}: there is no such directory", fix="Name the directory of a run; its first line says it."
        )
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


def examine(flights: Sequence[Flight], now: float) -> Standstill:
    """Find out who waits for whom.

    Args:
        flights: Records of the workers of a run, by rank.
        now: Seconds since the epoch.

    Returns:
        What was found, with a conclusion.
    """
    by_rank = {flight.rank: flight for flight in flights}
    states = {flight.rank: _state(flight) for flight in flights}
    waits = tuple(wait for flight in flights for wait in _waits_of(flight, by_rank))
    missing = tuple(rank for rank in range(flights[0].size) if rank not in by_rank)
    age = max(0.0, now - max(flight.changed for flight in flights))
    gone = [rank for rank, state in states.items() if state == _GONE]
    if age < FRESH_SECONDS and not gone:
        told = [f"The last note is {age:.1f} s old: the run goes on, or stands still only since then."]
        return Standstill(tuple(flights), states, age, waits, missing, tuple(told), hangs=False)
    told = _conclude(by_rank, states, waits, missing, now)
    return Standstill(tuple(flights), states, age, waits, missing, tuple(told), hangs=True)


def _state(flight: Flight) -> str:
    """What the process of a record does; empty where it is another machine's."""
    if flight.host != socket.gethostname():
        return ""
    fields = process_fields(flight.pid)
    if not fields or process_start(flight.pid) != flight.started:
        return _GONE
    return _STATES.get(fields[0], f"is in state {fields[0]}")


def _waits_of(flight: Flight, by_rank: dict[int, Flight]) -> Iterable[Wait]:
    for lane in flight.lanes:
        shared = [note for note in flight.open_notes(lane) if note.channel is not None]
        if shared and (channel := shared[-1].channel) is not None:
            note, others = shared[-1], [rank for rank in channel.members if rank != flight.rank]
            absent = tuple(
                rank for rank in others if rank in by_rank and _begun(by_rank[rank], channel, lane) < note.order
            )
            yield Wait(flight.rank, lane, note, absent, tuple(rank for rank in others if rank not in by_rank))


def _begun(flight: Flight, channel: Channel, lane: str) -> int:
    """How many exchanges of a channel a worker has begun; collectives are counted by lane."""
    lanes = flight.lanes.values() if channel.is_transfer else [flight.lanes.get(lane, ())]
    return max((note.order for notes in lanes for note in notes if note.channel == channel), default=0)


# --------------------------------------------------------------------------------------------------------- conclusion


def _conclude(
    by_rank: dict[int, Flight], states: dict[int, str], waits: Sequence[Wait], missing: Sequence[int], now: float
) -> list[str]:
    gone = [rank for rank, state in states.items() if state == _GONE]
    if len(gone) == len(by_rank):
        return ["All processes of this run are gone. Above is what they did last."]
    differing = _different_programs(by_rank, waits)
    if differing is not None:
        return [differing]
    absent = sorted({rank for wait in waits for rank in wait.absent})
    waiting = {wait.rank for wait in waits if wait.absent}
    culprits = sorted({*gone, *(rank for rank in absent if rank not in waiting)})
    culprits = [rank for rank in culprits if rank in gone or states[rank] != _GONE]
    told = [_blame(by_rank[rank], states[rank], waits, now) for rank in culprits]
    unknown = sorted({rank for wait in waits if not wait.absent for rank in wait.unknown})
    if not told and absent:
        told = ["The workers wait for each other in a circle, so none can go on:"]
        told += [f"worker {one.rank} in {_told(one.note)} for {_workers(one.absent)}" for one in waits if one.absent]
    elif not told and unknown:
        told = [
            f"The workers here wait, and the record of {_workers(unknown)} is not here: look at the same directory on "
            "the host of each, or copy its files of flight/ to here."
        ]
    elif not told and waits:
        longest = min(waits, key=lambda wait: wait.note.begin)
        told = [
            f"All workers have come to {_told(longest.note)}, and it does not end: the fault is between them. Look at "
            "the network, GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME."
        ]
    elif not told:
        told = [f"No worker waits for another one. {_busy(flight, now)}" for flight in by_rank.values()]
    if missing and culprits:
        told.append(f"There is no record of {_workers(missing)} here; they may be on other hosts.")
    return told


def _different_programs(by_rank: dict[int, Flight], waits: Sequence[Wait]) -> str | None:
    """Two workers of which each takes the same exchange for another one."""
    for wait in waits:
        channel, order = wait.note.channel, wait.note.order
        if channel is None or channel.is_transfer:
            continue
        for rank in channel.members:
            notes = by_rank[rank].lanes.get(wait.lane, ()) if rank in by_rank else ()
            for note in notes:
                if (note.channel, note.order) == (channel, order) and note.doing != wait.note.doing:
                    return (
                        f"Workers {wait.rank} and {rank} do not run the same program: the exchange number {order} of "
                        f"{_lane(wait.lane)} is {_told(wait.note)} on worker {wait.rank} and {_told(note)} on worker "
                        f"{rank}. Start both with the same options, data and code."
                    )
    return None


def _blame(flight: Flight, state: str, waits: Sequence[Wait], now: float) -> str:
    waiters = [wait for wait in waits if flight.rank in wait.absent]
    who = f"Worker {flight.rank} (process {flight.pid} on {flight.host})"
    for_it = ""
    if waiters:
        first = min(waiters, key=lambda wait: wait.note.begin)
        for_it = (
            f"; {_workers(sorted({wait.rank for wait in waiters}))} wait{'s' if len(waiters) == 1 else ''} for it in "
            f"{_told(first.note)}"
        )
    if state == _STOPPED:
        return f"{who} {state}{for_it}. `kill -CONT {flight.pid}` lets it go on."
    if state == _GONE:
        return f"{who} {state}{for_it}. Look for its last words above, and in `dmesg`; --resume goes on."
    return f"{who} has not come{for_it}. {_busy(flight, now)} `py-spy dump --pid {flight.pid}` shows where it is."


def _busy(flight: Flight, now: float) -> str:
    """What a worker is at, outside of exchanges with others."""
    lane, notes = _most_telling(flight)
    if notes:
        doing = ", in it ".join(describe(note.doing) for note in notes)
        return f"Worker {flight.rank} is in {doing} since {seconds(now - notes[-1].begin)}."
    return f"Worker {flight.rank} has begun nothing since {seconds(now - flight.changed)}, on {_lane(lane)}."


def _most_telling(flight: Flight) -> tuple[str, list[Note]]:
    """The lane that has been at something longest, or the main thread."""
    busy = {lane: notes for lane in flight.lanes if (notes := flight.open_notes(lane))}
    if not busy:
        return next(iter(flight.lanes), "MainThread"), []
    lane = min(busy, key=lambda one: busy[one][-1].begin)
    return lane, busy[lane]


# -------------------------------------------------------------------------------------------------------------- words


def text_lines(found: Standstill, run: Path, now: float) -> list[str]:
    """Where a run stands, as text.

    Args:
        found: What was found.
        run: Directory of the run.
        now: Seconds since the epoch.
    """
    first, hosts = found.flights[0], len({flight.host for flight in found.flights})
    lines = [
        f"{run}: {first.size} worker{'' if first.size == 1 else 's'}; records of {len(found.flights)} here, of "
        f"{hosts} host{'' if hosts == 1 else 's'}; the last note {seconds(found.age)} ago"
    ]
    for flight in found.flights:
        state = found.states[flight.rank]
        lines += ["", f"worker {flight.rank}   process {flight.pid} on {flight.host}{' ' + state if state else ''}"]
        width = max(len(_lane(lane)) for lane in flight.lanes)
        for lane, notes in flight.lanes.items():
            waits = next((wait for wait in found.waits if (wait.rank, wait.lane) == (flight.rank, lane)), None)
            told = _lane_lines(notes, waits, now)
            lines += [f"  {name:{width}}  {line}" for name, line in zip([_lane(lane), ""], told, strict=False)]
    if found.missing:
        lines += ["", f"no record of {_workers(found.missing)} here"]
    return [*lines, "", *found.conclusion]


def _lane_lines(notes: Sequence[Note], wait: Wait | None, now: float) -> list[str]:
    is_open = [note for note in notes if note.end is None]
    done = [note for note in notes if note.end is not None]
    lines = []
    if wait is not None:
        text = f"waits {seconds(now - wait.note.begin)} in {_told(wait.note)}"
        late = [*wait.absent, *wait.unknown]
        lines.append(f"{text} for {_workers(late)}" if late else f"{text}; all have come")
    elif is_open:
        lines.append(f"in {', '.join(describe(note.doing) for note in is_open)} since {_since(is_open[-1], now)}")
    if done and done[-1].end is not None:
        last = max(done, key=lambda note: note.end or 0.0)
        ago = seconds(now - (last.end or now))
        lines.append(f"{'last done' if lines else 'idle; last done'}: {_told(last)}, {ago} ago")
    return lines


def _since(note: Note, now: float) -> str:
    return seconds(now - note.begin)


def _told(note: Note) -> str:
    """A note with its number and who takes part."""
    text = f'"{describe(note.doing)}"'
    if note.channel is None:
        return text
    if note.channel.is_transfer:
        return f"{text} (number {note.order}, worker {note.channel.members[0]} to {note.channel.members[1]})"
    return f"{text} (number {note.order} of {_workers(note.channel.members)})"


def describe(doing: str) -> str:
    """What a lane does, in words: actions of a schedule are noted in short.

    Args:
        doing: As it was noted.
    """
    try:
        return describe_action(parse_action(doing))
    except ScheduleError:
        return doing


def _lane(name: str) -> str:
    return "main thread" if name == "MainThread" else f"lane {name}"


def _workers(ranks: Sequence[int]) -> str:
    """Workers in few words: `worker 3`, `workers 0 to 7`, `workers 0, 2, 4`."""
    if len(ranks) == 1:
        return f"worker {ranks[0]}"
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"workers {ranks[0]} to {ranks[-1]}"
    if len(ranks) > 20:
        return f"{len(ranks)} workers, {', '.join(map(str, ranks[:10]))}, ..."
    return f"workers {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def seconds(value: float) -> str:
    """A duration in words.

    Args:
        value: Seconds.
    """
    if value < 100:
        return f"{max(0.0, value):.1f} s"
    return f"{value / 60:.0f} min" if value < 6000 else f"{value / 3600:.1f} h"


def to_json(found: Standstill) -> str:
    """Where a run stands, as indented JSON.

    Args:
        found: What was found.
    """
    content = {
        "hangs": found.hangs,
        "age_seconds": round(found.age, 3),
        "conclusion": " ".join(found.conclusion),
        "missing": found.missing,
        "waits": [asdict(wait) for wait in found.waits],
        "workers": [{"state": found.states[flight.rank], **asdict(flight)} for flight in found.flights],
    }
    return json.dumps(content, indent=2)
