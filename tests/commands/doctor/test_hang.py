"""Tests that `hybridpar doctor --hang` lists what each worker is in: of a process that was stopped, and of records."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path
from typing import Any

from hybridpar.cli import main
from hybridpar.comm.flight import FLIGHT, FOLDER, Channel, Flight, Note, process_fields, read_flights
from hybridpar.commands.doctor.hang import state_of, text_lines
from tests.ranks import start_processes
from tests.waiting import eventually

NOW = 1000.0


def note(number: int, doing: str, *, order: int = 0, channel: Channel | None = None, end: float | None = None) -> Note:
    return Note(number, order, NOW - 60, end, channel, doing)


def test_each_lane_has_its_stack_and_its_last_note() -> None:
    both = Channel((0, 2))
    lanes = {
        "MainThread": (note(1, "loading", end=NOW - 9), note(2, "0F0"), note(3, "waiting for data")),
        "sync": (note(6, "adding gradients", order=6, channel=both, end=NOW - 50),),
        "idle": (),
    }
    lines = list(text_lines([Flight(0, 3, "elsewhere", 100, "1", "job", lanes)], NOW))
    assert lines[:3] == [
        "worker 0   process 100 on elsewhere",
        "  MainThread: in 0F0 since 1:00; in waiting for data since 1:00; last done: loading, 9.0 s ago",
        "  sync: last done: adding gradients (number 6 of workers 0, 2), 50 s ago",
    ]
    assert "no record here of workers 1, 2" in lines


def test_a_process_that_is_gone() -> None:
    assert state_of(Flight(1, 2, socket.gethostname(), os.getpid(), "not this one", None, {})) == "is gone"
    assert state_of(Flight(1, 2, "elsewhere", os.getpid(), "not this one", None, {})) == ""


def test_a_run_without_records(tmp_path, capsys):
    for place in (tmp_path, tmp_path / "no"):
        assert main(["doctor", "--hang", str(place)]) == 2
        assert "no worker has left a record" in capsys.readouterr().err


def stops(rank: int, directory: str, run: str, answers: Any) -> None:
    """Two workers, of which the second stops itself before the third exchange."""
    import torch.distributed as dist

    from hybridpar.comm.world import World

    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=2)
    world = World.join(lanes=1)
    FLIGHT.open(Path(run) / FOLDER, rank, 2)
    for number in range(3):
        if (number, rank) == (2, 1):
            os.kill(os.getpid(), signal.SIGSTOP)
        world.barrier()
    answers.put("done")


def test_a_worker_that_was_stopped_is_found(tmp_path, capsys):
    with start_processes(stops, 2, str(tmp_path)) as answers:

        def flights() -> dict[int, Any]:
            return {one.rank: one for one in read_flights(tmp_path / FOLDER)}

        eventually(lambda: len(flights()) == 2 and flights()[0].open_notes("MainThread"))
        stopped = flights()[1].pid
        eventually(lambda: process_fields(stopped)[0] == "T")

        def orders() -> list[int]:
            return [max(note.order for note in flights()[rank].lanes["MainThread"]) for rank in range(2)]

        eventually(lambda: orders()[0] == orders()[1] + 1)  # what a worker does is written a moment after it began
        assert main(["doctor", "--hang", str(tmp_path)]) == 0
        text = capsys.readouterr().out
        assert f"process {stopped} on {socket.gethostname()} is stopped by a signal" in text
        assert f"(number {orders()[0]} of workers 0, 1) since" in text
        os.kill(stopped, signal.SIGCONT)
        assert {answers.get(timeout=90) for _ in range(2)} == {"done"}
