"""The flight record of a process: what each of its lanes did last, readable from outside while the process hangs.

A lane notes when it begins something and when it has done it: collectives and transfers, with their number among those
of the same workers, and passes. The notes of a lane are a ring of `DEPTH` entries in memory that is mapped to a file of
the run directory. So they are there whatever becomes of the process, also where it is stopped, killed, or holds the
interpreter's lock; a dump on a signal would need it to run. Taking a note is a few copies and no system call.

`hybridpar doctor --hang` reads the files of all workers (`read_flights`).
"""

from __future__ import annotations

import contextlib
import functools
import json
import mmap
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

#: Folder of a run directory that holds a file per worker.
FOLDER = "flight"
#: Entries of a lane, and lanes of a process.
DEPTH, LANES = 16, 64
#: An entry (its number, its number on the channel, begin, end, channel, what is done), its number, and its end.
_ROW, _NUMBER, _END = struct.Struct("<QQddH94s"), struct.Struct("<Q"), struct.Struct("<d")
_END_AT = 24
#: The header is JSON behind its length.
_HEADER = 1 << 16
_LENGTH = struct.Struct("<I")
_BYTES = _HEADER + LANES * DEPTH * _ROW.size
_VERSION = 1


class Channel(NamedTuple):
    """Between which workers something is exchanged.

    Attributes:
        members: Their ranks in the job; of a transfer sender and receiver.
        is_transfer: One of two workers sends to the other.
    """

    members: tuple[int, ...]
    is_transfer: bool = False


@dataclass
class _Lane:
    """A lane that takes notes: its number, its notes so far, and those on each channel."""

    number: int
    count: int = 0
    orders: dict[int, int] = field(default_factory=dict)


class FlightRecorder:
    """Takes the notes of this process: in its own memory, and from `open` on in a file."""

    def __init__(self) -> None:
        self.names_ranges = False
        self._outside = ""  # what `outside` was given
        self._memory: bytearray | mmap.mmap = bytearray(_BYTES)
        self._path: Path | None = None
        self._facts: dict[str, Any] = {}
        self._lanes: dict[str, _Lane] = {}
        self._channels: dict[Channel, int] = {}
        self._local = threading.local()
        self._lock = threading.Lock()

    def channel(self, members: Sequence[int], *, is_transfer: bool = False) -> int:
        """The number of a channel, for `noted`; 0 where nobody else is on it."""
        if len(members) < 2:
            return 0
        key = Channel(tuple(members), is_transfer)
        known = self._channels.get(key)
        if known is None:
            with self._lock:
                known = self._channels.setdefault(key, len(self._channels) + 1)
                self._write_header()
        return known

    def noted(self, doing: str, channel: int = 0) -> _Noted:
        """Context of something that the current thread does."""
        return _Noted(self, doing, channel)

    @contextlib.contextmanager
    def outside(self, doing: str) -> Iterator[None]:
        """Context of something that the process does outside of a step, for which others may have to wait."""
        before, self._outside = self._outside, doing
        try:
            with self.noted(doing):
                yield
        finally:
            self._outside = before

    def open(self, directory: Path, rank: int, size: int) -> None:
        """Move the notes to `directory/rank-N`. Where that cannot be written they stay in memory."""
        path = directory / f"rank-{rank}"
        aside = path.with_name(f".{path.name}.tmp")
        try:
            directory.mkdir(parents=True, exist_ok=True)
            aside.write_bytes(bytes(_BYTES))  # no hole: a full disk would kill the process when it takes a note
            with open(aside, "r+b") as file:
                memory = mmap.mmap(file.fileno(), 0)
            aside.replace(path)
        except OSError:
            with contextlib.suppress(OSError):
                aside.unlink()
            return
        with self._lock:
            self._facts = {
                "version": _VERSION,
                "rank": rank,
                "size": size,
                "host": socket.gethostname(),
                "pid": os.getpid(),
                "job": os.environ.get("TORCHELASTIC_RUN_ID"),
            }
            memory[:] = bytes(self._memory)
            self._memory, self._path = memory, path
            self._write_header()

    def close(self) -> None:
        """Delete the file: the run has ended in an orderly way, and nobody needs to ask where it stands."""
        path, self._path = self._path, None
        if path is not None:
            self._memory = bytearray(self._memory)
            with contextlib.suppress(OSError):
                path.unlink()
                path.parent.rmdir()  # by the last one

    def busy_with(self) -> str | None:
        """What this process does outside of a step; None in a step, or where one of its lanes waits for others."""
        channels = [None, *self._channels]
        notes = [note for lane in range(len(self._lanes)) for note in _notes(self._memory, lane, channels)]
        begun = [note for note in notes if note.end is None]
        if any(note.channel is not None for note in begun):
            return None
        return self._outside or (None if begun else "outside of a step")

    def _enter_lane(self) -> _Lane | None:
        """The lane of the current thread, which goes on where an earlier thread of the same name has left it."""
        name = threading.current_thread().name.removeprefix("lane ")
        with self._lock:
            if name not in self._lanes:
                if len(self._lanes) >= LANES:
                    return None
                self._lanes[name] = _Lane(len(self._lanes))
                self._write_header()
            self._local.lane = self._lanes[name]
            return self._lanes[name]

    def _write_header(self) -> None:
        facts = {**self._facts, "lanes": list(self._lanes), "channels": list(self._channels)}
        text = json.dumps(facts).encode()
        if len(text) <= _HEADER - _LENGTH.size:
            self._memory[: _LENGTH.size + len(text)] = _LENGTH.pack(len(text)) + text


class _Noted:
    """A note that is taken where its context begins and ends; written as bytes, as each transfer takes one."""

    __slots__ = ("_channel", "_count", "_doing", "_offset", "_range", "_recorder")

    def __init__(self, recorder: FlightRecorder, doing: str, channel: int = 0) -> None:
        self._recorder, self._doing, self._channel = recorder, doing, channel
        self._offset = self._count = 0
        self._range: Any = None

    def __enter__(self) -> None:
        recorder, channel, order = self._recorder, self._channel, 0
        lane = getattr(recorder._local, "lane", None) or recorder._enter_lane()
        if lane is not None:
            self._count = lane.count = lane.count + 1
            self._offset = _HEADER + (lane.number * DEPTH + self._count % DEPTH) * _ROW.size
            if channel:
                lane.orders[channel] = order = lane.orders.get(channel, 0) + 1
            numbers = self._count, order, time.time(), 0.0, channel
            _ROW.pack_into(recorder._memory, self._offset, *numbers, self._doing.encode())
        if recorder.names_ranges:
            from torch.profiler import record_function

            self._range = record_function(self._doing)
            self._range.__enter__()

    def __exit__(self, *raised: object) -> None:
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None
        memory = self._recorder._memory
        # By now the entry may be another note's.
        if self._count and _NUMBER.unpack_from(memory, self._offset)[0] == self._count:
            _END.pack_into(memory, self._offset + _END_AT, time.time())


#: Of this process.
FLIGHT = FlightRecorder()
noted = functools.partial(_Noted, FLIGHT)
outside = FLIGHT.outside


# ------------------------------------------------------------------------------------------------------------ reading


@dataclass(frozen=True)
class Note:
    """Something that a lane did, or is doing.

    Attributes:
        number: Among all notes of the lane.
        order: Among those of its channel; 0 without one.
        begin: When it began, in seconds since the epoch.
        end: When it was done; None where it is not.
        channel: Who takes part; None where nobody else does.
        doing: What it is.
    """

    number: int
    order: int
    begin: float
    end: float | None
    channel: Channel | None
    doing: str

    @property
    def text(self) -> str:
        """What it is, with its number and who takes part; passes are in the notation of schedules, as 0F1."""
        if self.channel is None:
            return self.doing
        return f"{self.doing} (number {self.order} of workers {', '.join(map(str, self.channel.members))})"


@dataclass(frozen=True)
class Flight:
    """The record of one worker.

    Attributes:
        rank: Its number in the job.
        size: Number of workers of the job.
        host: Its host's name.
        pid: Its process.
        job: What the launcher calls the job.
        lanes: The last notes of each lane by name, oldest first.
    """

    rank: int
    size: int
    host: str
    pid: int
    job: str | None
    lanes: dict[str, tuple[Note, ...]]

    @property
    def changed(self) -> float:
        """When the last note was taken."""
        moments = [note.end or note.begin for notes in self.lanes.values() for note in notes]
        return max(moments, default=0.0)


def process_state(pid: int) -> str:
    """The state of a process as the system has it, as `T (stopped)`."""
    try:
        text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "gone"
    return text.partition("State:")[2].partition("\n")[0].strip()


def read_flights(directory: Path) -> list[Flight]:
    """The records of all workers that left one, by rank."""
    flights = [_read(path) for path in directory.glob("rank-*")] if directory.is_dir() else []
    return sorted((flight for flight in flights if flight is not None), key=lambda flight: flight.rank)


def _read(path: Path) -> Flight | None:
    try:
        data = path.read_bytes()
        (length,) = _LENGTH.unpack_from(data)
        facts = json.loads(data[_LENGTH.size : _LENGTH.size + length])
        if facts.get("version") != _VERSION:
            return None
        channels = [None, *(Channel(tuple(members), pair) for members, pair in facts["channels"])]
        lanes = {name: _notes(data, lane, channels) for lane, name in enumerate(facts["lanes"])}
        return Flight(lanes=lanes, **{key: facts[key] for key in ("rank", "size", "host", "pid", "job")})
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error):
        return None  # not ours, or of a process that was killed while it wrote the header


def _notes(memory: bytes | bytearray | mmap.mmap, lane: int, channels: Sequence[Channel | None]) -> tuple[Note, ...]:
    """What a lane noted, by its number."""
    start, size = _HEADER + lane * DEPTH * _ROW.size, DEPTH * _ROW.size
    notes = [
        Note(number, order, begin, end or None, channels[channel], doing.rstrip(b"\0").decode(errors="replace"))
        for number, order, begin, end, channel, doing in _ROW.iter_unpack(memory[start : start + size])
        if number and channel < len(channels)
    ]
    return tuple(sorted(notes, key=attrgetter("number")))
