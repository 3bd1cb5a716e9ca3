"""Tests of the record that a process keeps of what its lanes do."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from hybridpar.comm import flight
from hybridpar.comm.flight import DEPTH, Channel, FlightRecorder, read_flights


@pytest.fixture
def recorder(tmp_path: Path) -> FlightRecorder:
    made = FlightRecorder()
    made.open(tmp_path, 1, 4)
    return made


def on_lane(name: str, work) -> None:
    thread = threading.Thread(target=work, name=name)
    thread.start()
    thread.join()


def test_what_lanes_do_is_there_while_they_do_it(recorder, tmp_path):
    both, pair = recorder.channel((0, 1)), recorder.channel((1, 0), is_transfer=True)

    def work() -> None:
        with recorder.noted("adding", both):
            pass
        with recorder.noted("F0"), recorder.noted("sending", pair):
            (seen,) = read_flights(tmp_path)
            assert [note.doing for note in seen.lanes["sync-0"] if note.end is None] == ["F0", "sending"]
            with recorder.noted("adding", both):
                pass

    on_lane("lane sync-0", work)
    (record,) = read_flights(tmp_path)
    assert (record.rank, record.size, record.pid) == (1, 4, os.getpid())
    notes = record.lanes["sync-0"]
    assert [(note.number, note.order, note.doing) for note in notes] == [
        (1, 1, "adding"),
        (2, 0, "F0"),
        (3, 1, "sending"),
        (4, 2, "adding"),
    ]
    assert [note.channel for note in notes] == [
        Channel((0, 1)),
        None,
        Channel((1, 0), is_transfer=True),
        Channel((0, 1)),
    ]
    assert all(note.end is not None and note.end >= note.begin for note in notes)
    assert record.changed == max(note.end for note in notes)


def test_a_lane_keeps_the_last_notes_and_ends_none_of_another(recorder, tmp_path):
    with recorder.noted("a long step"):
        for number in range(2 * DEPTH):
            with recorder.noted(f"pass {number}"):
                pass
    notes = read_flights(tmp_path)[0].lanes["MainThread"]
    assert [note.number for note in notes] == list(range(DEPTH + 2, 2 * DEPTH + 2))
    assert all(note.end is not None for note in notes)


def test_notes_from_before_the_file_are_in_it_and_a_new_thread_of_a_name_goes_on(tmp_path):
    recorder = FlightRecorder()
    channel = recorder.channel((0, 1))
    for _ in range(2):
        on_lane("lane control", lambda: recorder.noted("agreeing", channel).__enter__())
        recorder.open(tmp_path, 0, 2)
    assert [note.order for note in read_flights(tmp_path)[0].lanes["control"]] == [1, 2]


def test_a_process_is_busy_with_what_it_began_unless_it_waits_for_others(recorder):
    assert recorder.busy_with() == "outside of a step"
    with recorder.noted("a pass"):
        assert recorder.busy_with() is None  # of a step
    with recorder.outside("testing"):
        with recorder.noted("a pass"):
            assert recorder.busy_with() == "testing"
        with recorder.noted("adding up", recorder.channel((0, 1))):
            assert recorder.busy_with() is None
    assert recorder.busy_with() == "outside of a step"


def test_an_orderly_end_leaves_nothing(recorder, tmp_path):
    recorder.close()
    assert read_flights(tmp_path) == []
    with recorder.noted("later"):
        pass
    assert not tmp_path.exists() or not list(tmp_path.iterdir())


def test_a_record_that_cannot_be_written_costs_the_record_only(tmp_path, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    recorder = FlightRecorder()
    monkeypatch.setattr(flight.mmap, "mmap", full)
    recorder.open(tmp_path / "flight", 0, 1)
    (tmp_path / "file").touch()
    recorder.open(tmp_path / "file", 0, 1)
    with recorder.noted("going on"):
        pass
    assert not list((tmp_path / "flight").iterdir())


@pytest.mark.parametrize(
    "content", [b"", b"\xff" * 100, b"\x02\0\0\0{}", b"\x10\0\0\0" + b'{"version": 9}  ' + bytes(9)]
)
def test_what_is_no_record_is_left_out(recorder, tmp_path, content):
    (tmp_path / "rank-7").write_bytes(content)
    assert [one.rank for one in read_flights(tmp_path)] == [1]
